"""The inputs of a layer besides activations: the coordinates of tokens, and what follows from them for all layers."""

from typing import NamedTuple

import jax
from jaxtyping import PyTree

from moezoo.nn.context_parallel import context_parallel
from moezoo.parallel.context_parallel import BothCoordinates, Coordinates
from moezoo.parallel.dropout import Dropout
from moezoo.parallel.execution import Execution


class Context(NamedTuple):
    """The coordinates of the queries of this device and of the keys.

    `prepared` is what `Mixer.prepare` returned for the layer, if it was called before the layer. `dropout` is what
    low-rank pairs drop of their inputs; None except in training.
    """

    queries: Coordinates
    keys: Coordinates
    prepared: PyTree = None
    dropout: Dropout | None = None

    @property
    def coordinates(self) -> BothCoordinates:
        """The coordinates of queries and keys."""
        return BothCoordinates(self.queries, self.keys)


@jax.named_scope("positions")
def make_context(queries: Coordinates, execution: Execution) -> Context:
    """Return the context of a forward pass. All layers share it."""
    return Context(*context_parallel(execution).coordinates(queries, execution.sequence_group))
