"""`grouped_matmul` and `gated`: the contracts that every backend keeps, the choice of one, and the gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moezoo.errors import UserError
from moezoo.kernels.grouped_matmul import blocked, ragged_dot, reference
from moezoo.kernels.grouped_matmul.backend import Activation, Backend
from moezoo.parallel.collectives import GROUPED_MATMUL, vary_like
from moezoo.parallel.kernels import Choice, KernelOrder, Target, choose, run
from moezoo.parallel.stored import Stored, plain

Implementation = Literal["reference", "blocked", "ragged_dot"]
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference.multiply, reference.outer),
    "blocked": Backend(blocked.multiply, blocked.outer),
    "ragged_dot": Backend(ragged_dot.multiply, ragged_dot.outer),
}
_RUNS_ON = {name: backend.runs_on for name, backend in _BACKENDS.items()}
assert set(_BACKENDS) == set(get_args(Implementation))


def _own_order(target: Target) -> Sequence[str]:
    # XLA's own product is one kernel on a TPU, and the work of every group on every row elsewhere.
    return ("ragged_dot", "blocked") if target.platform == "tpu" else ("blocked",)


def chosen_backend(target: Target, names: tuple[str, ...] = ()) -> str:
    """The backend that runs on `target`: the first of `names` that does, or of the kernel's own order.

    Raises `UserError` for a name that is no backend, and where none of them runs there.
    """
    return _choose(KernelOrder(names, target))[0][1]


def _choose(implementation: str | KernelOrder | None) -> Choice:
    return choose("grouped_matmul", _RUNS_ON, implementation, _own_order)


def grouped_matmul(
    rows: Float[Array, "rows inputs"],
    weights: Float[Array, "groups inputs outputs"] | Stored,
    group_sizes: Int[Array, " groups"],
    *,
    implementation: str | KernelOrder | None = None,
) -> Float[Array, "rows outputs"]:
    """Multiply each run of rows by its group's matrix.

    Rows lie group after group; `group_sizes` (int32) says how many each has, none included, and sums to at most the
    number of rows. Rows beyond that sum come out exactly zero, whatever they hold, and take no part in any gradient; a
    group without rows has a gradient of exactly zero. Products are accumulated in float32; the result has the dtype of
    `rows`. Inside `shard_map` the result varies wherever an operand does.

    `implementation` names a backend, or is the order that `Execution.kernel` gives: `blocked` (portable: loops that
    stop at the sum of the group sizes), `ragged_dot` (XLA's own, one kernel on a TPU, `groups` times the work
    elsewhere) or `reference` (naive, to compare with). None takes `ragged_dot` where the program is compiled for a
    TPU, whatever machine compiles it, and `blocked` elsewhere.

    Gradients are of first order and in reverse mode.

    Raises `UserError` for a backend that does not exist or run here, or another number of sizes than of matrices.
    """
    choice = _choose(implementation)
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
        choice,
        vary_like(rows, weights, group_sizes),
        vary_like(weights, rows, group_sizes),
        vary_like(group_sizes, rows, weights),
    )
    # Rematerialisation never saves what a loop returns, unless it has a name.
    return checkpoint_name(result, GROUPED_MATMUL)


def gated(
    rows: Float[Array, "rows inputs"],
    gate: Float[Array, "groups inputs outputs"] | Stored,
    up: Float[Array, "groups inputs outputs"] | Stored,
    group_sizes: Int[Array, " groups"],
    *,
    activation: Activation,
    gate_bias: Float[Array, "groups outputs"] | None = None,
    up_bias: Float[Array, "groups outputs"] | None = None,
    implementation: str | KernelOrder | None = None,
) -> Float[Array, "rows outputs"]:
    """activation(rows x gate + gate_bias, rows x up + up_bias), each row by its group's matrices and biases.

    Rows beyond the sum of `group_sizes` come out exactly zero, whatever `activation` makes of zeros: a finite number
    with a finite gradient. All else is as
    for `grouped_matmul`, which this is made of where the backend has no such kernel of its own.
    """
    choice = _choose(implementation)
    composed = functools.partial(_gated, activation=activation)
    if not any(_BACKENDS[name].gated for _, name in choice):
        return composed(implementation, rows, gate, up, group_sizes, gate_bias, up_bias)

    def own(name: str) -> Callable[..., Array]:
        one = _BACKENDS[name].gated
        return functools.partial(composed, name) if one is None else functools.partial(one, activation=activation)

    matrices = (plain(weights, rows.dtype) for weights in (gate, up))
    operands = (rows, *matrices, jnp.asarray(group_sizes, jnp.int32), gate_bias, up_bias)
    alike = jax.tree.leaves(operands)
    return checkpoint_name(run(choice, own, *jax.tree.map(lambda x: vary_like(x, *alike), operands)), GROUPED_MATMUL)


def _gated(implementation, rows, gate, up, group_sizes, gate_bias, up_bias, *, activation):
    product = functools.partial(grouped_matmul, group_sizes=group_sizes, implementation=implementation)

    def biased(weights: Array | Stored, bias: Array | None) -> Array:
        y = product(rows, weights)
        # A product too, so that a bias's gradient is summed group by group in fixed order.
        return y if bias is None else y + product(jnp.ones_like(rows[:, :1]), bias[:, None])

    result = activation(biased(gate, gate_bias), biased(up, up_bias))
    used = lax.iota(jnp.int32, rows.shape[0])[:, None] < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(used, result, jnp.zeros((), result.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(choice, rows, weights, group_sizes):
    return run(choice, lambda name: lambda *x: _BACKENDS[name].multiply(*x, 1), rows, weights, group_sizes)


def _forward(choice, rows, weights, group_sizes):
    return _product(choice, rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(choice, residuals, cotangent):
    rows, weights, group_sizes = residuals
    by_rows = run(choice, lambda name: lambda *x: _BACKENDS[name].multiply(*x, 2), cotangent, weights, group_sizes)
    outer = lambda name: lambda *x: _BACKENDS[name].outer(*x, weights.dtype)  # noqa: E731
    return by_rows, run(choice, outer, rows, cotangent, group_sizes), None


_product.defvjp(_forward, _backward)
