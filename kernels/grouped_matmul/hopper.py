"""Grouped products for NVIDIA GPUs of compute capability 9.0 (Hopper), in Pallas's dialect for their tensor cores.

A program multiplies one tile. Rows are cut into blocks of a fixed size, whatever the groups; where a block meets
several groups, each has a *task* of its own, which computes the whole block and stores the rows of its group. Loads
run ahead of the products in a ring of buffers in shared memory (`emit_pipeline`).

    tasks of rows [0, 0, 0, 1, 1, 3, 3, 3] (numbers of their groups) in blocks of four:
    group 0, block 0, rows 0-2;  group 1, block 0, row 3;  group 1, block 1, row 4;  group 3, block 1, rows 5-7

Rows beyond the last group are one more group, whose result is zero. The number of tasks is known when a program is
traced: blocks + groups; those that are not needed have no rows. Operands are in bfloat16, sums in float32.

Nothing here asks for a device: programs are compiled where there is none, and interpreted on a CPU. None has been run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moezoo.kernels.grouped_matmul.backend import Activation, ExpertWeights, GroupMatrices, GroupSizes
from moezoo.parallel.collectives import GROUPED_MATMUL, vary_like
from moezoo.parallel.kernels import Keep
from moezoo.parallel.traces import equations

_BUFFERS = 2**17  # bytes of shared memory for loads in flight: of 227 KiB, a program's result takes up to 64
# Sizes of tiles: rows, the numbers that a step sums over, and columns in units of the least number. The accumulators of
# a program have 128 columns together, which take half of a warpgroup's registers.
ROWS, DEPTH, UNIT = 128, 64, 64


_Accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class _Tasks(NamedTuple):
    """For each task its group, the number of its block, and the first and the number of its rows in the block."""

    group: Int[Array, " tasks"]
    block: Int[Array, " tasks"]
    first: Int[Array, " tasks"]
    size: Int[Array, " tasks"]


def _tasks(group_sizes: GroupSizes, rows: int) -> _Tasks:
    """Return the tasks of each group, and of the rows after the last one, whose group has the number of groups."""
    beyond = rows - group_sizes.sum(dtype=jnp.int32)
    sizes = jnp.concatenate([group_sizes.astype(jnp.int32), beyond[None]])
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts, groups = ends - sizes, sizes.shape[0]
    blocks = jnp.where(sizes > 0, (ends - 1) // ROWS - starts // ROWS + 1, 0)
    ends_of_tasks = jnp.cumsum(blocks, dtype=jnp.int32)
    number = lax.iota(jnp.int32, pl.cdiv(rows, ROWS) + groups - 1)
    group = (ends_of_tasks[None] <= number[:, None]).sum(1, dtype=jnp.int32)
    used, group = group < groups, jnp.minimum(group, groups - 1)
    block = starts[group] // ROWS + number - (ends_of_tasks - blocks)[group]
    block = jnp.where(used, block, 0)
    first = jnp.maximum(starts[group], block * ROWS)
    size = jnp.minimum(ends[group], (block + 1) * ROWS) - first
    return _Tasks(group, block, first - block * ROWS, jnp.where(used, size, 0))


def _padded(x: Array, *multiples: int) -> Array:
    """Return `x` with zeros up to multiples of these sizes in its last dimensions; `x` itself where they are."""
    leading = x.ndim - len(multiples)
    more = [(0, 0)] * leading + [(0, -size % by) for size, by in zip(x.shape[leading:], multiples, strict=True)]
    return jnp.pad(x, more) if any(high for _, high in more) else x


def _kernel(body: Callable[..., None], out: Any, programs: int, name: str) -> Callable[..., Any]:
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    return plgpu.kernel(
        body, out_type=out, grid=(programs,), grid_names=("program",), kernel_name=name, compiler_params=params
    )


def _columns(width: int, accumulators: int = 1) -> int:
    """Return the columns of a tile of an array that has so many."""
    return 2 * UNIT if accumulators == 1 and width % (2 * UNIT) == 0 else UNIT


def _store_rows(value: Array, out: Any, task: Any, column: Any) -> None:
    """Store the rows of a task's group: 2**i rows for each bit of their number, because sizes of copies are static."""
    (block, first, size), (_, columns) = task, value.shape

    @functools.partial(pl.run_scoped, tile=plgpu.SMEM(value.shape, dtype=out.dtype))
    def _(tile: Any) -> None:
        tile[...] = value.astype(tile.dtype)
        plgpu.commit_smem()
        start, length = first, ROWS
        while length:

            @pl.when(size & length != 0)
            def _(start: Any = start, length: int = length) -> None:
                there = out.at[pl.ds(block * ROWS + start, length), pl.ds(column * columns, columns)]
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(start, length)], there)

            start, length = start + (size & length), length // 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _products(
    rows: tuple[Float[Array, "rows a"], ...],
    stacks: tuple[GroupMatrices, ...],
    group_sizes: GroupSizes,
    contract: Literal[1, 2],
    finish: Callable[..., tuple[Array, ...]],
    results: int,
) -> list[Float[Array, "rows b"]]:
    """Multiply each row by its group's matrices, and store what `finish` makes of the products in float32.

    One array of rows is multiplied by every stack; of several, each by its own, and there is one sum of all products.
    """
    count, width = rows[0].shape[0], stacks[0].shape[3 - contract]
    inputs = [_padded(x, DEPTH) for x in rows]
    stacks = tuple(_padded(stack, UNIT, UNIT) for stack in stacks)
    wide, accumulators = stacks[0].shape[3 - contract], 1 if len(inputs) > 1 else len(stacks)
    columns, tasks = _columns(wide, accumulators), _tasks(group_sizes, count)
    depth, groups, across = inputs[0].shape[1] // DEPTH, group_sizes.shape[0], wide // columns
    shape, number = (DEPTH, columns) if contract == 1 else (columns, DEPTH), tasks.group.shape[0]
    steps = min(depth, _BUFFERS // (2 * DEPTH * (ROWS * len(inputs) + columns * len(stacks))))

    def body(group_ref: Any, block_ref: Any, first_ref: Any, size_ref: Any, *refs: Any) -> None:
        here, matrices, outs = refs[: len(inputs)], refs[len(inputs) : -results], refs[-results:]
        at, column = plgpu.planar_snake(lax.axis_index("program"), (number, across), 1, 1)
        group, task = group_ref[at], (block_ref[at], first_ref[at], size_ref[at])

        def sums(*totals: Any) -> list[Array]:
            def step(_: Any, *tiles: Any) -> None:
                for i, matrix in enumerate(tiles[len(inputs) :]):
                    total, x = totals[min(i, accumulators - 1)], tiles[min(i, len(inputs) - 1)]
                    plgpu.wgmma(total, x, matrix if contract == 1 else matrix.transpose((1, 0)))

            there = lambda i: (i, column) if contract == 1 else (column, i)  # noqa: E731
            later = min(1, steps - 1)  # a buffer is in use for one step more, as products run on
            specs = [plgpu.BlockSpec((ROWS, DEPTH), lambda i: (task[0], i), delay_release=later) for _ in inputs]
            specs += [plgpu.BlockSpec(shape, there, delay_release=later) for _ in stacks]
            pipeline = plgpu.emit_pipeline(step, grid=(depth,), in_specs=specs, max_concurrent_steps=steps)
            pipeline(*here, *(stack.at[group] for stack in matrices))
            return [total[...] for total in totals]

        @pl.when((task[2] > 0) & (group < groups))
        def _() -> None:
            products = pl.run_scoped(sums, *(_Accumulator((ROWS, columns)) for _ in range(accumulators)))
            for value, out in zip(finish(*products), outs, strict=True):
                _store_rows(value, out, task, column)

        @pl.when((task[2] > 0) & (group == groups))
        def _() -> None:
            for out in outs:
                _store_rows(jnp.zeros((ROWS, columns), out.dtype), out, task, column)

    out = [jax.ShapeDtypeStruct((count, wide), rows[0].dtype)] * results
    found = _kernel(body, out, number * across, "grouped_matmul")(*tasks, *inputs, *stacks)
    return [vary_like(x[:, :width], *rows, *stacks) for x in found]


def multiply(
    rows: Float[Array, "rows a"], weights: GroupMatrices, group_sizes: GroupSizes, contract: Literal[1, 2]
) -> Float[Array, "rows b"]:
    """Multiply each row by its group's matrix."""
    return _products((rows,), (weights,), group_sizes, contract, lambda x: (x,), 1)[0]


def outer(
    rows: Float[Array, "rows inputs"], others: Float[Array, "rows outputs"], group_sizes: GroupSizes, dtype: DTypeLike
) -> GroupMatrices:
    """Return rows.T @ others for the rows of each group.

    Blocks of rows that belong to other groups too are masked in both operands: zero times NaN is NaN.
    """
    inputs, outputs, groups = rows.shape[1], others.shape[1], group_sizes.shape[0]
    operands = tuple(_padded(x, UNIT) for x in (rows, others))
    shape = tuple(_columns(x.shape[1]) for x in operands)
    down, across = (x.shape[1] // size for x, size in zip(operands, shape, strict=True))
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes.astype(jnp.int32)
    steps = _BUFFERS // (2 * DEPTH * sum(shape))

    def body(start_ref: Any, end_ref: Any, rows_ref: Any, others_ref: Any, out: Any) -> None:
        program = lax.axis_index("program")
        group, tile = lax.div(program, down * across), lax.rem(program, down * across)
        at = plgpu.planar_snake(tile, (down, across), 1, 1)
        start, end = start_ref[group], end_ref[group]
        first = lax.div(start, DEPTH)
        blocks = lax.div(end + DEPTH - 1, DEPTH) - first

        def sums(accumulator: Any) -> Array:
            def step(index: Any, *tiles: Any) -> None:
                row = (first + index[0]) * DEPTH

                @pl.when((row < start) | (row + DEPTH > end))
                def _() -> None:
                    for x in tiles:
                        number = row + lax.broadcasted_iota(jnp.int32, x.shape, 0)
                        number = plgpu.layout_cast(number, plgpu.Layout.WGMMA)
                        x[...] = jnp.where((number >= start) & (number < end), x[...], jnp.zeros((), x.dtype))
                    plgpu.commit_smem()

                plgpu.wgmma(accumulator, tiles[0].transpose((1, 0)), tiles[1])

            @pl.when(end > start)
            def _() -> None:
                specs = [
                    plgpu.BlockSpec((DEPTH, size), lambda i, column=column: (first + i, column), delay_release=1)
                    for size, column in zip(shape, at, strict=True)
                ]
                pipeline = plgpu.emit_pipeline(step, grid=(blocks,), in_specs=specs, max_concurrent_steps=steps)
                pipeline(rows_ref, others_ref)

            return accumulator[...]

        value = pl.run_scoped(sums, _Accumulator(shape))

        @functools.partial(pl.run_scoped, tile=plgpu.SMEM(shape, dtype=out.dtype))
        def _(tile: Any) -> None:
            tile[...] = value.astype(tile.dtype)
            plgpu.commit_smem()
            there = [pl.ds(i * size, size) for i, size in zip(at, shape, strict=True)]
            plgpu.copy_smem_to_gmem(tile, out.at[group, *there])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((groups, down * shape[0], across * shape[1]), dtype)
    found = _kernel(body, out, groups * down * across, "grouped_outer")(starts, ends, *operands)
    return vary_like(found[:, :inputs, :outputs], rows, others)


# What a kernel's registers can compute of an activation; another one is computed in a pass of its own.
_FUSED = {"mul", "add", "sub", "neg", "div", "exp", "logistic", "max", "min", "integer_pow", "convert_element_type"}
_CALLS = {"jit", "pjit", "custom_jvp_call", "broadcast_in_dim"}


def _fuses(activation: Activation) -> bool:
    """Return whether an activation consists of operations that the kernel can compute."""
    x = jax.ShapeDtypeStruct((ROWS, UNIT), jnp.float32)
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


def products(rows: Float[Array, "rows inputs"], weights: ExpertWeights, group_sizes: GroupSizes) -> list[Array]:
    """Return the products with gate and up, plus their biases."""
    matrices, biases = weights[:2], weights[3:]
    found = _products((rows,), matrices, group_sizes, 1, lambda *both: both, 2)
    return [_biased(x, bias, group_sizes) for x, bias in zip(found, biases, strict=True)]


def activate(
    both: Sequence[Float[Array, "rows outputs"]], group_sizes: GroupSizes, activation: Activation
) -> Float[Array, "rows outputs"]:
    """Return the activation of both products, with zeros in unused rows."""
    used = lax.iota(jnp.int32, both[0].shape[0]) < group_sizes.sum(dtype=jnp.int32)
    result = activation(*both)
    return jnp.where(used[:, None], result, jnp.zeros((), result.dtype))


def forward(
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
        result, *both = _products((rows,), weights[:2], group_sizes, 1, finish, results)
    else:
        both = products(rows, weights, group_sizes)
        result = activate(both, group_sizes, activation)
    return result, [checkpoint_name(x, GROUPED_MATMUL) for x in both] if keep == "products" else []


def backward(
    rows: Float[Array, "rows inputs"], weights: ExpertWeights, group_sizes: GroupSizes, by_both: Sequence[Array]
) -> tuple[Float[Array, "rows inputs"], list[Any]]:
    """Return the gradients by rows, and by gate, up and their biases, given those by both products."""
    by_matrices = [outer(rows, y, group_sizes, w.dtype) for y, w in zip(by_both, weights[:2], strict=True)]
    by_biases = [_by_bias(y, bias, group_sizes) for y, bias in zip(by_both, weights[3:], strict=True)]
    by_rows = _products(tuple(by_both), weights[:2], group_sizes, 2, lambda x: (x,), 1)[0]
    return by_rows, by_matrices + by_biases


def gated(
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
    return _gated(activation, keep, rows, group_sizes, gate, up, gate_bias, up_bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated(activation, keep, rows, group_sizes, gate, up, gate_bias, up_bias):
    del keep  # nothing is kept without a backward pass
    return forward(rows, ExpertWeights(gate, up, up, gate_bias, up_bias), group_sizes, activation, "inputs")[0]


def _gated_forward(activation, keep, rows, group_sizes, gate, up, *biases):
    weights = ExpertWeights(gate, up, up, *biases)  # the third is not read
    result, kept = forward(rows, weights, group_sizes, activation, keep)
    return result, (rows, group_sizes, weights, kept)


def _gated_backward(activation, keep, residuals, cotangent):
    del keep
    rows, sizes, weights, kept = residuals
    both = kept or products(rows, weights, sizes)
    _, pull = jax.vjp(lambda *both: activate(both, sizes, activation), *both)
    by_rows, by_weights = backward(rows, weights, sizes, pull(cotangent))
    return by_rows, None, *by_weights


_gated.defvjp(_gated_forward, _gated_backward)
