"""What one device holds in a training step, in named terms, without compiling it.

A step has a few moments at which much is held: the head, the backward pass of each stack of layers, and the update.
What a layer holds is read from its traced program (`moezoo.models.layer_memory`), whatever its parts are; arguments,
gradients, the head and the update are closed forms of sizes. No number is fitted. The peak is the moment with the most
bytes. docs/planning.md lists the terms, and how far they are from what compilers reserve.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from moezoo.models.base import LanguageModel
from moezoo.models.layer_memory import LayerMemory, layer_memories, layer_memory
from moezoo.models.working_set import Term, stage_weights, stream, weights_of
from moezoo.parallel.axes import Role
from moezoo.parallel.kernels import Target
from moezoo.parallel.liveness import Held
from moezoo.parallel.memory import local_bytes
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.placement import Placement
from moezoo.training.loss import BYTES_PER_LOGIT, chunk_rows
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


def step_footprint(step: Step, traced: "jax.stages.Traced | None" = None) -> Footprint:
    """Return the memory of a training step on one device of its mesh.

    Without the `traced` step one layer of each kind is traced, and with stages it is traced in any case.
    """
    execution, model, mask, held = step.execution, step.blueprint.shapes, step.blueprint.mask, step.memory
    own, steps = execution.micro_batches // execution.stages, len(step.arguments[1].tokens) // execution.micro_batches
    tokens, arguments = _tokens(step), _arguments(step)
    # Over several micro-steps their sum is there too.
    total = Term("sum of gradients over micro-steps", held["gradients"] * (steps > 1))
    always = (*arguments, total, Term("parameters as loops read them", hoisted_bytes(model, execution)))
    beside = _gradients_beside_layers(step, steps)
    saved, parts = _parts_backward(step, traced)
    vocab = model.vocab // execution.inner_group("vocab").size
    readout = weights_of(model.readout, mask.readout, execution)
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
    for part in parts:
        # Later parts have used up what they saved.
        before = Term("saved activations", sum(saved[: part.saved + 1]))
        passes = Term("gradient of the residual stream", stream(tokens, model.config.embed, execution))
        held = (Term(what, size) for what, size in part.held.parts.items())
        name = f"backward pass of {part.name}"
        moments.append(moment_of(name, *always, *beside, before, passes, *held, *part.more))
    moments.append(_update(step))
    return Footprint(sum(term.bytes for term in arguments), tuple(moments))


def _gradients_beside_layers(step: Step, steps: int) -> tuple[Term, ...]:
    """Return the gradients that are there while layers run backward.

    That of the unembedding is whole until the update, in which compilers sum it over devices. Where experts are on
    several devices a TPU sums it at once (deepseek_v3: all-reduce.144; mixtral_8x7b: while.294 stays). That of the
    embedding is made later, but a GPU makes its zeros first in a loop over micro-steps (deepseek_v2_lite on h200:
    loop_broadcast_fusion).
    """
    model, mask, execution = step.blueprint.shapes, step.blueprint.mask, step.execution
    stacks = local_bytes(*(eqx.filter(each.stacks, mask.stacks) for each in (model, step.placements.model)))
    readout = weights_of(model.readout, mask.readout, execution)
    platform, zeros = _target(execution).platform, 0
    if platform == "cuda" and steps > 1:
        zeros = weights_of(model.embedding, mask.embedding, execution).gradients
    whole = readout.summed if platform == "tpu" and execution.ways(("expert",)) > 1 else readout.gradients
    return (
        Term("gradients", stacks),
        Term("gradient of the unembedding", whole),
        Term("gradient of the embedding", zeros),
    )


def least_bytes(step: Step) -> int:
    """Return what a step holds at its update: `step_footprint` has at least as much, and takes a trace."""
    return _update(step).bytes


def _update(step: Step) -> Moment:
    gradients = Term("gradients", step.memory["gradients"])
    return moment_of("update", *_arguments(step), gradients, Term("updates in float32", _updates(step)))


def _tokens(step: Step) -> int:
    """Return the tokens of a micro-batch on one device."""
    _, rows, length = step.arguments[1].tokens.shape
    return rows * length // step.execution.ways(step.execution.within_stage.token_axes)


def _arguments(step: Step) -> tuple[Term, ...]:
    execution, held = step.execution, step.memory
    micro_batches = len(step.arguments[1].tokens) // execution.stages
    stored = local_bytes(step.arguments[0], step.placements)
    pace = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.arguments[2:]))
    counters = stored - held["parameters"] - held["optimizer state"] + pace
    return (
        *(Term(name, held[name]) for name in ("parameters", "optimizer state")),
        Term("batch and counters", 4 * 4 * micro_batches * _tokens(step) + counters),
    )


class _Part(NamedTuple):
    """Layers in a backward pass: the number of what they saved, their name, what one holds, and what else is there."""

    saved: int
    name: str
    held: Held
    more: tuple[Term, ...] = ()


def _parts_backward(step: Step, traced: "jax.stages.Traced | None") -> tuple[list[int], list[_Part]]:
    """Return what layers save on the device, part by part, and the parts of the backward pass.

    A part is a stack. With stages it is what is before, in and after their ticks, micro-batch by micro-batch.
    """
    execution, model, mask = step.execution, step.blueprint.shapes, step.blueprint.mask
    piped, pipeline = execution.piped(model), execution.pipeline
    of = _layer_memories(step, traced)
    if piped is None or pipeline is None:
        saved = [stack.count * each.saved for stack, each in zip(model.stacks, of, strict=True)]
        return saved, [_Part(number, f"stacks[{number}]", each.backward) for number, each in enumerate(of)]
    _, rows, length = step.arguments[1].tokens.shape
    inside, own = execution.within_stage, execution.micro_batches // execution.stages
    passing = stream(rows * length // execution.ways(inside.token_axes), model.config.embed, execution)
    # Of the layers outside of stages: the activations of all own micro-batches, and their gradients.
    between = (Term("micro-batches of the stage", 2 * own * passing),)
    here = layer_memory(model.stacks[piped.stack], mask.stacks[piped.stack], inside, rows, length)
    # A tick keeps its input and routing sums.
    tick = passing * (execution.remat != "offload") + piped.depth * here.sums
    counts = [stack.count for stack in model.stacks]
    counts[piped.stack] -= piped.periods
    whole = [own * count * each.saved for count, each in zip(counts, of, strict=True)]
    parts = (sum(whole[: piped.stack]), pipeline.ticks(execution.stages) * tick, sum(whole[piped.stack :]))
    more = (
        *stage_weights(model, mask, execution),
        # Of those that wait and of those that are done, and of what passes.
        Term("gradients of micro-batches of the stage", (2 * own + 1) * passing),
        Term("inputs of the layers of a tick", piped.depth * (here.saved - here.sums)),
    )
    name = f"stacks[{piped.stack}]"
    found = [_Part(1, f"{name} in a tick", here.backward, more)]
    for number, (count, each) in enumerate(zip(counts, of, strict=True)):
        if count:
            found.append(_Part(0 if number < piped.stack else 2, f"stacks[{number}]", each.backward, between))
    return list(parts), found


def _layer_memories(step: Step, traced: "jax.stages.Traced | None") -> list[LayerMemory]:
    """Return the memory of a period of each stack."""
    model, mask, execution = step.blueprint.shapes, step.blueprint.mask, step.execution
    if traced is not None and execution.stages == 1:
        found = layer_memories(traced.jaxpr, _target(execution).platform)
        # Layers before all that is trained save nothing.
        return [LayerMemory(0, 0, Held(0, {}))] * (len(model.stacks) - len(found)) + found
    _, rows, length = step.arguments[1].tokens.shape
    stacks = zip(model.stacks, mask.stacks, strict=True)
    return [layer_memory(stack, learns, execution, rows, length) for stack, learns in stacks]


def _updates(step: Step) -> int:
    """Return the bytes of updates that are arrays.

    Those that are not elementwise are made for all layers before one is applied. A GPU makes others of one parameter at
    a time if they are wider than it (mixtral_8x7b with execution.param_dtype=bfloat16: loop_select_subtract_fusion.2).
    """
    multiplied = {path for work in step.update_work if work.flops for path in work.paths}
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(step.blueprint.shapes, step.blueprint.mask))
    placements = jax.tree.leaves(eqx.filter(step.placements.model, step.blueprint.mask))
    together, alone = 0, [0]
    for (path, x), placement in zip(leaves, placements, strict=True):
        size = 4 * placement.local_size(x.shape)
        if jax.tree_util.keystr(path) in multiplied:
            together += size
        elif _target(step.execution).platform == "cuda" and x.dtype.itemsize < 4:
            alone.append(size)
    return together + max(alone)


def hoisted_bytes(model: LanguageModel, execution: MeshExecution) -> int:
    """Return the bytes of copies of whole stacks of weights that XLA makes before the loops over layers.

    A loop reads them in each iteration, so XLA does once what the loop does to all of them. On a TPU it casts them to
    the dtype of computation. On a GPU it turns those that are gathered along an inner dimension: this then comes first.
    With `remat=none` the backward pass reads what the forward pass saved of them, and these copies are gone.
    """
    itemsize, found = jnp.dtype(execution.dtype).itemsize, 0
    platform = _target(execution).platform
    placements = jax.tree.leaves(execution.placements(model.stacks))
    for x, placement in zip(jax.tree.leaves(model.stacks), placements, strict=True):
        numbers = placement.local_size(x.shape)
        if platform == "tpu" and placement.axes.role is Role.WEIGHT and x.dtype.itemsize > itemsize:
            found += int(numbers * itemsize * _tiles(x.shape, placement, execution))
        inner = any(placement.gathered[2:])  # after the dimension of layers and the first of the weight
        if platform == "cuda" and execution.remat != "none" and inner:
            found += numbers * x.dtype.itemsize
    return found


def _tiles(shape: tuple[int, ...], placement: Placement, execution: MeshExecution) -> float:
    """Return the room of a copy for loops on a TPU, as a multiple of its numbers.

    Parts of an array that is gathered over all devices have this dimension last, and tiles fill it up to 128
    (mixtral_8x7b: copy.617 of bf16[32,8,64,14336] has layout {2,3,1,0}; over some devices, as in deepseek_v3, not).
    """
    assert execution.mesh is not None
    for size, axes in zip(shape, placement.gathered, strict=True):
        ways = execution.ways(axes)
        if ways == execution.mesh.size:
            return max(1, 128 * ways / size)
    return 1


def _target(execution: MeshExecution) -> Target:
    return execution.target or TPU
