"""Context parallelism: how a query meets keys of other devices where the sequence is split."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from moezoo.kernels.attention import attend
from moezoo.parallel.collectives import gather, gather_tokens
from moezoo.parallel.context_parallel import ContextParallel, Expand, Place, Places, Scoring, SequenceGroup
from moezoo.parallel.execution import Execution
from moezoo.parallel.traffic import Move, Moves


@dataclasses.dataclass(frozen=True)
class GatherKept(ContextParallel):
    """Queries stay; what tokens leave behind is gathered over the group and expanded whole on every device."""

    def places(self, queries: Place, group: SequenceGroup) -> Places:
        """Two all-gathers of integers."""
        return Places(queries, Place(*(gather(x, group.axes, 1, tokens=group.token_axes) for x in queries)))

    def attend(
        self,
        q: Array,
        kept: PyTree,
        weights: PyTree,
        expand: Expand,
        places: Places,
        scoring: Scoring,
        group: SequenceGroup,
    ) -> Array:
        """An all-gather for each array of `kept`, whose transpose is a reduce-scatter."""
        whole = jax.tree.map(lambda x: gather_tokens(x, group.axes, 1, tokens=group.token_axes), kept)
        return attend_whole(q, *expand(weights, whole), places, scoring)

    def place_exchanges(self, tokens: int, group: SequenceGroup) -> Moves:
        """Positions and segments."""
        return Moves((Move("all_gather", group.axes, group.size, tokens, jnp.int32),) * 2)

    def exchanges(self, numbers: tuple[int, ...], dtype: DTypeLike, group: SequenceGroup) -> Moves:
        """There, and gradients back."""
        there = tuple(Move("all_gather", group.axes, group.size, each, dtype) for each in numbers)
        return Moves(there, there, tuple(move.back() for move in there))


CONTEXT_PARALLEL: dict[str, type[ContextParallel]] = {"gather": GatherKept}


def context_parallel(execution: Execution) -> ContextParallel:
    """The execution's; without one, `gather`."""
    return execution.context_parallel or GatherKept()


def attend_whole(q: Array, k: Array, v: Array, places: Places, scoring: Scoring) -> Array:
    """Queries over keys that are all here: the kernel's result alone."""
    scale, window, sinks, order = scoring
    return attend(q, k, v, **places._asdict(), scale=scale, window=window, sinks=sinks, implementation=order).result
