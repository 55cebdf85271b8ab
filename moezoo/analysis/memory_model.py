"""The memory model: what one device holds in a program, in named terms, without compiling it.

A program has a few moments at which much is held: the backward pass of each kind of layer, the head, the update. The
terms of a moment are closed forms of the sizes of the model, the layout and the batch; no number is fitted. The peak is
the moment with the most bytes. docs/planning.md compares it with what compilers reserve.
"""

from typing import NamedTuple

import jax

from moezoo.analysis.calls import CALLS
from moezoo.config.build import blueprint_on
from moezoo.config.settings import TrainConfig
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.kernels import Target
from moezoo.parallel.traffic import CallName

TPU = Target("tpu")


class Term(NamedTuple):
    """A part of what a device holds: its `name`, and its `bytes` on one device."""

    name: str
    bytes: int


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

    Args:
        cfg: The configuration.
        call: What runs, as for `moezoo.analysis.sharding.describe`.
        target: What the program is for: it decides which kernels run.
        blueprint: As in `moezoo.training.build.build_step`.

    Raises:
        UserError: The parts of the configuration do not fit together, or a mesh axis is -1.
    """
    blueprint = blueprint_on(cfg, given=blueprint)
    program = CALLS[call](cfg, blueprint)
    held = tuple(Term(*item) for item in program.memory.items())
    rows, length = program.local_tokens
    batch = Term("batch", 4 * 4 * rows * length)
    return Footprint(sum(term.bytes for term in held) + batch.bytes, (Moment("arguments", (*held, batch)),))
