"""The weights of a part of a model while it runs, and the activations between two layers, in bytes on one device."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.parallel.axes import Role
from moezoo.parallel.mesh_execution import MeshExecution


class Term(NamedTuple):
    """A part of what a device holds: its `name`, and its `bytes` on one device."""

    name: str
    bytes: int


class Weights(NamedTuple):
    """The weights of a part of a layer while it runs, in bytes on one device.

    Attributes:
        whole: As the layer reads them: gathered, in the dtype of computation.
        gradients: The gradients of the trained ones, in that dtype.
        summed: Those that are summed over devices, in the dtype of the sum.
    """

    whole: int
    gradients: int
    summed: int


def weights_of(module: PyTree, trained: PyTree, execution: MeshExecution) -> Weights:
    """Return the weights of `module`: the shapes of one layer, whole. `trained` is a tree of booleans like it."""
    itemsize, width = jnp.dtype(execution.dtype).itemsize, jnp.dtype(execution.reduce_dtype).itemsize
    found = []
    placements = jax.tree.leaves(execution.placements(module))
    for x, placement, learns in zip(jax.tree.leaves(module), placements, jax.tree.leaves(trained), strict=True):
        ways = math.prod(execution.ways(axes) for axes in placement.gathered)
        # Of key-value heads that all devices store, a device takes its own.
        taken = math.prod(min(execution.ways(a), n) for a, n in zip(placement.taken, x.shape, strict=False) if a)
        numbers = placement.local_size(x.shape) * ways // taken
        keeps = placement.axes.role in (Role.PART, Role.FROZEN, Role.BUFFER)
        whole, sums = numbers * (x.dtype.itemsize if keeps else itemsize), numbers * width * (learns and ways > 1)
        found.append((whole, numbers * itemsize * learns, sums))
    return Weights(*map(sum, zip(*found, strict=True)))


def of_one(stacked: PyTree) -> PyTree:
    """Return the shapes of one layer of a stack."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def stream(tokens: int, embed: int, execution: MeshExecution) -> int:
    """Return the bytes of the activations of so many tokens between two layers: what `remat=full` saves of a layer."""
    return tokens * embed * jnp.dtype(execution.dtype).itemsize
