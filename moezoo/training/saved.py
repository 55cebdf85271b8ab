"""Runs that are there: their configuration, and the model of a checkpoint."""

from pathlib import Path

import jax

from moezoo.config.compose import as_mapping, compose_onto, read_run
from moezoo.config.settings import TrainConfig
from moezoo.convert import show
from moezoo.errors import UserError
from moezoo.models import model_shapes
from moezoo.models.base import LanguageModel
from moezoo.parallel.mesh import make_mesh
from moezoo.training.checkpoint import find, read_about, restore


def saved_config(folder: str | Path, *overrides: str) -> TrainConfig:
    """A run's configuration with `overrides` on top. Raises `UserError` when the folder holds no run."""
    cfg = compose_onto(read_run(folder, "run_dir"), *overrides)
    if cfg.distributed.is_several:
        raise UserError("distributed: only training runs in several processes; leave it out")
    return cfg


def load_run(folder: str | Path, *overrides: str) -> tuple[LanguageModel, TrainConfig]:
    """The model at a run's last checkpoint, on the first device, and the run's configuration with `overrides`.

    `folder` may also be one of the run's `checkpoints/STEP`. Raises `UserError` when there is no run or its files are
    damaged or do not fit.
    """
    folder = Path(folder).expanduser()
    cfg = saved_config(folder, *overrides)
    checkpoints, step = find(folder, "run_dir")
    about = read_about(checkpoints, step)
    _check_model(cfg, about["config"]["model"], checkpoints / str(step))
    make_mesh(cfg.mesh)  # as many CPU devices as will be needed, before the first is used
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model_shapes(cfg.model, cfg.execution.param_dtype),
    )
    return restore(checkpoints, step, about, model=target)["model"], cfg


def _check_model(cfg: TrainConfig, saved: dict, checkpoint: Path) -> None:
    wanted = as_mapping(cfg)["model"]
    for key in dict.fromkeys((*saved, *wanted)):
        if saved.get(key) != wanted.get(key):
            raise UserError(
                f"model.{key}={show(wanted.get(key))} but {checkpoint} was saved with model.{key}="
                f"{show(saved.get(key))}; it is another model's, or the setting was changed: leave it out"
            )
