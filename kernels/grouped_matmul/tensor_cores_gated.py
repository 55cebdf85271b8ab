"""`gated` by the kernels for NVIDIA's tensor cores: two products and the activation in one, and the gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from moezoo.kernels.grouped_matmul.backend import Activation, ExpertWeights, GroupMatrices, GroupSizes
from moezoo.kernels.grouped_matmul.chips import Chip
from moezoo.kernels.grouped_matmul.tensor_cores import UNIT, outer, row_products
from moezoo.parallel.collectives import GROUPED_MATMUL
from moezoo.parallel.kernels import Keep
from moezoo.parallel.traces import equations

# What a kernel's registers can compute of an activation; another one is computed in a pass of its own.
_FUSED = {"mul", "add", "sub", "neg", "div", "exp", "logistic", "max", "min", "integer_pow", "convert_element_type"}
_CALLS = {"jit", "pjit", "custom_jvp_call", "broadcast_in_dim"}


def _fuses(activation: Activation) -> bool:
    """Return whether an activation consists of operations that the kernel can compute."""
    x = jax.ShapeDtypeStruct((UNIT, UNIT), jnp.float32)
    found = {each.equation.primitive.name for each in equations(jax.make_jaxpr(activation)(x, x))}
    return found <= _FUSED | _CALLS


def _members(rows: int, group_sizes: GroupSizes) -> Bool[Array, "rows groups"]:
    """Return which group each row belongs to; none after the last group."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)[None]
    row = lax.iota(jnp.int32, rows)[:, None]
    return (ends - group_sizes.astype(jnp.int32)[None] <= row) & (row < ends)


def _biased(x: Array, bias: Array | None, group_sizes: GroupSizes) -> Array:
    if bias is None:
        return x
    return x + jnp.take(bias, jnp.argmax(_members(x.shape[0], group_sizes), 1), axis=0, mode="clip")


def _by_bias(y: Array, bias: Array | None, group_sizes: GroupSizes) -> Array | None:
    """Return the gradient of a bias, given that of the rows: a product, as a sum by groups would be a scatter."""
    if bias is None:
        return None
    member = _members(y.shape[0], group_sizes).astype(y.dtype)
    return jnp.einsum("rg,rn->gn", member, y, preferred_element_type=jnp.float32).astype(bias.dtype)


def products(
    chip: Chip, rows: Float[Array, "rows inputs"], weights: ExpertWeights, group_sizes: GroupSizes
) -> list[Array]:
    """Return the products with gate and up, plus their biases."""
    matrices, biases = weights[:2], weights[3:]
    found = row_products(chip, (rows,), matrices, group_sizes, 1, lambda *both: both, 2)
    return [_biased(x, bias, group_sizes) for x, bias in zip(found, biases, strict=True)]


def activate(
    both: Sequence[Float[Array, "rows outputs"]], group_sizes: GroupSizes, activation: Activation
) -> Float[Array, "rows outputs"]:
    """Return the activation of both products, with zeros in unused rows."""
    used = lax.iota(jnp.int32, both[0].shape[0]) < group_sizes.sum(dtype=jnp.int32)
    result = activation(*both)
    return jnp.where(used[:, None], result, jnp.zeros((), result.dtype))


def forward(
    chip: Chip,
    rows: Float[Array, "rows inputs"],
    weights: ExpertWeights,
    group_sizes: GroupSizes,
    activation: Activation,
    keep: Keep,
) -> tuple[Float[Array, "rows outputs"], list[Float[Array, "rows outputs"]]]:
    """Return the activation, and the products if they are kept: without biases of one kernel, if it can compute it."""
    if weights.gate_bias is None and weights.up_bias is None and _fuses(activation):
        results = 3 if keep == "products" else 1
        finish = lambda *both: (activation(*both), *both)[:results]  # noqa: E731
        result, *both = row_products(chip, (rows,), weights[:2], group_sizes, 1, finish, results)
    else:
        both = products(chip, rows, weights, group_sizes)
        result = activate(both, group_sizes, activation)
    return result, [checkpoint_name(x, GROUPED_MATMUL) for x in both] if keep == "products" else []


def backward(
    chip: Chip,
    rows: Float[Array, "rows inputs"],
    weights: ExpertWeights,
    group_sizes: GroupSizes,
    by_both: Sequence[Array],
) -> tuple[Float[Array, "rows inputs"], list[Any]]:
    """Return the gradients by rows, and by gate, up and their biases, given those by both products."""
    by_matrices = [outer(chip, rows, y, group_sizes, w.dtype) for y, w in zip(by_both, weights[:2], strict=True)]
    by_biases = [_by_bias(y, bias, group_sizes) for y, bias in zip(by_both, weights[3:], strict=True)]
    by_rows = row_products(chip, tuple(by_both), weights[:2], group_sizes, 2, lambda x: (x,), 1)[0]
    return by_rows, by_matrices + by_biases


def gated(
    chip: Chip,
    rows: Float[Array, "rows inputs"],
    gate: GroupMatrices,
    up: GroupMatrices,
    group_sizes: GroupSizes,
    gate_bias: Float[Array, "groups outputs"] | None,
    up_bias: Float[Array, "groups outputs"] | None,
    *,
    activation: Activation,
    keep: Keep,
) -> Float[Array, "rows outputs"]:
    """Compute the activation of both products."""
    return _gated(chip, activation, keep, rows, group_sizes, gate, up, gate_bias, up_bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gated(chip, activation, keep, rows, group_sizes, gate, up, gate_bias, up_bias):
    del keep  # nothing is kept without a backward pass
    return forward(chip, rows, ExpertWeights(gate, up, up, gate_bias, up_bias), group_sizes, activation, "inputs")[0]


def _gated_forward(chip, activation, keep, rows, group_sizes, gate, up, *biases):
    weights = ExpertWeights(gate, up, up, *biases)  # the third is not read
    result, kept = forward(chip, rows, weights, group_sizes, activation, keep)
    return result, (rows, group_sizes, weights, kept)


def _gated_backward(chip, activation, keep, residuals, cotangent):
    del keep
    rows, sizes, weights, kept = residuals
    both = kept or products(chip, rows, weights, sizes)
    _, pull = jax.vjp(lambda *both: activate(both, sizes, activation), *both)
    by_rows, by_weights = backward(chip, rows, weights, sizes, pull(cotangent))
    return by_rows, None, *by_weights


_gated.defvjp(_gated_forward, _gated_backward)
