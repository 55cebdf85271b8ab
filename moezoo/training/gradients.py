"""Gradients summed over devices, and their norm; inside `shard_map`."""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from moezoo.parallel.collectives import MeshAxes, psum, vary, varying_axes


def _storage_axes(spec: PartitionSpec) -> MeshAxes:
    """The mesh axes a parameter is stored over."""
    return tuple(itertools.chain(*((p,) if isinstance(p, str) else p for p in spec if p is not None)))


def _with_specs(tree: PyTree, specs: PyTree) -> Iterator[tuple[Array, MeshAxes]]:
    spec_leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    for leaf, spec in zip(jax.tree.leaves(tree), spec_leaves, strict=True):
        yield leaf, _storage_axes(spec)


def reduce_gradients(gradients: PyTree, specs: PyTree, dtype: DTypeLike) -> PyTree:
    """Sum each leaf, in `dtype`, over the axes it varies over but is not stored over: one psum a leaf that has such.

    What is gathered in a layer has been reduce-scattered there; the rest is left to here, so that it happens once a
    step however many layers and micro-steps there are.
    """

    def leaf(gradient: Array, stored: MeshAxes) -> Array:
        axes = tuple(sorted(varying_axes(gradient) - set(stored)))
        return psum(gradient.astype(dtype), axes).astype(gradient.dtype) if axes else gradient

    leaves = [leaf(*pair) for pair in _with_specs(gradients, specs)]
    return jax.tree.unflatten(jax.tree.structure(gradients), leaves)


def global_norm(gradients: PyTree, specs: PyTree, axes: MeshAxes) -> Float[Array, ""]:
    """The 2-norm of the whole gradient, float32: one sum over all `axes` of the mesh, every value counted once.

    A leaf is the same on all devices along axes it is not stored over; the first of those counts it.
    """
    total = vary(jnp.zeros(()), axes)
    for gradient, stored in _with_specs(gradients, specs):
        first = jnp.array(True)
        for axis in axes:
            if axis not in stored:
                first &= lax.axis_index(axis) == 0
        total += jnp.where(first, jnp.sum(gradient.astype(jnp.float32) ** 2), 0)
    return jnp.sqrt(psum(total, axes))
