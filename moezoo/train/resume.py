"""What may change when a run is continued, and what may not."""

from collections.abc import Mapping
from typing import Any

from moezoo.compose import as_mapping, from_mapping, read_run
from moezoo.convert import show
from moezoo.errors import UserError
from moezoo.settings import TrainConfig

# With another of these it would be another run: its moments, or the place in its data, would mean nothing.
_OWN = ("model", "data", "seed", "batch_size", "seq_len", "execution.microbatches", "optimizer.name")
_FREE = ("data.path", "data.eval_sequences")  # data may have moved
_NOT_SETTINGS = ("resume", "run_dir")


def changes(cfg: TrainConfig) -> list[str]:
    """What `cfg` sets otherwise than the run that it resumes, a line each.

    Raises `UserError` for what a run keeps to its end.
    """
    assert cfg.resume is not None
    before = _flat(as_mapping(from_mapping(read_run(cfg.resume, "resume"))))
    after = _flat(as_mapping(cfg))
    lines = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if old == new or key in _NOT_SETTINGS:
            continue
        if any(key == own or key.startswith(f"{own}.") for own in _OWN) and key not in _FREE:
            raise UserError(
                f"{key}={show(new)} but the run at resume={cfg.resume} has {key}={show(old)}, which a run keeps to its "
                "end; leave it out, or start a new run"
            )
        lines.append(f"{key}: {show(old)} before, {show(new)} now")
    return lines


def _flat(mapping: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{parent}{key}.")
        else:
            flat[f"{parent}{key}"] = value
    return flat
