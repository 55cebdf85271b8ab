"""A factor on queries that grows with their position, so that attention stays sharp in texts longer than in training.

Llama 4 (Meta, 2025) has it in some layers, Mistral 4 in all. transformers calls its strength `llama_4_scaling_beta`.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.positions import Context
from moezoo.typed import NotNegative, Size, check_fields


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """Queries are multiplied by 1 + `beta` * ln(1 + floor(position / `length`)).

    Args:
        beta: The strength; 0 is no factor.
        length: The tokens per text in training; the factor is 1 for that many.

    Raises:
        UserError: A value has a wrong type, or a number is out of its range.
    """

    beta: NotNegative = 0.0
    length: Size = 8192

    def __post_init__(self):
        check_fields("model.query_scale", self)

    def __call__(
        self, queries: Float[Array, "batch seq heads head_dim"], context: Context
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Return the queries of the tokens of this device times their factors; the product is rounded once."""
        if not self.beta:
            return queries
        # At padding a position may be any number, and a logarithm must not become NaN.
        periods = (jnp.maximum(context.queries.position, 0) // self.length).astype(jnp.float32)
        factor = 1 + self.beta * jnp.log1p(periods)
        return (queries.astype(jnp.float32) * factor[:, :, None, None]).astype(queries.dtype)


NO_QUERY_SCALE = QueryScale()
