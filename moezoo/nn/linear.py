"""The products with weights outside the experts, and the initial values of a matrix."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.parallel import stored
from moezoo.parallel.stacks import turned
from moezoo.parallel.stored import Stored


def project(
    x: Float[Array, "..."], weight: Float[Array, "..."] | Stored, inputs: int = 1, *, dtype: DTypeLike | None = None
) -> Float[Array, "..."]:
    """Contract the last `inputs` dimensions of `x` with the first `inputs` dimensions of `weight`.

    The result has the dtype of `x`, or `dtype`: scores and logits ask for float32, so their sums are not rounded.
    Only this function, `contract` and `grouped_matmul` read weights, so layers do not know how weights are stored.
    """
    return stored.multiply(x, weight, inputs, dtype)


def project_rows(x: Float[Array, "rows inputs"], weight: Float[Array, "inputs outputs"] | Stored) -> Array:
    """Return `project` in float32. The gradient of an array `weight`, x.T times the cotangent, is fast on a CPU too."""
    return project(x, weight, dtype=jnp.float32) if isinstance(weight, Stored) else _times(x, weight)


@jax.custom_vjp
def _times(x: Float[Array, "rows inputs"], matrix: Float[Array, "inputs outputs"]) -> Float[Array, "rows outputs"]:
    return project(x, matrix, dtype=jnp.float32)


def _times_backward(operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, matrix = operands
    (by_x,) = jax.vjp(lambda x: project(x, matrix, dtype=jnp.float32), x)[1](cotangent)
    columns = turned(x)
    (by_matrix,) = jax.vjp(lambda matrix: project(columns, matrix, dtype=jnp.float32), matrix)[1](cotangent)
    return by_x, by_matrix


_times.defvjp(lambda x, matrix: (_times(x, matrix), (x, matrix)), _times_backward)


def contract(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."] | Stored) -> Float[Array, "..."]:
    """Return the `jnp.einsum` of `x` and a weight, for products that `project` cannot express."""
    return stored.contract(equation, x, weight)


# False while only shapes of a model are wanted: to trace what draws numbers takes several times as long as all else.
# jax.jit keeps what it has traced apart by it.
draws_numbers = jax.make_user_context(default_value=True)


def normal(key: Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> Array:
    """Draw from a normal distribution truncated at two standard deviations, in float32, and cast to `dtype`."""
    if not draws_numbers.value:
        return jnp.zeros(shape, dtype)
    return (std * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)).astype(dtype)
