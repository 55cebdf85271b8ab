"""Saved runs: what a checkpoint records of one, its configuration and model, and which settings a resume may change."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

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
from moezoo.config.own import name_in, saved_own
from moezoo.config.run_folders import find
from moezoo.config.settings import ProfileSettings, TrainConfig
from moezoo.config.sizes import check_arrays
from moezoo.config.text_copies import COPIED
from moezoo.data import Source
from moezoo.data.file_settings import fill_in
from moezoo.errors import UserError
from moezoo.host.files import is_same_file
from moezoo.models.base import LanguageModel
from moezoo.parallel import distributed
from moezoo.parallel.distributed import Alone
from moezoo.parallel.mesh import make_mesh
from moezoo.training.checkpoint import read_about
from moezoo.training.initial import restore_run
from moezoo.typed import convert, flatten, get, show

# A change of these would make the saved moments, or the position in the data, meaningless.
_FIXED = (
    "model",
    "trained",
    "frozen",
    "data",
    "seed",
    "batch_size",
    "seq_len",
    "execution.param_dtype",
    "init_forms",
    "upcycle",
    "adapter",
    "checkpoint_frozen",
)
_FIXED += tuple(f"optimizer.{key}" for key in ("name", "moment_dtype", "muon", "adamw"))
# The data, and those of a source of a mixture, may have moved to another path.
_FREE = re.compile(r"data(\.sources\.\w+)?\.(path|data_files\.\w+|download|cache|eval_sequences)|adapter\.init_from")


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


def run_settings(cfg: TrainConfig) -> TrainConfig:
    """Return `cfg` without the settings of one command: its folder, what it resumes, processes, view and profile."""
    alone = {"run_dir": None, "resume": None, "distributed": Alone(), "watch": False, "profile": ProfileSettings()}
    return dataclasses.replace(cfg, **alone)


def list_changes(cfg: TrainConfig, saved: Mapping[str, Any]) -> list[str]:
    """Return one line per setting in which `cfg` differs from the configuration `saved` in the checkpoint.

    Raises `UserError` for a setting that a run cannot change.
    """
    before, after = flatten(with_defaults(saved)), flatten(as_mapping(run_settings(cfg)))
    if before["init_sha256"] != after["init_sha256"]:
        raise UserError(
            f"init_from={show(after['init_from'])} but the run at resume={cfg.resume} began with "
            f"init_from={show(before['init_from'])}, which holds something else; leave it out, or start a new run"
        )
    _check_parts(cfg, saved)
    copies, lines = _copies(cfg), []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if COPIED.fullmatch(key):
            old = copies.get(key, old)
        if key == "steps" and new is None:  # the line of epochs says it
            continue
        if old == new or (COPIED.fullmatch(key) and _is_same_text(old, new)):
            continue
        if any(key == kept or key.startswith(f"{kept}.") for kept in _FIXED) and not _FREE.fullmatch(key):
            raise UserError(
                f"{key}={show(new)} but the run at resume={cfg.resume} has {key}={show(old)}, which cannot change "
                "during a run; leave it out, or start a new run"
            )
        lines.append(f"{key}: {show(old)} before, {show(new)} now")
    return lines


def list_rate_change(cfg: TrainConfig, saved: Mapping[str, Any], step: int) -> list[str]:
    """Return a line if the learning rate changes at the step from which a run goes on; `saved` is as it was before.

    A schedule follows `steps`, so a run that is made longer goes on at the rate of a shorter part of it. A schedule of
    the user's own is compared where `cfg` has its class too: nothing is imported for this.
    """
    before = from_saved(saved)
    # With schedules and update rules of moezoo's in place of the user's own, which are in `saved`.
    peak, schedule = get(saved, "optimizer.learning_rate"), before.schedule
    if (own := saved_own(saved).get("schedule")) is not None:
        if own != name_in(cfg.schedule):
            return [f"learning rate at step {step}: not compared, as schedule={own} of the run is not imported"]
        options = {name: value for name, value in saved["schedule"].items() if name != "name"}
        schedule = convert(type(cfg.schedule), options, "schedule")
    old = float(schedule.rate(peak, jnp.int32(step), before.last_step))
    new = float(cfg.schedule.rate(cfg.optimizer.learning_rate, jnp.int32(step), cfg.last_step))
    if abs(new - old) <= 1e-5 * old:
        return []
    keep = f"; schedule=constant optimizer.learning_rate={old:.6g} keeps the old one" * (old > 0)
    return [f"learning rate at step {step}: {old:.6g} by the settings before, {new:.6g} now{keep}"]


def _check_parts(cfg: TrainConfig, saved: Mapping[str, Any]) -> None:
    """Refuse another number of micro-batches: the loss that balances experts is a mean over them."""
    before = from_saved(saved)
    if before.micro_batches != cfg.micro_batches:
        then, now = (" x ".join(f"{key}={n}" for key, n in each.parts.items()) for each in (before, cfg))
        own, odd = divmod(before.micro_batches * cfg.execution.microbatches, cfg.micro_batches)
        how = "choose settings with the same product" if odd else f"set execution.microbatches={own}"
        raise UserError(
            f"{now} but the run at resume={cfg.resume} has {then}, and the number of micro-batches, over which balance "
            f"losses are averaged, cannot change during a run; {how}, or start a new run"
        )


def _copies(cfg: TrainConfig) -> dict[str, Any]:
    """Return the saved settings of the run that `cfg` resumes, with its copies of tokenizers and templates."""
    return {} if cfg.resume is None else flatten(read_run(cfg.resume, "resume"))


def _is_same_text(*paths: Any) -> bool:
    """Return whether two tokenizers or templates are files with the same contents."""
    return all(isinstance(path, str) for path in paths) and is_same_file(*(Path(os.path.expanduser(p)) for p in paths))


def describe_run(cfg: TrainConfig, loader: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what about.json records. All randomness of a run follows from its seed and its position in the data."""
    key = jax.random.key_data(jax.random.key(cfg.seed))
    names = ("moezoo", "jax", "equinox", "optax", "orbax-checkpoint")
    versions = {name: importlib.metadata.version(name) for name in names} | {"python": platform.python_version()}
    return {
        "versions": versions,
        "processes": distributed.count(),
        "random_key": key.tolist(),
        "loader": dict(loader),
        "data": dict(data),
        "config": as_mapping(run_settings(cfg)),
    }


def loader_state(
    batches: int, source: Source, seen: Mapping[str, int], places: Mapping[int, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the position in the data, hashes of all ids, if they are in files, and of documents, and tokens seen.

    Of a stream, `places` are those of this process's readers, and the result has those of all processes, in order: then
    all processes must call this at the same point.
    """
    hashes = {"sha256": source.summary.get("sha256"), "documents": source.documents_hash}
    state: dict[str, Any] = {"batches": batches, **hashes, **({"seen": dict(seen)} if seen else {})}
    if places:
        found = {
            int(number): place
            for text in distributed.gather_texts(json.dumps(places))
            for number, place in json.loads(text).items()
        }
        state["places"] = [found[number] for number in sorted(found)]
    return state


def read_batch_count(state: Mapping[str, Any], source: Source, cfg: TrainConfig) -> int:
    """Return the number of batches that a checkpoint's run had read. Raises `UserError` if `source` is other data."""
    if not isinstance(state.get("batches"), int):
        raise UserError(f"resume={cfg.resume}: the checkpoint does not record how much data was read; name another run")
    hashes = {"data with sha256": ("sha256", source.summary.get("sha256"))}
    hashes["documents with hash"] = ("documents", source.documents_hash)
    for what, (key, now) in hashes.items():
        before = state.get(key)
        if before not in (None, now):  # an older run may have recorded none
            raise UserError(
                f"resume={cfg.resume} was trained on {what} {before}, and this data has {now}; use the same data "
                "(for data=python_stdlib the same Python), or start a new run"
            )
    return state["batches"]
