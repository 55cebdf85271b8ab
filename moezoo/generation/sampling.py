"""Draw the next token from its logits."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.errors import UserError
from moezoo.typed import NotNegative, Range, Size, check_fields


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Each setting except `temperature` reduces the tokens that can be drawn.

    Of equally likely tokens, those with lower numbers count as more likely.

    Attributes:
        temperature: 0 takes the most likely token; above 0, draw from softmax(logits / temperature).
        top_k: Draw only from the `top_k` most likely tokens.
        top_p: Of those, draw only from the smallest set of most likely tokens whose probabilities sum to at least
            `top_p` (Holtzman et al., 2020, "The Curious Case of Neural Text Degeneration"). Probabilities, which sum
            to 1 over the tokens that `top_k` leaves, and their sums are float32.
        vocab: Draw only tokens below `vocab`, for embeddings with more rows than the tokenizer has tokens.

    Raises:
        UserError: A setting has a wrong type, is out of its range, or has no effect at temperature 0.
    """

    temperature: NotNegative = 0.0
    top_k: Size | None = None
    top_p: Annotated[float, Range(above=0, at_most=1)] | None = None
    vocab: Size | None = None

    def __post_init__(self):
        check_fields("", self)
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise UserError(
                    f"{name}={getattr(self, name)} has no effect at temperature 0, which takes the most likely token; "
                    f"set a temperature, such as 1, or leave out {name}"
                )

    def __call__(
        self, logits: Float[Array, "rows vocab"], row: Int[Array, " rows"], step: Int[Array, ""] | int, key: Array
    ) -> Int[Array, " rows"]:
        """Return one token per row, int32. It depends only on the row's logits, its number `row`, `step` and `key`."""
        logits = logits[:, : self.vocab]
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        count = min(self.top_k or logits.shape[1], logits.shape[1])
        top, tokens = jax.lax.top_k(logits, count)
        # The largest becomes 0, so nothing overflows. Temperatures below the least normal float32 would round to 0.
        coldest = float(jnp.finfo(jnp.float32).tiny)
        top = (top - top[:, :1]) / max(self.temperature, coldest)
        if self.top_p is not None:
            probabilities = jax.nn.softmax(top)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            # Keep the most likely token even if rounding excludes it.
            kept = (before < self.top_p) | (jnp.arange(count)[None] == 0)
            top = jnp.where(kept, top, -jnp.inf)
        keys = jax.vmap(lambda r: jax.random.fold_in(jax.random.fold_in(key, step), r))(row)
        drawn = jax.vmap(jax.random.categorical)(keys, top)
        return jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)
