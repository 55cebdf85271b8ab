"""The memory model: what one device holds in a program, in named terms, without compiling it.

A program has a few moments at which much is held: the backward pass of each kind of layer, the head, the update. The
terms of a moment are closed forms of the sizes of the model, the layout and the batch; no number is fitted. The peak is
the moment with the most bytes. docs/planning.md compares it with what compilers reserve.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moezoo.analysis.saved import saved_bytes
from moezoo.config.build import build_execution
from moezoo.config.settings import TrainConfig
from moezoo.kernels.grouped_matmul import chosen_backend
from moezoo.models.blueprint import Blueprint
from moezoo.models.layers import block_path
from moezoo.models.working_set import Term, layer_moments, of_one, stream, weights_of
from moezoo.parallel.axes import Role, Stack
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Target, mesh_for
from moezoo.parallel.memory import local_bytes
from moezoo.parallel.traffic import CallName
from moezoo.training.build import build_step
from moezoo.training.loss import chunk_rows
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
        """What is held at the peak."""
        return self.highest.terms

    @property
    def peak(self) -> int:
        """The bytes on one device at the moment with the most."""
        return self.highest.bytes

    @property
    def moment(self) -> str:
        """The name of the moment with the most bytes."""
        return self.highest.name


def footprint(
    cfg: TrainConfig, call: CallName = "train", *, target: Target = TPU, blueprint: Blueprint | None = None
) -> Footprint:
    """Return the memory of a program on one device of the mesh of `cfg`. No device is used and nothing is compiled.

    With `remat` of `dots` or `none` the step is traced, which takes seconds.

    Args:
        cfg: The configuration.
        call: What runs, as for `moezoo.analysis.sharding.describe`.
        target: What the program is for: it decides which kernels run.
        blueprint: As in `moezoo.training.build.build_step`.

    Raises:
        UserError: The parts of the configuration do not fit together, or a mesh axis is -1.
    """
    step = build_step(cfg, build_execution(cfg, mesh_for(cfg.mesh, target)), blueprint)
    return _train(cfg, step, target)


def _train(cfg: TrainConfig, step: Step, target: Target) -> Footprint:
    execution, blueprint = step.execution, step.blueprint
    model, mask = blueprint.shapes, blueprint.mask
    steps, rows, length = step.arguments[1].tokens.shape
    tokens = rows * length // execution.ways(execution.token_axes)
    held = step.memory
    counters = local_bytes(step.arguments[0], step.placements) - held["parameters"] - held["optimizer state"]
    arguments = (
        Term("parameters", held["parameters"]),
        Term("optimizer state", held["optimizer state"]),
        Term("batch and counters", 4 * 4 * tokens * steps + counters),
    )
    gradients = Term("gradients", held["gradients"])
    # Over several micro-steps: their sum, beside those of the micro-step.
    total = (Term("sum of gradients over micro-steps", held["gradients"]),) * (steps > 1)
    hoisted = Term("parameters as loops read them", _hoisted(model.stacks, execution, target))
    always = (*arguments, *total, hoisted)
    saved = saved_bytes(step)
    moments = []

    def add(name: str, *terms: Term) -> None:
        moments.append(Moment(name, tuple(term for term in (*always, *terms) if term.bytes)))

    one = stream(tokens, cfg.model.embed, execution)
    vocab = model.vocab // execution.inner_group("vocab").size
    readout = weights_of(model.readout, mask.readout, execution)
    add(
        "head",
        Term("saved activations", sum(saved)),
        Term("activations of the residual stream and their gradient", 3 * one),
        Term("unembedding and its gradient", readout.whole + readout.gradients + readout.summed),
        Term("logits and their gradient", 3 * 4 * vocab * chunk_rows(tokens, vocab)),
    )
    backend = chosen_backend(target, execution.kernels.grouped_matmul, execution.dtype)
    for number, stack in reversed(list(enumerate(model.stacks))):
        for kind, block in enumerate(stack.blocks):
            learns = mask.stacks[number].blocks[kind]
            for name, terms in layer_moments(of_one(block), learns, execution, tokens, backend).items():
                where = f"backward pass of {block_path(number, kind)}: {name}"
                add(where, gradients, Term("saved activations", sum(saved[: number + 1])), *terms)
    moments.append(Moment("update", (*arguments, gradients)))
    return Footprint(sum(term.bytes for term in arguments), tuple(moments))


def _hoisted(stacks: tuple[Stack, ...], execution: Execution, target: Target) -> int:
    """Return the bytes of copies of stacks of weights that XLA makes before the loop over layers, which read them.

    A TPU's compiler casts them to the dtype of computation. A GPU's turns those that are gathered along an inner
    dimension, so that this comes first.
    """
    found = 0
    for x, placement in zip(jax.tree.leaves(stacks), jax.tree.leaves(execution.placements(stacks)), strict=True):
        size, itemsize = placement.local_size(x.shape), jnp.dtype(execution.dtype).itemsize
        if target.platform == "tpu" and placement.axes.role is Role.WEIGHT and x.dtype.itemsize > itemsize:
            found += size * itemsize
        if target.platform == "cuda" and any(placement.gathered[2:]):
            found += size * x.dtype.itemsize
    return found
