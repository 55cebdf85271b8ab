"""What a device holds for its pipeline stage, beside what one layer holds: closed forms of sizes."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.models.base import LanguageModel
from moezoo.models.working_set import Term, of_one, weights_of
from moezoo.parallel.axes import axes_of
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.pipeline import Piped


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
