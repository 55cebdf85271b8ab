"""The inputs of a layer besides activations: the coordinates of tokens, and what follows from them for all layers."""

import equinox as eqx
import jax
from jaxtyping import PyTree

from moezoo.kernels.attention.intervals import intervals
from moezoo.nn.context_parallel import context_parallel
from moezoo.parallel.context_parallel import BothCoordinates, Chunks, Coordinates, Interval, Reach, in_order
from moezoo.parallel.dropout import Dropout
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.sequence_order import SequenceOrder, balanced_chunks


class Context(eqx.Module):
    """The coordinates of the queries of this device and of the keys.

    `prepared` is what `Mixer.prepare` returned for the layer, if it was called before the layer. `dropout` is what
    low-rank pairs drop of their inputs; None except in training. `chunks` is where tokens lie on the devices that share
    the sequence, if they are sorted; None if nothing is known.
    """

    queries: Coordinates
    keys: Coordinates
    prepared: PyTree = None
    dropout: Dropout | None = None
    chunks: Chunks = eqx.field(static=True, default=None)

    @property
    def coordinates(self) -> BothCoordinates:
        """The coordinates of queries and keys."""
        return BothCoordinates(self.queries, self.keys)

    def seen(self, window: Reach) -> Interval | None:
        """Return the keys that each query sees, of all keys in sorted order; None if nothing is known of the order."""
        if self.chunks is None:
            return None
        chunks = self.chunks
        keys = Coordinates(*(in_order(x, chunks) for x in self.keys))
        return intervals(self.queries, keys, window)


@jax.named_scope("positions")
def make_context(queries: Coordinates, execution: MeshExecution, order: SequenceOrder | None = None) -> Context:
    """Return the context of a forward pass. All layers share it.

    Args:
        queries: The coordinates of this device's tokens.
        execution: The devices and how they share sequences.
        order: The order in which the tokens of each sequence lie on devices, if they are sorted by segment, then
            position, with padding first or last; None if they may lie in any order.
    """
    group = execution.sequence_group
    both = context_parallel(execution).coordinates(queries, group)
    chunks = None if order is None else _CHUNKS[order](group.size)
    return Context(*both, chunks=chunks)


_CHUNKS = {"contiguous": lambda devices: tuple(range(devices)), "balanced": balanced_chunks}
