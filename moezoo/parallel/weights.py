"""The formula for the collectives of `Execution.whole`, which gathers weights."""

from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import PyTree

from moezoo.parallel.axes import Role
from moezoo.parallel.collectives import split_by_tokens
from moezoo.parallel.execution import Execution
from moezoo.parallel.placement import Placement
from moezoo.parallel.traffic import Move, Moves


def placed(module: PyTree, trained: PyTree, execution: Execution) -> Iterable[tuple[Placement, Any, bool]]:
    """Return each array of a module with its placement, and whether it is trained."""
    return zip(*map(jax.tree.leaves, (execution.placements(module), module, trained)), strict=True)


def weight_moves(module: PyTree, trained: PyTree, execution: Execution) -> Moves:
    """Return the collectives of `Execution.whole` for a module's weights, or for one layer of a stack.

    A part is taken before anything is gathered. The last dimension is gathered first. Within a dimension, axes over
    which gradients are summed and other axes take one gather each, minor axes first.
    """
    forward, recomputed, backward = [], [], []
    for placement, array, learns in placed(module, trained, execution):
        shape, role = array.shape, placement.axes.role
        dtype = array.dtype if role is Role.PART else execution.dtype
        numbers = placement.local_size(shape) // (shape[0] if "layer" in placement.axes.names else 1)
        if placement.entered and learns:
            ways = execution.ways(placement.entered)
            backward.append(Move("psum", placement.entered, ways, numbers, execution.reduce_dtype))
        for dim, size in zip(placement.taken, shape, strict=True):
            whole = Move("psum", dim, execution.ways(dim), numbers, execution.reduce_dtype)
            backward += [whole] if dim and learns else []
            numbers //= size if dim else 1
        for dim in reversed(placement.gathered):
            for summed, part in reversed(split_by_tokens(dim, execution.summed_axes(placement))):
                gathered = Move("all_gather", part, execution.ways(part), numbers, dtype)
                forward.append(gathered)
                # A bias is added, so its gradient does not need its value: only rematerialisation gathers it again.
                # Those of experts are kept where products are (`Experts.partial`).
                kept = ("none", "dots") if "expert" in placement.axes.names else ("none",)
                needed = role is not Role.BIAS or execution.remat not in kept
                recomputed += [gathered] if needed else []
                backward += [gathered.back(execution.reduce_dtype)] if summed and learns else []
                numbers *= gathered.ways
    return Moves(tuple(forward), tuple(recomputed), tuple(backward))
