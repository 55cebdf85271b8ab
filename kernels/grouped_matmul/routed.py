"""Experts as one, the portable kernel of `routed_mlp`: all that happens to a block of rows is one step of a loop.

A step gathers the tokens of a block, multiplies them by gate and up, applies the activation, and multiplies by down.
The backward pass does the same in a second loop, which also sums the gradients of the group's matrices in place. No
array holds permuted tokens or cotangents, and no step is made of rows that hold no assignment only.

As in `moezoo.kernels.grouped_matmul.blocked`, a product in a loop is one call of a fast matrix product on a CPU:

- A group's matrices are sliced once per group.
- A group's rows are cut into blocks of `SIZES[0]`, and what remains runs as one block of the smallest size that holds
  it: two small products take longer than one of both. The sizes are chosen by timing, so near to each other
  that few rows are computed in vain. Some are a little more than a power of two, which is often the average number of
  rows of a group.
- The block of what remains runs first. Its products become the gradients of the group's matrices, which the others add
  to. So a group of one small block never reads them.
- The last block of a group may reach into the rows of the next, which overwrites them, or beyond all rows: buffers are
  longer by one block. What a block writes there is never read.

The gradient of a gate is the product of the cotangent and the expert's result. It is computed as that of the
activations and (cotangent x down), which the backward pass needs anyway, so no result is kept or computed again.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moezoo.kernels.calls import traced_once
from moezoo.kernels.grouped_matmul.backend import Activation, ExpertWeights
from moezoo.kernels.grouped_matmul.blocked import dot, each_group, repeat
from moezoo.kernels.permute import sum_rows
from moezoo.parallel.collectives import GROUPED_MATMUL
from moezoo.parallel.dispatch import Plan
from moezoo.parallel.kernels import Keep
from moezoo.parallel.stacks import InStack, ReadInStack, put_matrix
from moezoo.parallel.stored import Composed, Widened, is_matrices, matrix_of

SIZES = (352, 288, 216, 144, 80, 40)
# The same where weights are read out of a stack, as in generation, and groups have few rows. Most groups are then one
# block, and a product of 8 rows takes a fraction of the time that it takes to copy the matrix.
SIZES_OF_FEW, ROWS_PER_GROUP = (16, 8), 16

Mask = Bool[Array, " block"]
# The rows of blocks for an array of some rows, the smallest first.
_Sizes = list[int]
# (carry, first row of the block, rows in the block, which of them count, whether it surely is the group's first block)
# -> carry
Step = Callable[[Any, Int[Array, ""], int, Mask, bool], Any]


def _over_groups(
    plan: Plan,
    weights: ExpertWeights,
    sizes: _Sizes,
    step_of: Callable[[Int[Array, ""], ExpertWeights], Step],
    carry: Any,
) -> Any:
    """Run the step of each group that has rows, `step_of(group, its weights)`, on blocks that cover the group."""
    *rests, largest = sizes

    def group(g: Int[Array, ""], start: Int[Array, ""], stop: Int[Array, ""], carry: Any) -> Any:
        step = step_of(g, jax.tree.map(lambda w: matrix_of(w, g), weights, is_leaf=is_matrices))
        # As many of the largest blocks as leave no more than the next smaller size holds.
        count = (stop - start + largest - max(rests, default=0) - 1) // largest
        first, below = start + count * largest, 0
        for size in rests:
            # A loop of no or one step: unlike a branch, it surely updates its carry in place.
            fits = ((stop - first > below) & (stop - first <= size)).astype(jnp.int32)
            carry = repeat(fits, functools.partial(_block, first, stop, size, step, True), carry)
            below = size
        return repeat(count, functools.partial(_block, start, stop, largest, step, False), carry)

    return each_group(plan.group_sizes, group, carry)


def _sizes(plan: Plan, rows: tuple[int, ...]) -> _Sizes:
    return sorted({min(size, plan.assignment.shape[0]) for size in rows})


def _block(
    start: Int[Array, ""], stop: Int[Array, ""], size: int, step: Step, begins: bool, i: Int[Array, ""], carry: Any
) -> Any:
    # XLA computes before a loop what does not depend on `i`, whether the loop runs or not.
    first = start + i * size
    return step(carry, first, size, first + lax.iota(jnp.int32, size) < stop, begins)


def _slice(x: Array, first: Int[Array, ""], size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, first, size, allow_negative_indices=False)


def _write(x: Array, part: Array, first: Int[Array, ""]) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), first, 0, allow_negative_indices=False)


def _read(tokens: Float[Array, "tokens embed"], index: Int[Array, " block"]) -> Float[Array, "block embed"]:
    return jnp.take(tokens, index, axis=0, mode="clip")


def _counting(x: Float[Array, "block embed"], mask: Mask) -> Float[Array, "block embed"]:
    """Return `x` with zeros in rows that do not count. (Times zero would keep a NaN.)"""
    return jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))


def _times(x: Float[Array, "block a"], matrix: Any) -> Float[Array, "block b"]:
    return matrix.forward(x, dot) if isinstance(matrix, Composed) else dot(x, matrix, 1, 0)


def _times_transposed(y: Float[Array, "block b"], matrix: Any) -> Float[Array, "block a"]:
    return matrix.backward(y, dot) if isinstance(matrix, Composed) else dot(y, matrix, 1, 1)


def _outer(x: Float[Array, "block a"], y: Float[Array, "block b"], matrix: Any) -> Any:
    """Return the gradient of a group's matrix."""
    return matrix.outer(x, y, dot) if isinstance(matrix, Composed) else dot(x, y, 0, 0)


def _trained(weights: Any) -> Any:
    """Return the operand of stacked matrices with None in place of what has no gradient."""
    if isinstance(weights, Composed):
        return weights.trained_parts()
    if isinstance(weights, ReadInStack):
        return weights.part
    return None if isinstance(weights, Widened) else weights


def _cotangent(weights: Any, gradient: Any) -> Any:
    """Return the gradient of what `_trained` returns as that of the operand."""
    return weights.with_gradient(gradient) if isinstance(weights, ReadInStack) else gradient


def _products(x: Float[Array, "block embed"], weights: ExpertWeights) -> list[Float[Array, "block mlp"]]:
    """Return x times gate and up, plus their biases, in the dtype of x."""
    pairs = (weights.gate, weights.gate_bias), (weights.up, weights.up_bias)
    products = [(_times(x, w).astype(x.dtype), bias) for w, bias in pairs]
    return [y if bias is None else y + bias[None] for y, bias in products]


def _longer(x: Array, sizes: _Sizes) -> Array:
    """Return `x` with a block of zeros after its rows."""
    return jnp.pad(x, ((0, sizes[-1]), *((0, 0) for _ in x.shape[1:])))


class _Zeros:
    """Makes the arrays that a loop fills.

    XLA makes arrays of equal zeros once and copies them for each loop that writes to one. So every array gets a zero
    that XLA takes for another number: min(size of a group + n, 0), with n = 0, 1, 2, ... The backward pass begins where
    the forward pass, which makes three arrays at most, has ended.
    """

    def __init__(self, plan: Plan, sizes: _Sizes, begin: Literal[0, 3]):
        self._plan, self._sizes, self._numbers = plan, sizes, itertools.count(begin)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return zeros."""
        zero = jnp.minimum(self._plan.group_sizes[0] + next(self._numbers), 0)
        return jnp.broadcast_to(zero.astype(dtype), shape)

    def rows(self, *shape: int, dtype: DTypeLike) -> Array:
        """Return zeros of this shape for every row, and for one block after the last row."""
        return self.array((self._plan.assignment.shape[0] + self._sizes[-1], *shape), dtype)


def _row_of(plan: Plan, rows: Array) -> Int[Array, "tokens k"]:
    """Return the row of each assignment in the longer array `rows`, its length if none."""
    return jnp.where(plan.row < plan.assignment.shape[0], plan.row, rows.shape[0])


def _forward(
    activation: Activation, keep: Keep, rows: tuple[int, ...], tokens: Array, plan: Plan, weights: ExpertWeights
) -> list[Array]:
    """Return the results of all rows, and their products with gate and up if they are kept."""
    sizes = _sizes(plan, rows)
    index = _longer(plan.assignment // plan.row.shape[1], sizes)

    def step_of(_: Int[Array, ""], mine: ExpertWeights) -> Step:
        def step(carry: list[Array], first: Int[Array, ""], size: int, *_: Any) -> list[Array]:
            products = _products(_read(tokens, _slice(index, first, size)), mine)
            result = _times(activation(*products), mine.down)
            return [_write(x, part, first) for x, part in zip(carry, (result, *products), strict=False)]

        return step

    width, embed = weights.down.shape[1:]
    kept = (width, width) if keep == "products" else ()
    zeros = _Zeros(plan, sizes, begin=0)
    carry = [zeros.rows(n, dtype=tokens.dtype) for n in (embed, *kept)]
    return _over_groups(plan, weights, sizes, step_of, carry)


def routed_mlp(
    tokens: Float[Array, "tokens embed"],
    gates: Float[Array, "tokens k"],
    plan: Plan,
    weights: ExpertWeights,
    activation: Activation,
    keep: Keep,
    sizes: tuple[int, ...] | None = None,
) -> Float[Array, "tokens embed"]:
    """Run both passes as loops over blocks of rows, of `SIZES`, or `SIZES_OF_FEW`, unless `sizes` are given."""
    are_few = plan.assignment.shape[0] <= ROWS_PER_GROUP * plan.group_sizes.shape[0]
    own = SIZES_OF_FEW if are_few and isinstance(weights.gate, InStack) else SIZES
    return _routed_mlp(tokens, gates, plan, weights, activation, keep, sizes or own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _routed_mlp(tokens, gates, plan, weights, activation, keep, sizes):
    del keep  # nothing is kept without a backward pass
    return _run_forward(tokens, gates, plan, weights, activation, "inputs", sizes)[0]


def _run_forward(tokens, gates, plan, weights, activation, keep, sizes):
    results, *products = traced_once(_forward, None, (activation, keep, sizes), tokens, plan, weights)
    products = [checkpoint_name(x[: plan.assignment.shape[0]], GROUPED_MATMUL) for x in products]
    return sum_rows(results, _row_of(plan, results), gates), (tokens, gates, plan, weights, products)


def _run_backward(activation, rows, residuals, cotangent):
    tokens, gates, plan, weights, kept = residuals
    sizes = _sizes(plan, rows)
    kept = [_longer(x, sizes) for x in kept]
    index = _longer(plan.assignment // plan.row.shape[1], sizes)
    gate_of = _longer(jnp.take(gates.reshape(-1), plan.assignment, mode="fill", fill_value=0), sizes)

    def step_of(group: Int[Array, ""], mine: ExpertWeights) -> Step:
        def step(carry: tuple, first: Int[Array, ""], size: int, mask: Mask, begins: bool) -> tuple:
            by_rows, by_gates, sums = carry
            at = _slice(index, first, size)
            x, back = (_counting(_read(y, at), mask) for y in (tokens, cotangent))
            gate = _slice(gate_of, first, size)[:, None]
            products = [_counting(_slice(y, first, size), mask) for y in kept] or _products(x, mine)
            inner, pull = jax.vjp(activation, *products)
            by_inner = _times_transposed(back, mine.down)
            by_gate = (inner.astype(jnp.float32) * by_inner).sum(1)
            a, b = pull((gate * by_inner).astype(inner.dtype))
            back = (gate * back.astype(jnp.float32)).astype(back.dtype)
            biases = (x.astype(jnp.float32).sum(0) for x in (a, b))
            factors = zip(sums[:3], ((x, a), (x, b), (inner, back)), mine[:3], strict=True)
            parts = [None if s is None else _outer(*pair, matrix) for s, pair, matrix in factors]
            pairs = (None if s is None else part for s, part in zip(sums, (*parts, *biases), strict=True))
            put = lambda s, part: put_matrix(s, group, part, not begins)  # noqa: E731
            sums = jax.tree.map(put, sums, ExpertWeights(*pairs), is_leaf=is_matrices)  # pyright: ignore[reportArgumentType] containers
            by_x = _times_transposed(a, mine.gate) + _times_transposed(b, mine.up)
            return _write(by_rows, by_x, first), _write(by_gates, by_gate, first), sums

        return step

    zeros = _Zeros(plan, sizes, begin=3)
    trained = ExpertWeights(*map(_trained, weights))
    carry = (
        zeros.rows(tokens.shape[1], dtype=tokens.dtype),
        zeros.rows(dtype=jnp.float32),
        jax.tree.map(lambda w: zeros.array(w.shape, jnp.float32), trained),
    )
    by_rows, by_gates, sums = _over_groups(plan, weights, sizes, step_of, carry)
    row = _row_of(plan, by_rows)
    by_gates = jnp.take(by_gates, row, mode="fill", fill_value=0).astype(gates.dtype)
    sums = jax.tree.map(lambda s, w: s.astype(w.dtype), sums, trained)
    return sum_rows(by_rows, row, None), by_gates, None, ExpertWeights(*map(_cotangent, weights, sums))


_routed_mlp.defvjp(
    _run_forward,
    lambda activation, keep, sizes, *operands: traced_once(_run_backward, None, (activation, sizes), *operands),
)
