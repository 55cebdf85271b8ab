"""`routed_mlp` by the kernels for NVIDIA's tensor cores: rows are gathered, multiplied, activated and multiplied, and
the results summed per token.

All of it has one `custom_vjp`, which keeps less than rules for each part would. Rows are gathered again: kept are the
tokens, and the two products of each row or nothing (`keep`). And the gradient of a gate is, for its row, the inner
product of the activations and (cotangent x down), which the backward pass computes anyway: no expert's result is kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.kernels.grouped_matmul.backend import Activation, ExpertWeights
from moezoo.kernels.grouped_matmul.chips import Chip
from moezoo.kernels.grouped_matmul.tensor_cores import multiply, outer
from moezoo.kernels.grouped_matmul.tensor_cores_gated import activate, backward, forward, products
from moezoo.kernels.permute import permute, sum_rows, unpermute
from moezoo.parallel.dispatch import Plan
from moezoo.parallel.kernels import Keep


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def routed_mlp(
    chip: Chip,
    tokens: Float[Array, "tokens embed"],
    gates: Float[Array, "tokens k"],
    plan: Plan,
    weights: ExpertWeights,
    activation: Activation,
    keep: Keep,
) -> Float[Array, "tokens embed"]:
    """Run gather, kernels and sum one after the other."""
    del keep  # without a backward pass no product is kept, as with "inputs"
    return _forward(chip, tokens, gates, plan, weights, activation, "inputs")[0]


def _forward(chip, tokens, gates, plan, weights, activation, keep):
    inner, kept = forward(chip, permute(tokens, plan), weights, plan.group_sizes, activation, keep)
    results = multiply(chip, inner, weights.down, plan.group_sizes, 1)
    return unpermute(results, gates, plan), (tokens, gates, plan, weights, kept)


def _backward(chip: Chip, activation: Activation, keep: Keep, residuals: Any, cotangent: Array) -> tuple:
    del keep  # the residuals say what was kept
    tokens, gates, plan, weights, kept = residuals
    plan = jax.tree.map(jnp.asarray, plan)  # a plan that is known when the program is traced has NumPy arrays
    sizes, rows, back = plan.group_sizes, permute(tokens, plan), permute(cotangent, plan)
    both = kept or products(chip, rows, weights, sizes)
    inner, pull = jax.vjp(lambda *both: activate(both, sizes, activation), *both)
    by_inner = multiply(chip, back, weights.down, sizes, 2).astype(jnp.float32)
    gate = jnp.take(gates.reshape(-1), plan.assignment, mode="fill", fill_value=0)[:, None]
    by_gates = jnp.take((inner.astype(jnp.float32) * by_inner).sum(1), plan.row, mode="fill", fill_value=0)
    by_both = pull((gate * by_inner).astype(inner.dtype))
    by_down = outer(chip, (gate * inner.astype(jnp.float32)).astype(inner.dtype), back, sizes, weights.down.dtype)
    by_rows, (by_gate, by_up, *biases) = backward(chip, rows, weights, sizes, by_both)
    by_tokens = sum_rows(by_rows, plan.row, None)
    return by_tokens, by_gates.astype(gates.dtype), None, ExpertWeights(by_gate, by_up, by_down, *biases)


routed_mlp.defvjp(_forward, _backward)
