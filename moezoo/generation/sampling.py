"""The next token from its logits."""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn: the likeliest at `temperature` 0, otherwise from the softmax of logits / temperature.

    `top_k`: only from so many of the likeliest. `top_p`: of those, only from the fewest likeliest whose probabilities
    together reach it (Holtzman et al., 2020). `vocab`: only from tokens below it, where an embedding has more rows than
    the tokenizer has tokens. Raises `UserError` for what cannot be drawn from.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    vocab: int | None = None

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} must be at least 0; 0 takes the likeliest token")
        for name in ("top_k", "vocab"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, numbers.Integral) or value < 1):
                raise UserError(f"{name}={value} must be a whole number of at least 1; leave it out for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1; leave it out for all tokens")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise UserError(
                    f"{name}={getattr(self, name)} does nothing at temperature 0, which takes the likeliest token; "
                    f"set a temperature, such as 1, or leave out {name}"
                )

    def __call__(
        self, logits: Float[Array, "rows vocab"], row: Int[Array, " rows"], step: Int[Array, ""] | int, key: Array
    ) -> Int[Array, " rows"]:
        """A token a row, int32. What is drawn for row number `row` depends on its logits, `step` and `key` alone."""
        logits = logits[:, : self.vocab]
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        count = min(self.top_k or logits.shape[1], logits.shape[1])
        likeliest, tokens = jax.lax.top_k(logits, count)
        # Nothing overflows, however small the temperature is; below the least normal float32 it would be zero.
        coldest = float(jnp.finfo(jnp.float32).tiny)
        likeliest = (likeliest - likeliest[:, :1]) / max(self.temperature, coldest)
        if self.top_p is not None:
            probabilities = jax.nn.softmax(likeliest)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            # The likeliest stays whatever the rounding.
            kept = (before < self.top_p) | (jnp.arange(count)[None] == 0)
            likeliest = jnp.where(kept, likeliest, -jnp.inf)
        keys = jax.vmap(lambda r: jax.random.fold_in(jax.random.fold_in(key, step), r))(row)
        drawn = jax.vmap(jax.random.categorical)(keys, likeliest)
        return jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)
