"""What one device holds in a training step, in named terms, without compiling it.

A step has a few moments at which much is held: the head, two in the feed-forward part and one in the attention of each
kind of layer, and the update. The terms of a moment are closed forms of the sizes of the model, the layout and the
batch; no number is fitted. The peak is the moment with the most bytes. docs/planning.md lists the terms, and how far
they are from what compilers reserve.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moezoo.kernels.grouped_matmul import chosen_backend
from moezoo.models.base import LanguageModel
from moezoo.models.block import Block
from moezoo.models.layers import block_path
from moezoo.models.stage_set import stage_weights
from moezoo.models.working_set import Term, backward_moments, of_one, stream, weights_of
from moezoo.parallel.axes import Role
from moezoo.parallel.kernels import Target
from moezoo.parallel.memory import local_bytes
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.training.loss import BYTES_PER_LOGIT, chunk_rows
from moezoo.training.saved_activations import saved_bytes, tick_bytes
from moezoo.training.step import Step

TPU = Target("tpu")


class Moment(NamedTuple):
    """A moment of a program: its `name`, and the `terms` that are held then, arguments included."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        """The sum of the terms, in bytes on one device."""
        return sum(term.bytes for term in self.terms)


class Footprint(NamedTuple):
    """The memory of a program on one device.

    Attributes:
        arguments: The bytes of its arguments: for a step, parameters, optimizer state, counters and the batch.
        moments: Its moments, in the order in which they happen.
    """

    arguments: int
    moments: tuple[Moment, ...]

    @property
    def highest(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def terms(self) -> tuple[Term, ...]:
        """What is held at the moment with the most bytes."""
        return self.highest.terms

    @property
    def peak(self) -> int:
        """The bytes on one device at the moment with the most."""
        return self.highest.bytes

    @property
    def moment(self) -> str:
        """The name of the moment with the most bytes."""
        return self.highest.name


def moment_of(name: str, *terms: Term) -> Moment:
    """Return the moment with those of `terms` that have bytes."""
    return Moment(name, tuple(term for term in terms if term.bytes))


def step_footprint(step: Step) -> Footprint:
    """Return the memory of a training step on one device of its mesh."""
    execution, model, mask, held = step.execution, step.blueprint.shapes, step.blueprint.mask, step.memory
    count, rows, length = step.arguments[1].tokens.shape
    inside, own = execution.within_stage, execution.micro_batches // execution.stages
    tokens = rows * length // execution.ways(inside.token_axes)  # of a micro-batch
    steps = count // execution.micro_batches
    stored = local_bytes(step.arguments[0], step.placements)
    pace = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.arguments[2:]))
    counters = stored - held["parameters"] - held["optimizer state"] + pace
    arguments = (
        *(Term(name, held[name]) for name in ("parameters", "optimizer state")),
        Term("batch and counters", 4 * 4 * own * tokens * steps + counters),
    )
    gradients = Term("gradients", held["gradients"])
    # Over several micro-steps their sum is there too.
    total = Term("sum of gradients over micro-steps", held["gradients"] * (steps > 1))
    always = (*arguments, total, Term("parameters as loops read them", hoisted_bytes(model, execution)))
    saved = saved_bytes(step)
    vocab = model.vocab // execution.inner_group("vocab").size
    rows = chunk_rows(own * tokens, vocab, _target(execution))
    readout, backend = weights_of(model.readout, mask.readout, execution), backend_of(execution)
    moments = [
        moment_of(
            "head",
            *always,
            Term("saved activations", sum(saved)),
            # The last activations, as given and cut into chunks, and their gradient.
            Term("residual stream and its gradient", 3 * stream(own * tokens, model.config.embed, execution)),
            Term("unembedding and its gradient", readout.whole + readout.gradients + readout.summed),
            Term(
                "logits and their gradient",
                BYTES_PER_LOGIT * vocab * chunk_rows(own * tokens, vocab, _target(execution)),
            ),
        )
    ]
    for part, name, block, learns, how, more in _parts_backward(step, len(saved)):
        # Later parts have used up what they saved.
        before = Term("saved activations", sum(saved[: part + 1]))
        for moment, terms in backward_moments(block, learns, how, tokens, backend).items():
            moments.append(moment_of(f"backward pass of {name}: {moment}", *always, gradients, before, *terms, *more))
    moments.append(moment_of("update", *arguments, gradients, Term("updates in float32", _updates(step))))
    return Footprint(sum(term.bytes for term in arguments), tuple(moments))


class _Part(NamedTuple):
    """Layers of one kind in a backward pass: the number of what they saved, their name, and what else is there."""

    saved: int
    name: str
    block: Block
    learns: Block
    execution: MeshExecution
    more: tuple[Term, ...] = ()


def _parts_backward(step: Step, saved: int) -> Iterator[_Part]:
    """Yield the kinds of layers, the last of the model first; with stages those before, in and after their ticks."""
    execution, model, mask = step.execution, step.blueprint.shapes, step.blueprint.mask
    piped = execution.piped(model)
    _, rows, length = step.arguments[1].tokens.shape
    passing = stream(rows * length // execution.ways(execution.within_stage.token_axes), model.config.embed, execution)
    own = execution.micro_batches // execution.stages
    # Of the layers outside of stages: the activations of all own micro-batches, and their gradients.
    between = (Term("micro-batches of the stage", 2 * own * passing),) if piped is not None else ()
    for number, kind in _blocks_backward(model):
        block, learns = of_one(model.stacks[number].blocks[kind]), mask.stacks[number].blocks[kind]
        name = block_path(number, kind)
        if piped is None:
            yield _Part(number, name, block, learns, execution)
            continue
        in_ticks = int(piped.stack > 0)  # what is before the ticks saves first
        if number > piped.stack or (number == piped.stack and model.stacks[number].count > piped.periods):
            yield _Part(saved - 1, name, block, learns, execution, between)
        if number == piped.stack:
            # Gradients of those that wait and of those that are done, and of what passes.
            more = (
                *stage_weights(model, mask, execution),
                Term("gradients of micro-batches of the stage", (2 * own + 1) * passing),
                Term("inputs of the layers of a tick", tick_bytes(step)),
            )
            yield _Part(in_ticks, f"{name} in a tick", block, learns, execution.within_stage, more)
        if number < piped.stack:
            yield _Part(0, name, block, learns, execution, between)


def _blocks_backward(model: LanguageModel) -> Iterator[tuple[int, int]]:
    for number in reversed(range(len(model.stacks))):
        yield from ((number, kind) for kind in reversed(range(len(model.stacks[number].blocks))))


def _updates(step: Step) -> int:
    """Return the bytes of updates that are not elementwise, which are made for all layers before one is applied."""
    multiplied = {path for work in step.update_work if work.flops for path in work.paths}
    leaves = jax.tree_util.tree_leaves_with_path(step.blueprint.shapes)
    placements = jax.tree.leaves(step.placements.model)
    return sum(
        4 * placement.local_size(x.shape)
        for (path, x), placement in zip(leaves, placements, strict=True)
        if jax.tree_util.keystr(path) in multiplied
    )


def hoisted_bytes(model: LanguageModel, execution: MeshExecution) -> int:
    """Return the bytes of copies of whole stacks of weights that XLA makes before the loops over layers.

    A loop reads them in each iteration, so XLA does once what the loop does to all of them. On a TPU it casts them to
    the dtype of computation. On a GPU it turns those that are gathered along an inner dimension: this then comes first.
    """
    itemsize, found = jnp.dtype(execution.dtype).itemsize, 0
    platform = _target(execution).platform
    placements = jax.tree.leaves(execution.placements(model.stacks))
    for x, placement in zip(jax.tree.leaves(model.stacks), placements, strict=True):
        numbers = placement.local_size(x.shape)
        if platform == "tpu" and placement.axes.role is Role.WEIGHT and x.dtype.itemsize > itemsize:
            found += numbers * itemsize
        if platform == "cuda" and any(placement.gathered[2:]):  # after the dimensions of layers and the first
            found += numbers * x.dtype.itemsize
    return found


def _target(execution: MeshExecution) -> Target:
    return execution.target or TPU


def backend_of(execution: MeshExecution) -> str:
    """Return the name of what runs grouped products."""
    return chosen_backend(_target(execution), execution.kernels.grouped_matmul, execution.dtype)
