"""The nearest matrix with orthonormal rows, approximately, by matrix products alone: Newton-Schulz iteration.

Five steps of an odd polynomial drive every singular value of X towards 1:

    X <- X / (|X| + 1e-7)                          |X| is the Frobenius norm
    X <- a X + (b A + c A A) X,  A = X X^T         five times, (a, b, c) = (3.4445, -4.7750, 2.0315)

Source: Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks". Singular values above 1/500 of
the Frobenius norm come out between 0.5 and 1.3; smaller ones are enlarged by up to a^5 = 485.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7


def orthogonalise(x: Float[Array, "matrices rows columns"]) -> Float[Array, "matrices rows columns"]:
    """Return the orthogonalised matrices, in the dtype of `x`; a matrix of zeros stays zero.

    Products are computed in this dtype, norms in float32. With fewer rows than columns it is faster than
    with their transpose: A is rows x rows.
    """
    # On a TPU the default precision of float32 products is that of bfloat16.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def times(x: Array, y: Array) -> Array:
        return jnp.matmul(x, y, precision=precision)

    def step(_: Any, x: Array) -> Array:
        a, b, c = _COEFFICIENTS
        square = times(x, x.mT)
        return a * x + times(b * square + c * times(square, square), x)

    norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum((1, 2), keepdims=True))
    return lax.fori_loop(0, STEPS, step, (x.astype(jnp.float32) / (norm + _EPSILON)).astype(x.dtype))


def flops(rows: int, columns: int) -> int:
    """Return the FLOPs of the products for one matrix."""
    return STEPS * (4 * rows**2 * columns + 2 * rows**3)
