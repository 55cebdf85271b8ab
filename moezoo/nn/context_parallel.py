"""Context parallelism: attention where the sequence is split over devices."""

import dataclasses

import jax
from jaxtyping import Array

from moezoo.kernels.attention import Operands, attend
from moezoo.nn.ring_attention import RotateKept
from moezoo.parallel.collectives import gather_tokens
from moezoo.parallel.context_parallel import (
    BothCoordinates,
    ContextParallel,
    Interval,
    Scoring,
    SequenceGroup,
    SplitOperands,
    in_order,
)
from moezoo.parallel.mesh_execution import MeshExecution


@dataclasses.dataclass(frozen=True)
class GatherKept(ContextParallel):
    """All-gather what tokens keep, sort it, and expand it to keys and values on every device. Queries stay."""

    def attend(self, operands: SplitOperands, group: SequenceGroup) -> Array:
        """All-gather each array of `kept`; gradients are reduce-scattered."""
        q, kept, weights, expand, (queries, keys), scoring, seen, chunks = operands
        whole = jax.tree.map(lambda x: gather_tokens(x, group.axes, 1, tokens=group.token_axes), kept)
        if chunks is not None:
            whole, keys = jax.tree.map(lambda x: in_order(x, chunks), (whole, keys))
        return attend_whole(q, *expand(weights, whole), BothCoordinates(queries, keys), scoring, seen)


CONTEXT_PARALLEL: dict[str, type[ContextParallel]] = {"gather": GatherKept, "ring": RotateKept}


def context_parallel(execution: MeshExecution) -> ContextParallel:
    """Return the execution's context parallelism, by default `gather`."""
    return execution.context_parallel or GatherKept()


def attend_whole(
    q: Array, k: Array, v: Array, at: BothCoordinates, scoring: Scoring, seen: Interval | None = None
) -> Array:
    """Attend to keys and values that are all on this device; `seen` is known only of keys in sorted order."""
    operands = Operands(q, k, v, at.queries, at.keys, scoring.window, seen)
    return attend(operands, scoring.scale, sinks=scoring.sinks, implementation=scoring.order).result
