"""Where the tensor cores of NVIDIA's generations sum the products of tiles, and how a kernel waits for them.

Both read tiles from shared memory and run on while the kernel does something else. Hopper's sum in the registers of
a program. Blackwell's have a memory of their own, from which the sums are loaded at the end, and signal the end of each
product at a barrier.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

UNIT = 64  # the least columns of a tile


class Tiles(NamedTuple):
    """Sizes that change no result. On an H200 no others that were tried were faster (docs/benchmarks.md).

    Attributes:
        rows: Rows of a tile of results, 64 or 128.
        depth: Numbers that a step sums over, 64 or 128.
        columns: Columns of a tile, 64 or 128, if there is one sum and they divide the width; of two sums 64. 128 rows
            of 128 columns take half of the registers of Hopper's warpgroup.
        buffers: Bytes of shared memory for loads in flight, at most 163 KiB. At least two steps fit, so that products
            of one run on while the next one's begin. With up to 112 KiB, a multiprocessor holds two programs, and
            products of one run while the other fills its buffers or stores its result.
        snake: Tiles side by side before programs go on to the next rows, so that they find operands in the cache. By
            one column of tiles after the other, all rows would be read again for each.
    """

    rows: int = 128
    depth: int = 64
    columns: int = 128
    buffers: int = 3 * 2**15
    snake: int = 8

    def refusal(self) -> str | None:
        """Return why kernels cannot have these sizes; None if they can."""
        for name in ("rows", "depth", "columns"):
            if (size := getattr(self, name)) not in (64, 128):
                return f"{name}={size} must be 64 or 128"
        # Of a step: a tile of rows and one or two of matrices, or the two tiles of `outer`.
        lines = max(self.rows + max(self.columns, 2 * UNIT), 2 * self.columns)
        least, most = 4 * self.depth * lines, (227 - 64) << 10
        if not least <= self.buffers <= most:
            return f"buffers={self.buffers} must be from {least} to {most} for tiles of these sizes"
        return None

    def steps(self, lines: int) -> int:
        """Return the most steps in flight whose tiles have so many rows and columns of operands together."""
        steps = self.buffers // (2 * self.depth * lines)
        assert steps > 1, (self, lines)
        return steps


class Chip(NamedTuple):
    """What differs between generations.

    - `accumulator(shape)`: what a program allocates for a sum of products (`run_scoped`);
    - `add(total, x, y, number, sums, is_first)`: begin to add x @ y, as product `number` of a loop, and wait for the
      one before it, whose operands may then be overwritten. In the loop, products go to `sums` sums by turns. The sum
      is zero before if `is_first`;
    - `settle(total, count)`: wait for the last of a loop's `count` products, at least one, of this sum;
    - `finish(total)`: return the sum in float32;
    - `tiles`: the sizes of tiles.
    """

    accumulator: Callable[[Any], Any]
    add: Callable[[Any, Any, Any, Any, int, Any], None]
    settle: Callable[[Any, Any], None]
    finish: Callable[[Any], Array]
    tiles: Tiles = Tiles()


def _add(total: Any, x: Any, y: Any, number: Any, sums: int, is_first: Any) -> None:
    del number, is_first  # a sum begins with zeros, and products end in order
    plgpu.wgmma(total, x, y)
    plgpu.wgmma_wait(sums)


HOPPER = Chip(
    plgpu.ACC,  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
    _add,
    lambda total, count: plgpu.wgmma_wait(0),
    lambda total: total[...],
)


def _add_in_its_memory(total: Any, x: Any, y: Any, number: Any, sums: int, is_first: Any) -> None:
    del sums  # each has barriers of its own
    memory, done = total
    # What the memory held before is not read.
    plgpu.tcgen05_mma(memory, x, y, done.at[lax.rem(number, 2)], accumulate=jnp.logical_not(is_first))

    @pl.when(number > 0)
    def _() -> None:
        plgpu.barrier_wait(done.at[lax.rem(number + 1, 2)])


def _settle_in_its_memory(total: Any, count: Any) -> None:
    _, done = total
    plgpu.barrier_wait(done.at[lax.rem(jnp.asarray(count - 1, jnp.int32), 2)])


def _finish_in_its_memory(total: Any) -> Array:
    memory, _ = total
    value = plgpu.async_load_tmem(memory)
    plgpu.wait_load_tmem()
    return value


BLACKWELL = Chip(
    lambda shape: (plgpu.TMEM(shape, jnp.float32), plgpu.Barrier(num_barriers=2, orders_tensor_core=True)),
    _add_in_its_memory,
    _settle_in_its_memory,
    _finish_in_its_memory,
)
