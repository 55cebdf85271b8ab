"""The inputs of a layer besides activations: the places of tokens, and what follows from them for all layers."""

from typing import NamedTuple

import jax
from jaxtyping import PyTree

from moezoo.nn.context_parallel import context_parallel
from moezoo.parallel.context_parallel import Place, Places
from moezoo.parallel.execution import Execution


class Context(NamedTuple):
    """The places of the queries of this device and of the keys.

    `prepared` is what `Mixer.prepare` returned for the layer, if it was called before the layer.
    """

    queries: Place
    keys: Place
    prepared: PyTree = None

    @property
    def places(self) -> Places:
        """The places of queries and keys."""
        return Places(self.queries, self.keys)


@jax.named_scope("positions")
def make_context(queries: Place, execution: Execution) -> Context:
    """Return the context of a forward pass. All layers share it."""
    return Context(*context_parallel(execution).places(queries, execution.sequence_group))
