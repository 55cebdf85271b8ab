"""`grouped_matmul`: the contract that every backend keeps, the choice of one, and the gradients."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moezoo.errors import UserError, nearest
from moezoo.kernels.grouped_matmul import blocked, ragged_dot, reference
from moezoo.kernels.grouped_matmul.backend import Backend
from moezoo.parallel.collectives import GROUPED_MATMUL, vary_like
from moezoo.parallel.stored import Stored, plain

Implementation = Literal["reference", "blocked", "ragged_dot"]
_BACKENDS: dict[str, Backend] = {"reference": reference, "blocked": blocked, "ragged_dot": ragged_dot}
assert set(_BACKENDS) == set(get_args(Implementation))

# What None takes by platform; `blocked` on any other.
_PREFERRED: dict[str, Implementation] = {"tpu": "ragged_dot"}


def default_implementation(platform: str) -> Implementation:
    """The backend that `implementation=None` takes on a platform, named as a JAX device names it."""
    return _PREFERRED.get(platform, "blocked")


def grouped_matmul(
    rows: Float[Array, "rows inputs"],
    weights: Float[Array, "groups inputs outputs"] | Stored,
    group_sizes: Int[Array, " groups"],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows outputs"]:
    """Multiply each run of rows by its group's matrix.

    Rows lie group after group; `group_sizes` (int32) says how many each has, none included, and sums to at most the
    number of rows. Rows beyond that sum come out exactly zero, whatever they hold, and take no part in any gradient; a
    group without rows has a gradient of exactly zero. Products are accumulated in float32; the result has the dtype of
    `rows`. Inside `shard_map` the result varies wherever an operand does.

    `implementation` names a backend: `blocked` (portable: loops that stop at the sum of the group sizes),
    `ragged_dot` (XLA's own, one kernel on a TPU, `groups` times the work elsewhere) or `reference` (naive, to compare
    with). None takes `ragged_dot` where the program is compiled for a TPU, whatever machine compiles it, and
    `blocked` elsewhere.

    Gradients are of first order and in reverse mode.

    Raises `UserError` for a backend that does not exist, or another number of sizes than of matrices.
    """
    if implementation is not None and implementation not in _BACKENDS:
        raise UserError(f"grouped_matmul: no implementation '{implementation}'; {nearest(implementation, _BACKENDS)}")
    if weights.shape[0] != group_sizes.shape[0] or not weights.shape[0]:
        raise UserError(
            f"grouped_matmul: {group_sizes.shape[0]} group sizes for {weights.shape[0]} matrices; give one for each, "
            "and at least one"
        )
    group_sizes = jnp.asarray(group_sizes, jnp.int32)
    weights = plain(weights, rows.dtype)
    # The gradients below must vary exactly as their operands: make all three vary alike first, and the transpose of
    # that cast is the sum over devices that a replicated operand needs.
    result = _product(
        implementation,
        vary_like(rows, weights, group_sizes),
        vary_like(weights, rows, group_sizes),
        vary_like(group_sizes, rows, weights),
    )
    # Rematerialisation never saves what a loop returns, unless it has a name.
    return checkpoint_name(result, GROUPED_MATMUL)


def _run(implementation: Implementation | None, part: Literal["multiply", "outer"], last: object, *operands: Array):
    """A backend's function. None is settled when the program is lowered: only then is its platform known."""

    def of(name: Implementation):
        return lambda *operands: getattr(_BACKENDS[name], part)(*operands, last)

    if implementation is not None:
        return of(implementation)(*operands)
    return lax.platform_dependent(*operands, default=of("blocked"), **{p: of(n) for p, n in _PREFERRED.items()})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(implementation, rows, weights, group_sizes):
    return _run(implementation, "multiply", 1, rows, weights, group_sizes)


def _forward(implementation, rows, weights, group_sizes):
    return _product(implementation, rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(implementation, residuals, cotangent):
    rows, weights, group_sizes = residuals
    return (
        _run(implementation, "multiply", 2, cotangent, weights, group_sizes),
        _run(implementation, "outer", weights.dtype, rows, cotangent, group_sizes),
        None,
    )


_product.defvjp(_forward, _backward)
