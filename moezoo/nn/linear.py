"""The one contraction outside the experts, and how a matrix begins."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def project(
    x: Float[Array, "..."], weight: Float[Array, "..."], inputs: int = 1, *, dtype: DTypeLike | None = None
) -> Float[Array, "..."]:
    """Contract the last `inputs` dimensions of `x` with the first `inputs` of `weight`.

    The result has the dtype of `x`, or `dtype`: scores and logits ask for float32, so that sums are not rounded. Layers
    contract here and in `grouped_matmul` only, so that quantised or low-rank weights have one place to go.
    """
    return jnp.tensordot(x, weight, inputs, preferred_element_type=dtype)


def normal(key: Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> Array:
    """A normal distribution cut at two standard deviations, drawn in float32."""
    return (std * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)).astype(dtype)
