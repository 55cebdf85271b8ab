"""How many changes of parameters are lost where these are stored in fewer bits than updates are computed in."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PyTree, UInt32

from moezoo.parallel.collectives import MeshAxes, psum, vary
from moezoo.training.gradients import first_of, on_first

COUNTED_STEPS = 20
_BITS = 16  # of the lower part of a count


@jax.named_scope("rounding")
def count_lost(parameters: PyTree, changes: PyTree, placements: PyTree, axes: MeshAxes) -> UInt32[Array, "2 2"] | None:
    """Count the numbers that an update changes in float32, and those of them that rounding sets back, of all devices.

    Only arrays of less than 32 bits are counted; None without one. Models have more numbers than 32 bits can count, so
    a count has two parts: [changed, lost] x [times 2^16, ones], which `as_counts` joins.

    Args:
        parameters: This device's parts before the update, inside `shard_map`.
        changes: What the update subtracts from them, float32.
        placements: How each array is split.
        axes: The mesh axes of several devices.
    """
    leaves = zip(*map(jax.tree.leaves, (parameters, changes, placements)), strict=True)
    if not (narrow := [each for each in leaves if each[0].dtype.itemsize < 4]):
        return None
    total = none = vary(jnp.zeros((2, 2), jnp.uint32), axes)
    first = first_of(axes)
    for parameter, change, placement in narrow:
        before, kind = parameter.astype(jnp.float32), jnp.finfo(parameter.dtype)
        after = before - change
        # XLA may take a cast to fewer bits and back for nothing, but not this.
        lost = (after != before) & (lax.reduce_precision(after, kind.nexp, kind.nmant) == before)
        counts = vary(_count(after != before, lost), axes)
        total = _carry(total + on_first(counts, placement, first, none))
    return _carry(psum(total, axes))


def _count(*which: Bool[Array, "..."]) -> UInt32[Array, "n 2"]:
    """Return how many of each are True. A matrix has less than 2^32 numbers, a stack of them may have more."""
    ones, zeros = [each.astype(jnp.uint32) for each in which], [jnp.uint32(0)] * len(which)
    # One reduction for all: XLA computes what it reduces once for each.
    add = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]  # noqa: E731
    matrices = jnp.stack(lax.reduce(ones, zeros, add, tuple(range(ones[0].ndim))[-2:])).reshape(len(which), -1)
    high, low = matrices >> _BITS, matrices & ((1 << _BITS) - 1)
    return _carry(jnp.stack([high.sum(axis=1, dtype=jnp.uint32), low.sum(axis=1, dtype=jnp.uint32)], axis=-1))


def _carry(counts: UInt32[Array, "... 2"]) -> UInt32[Array, "... 2"]:
    """Return the same counts with less than 2^16 ones, so that 2^16 of them can be added."""
    high, low = counts[..., 0], counts[..., 1]
    return jnp.stack([high + (low >> _BITS), low & ((1 << _BITS) - 1)], axis=-1)


def as_counts(counts: UInt32[Array, "2 2"]) -> tuple[int, int]:
    """Return the numbers that changed, and those that rounding set back."""
    changed, lost = (int(high) << _BITS | int(low) for high, low in np.asarray(counts))
    return changed, lost
