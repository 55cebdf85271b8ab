"""The order in which the micro-batches of a step pass through pipeline stages, as a value.

Stages are the devices along the mesh axis `stage`. Each holds some of the layers and hands activations to the next.
Outside the layers that are piped, stages split micro-batches as one more axis of the batch.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, PyTree

from moezoo.errors import UserError
from moezoo.parallel.axes import Stack
from moezoo.typed import Size, check_fields


class Piped(NamedTuple):
    """Which layers run in stages: the first `stages * chunks * depth` periods of stack number `stack`.

    Attributes:
        stack: The number of the stack.
        path: Its path in the model.
        stages: The number of stages, S.
        chunks: The number of chunks of each stage, v.
        depth: The periods of a chunk, k. Chunk r of stage s has periods (r S + s) k to (r S + s) k + k - 1.
        by_layer: Whether each stage stores its own layers of the stack, so that no weight moves to its stage.
    """

    stack: int
    path: str
    stages: int
    chunks: int
    depth: int
    by_layer: bool

    @property
    def periods(self) -> int:
        """The number of periods that run in stages."""
        return self.stages * self.chunks * self.depth


class Work(NamedTuple):
    """What a stage does in a tick: chunk number `chunk` of its layers, on micro-batch number `micro`."""

    chunk: Array | int
    micro: Array | int


@dataclasses.dataclass(frozen=True)
class Circular:
    """Micro-batches go round all stages `chunks` times, in groups of as many micro-batches as there are stages.

    With S stages, v chunks and M micro-batches, stage s does its work number n in tick n + s. A group of S
    micro-batches passes chunk 0 of all stages, then chunk 1, and so on; the next group follows without a gap. All
    M v + S - 1 ticks take the same time, and in S - 1 of them a stage does nothing useful. With one chunk this is GPipe
    (Huang et al., 2019, arXiv:1811.06965); with more, the interleaved order of Narayanan et al. (2021,
    arXiv:2104.04473).

    Attributes:
        microbatches: The micro-batches of a pass, M; None for as many as there are stages, the fewest.
        chunks: The chunks of layers of each stage, v.
        gather: When weights are gathered: `once`, which keeps those of a stage for a whole pass, or in every `tick`.

    Raises:
        UserError: A field has a value that it cannot have.
    """

    microbatches: Size | None = None
    chunks: Size = 1
    gather: Literal["once", "tick"] = "once"

    def __post_init__(self):
        check_fields("execution.pipeline", self)

    def count(self, stages: int) -> int:
        """Return M for so many stages.

        Raises:
            UserError: M is not a multiple of `stages`.
        """
        wanted = self.microbatches or stages
        if wanted % stages:
            below, above = wanted // stages * stages, -(-wanted // stages) * stages
            raise UserError(
                f"execution.pipeline.microbatches={wanted} is not a multiple of mesh.stage={stages}; "
                f"choose {f'{below} or ' * bool(below)}{above}"
            )
        return wanted

    def ticks(self, stages: int) -> int:
        """Return the number of ticks of a pass."""
        return self.chunks * self.count(stages) + stages - 1

    def bubble(self, stages: int) -> float:
        """Return the share of ticks in which a stage does nothing useful."""
        return (stages - 1) / self.ticks(stages)

    def work(self, number: Array | int, stages: int) -> Work:
        """Return what the work of a stage with this number is, from 0 to M v - 1."""
        group, rest = number // (self.chunks * stages), number % (self.chunks * stages)
        return Work(rest // stages, group * stages + rest % stages)

    def by_micro(self, x: Array, stages: int) -> Array:
        """Order [M v, ...], what a stage made in its works, by micro-batch and chunk: [M, v, ...]."""
        rounds = x.reshape(-1, self.chunks, stages, *x.shape[1:])
        return rounds.swapaxes(1, 2).reshape(-1, self.chunks, *x.shape[1:])

    def piped(self, module: PyTree, stages: int, by_layer: bool) -> Piped | None:
        """Return which layers of a model run in stages; None for a module without stacks.

        They are of its longest stack, the first of equal ones. Its layers are stored `by_layer`, if they are to be,
        where each stage has one chunk and stages divide them.

        Raises:
            UserError: The stack has fewer periods than there are chunks.
        """
        leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=_is_stack)
        stacks = [(jax.tree_util.keystr(path), x) for path, x in leaves if isinstance(x, Stack)]
        if not stacks:
            return None
        layers = [stack.count * len(stack.blocks) for _, stack in stacks]
        longest = layers.index(max(layers))
        path, stack = stacks[longest]
        count, period = stack.count, len(stack.blocks)
        depth, left = divmod(count, stages * self.chunks)
        if not depth:
            raise UserError(_too_many(stages, self.chunks, count, period))
        return Piped(longest, path, stages, self.chunks, depth, by_layer and self.chunks == 1 and not left)


def _is_stack(x: object) -> bool:
    return isinstance(x, Stack)


def _too_many(stages: int, chunks: int, count: int, period: int) -> str:
    of_chunks = f" x execution.pipeline.chunks={chunks}" * (chunks > 1)
    units = "layers" if period == 1 else f"periods of {period} layers"
    key, most = ("execution.pipeline.chunks", count // stages) if count >= stages else ("mesh.stage", count)
    fewer = f"{key}={most}" + " or less" * (most > 1)
    return (
        f"mesh.stage={stages}{of_chunks} needs {stages * chunks} {units}, and the longest run of one pattern has "
        f"{count}; choose {fewer}, or a model with more layers"
    )
