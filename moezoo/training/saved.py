"""Load saved runs: their configuration, and the model of a checkpoint."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from moezoo.config.build import blueprint_of
from moezoo.config.compose import (
    as_mapping,
    compose_onto,
    folder_path,
    from_saved,
    given_keys,
    read_run,
    with_defaults,
)
from moezoo.config.origin import run_text_settings
from moezoo.config.overrides import read
from moezoo.config.own import saved_own
from moezoo.config.run_folders import find
from moezoo.config.settings import TrainConfig
from moezoo.config.sizes import check_arrays
from moezoo.data.file_settings import fill_in
from moezoo.errors import UserError
from moezoo.models.base import LanguageModel
from moezoo.parallel.mesh import make_mesh
from moezoo.training.checkpoint import read_about
from moezoo.training.initial import restore_run
from moezoo.typed import flatten, show


def saved_config(folder: str | Path, *overrides: str) -> TrainConfig:
    """Return a run's configuration with `overrides` on top; other data of files have its tokenizer, as for `init_from`.

    Raises `UserError` if the folder holds no run.
    """
    mapping = read_run(folder, "run_dir")
    cfg = compose_onto(mapping, *overrides)
    if "data" in read(overrides).choices:
        own = None if "data" in saved_own(mapping) else from_saved(mapping).data
        data = fill_in(cfg.data, given_keys(*overrides), lambda *ours: run_text_settings(own, *ours) or {})
        cfg = dataclasses.replace(cfg, data=data)
    if cfg.distributed.is_several:
        raise UserError("distributed: only training runs in several processes; leave it out")
    return cfg


def check_model(cfg: TrainConfig, about: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise `UserError` unless the checkpoint, which `about` describes, has the model and the adapter of `cfg`."""
    before, now = (
        flatten({key: of[key] for key in ("model", "adapter")})
        for of in (with_defaults(about["config"]), as_mapping(cfg))
    )
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if old != new and key != "adapter.init_from":
            raise UserError(
                f"{key}={show(new)} but {checkpoint} was saved with {key}={show(old)}; leave the setting out, or "
                "name a run of that model"
            )


def load_run(folder: str | Path, *overrides: str) -> tuple[LanguageModel, TrainConfig]:
    """Return the model of a run's newest checkpoint, on the first device, and the run's configuration.

    Args:
        folder: The run's folder, or one of its `checkpoints/STEP`.
        overrides: Settings on top of the run's configuration, such as "mesh=single".

    Raises:
        UserError: There is no run, its files are damaged, they do not fit the configuration, or the parameters do not
            fit into memory.
    """
    folder = folder_path(folder, "run_dir")
    cfg = saved_config(folder, *overrides)
    checkpoints, step = find(folder, "run_dir")
    about = read_about(checkpoints, step)
    check_model(cfg, about, checkpoints / str(step))
    make_mesh(cfg.mesh)  # creates the CPU devices that will be needed; JAX cannot add devices later
    shapes = blueprint_of(cfg).shapes
    check_arrays(cfg, shapes, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)), None)
    return restore_run(cfg, checkpoints, step, about)["model"], cfg
