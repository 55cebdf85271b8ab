"""What attention is given besides activations: the places of tokens, and numbers that differ by layer."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from moezoo.nn.context_parallel import context_parallel
from moezoo.parallel.context_parallel import Place, Places
from moezoo.parallel.execution import Execution


class LayerNumbers(NamedTuple):
    """Numbers of attention that differ by layer: the rotary base, and a factor on the scores."""

    rope_base: float | Float[Array, ""]
    score_scale: float | Float[Array, ""]


class Context(NamedTuple):
    """The places of this device's tokens and of keys; `numbers` is None where all layers have the same."""

    queries: Place
    keys: Place
    numbers: LayerNumbers | None = None

    @property
    def places(self) -> Places:
        """Without the numbers."""
        return Places(self.queries, self.keys)


@jax.named_scope("positions")
def make_context(queries: Place, execution: Execution) -> Context:
    """The context of a forward pass, made once, as all layers share it."""
    return Context(*context_parallel(execution).places(queries, execution.sequence_group))
