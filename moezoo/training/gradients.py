"""Sum gradients over devices, and compute their norm, inside `shard_map`."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from moezoo.parallel.collectives import MeshAxes, psum, vary, varying_axes
from moezoo.parallel.placement import Placement
from moezoo.parallel.stacks import on_cpu


@jax.named_scope("gradient_sums")
def reduce_gradients(gradients: PyTree, placements: PyTree, dtype: DTypeLike) -> PyTree:
    """Sum each leaf in `dtype` over the axes that it varies over but is not stored over, with one psum per leaf.

    Gradients of gathered weights are already reduce-scattered in their layer. The other sums happen here, so they run
    once per step, however many layers and micro-steps there are.
    """

    def leaf(gradient: Array, placement: Placement) -> Array:
        axes = tuple(sorted(varying_axes(gradient) - set(placement.mesh_axes)))
        return psum(gradient.astype(dtype), axes).astype(gradient.dtype) if axes else gradient

    return jax.tree.map(leaf, gradients, placements)


def _sum_in_halves(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Return the sum of an array, whose halves along the last dimension are added to each other up to six times before.

    XLA:CPU adds numbers one by one, each waiting for the one before, and halves as vectors: 12 times faster.
    """
    for _ in range(6):
        if not x.ndim or x.shape[-1] % 2:
            break
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x.sum()


@jax.named_scope("gradient_norm")
def global_norm(gradients: PyTree, placements: PyTree, axes: MeshAxes) -> Float[Array, ""]:
    """Return the 2-norm of the whole gradient in float32, with one sum over all mesh `axes`.

    Every value counts once: a leaf is the same on all devices along axes that it is not stored over, so only the first
    of these devices counts it.
    """
    total = none = vary(jnp.zeros(()), axes)
    first = first_of(axes)
    for gradient, placement in zip(jax.tree.leaves(gradients), jax.tree.leaves(placements), strict=True):
        squares = vary(on_cpu(_sum_in_halves, jnp.sum, lax.square(gradient.astype(jnp.float32))), axes)
        squares = on_first(squares, placement, first, none)
        total += squares
    return jnp.sqrt(psum(total, axes))


def first_of(axes: MeshAxes) -> dict[str, Array]:
    """Return for each axis whether this device is the first along it."""
    return {axis: lax.axis_index(axis) == 0 for axis in axes}


def on_first(value: Array, placement: Placement, first: Mapping[str, Array], none: Array) -> Array:
    """Return `value`, and `none` on all but the first of the devices that have the same numbers of a parameter.

    A sum over all axes of `first`, which value and none vary over, then has it once.
    """
    for axis, is_first in first.items():
        if axis not in placement.mesh_axes:
            value = lax.select(vary(is_first, tuple(first)), value, none)
    return value
