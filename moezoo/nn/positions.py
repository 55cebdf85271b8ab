"""Where tokens are: their positions, the documents they belong to, and what attention is given of both."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from moezoo.parallel.collectives import gather
from moezoo.parallel.execution import Execution


class TokenPositions(NamedTuple):
    """Each token's `position` in its document, and its `segment`: the document's number in its row, 0 for padding."""

    position: Int[Array, "batch seq"]
    segment: Int[Array, "batch seq"]


class LayerNumbers(NamedTuple):
    """Numbers of attention that differ by layer: the rotary base, and a factor on the scores."""

    rope_base: float | Float[Array, ""]
    score_scale: float | Float[Array, ""]


class Context(NamedTuple):
    """What a layer's attention needs besides activations.

    The positions of this device's tokens, and of all keys. `numbers` is None where all layers have the same.
    """

    queries: TokenPositions
    keys: TokenPositions
    numbers: LayerNumbers | None = None


@jax.named_scope("positions")
def gather_positions(queries: TokenPositions, execution: Execution) -> Context:
    """Gather positions over the axes that split the sequence: once per forward pass, as all layers share them."""
    axes = execution.sequence_axes
    keys = TokenPositions(*(gather(p, axes, 1, tokens=execution.token_axes) for p in queries))
    return Context(queries, keys)
