"""Is there room for a run, in memory and on disk? Both are answered before anything is compiled or written."""

import shutil
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from moezoo.config.run_folders import steps
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.host.machine import in_gib, in_units
from moezoo.host.remote import is_url
from moezoo.parallel.memory import room_of
from moezoo.training.checkpoint import FROZEN, UNFINISHED, count_kept
from moezoo.training.step import Step
from moezoo.training.step_memory import step_footprint

# The prediction is between 0.9 and 1.1 times what compilers have in use (docs/planning.md).
_MUCH, _TOO_MUCH = 0.8, 1.5


def check_memory(step: Step) -> list[str]:
    """Return a line where the step may need more memory than this process can have; none where that is not known.

    Raises `UserError` where it needs far more. The step is traced, which a run needs anyway.
    """
    mesh = step.execution.mesh
    assert isinstance(mesh, Mesh)
    if (room := room_of(mesh)) is None:
        return []
    found, target = step_footprint(step, step.traced), step.execution.target
    mixers = (block.attention for stack in step.blueprint.shapes.stacks for block in stack.blocks)
    low = max(mixer.memory_seen().get(target.platform if target else "", 1) for mixer in mixers)
    if low * (needed := room.devices * found.peak) <= _MUCH * room.bytes:
        return []
    each = f" ({room.devices} CPU devices with {in_gib(found.peak)} each)" * (room.devices > 1)
    largest = max(found.terms, key=lambda term: term.bytes).name
    what = (
        f"a step needs about {in_gib(needed)} of memory{each}, the largest part for {largest}, and {room.owner} may "
        f"use {in_gib(room.bytes)}"
    ) + f"; that is low for such recurrent layers, of which up to {low} times as much was seen" * (low > 1)
    remat = ", execution.remat=full" * (step.execution.remat in ("dots", "none"))
    advice = f"choose a smaller batch_size or seq_len, more execution.microbatches{remat}, or a smaller model"
    if needed > _TOO_MUCH * room.bytes:
        raise UserError(f"{what}; {advice}")
    return [f"{what}: the system may end the run; {advice}"]


def check_disk(cfg: TrainConfig, step: Step, folder: Any) -> None:
    """Raise `UserError` where the disk of a run folder has no room for one checkpoint more than is kept.

    The next one is written before the oldest is removed. Nothing is known of an object store, whose `folder` is a URL.
    """
    if is_url(folder):
        return
    checkpoints, state = folder / "checkpoints", step.arguments[0]
    frozen, _ = eqx.partition(state.model, step.blueprint.constant)
    once = _bytes(frozen)
    each = _bytes(state) - once
    if not cfg.checkpoint_frozen or (checkpoints / FROZEN).is_dir():
        once = 0
    count = max(0, count_kept(cfg) - len(steps(checkpoints))) + 1
    disk = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir()))
    # What a failed save left is removed when the run goes on.
    left = sum(path.stat().st_size for path in checkpoints.glob(f"{UNFINISHED}*/**/*") if path.is_file())
    if disk.total and (needed := count * each + once) > disk.free + left:
        more = f" and {in_units(once)} of frozen arrays" * bool(once)
        raise UserError(
            f"run_dir={folder}: checkpoints need {in_units(needed)} ({count} of {in_units(each)}{more}: one more than "
            f"is kept), and the disk has {in_units(disk.free + left)} free; name a folder on another disk, free some, "
            "or set a smaller checkpoint_keep"
        )


def _bytes(tree: PyTree) -> int:
    return sum(x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
