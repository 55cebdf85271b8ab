"""The inputs of attention besides activations: the places of tokens, and numbers that differ by layer."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from moezoo.nn.context_parallel import context_parallel
from moezoo.nn.rope import Turn
from moezoo.parallel.context_parallel import Place, Places
from moezoo.parallel.execution import Execution


class LayerNumbers(NamedTuple):
    """Numbers of attention that may differ by layer: the rotary base, and a factor on the scores."""

    rope_base: float | Float[Array, ""]
    score_scale: float | Float[Array, ""]


class Context(NamedTuple):
    """The places of the queries of this device and of the keys; `numbers` is None where layers do not differ.

    `turn` is what the rotary positions of the layer make of the places, if it was computed before the layer.
    """

    queries: Place
    keys: Place
    numbers: LayerNumbers | None = None
    turn: Turn | None = None

    @property
    def places(self) -> Places:
        """The places of queries and keys."""
        return Places(self.queries, self.keys)


@jax.named_scope("positions")
def make_context(queries: Place, execution: Execution) -> Context:
    """Return the context of a forward pass. All layers share it."""
    return Context(*context_parallel(execution).places(queries, execution.sequence_group))
