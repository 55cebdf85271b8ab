"""What a device holds while a model runs, besides its part of the parameters, in bytes: closed forms of sizes.

They are the weights of a part of a layer, those of a pipeline stage, and the activations between two layers.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.models.base import LanguageModel
from moezoo.parallel.axes import Role, axes_of
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.pipeline import Piped


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


def stage_weights(model: LanguageModel, trained: PyTree | None, execution: MeshExecution) -> tuple[Term, ...]:
    """Return the weights that a device holds for its stage during a pass, besides its part of the parameters.

    Args:
        model: The shapes of the model, whole.
        trained: Which of its arrays are trained; None for a pass without gradients.
        execution: How it runs; without stages nothing is held.
    """
    piped = execution.piped(model)
    if piped is None or execution.pipeline is None:
        return ()
    copies = 1 if trained is None else 2  # the backward pass has gradients of the copy
    moved = Term("layers moved to their stage", copies * sum(_moved(model, piped, execution)))
    found = () if piped.by_layer else (moved,)
    if execution.pipeline.gather != "once":
        return found
    inside, layers = execution.within_stage, piped.chunks * piped.depth
    itemsize, width = jnp.dtype(execution.dtype).itemsize, jnp.dtype(execution.reduce_dtype).itemsize
    mask = jax.tree.map(lambda _: False, model) if trained is None else trained
    kinds = zip(model.stacks[piped.stack].blocks, mask.stacks[piped.stack].blocks, strict=True)
    weights = [weights_of(of_one(block), learns, inside) for block, learns in kinds]
    whole, gradients = (layers * sum(getattr(each, of) for each in weights) for of in ("whole", "gradients"))
    found += (Term("gathered weights of the stage", whole),)
    return (
        found
        if trained is None
        else (*found, Term("gradients of weights of the stage", gradients // itemsize * max(itemsize, width)))
    )


def _moved(model: LanguageModel, piped: Piped, execution: MeshExecution) -> Iterator[int]:
    """Yield the bytes of each array of a stage, split as within it."""
    stack, inside = model.stacks[piped.stack], execution.within_stage
    layers = piped.periods // piped.stages
    for x, axes in zip(jax.tree.leaves(stack), jax.tree.leaves(axes_of(stack)), strict=True):
        yield inside.placement(axes, x.shape).local_size((layers, *x.shape[1:])) * x.dtype.itemsize
