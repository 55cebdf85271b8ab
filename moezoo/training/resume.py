"""What may change when a run is continued, and what may not."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

import jax

from moezoo.config.compose import as_mapping
from moezoo.config.settings import TrainConfig
from moezoo.convert import show
from moezoo.data import Source
from moezoo.errors import UserError
from moezoo.parallel import distributed
from moezoo.parallel.distributed import Alone

# With another of these it would be another run: its moments, or the position in its data, would mean nothing.
_FIXED = ("model", "data", "seed", "batch_size", "seq_len", "execution.microbatches", "optimizer.name")
_FREE = ("data.path", "data.eval_sequences")  # data may have moved


def run_settings(cfg: TrainConfig) -> TrainConfig:
    """Without what is the command's and not the run's: where it lies, what it continues, how many processes."""
    return dataclasses.replace(cfg, run_dir=None, resume=None, distributed=Alone())


def list_changes(cfg: TrainConfig, saved: Mapping[str, Any]) -> list[str]:
    """What `cfg` sets otherwise than the configuration `saved` in the checkpoint that it resumes, a line each.

    Raises `UserError` for what a run keeps to its end.
    """
    before, after = _flat(saved), _flat(as_mapping(run_settings(cfg)))
    lines = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if any(key == kept or key.startswith(f"{kept}.") for kept in _FIXED) and key not in _FREE:
            raise UserError(
                f"{key}={show(new)} but the run at resume={cfg.resume} has {key}={show(old)}, which a run keeps to its "
                "end; leave it out, or start a new run"
            )
        lines.append(f"{key}: {show(old)} before, {show(new)} now")
    return lines


def describe_run(cfg: TrainConfig, loader: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its run besides arrays. Seed and position are all the randomness that there is."""
    key = jax.random.key_data(jax.random.key(cfg.seed))
    names = ("moezoo", "jax", "equinox", "optax", "orbax-checkpoint")
    versions = {name: importlib.metadata.version(name) for name in names} | {"python": platform.python_version()}
    return {
        "versions": versions,
        "processes": distributed.count(),
        "random_key": key.tolist(),
        "loader": dict(loader),
        "config": as_mapping(run_settings(cfg)),
    }


def loader_state(batches: int, source: Source) -> dict[str, Any]:
    """What a checkpoint keeps of the data: how much of it was read, and a hash of it where it was read from files."""
    return {"batches": batches, "sha256": source.summary.get("sha256")}


def read_batch_count(state: Mapping[str, Any], source: Source, cfg: TrainConfig) -> int:
    """How many batches a checkpoint's run had read. Raises `UserError` when `source` is not the data it read."""
    if not isinstance(state.get("batches"), int):
        raise UserError(f"resume={cfg.resume}: the checkpoint does not say how much data was read; name another run")
    before, now = state.get("sha256"), source.summary.get("sha256")
    if before != now:
        raise UserError(
            f"resume={cfg.resume} was trained on data with sha256 {before} and this is {now}; give it the same data "
            "(and the same Python for data=python_stdlib), or start a new run"
        )
    return state["batches"]


def _flat(mapping: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{parent}{key}.")
        else:
            flat[f"{parent}{key}"] = value
    return flat
