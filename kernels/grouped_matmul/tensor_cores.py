"""Grouped products for NVIDIA GPUs of compute capability 9.0 (Hopper) and 10.0 (Blackwell), in Pallas's dialect for
their tensor cores, which `chips` has.

A program multiplies one tile. The rows of each group are cut into *tasks* of a fixed height. Copies begin at multiples
of eight rows, so a group's first task begins at most seven rows before the group. A task computes all of its rows and
stores those of its group. Loads run ahead of the products in a ring of buffers in shared memory (`emit_pipeline`).

    tasks of 4 rows, if copies began at multiples of 2, for rows of the groups [0, 0, 0, 1, 1, 3, 3, 3]:
    group 0, rows 0-2 of those from 0 on;  group 1, rows 3-4 from 2 on;  group 3, rows 5-7 from 4 on

Rows beyond the last group are one more group, whose result is zero. The number of tasks is known when a program is
traced; those that are not needed have no rows. Operands are in bfloat16, sums in float32.

Nothing here asks for a device: programs are compiled where there is none, and interpreted on a CPU.
Runs on an H200 are in docs/benchmarks.md.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.kernels.grouped_matmul.backend import GroupMatrices, GroupSizes
from moezoo.kernels.grouped_matmul.chips import UNIT, Chip
from moezoo.parallel.collectives import vary_like

_ROWS_OF_ARRAY = 8  # shared memory is filled by so many rows at a time: arrays have multiples, and copies begin there


class _Tasks(NamedTuple):
    """For each task its group, the row at which it begins, the first of its rows counted from there, and how many."""

    group: Int[Array, " tasks"]
    begin: Int[Array, " tasks"]
    first: Int[Array, " tasks"]
    size: Int[Array, " tasks"]


def _tasks(group_sizes: GroupSizes, rows: int, height: int) -> _Tasks:
    """Return the tasks of `height` rows of each group, and of the rows after the last group.

    The group of these has the number of groups.
    """
    beyond = rows - group_sizes.sum(dtype=jnp.int32)
    sizes = jnp.concatenate([group_sizes.astype(jnp.int32), beyond[None]])
    ends, groups = jnp.cumsum(sizes, dtype=jnp.int32), sizes.shape[0]
    starts = ends - sizes
    begins = starts // _ROWS_OF_ARRAY * _ROWS_OF_ARRAY
    tasks = jnp.where(sizes > 0, (ends - begins + height - 1) // height, 0)
    ends_of_tasks = jnp.cumsum(tasks, dtype=jnp.int32)
    # A group of n rows has at most (n + 7 + height - 1) // height tasks.
    number = lax.iota(jnp.int32, (rows + (height + _ROWS_OF_ARRAY - 2) * groups) // height)
    group = (ends_of_tasks[None] <= number[:, None]).sum(1, dtype=jnp.int32)
    used, group = group < groups, jnp.minimum(group, groups - 1)
    begin = begins[group] + (number - (ends_of_tasks - tasks)[group]) * height
    begin = jnp.where(used, begin, 0)
    first = jnp.maximum(starts[group], begin)
    size = jnp.minimum(ends[group], begin + height) - first
    return _Tasks(group, begin, first - begin, jnp.where(used, size, 0))


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


def _columns(chip: Chip, width: int, accumulators: int = 1) -> int:
    """Return the columns of a tile of an array that has so many."""
    columns = chip.tiles.columns
    return columns if accumulators == 1 and width % columns == 0 else UNIT


def _store_rows(value: Array, out: Any, task: Any, column: Any) -> None:
    """Store the rows of a task's group: 2**i rows for each bit of their number, because sizes of copies are static."""
    (begin, first, size), (rows, columns) = task, value.shape

    @functools.partial(pl.run_scoped, tile=plgpu.SMEM(value.shape, dtype=out.dtype))
    def _(tile: Any) -> None:
        tile[...] = value.astype(tile.dtype)
        plgpu.commit_smem()
        start, length = first, rows
        while length:

            @pl.when(size & length != 0)
            def _(start: Any = start, length: int = length) -> None:
                there = out.at[pl.ds(begin + start, length), pl.ds(column * columns, columns)]
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(start, length)], there)

            start, length = start + (size & length), length // 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def row_products(
    chip: Chip,
    rows: tuple[Float[Array, "rows a"], ...],
    stacks: tuple[GroupMatrices, ...],
    group_sizes: GroupSizes,
    contract: Literal[1, 2],
    finish: Callable[..., tuple[Array, ...]],
    results: int,
) -> list[Float[Array, "rows b"]]:
    """Multiply each row by its group's matrices, and store what `finish` makes of the products in float32.

    One array of rows is multiplied by every stack; of several, each by its own, one after the other, and there is one
    sum of all products.
    """
    tiles = chip.tiles
    height, step_depth = tiles.rows, tiles.depth
    inputs = [_padded(x, _ROWS_OF_ARRAY, step_depth) for x in rows]
    count, width = inputs[0].shape[0], stacks[0].shape[3 - contract]
    multiples = (step_depth, UNIT) if contract == 1 else (UNIT, step_depth)
    stacks = tuple(_padded(stack, *multiples) for stack in stacks)
    wide, accumulators = stacks[0].shape[3 - contract], 1 if len(inputs) > 1 else len(stacks)
    columns, tasks = _columns(chip, wide, accumulators), _tasks(group_sizes, count, height)
    depth, groups, across = inputs[0].shape[1] // step_depth, group_sizes.shape[0], wide // columns
    shape, number = (step_depth, columns) if contract == 1 else (columns, step_depth), tasks.group.shape[0]
    steps = min(depth, tiles.steps(height + columns * accumulators))

    def body(group_ref: Any, begin_ref: Any, first_ref: Any, size_ref: Any, *refs: Any) -> None:
        here, matrices, outs = refs[: len(inputs)], refs[len(inputs) : -results], refs[-results:]
        at, column = plgpu.planar_snake(lax.axis_index("program"), (number, across), 1, tiles.snake)
        group, task = group_ref[at], (pl.multiple_of(begin_ref[at], _ROWS_OF_ARRAY), first_ref[at], size_ref[at])

        def add_all(totals: Sequence[Any], x: Any, of_rows: Sequence[Any], is_first: bool) -> None:
            def step(index: Any, x: Any, *tiles: Any) -> None:
                for total, matrix in zip(totals, tiles, strict=True):
                    matrix = matrix if contract == 1 else matrix.transpose((1, 0))
                    chip.add(total, x, matrix, index[0], accumulators, is_first & (index[0] == 0))

            there = lambda i: (i, column) if contract == 1 else (column, i)  # noqa: E731
            later = min(1, depth - 1)  # a buffer is in use for one step more, as products run on
            specs = [plgpu.BlockSpec((height, step_depth), lambda i: (0, i), delay_release=later)]
            specs += [plgpu.BlockSpec(shape, there, delay_release=later) for _ in of_rows]
            pipeline = plgpu.emit_pipeline(step, grid=(depth,), in_specs=specs, max_concurrent_steps=steps)
            pipeline(x.at[pl.ds(task[0], height)], *(stack.at[group] for stack in of_rows))
            for total in totals:
                chip.settle(total, depth)

        def sums(*totals: Any) -> list[Array]:
            for i, x in enumerate(here):
                add_all(totals, x, matrices if len(here) == 1 else matrices[i : i + 1], i == 0)
            return [chip.finish(total) for total in totals]

        @pl.when((task[2] > 0) & (group < groups))
        def _() -> None:
            products = pl.run_scoped(sums, *(chip.accumulator((height, columns)) for _ in range(accumulators)))
            for value, out in zip(finish(*products), outs, strict=True):
                _store_rows(value, out, task, column)

        @pl.when((task[2] > 0) & (group == groups))
        def _() -> None:
            for out in outs:
                _store_rows(jnp.zeros((height, columns), out.dtype), out, task, column)

    out = [jax.ShapeDtypeStruct((count, wide), rows[0].dtype)] * results
    name = "matmul" if len(stacks) == 1 else "gated" if accumulators > 1 else "by_rows"
    found = _kernel(body, out, number * across, f"grouped_{name}")(*tasks, *inputs, *stacks)
    return [vary_like(x[: rows[0].shape[0], :width], *rows, *stacks) for x in found]


def multiply(
    chip: Chip, rows: Float[Array, "rows a"], weights: GroupMatrices, group_sizes: GroupSizes, contract: Literal[1, 2]
) -> Float[Array, "rows b"]:
    """Multiply each row by its group's matrix."""
    return row_products(chip, (rows,), (weights,), group_sizes, contract, lambda x: (x,), 1)[0]


def outer(
    chip: Chip,
    rows: Float[Array, "rows inputs"],
    others: Float[Array, "rows outputs"],
    group_sizes: GroupSizes,
    dtype: DTypeLike,
) -> GroupMatrices:
    """Return rows.T @ others for the rows of each group.

    Blocks of rows that belong to other groups too are masked in both operands: zero times NaN is NaN.
    """
    inputs, outputs, groups = rows.shape[1], others.shape[1], group_sizes.shape[0]
    operands = tuple(_padded(x, _ROWS_OF_ARRAY, UNIT) for x in (rows, others))
    shape, depth = tuple(_columns(chip, x.shape[1]) for x in operands), chip.tiles.depth
    down, across = (x.shape[1] // size for x, size in zip(operands, shape, strict=True))
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes.astype(jnp.int32)
    steps = chip.tiles.steps(sum(shape))

    def body(start_ref: Any, end_ref: Any, rows_ref: Any, others_ref: Any, out: Any) -> None:
        program = lax.axis_index("program")
        group, tile = lax.div(program, down * across), lax.rem(program, down * across)
        at = plgpu.planar_snake(tile, (down, across), 1, chip.tiles.snake)
        start, end = start_ref[group], end_ref[group]
        first = lax.div(start, depth)
        blocks = lax.div(end + depth - 1, depth) - first

        def sums(accumulator: Any) -> Array:
            def step(index: Any, *tiles: Any) -> None:
                row = (first + index[0]) * depth

                @pl.when((row < start) | (row + depth > end))
                def _() -> None:
                    for x in tiles:
                        number = row + lax.broadcasted_iota(jnp.int32, x.shape, 0)
                        number = plgpu.layout_cast(number, plgpu.Layout.WGMMA)
                        x[...] = jnp.where((number >= start) & (number < end), x[...], jnp.zeros((), x.dtype))
                    plgpu.commit_smem()

                chip.add(accumulator, tiles[0].transpose((1, 0)), tiles[1], index[0], 1, index[0] == 0)

            specs = [
                plgpu.BlockSpec((depth, size), lambda i, column=column: (first + i, column), delay_release=1)
                for size, column in zip(shape, at, strict=True)
            ]
            pipeline = plgpu.emit_pipeline(step, grid=(blocks,), in_specs=specs, max_concurrent_steps=steps)
            pipeline(rows_ref, others_ref)
            chip.settle(accumulator, blocks)
            return chip.finish(accumulator)

        def store(value: Array) -> None:
            @functools.partial(pl.run_scoped, tile=plgpu.SMEM(shape, dtype=out.dtype))
            def _(tile: Any) -> None:
                tile[...] = value.astype(tile.dtype)
                plgpu.commit_smem()
                there = [pl.ds(i * size, size) for i, size in zip(at, shape, strict=True)]
                plgpu.copy_smem_to_gmem(tile, out.at[group, *there])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(end > start)
        def _() -> None:
            store(pl.run_scoped(sums, chip.accumulator(shape)))

        @pl.when(end == start)
        def _() -> None:
            store(jnp.zeros(shape, out.dtype))

    out = jax.ShapeDtypeStruct((groups, down * shape[0], across * shape[1]), dtype)
    found = _kernel(body, out, groups * down * across, "grouped_outer")(starts, ends, *operands)
    return vary_like(found[:, :inputs, :outputs], rows, others)
