"""The contractions outside the experts, and how a matrix begins."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.parallel.stored import Stored, plain


def project(
    x: Float[Array, "..."], weight: Float[Array, "..."] | Stored, inputs: int = 1, *, dtype: DTypeLike | None = None
) -> Float[Array, "..."]:
    """Contract the last `inputs` dimensions of `x` with the first `inputs` of `weight`.

    The result has the dtype of `x`, or `dtype`: scores and logits ask for float32, so that sums are not rounded. Layers
    contract here, in `contract` and in `grouped_matmul` only, so they do not know how their weights are stored.
    """
    if isinstance(weight, Stored):
        return weight.product(x, inputs, x.dtype if dtype is None else dtype)
    return jnp.tensordot(x, weight, inputs, preferred_element_type=dtype)


def contract(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."] | Stored) -> Float[Array, "..."]:
    """`jnp.einsum` of `x` and a weight, where `project` does not do: over outputs of the weight, or head by head."""
    return jnp.einsum(equation, x, plain(weight, x.dtype))


def normal(key: Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> Array:
    """A normal distribution cut at two standard deviations, drawn in float32."""
    return (std * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)).astype(dtype)
