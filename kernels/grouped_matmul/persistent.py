"""A second form of the product for each row on Hopper: programs that stay, of warpgroups with different work.

There is one program per multiprocessor. It goes over tiles of 128 rows and up to 256 columns, and in it

- a warpgroup loads: for each step, 64 numbers of every row of the tile and the same 64 of the group's matrix, into the
  next of a few *slots* in shared memory. It begins the next tile while the others still compute or store;
- two warpgroups compute: each multiplies 64 of the rows by all columns, and stores those that are its group's.

Two barriers per slot say that it is full, and that it is free. A product reads its slot on its own while the warpgroup
goes on, so a warpgroup frees a slot only when it has waited for the product that reads it: that of the step before
while there are steps, and that of the last step before it stores.

Copies need rows at multiples of 8, so the tiles of a group begin at the last such row that is not behind its first:

    rows 0-9 are of group 0, rows 10-299 of group 1, rows 300-303 of none
    group 0: tile at row 0, its rows [0, 10)
    group 1: tile at row 8, its rows [2, 128); tile at row 136, [0, 128); tile at row 264, [0, 36)
    none: tile at row 296, [4, 8)

The rows beyond the last group are one more group, without products: its sums are the zeros that they begin with.
Operands are in bfloat16, sums in float32. Nothing here asks for a device.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moezoo.kernels.grouped_matmul.backend import GroupMatrices, GroupSizes
from moezoo.parallel.collectives import vary_like

_WORKERS = 2  # the warpgroups of a program that compute
_ROWS = 64  # of a tile that one of them computes: tensor cores take no other number
_HEIGHT = _WORKERS * _ROWS
_DEPTH = 64  # numbers that a step sums over
_UNIT = 64  # columns that are stored at a time
_ALIGNED = 8  # rows that copies begin at are multiples of it
# Registers of a thread after the warpgroups have exchanged them: those that compute need 128 for their sums.
_LOADING, _COMPUTING = 40, 232

_Accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class Sizes(NamedTuple):
    """Sizes that change no result. On an H200 no others that were tried were faster (docs/benchmarks.md).

    Attributes:
        programs: The programs; as many as the GPU has multiprocessors.
        columns: The most columns of a tile, 64, 128, 192 or 256. A width has tiles of equal width, up to 63 columns.
        slots: Steps that are loaded ahead, at least 2, together with the one that is multiplied.
        snake: Tiles side by side before programs go on to the next rows, so that they find rows in the cache.
    """

    programs: int = 132
    columns: int = 256
    slots: int = 4
    snake: int = 8

    def refusal(self) -> str | None:
        """Return why the kernel cannot have these sizes; None if it can."""
        if self.columns not in (64, 128, 192, 256):
            return f"columns={self.columns} must be 64, 128, 192 or 256"
        # 227 KiB without barriers and what is stored, for operands of two bytes.
        most = (226 * 1024 // 2 - _WORKERS * 2 * _ROWS * _UNIT) // (_DEPTH * (_HEIGHT + self.columns))
        if not 2 <= self.slots <= most:
            return f"slots={self.slots} must be from 2 to {most} for tiles of {self.columns} columns"
        return None


class Tasks(NamedTuple):
    """Tiles of rows: how many are used, and for each its group, its first row, and its group's rows [low, high) in it.

    After the used ones there are others, which mean nothing.
    """

    used: Int[Array, "1"]
    group: Int[Array, " tasks"]
    row: Int[Array, " tasks"]
    low: Int[Array, " tasks"]
    high: Int[Array, " tasks"]


def tasks_of(group_sizes: GroupSizes, rows: int) -> Tasks:
    """Return the tiles of each group, and of the rows beyond the last group, which are group `len(group_sizes)`."""
    beyond = rows - group_sizes.sum(dtype=jnp.int32)
    sizes = jnp.concatenate([group_sizes.astype(jnp.int32), beyond[None]])
    stops = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = stops - sizes
    begins = starts // _ALIGNED * _ALIGNED
    tiles = jnp.where(sizes > 0, (stops - begins + _HEIGHT - 1) // _HEIGHT, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    # A group of n rows has at most n / 128 + 2 tiles.
    number = lax.iota(jnp.int32, rows // _HEIGHT + 2 * sizes.shape[0])
    group = jnp.minimum((ends[None] <= number[:, None]).sum(1, dtype=jnp.int32), sizes.shape[0] - 1)
    row = begins[group] + (number - (ends - tiles)[group]) * _HEIGHT
    low, high = (jnp.clip(x[group] - row, 0, _HEIGHT) for x in (starts, stops))
    return Tasks(ends[-1:], group, row, low, high)


def _filled(x: Array, multiples: tuple[int, int]) -> Array:
    """Return `x` with zeros up to multiples of these sizes in its last two dimensions; `x` itself where they are."""
    more = [-size % by for size, by in zip(x.shape[-2:], multiples, strict=True)]
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), *((0, n) for n in more)]) if any(more) else x


def _store(
    value: Float[Array, "rows columns"], tiles: Any, out: Any, row: Any, column: Any, low: Any, high: Any
) -> None:
    """Store the rows [low, high) of a value at `row` and `column` of `out`, 64 columns after the other.

    Copies have static sizes: all rows, or 2**i rows for each bit of their number. Where all rows are stored, they are
    swizzled in shared memory, so that eight are written at once; such a tile could be cut at multiples of 8 rows only.
    So there are two kinds of tiles in one place, and two of each, as copies run on.
    """
    (whole, cut), size = tiles, high - low
    for part in range(value.shape[1] // _UNIT):
        columns = pl.ds(column + part * _UNIT, _UNIT)
        rounded = value[:, part * _UNIT : (part + 1) * _UNIT].astype(out.dtype)
        # All copies but the latest one's are done, and those of the tile before: their number may be odd.
        plgpu.wait_smem_to_gmem(min(part, 1), wait_read_only=True)

        @pl.when(size == _ROWS)
        def _(rounded: Any = rounded, mine: Any = whole.at[part % 2], columns: Any = columns) -> None:
            mine[...] = rounded
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, out.at[pl.ds(row, _ROWS), columns], commit_group=False)

        @pl.when(size < _ROWS)
        def _(rounded: Any = rounded, mine: Any = cut.at[part % 2], columns: Any = columns) -> None:
            mine[...] = rounded
            plgpu.commit_smem()
            start, length = low, _ROWS // 2
            while length:

                @pl.when(size & length != 0)
                def _(start: Any = start, length: int = length) -> None:
                    there = out.at[pl.ds(row + start, length), columns]
                    plgpu.copy_smem_to_gmem(mine.at[pl.ds(start, length)], there, commit_group=False)

                start, length = start + (size & length), length // 2

        plgpu.commit_smem_to_gmem_group()


def multiply(
    sizes: Sizes, rows: Float[Array, "rows a"], weights: GroupMatrices, group_sizes: GroupSizes, contract: Literal[1, 2]
) -> Float[Array, "rows b"]:
    """Multiply each row by its group's matrix."""
    x = _filled(rows, (_ALIGNED, _DEPTH))
    w = _filled(weights, (_DEPTH, _UNIT) if contract == 1 else (_UNIT, _DEPTH))
    count, wide, groups, depth = x.shape[0], w.shape[3 - contract], w.shape[0], x.shape[1] // _DEPTH
    across, slots = pl.cdiv(wide, sizes.columns), sizes.slots
    columns = pl.cdiv(wide, across * _UNIT) * _UNIT
    tasks = tasks_of(group_sizes, count)

    def body(*refs: Any) -> None:
        here, (x_ref, w_ref, out, x_slots, w_slots, full, free, tiles) = Tasks(*refs[:5]), refs[5:]
        worker, used = lax.axis_index("warpgroup"), here.used[0]

        def over_tiles(visit: Any) -> None:
            """Call `visit` with a task, a column, the number of its steps and the number of steps before."""

            @plgpu.nd_loop((used * across,), collective_axes="program", init_carry=jnp.int32(0))
            def _(loop: Any, carry: Any) -> Any:
                task, column = plgpu.planar_snake(loop.index[0], (used, across), 1, min(sizes.snake, across))
                steps = jnp.where(here.group[task] < groups, depth, 0)
                visit(task, column * columns, steps, carry)
                return carry + steps

        def load(task: Any, column: Any, steps: Any, before: Any) -> None:
            group, row = here.group[task], pl.multiple_of(here.row[task], _ALIGNED)

            @pl.loop(0, steps)
            def _(k: Any) -> None:
                slot = lax.rem(before + k, slots)

                @pl.when(before + k >= slots)
                def _() -> None:
                    plgpu.barrier_wait(free.at[slot])

                deep, wide = pl.ds(k * _DEPTH, _DEPTH), pl.ds(column, columns)
                matrix = w_ref.at[group, deep, wide] if contract == 1 else w_ref.at[group, wide, deep]
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, _HEIGHT), deep], x_slots.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(matrix, w_slots.at[slot], full.at[slot])

        def compute(task: Any, column: Any, steps: Any, before: Any) -> None:
            def done(k: Any) -> None:
                plgpu.barrier_arrive(free.at[lax.rem(before + k, slots)])

            def sums(total: Any) -> Array:
                @pl.loop(0, steps)
                def _(k: Any) -> None:
                    slot = lax.rem(before + k, slots)
                    plgpu.barrier_wait(full.at[slot])
                    matrix = w_slots.at[slot] if contract == 1 else w_slots.at[slot].transpose((1, 0))
                    plgpu.wgmma(total, x_slots.at[slot, pl.ds(worker * _ROWS, _ROWS)], matrix)
                    plgpu.wgmma_wait(1)
                    pl.when(k > 0)(functools.partial(done, k - 1))

                value = total[...]  # waits for all products
                pl.when(steps > 0)(functools.partial(done, steps - 1))
                return value

            value, mine = pl.run_scoped(sums, _Accumulator((_ROWS, columns))), worker * _ROWS
            low, high = (jnp.clip(ref[task] - mine, 0, _ROWS) for ref in (here.low, here.high))
            row = pl.multiple_of(here.row[task] + mine, _ALIGNED)
            _store(value, [each.at[worker] for each in tiles], out, row, column, low, high)

        @pl.when(worker == _WORKERS)
        def _() -> None:
            plgpu.set_max_registers(_LOADING, action="decrease")
            over_tiles(load)

        @pl.when(worker < _WORKERS)
        def _() -> None:
            plgpu.set_max_registers(_COMPUTING, action="increase")
            over_tiles(compute)
            plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((_WORKERS, 2, _ROWS, _UNIT), dtype=x.dtype)
    found = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, wide), x.dtype),
        grid=(min(sizes.programs, tasks.group.shape[0] * across),),
        grid_names=("program",),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((slots, _HEIGHT, _DEPTH), dtype=x.dtype),
            plgpu.SMEM((slots, *((_DEPTH, columns) if contract == 1 else (columns, _DEPTH))), dtype=x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),  # two copies fill a slot
            plgpu.Barrier(num_arrivals=_WORKERS, num_barriers=slots),
            plgpu.RefUnion(tile, tile),
        ],
        kernel_name="grouped_persistent",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*tasks, x, w)
    return vary_like(found[: rows.shape[0], : weights.shape[3 - contract]], rows, weights)
