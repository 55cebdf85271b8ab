"""Gathered weights that many micro-batches use, with one gradient in the dtype of sums.

The gradient of an array has the array's dtype, so that of a weight gathered in bfloat16 would be summed in bfloat16 over
all micro-batches. Here the sum is in another array, of zeros, which no program computes with.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from moezoo.parallel.collectives import vary_like


class Held(NamedTuple):
    """A gathered weight, and the zeros whose gradient is the weight's."""

    value: Float[Array, "..."]
    total: Float[Array, "..."]


def hold(weights: PyTree, dtype: DTypeLike) -> PyTree:
    """Return gathered weights with `Held` in place of each array of floats; gradients are summed in `dtype`."""
    total = lambda x: max(x.dtype, jnp.dtype(dtype), key=lambda each: each.itemsize)  # noqa: E731
    return jax.tree.map(lambda x: _hold(x, vary_like(jnp.zeros(x.shape, total(x)), x)) if _learns(x) else x, weights)


def use(held: PyTree) -> PyTree:
    """Return the weights that `hold` got."""
    return jax.tree.map(lambda x: _use(*x) if isinstance(x, Held) else x, held, is_leaf=lambda x: isinstance(x, Held))


def _learns(x: Array) -> bool:
    return eqx.is_inexact_array(x)


@jax.custom_vjp
def _hold(x: Array, zeros: Array) -> Held:
    return Held(x, zeros)


def _hold_forward(x: Array, zeros: Array) -> tuple[Held, None]:
    return Held(x, zeros), None


def _hold_backward(_: None, cotangents: Held) -> tuple[Array, None]:
    return cotangents.total.astype(cotangents.value.dtype), None


@jax.custom_vjp
def _use(x: Array, total: Array) -> Array:
    return x


def _use_forward(x: Array, total: Array) -> tuple[Array, Array]:
    return x, jnp.zeros((0,), total.dtype)


def _use_backward(like: Array, cotangent: Array) -> tuple[None, Array]:
    return None, cotangent.astype(like.dtype)


_hold.defvjp(_hold_forward, _hold_backward)
_use.defvjp(_use_forward, _use_backward)
