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


class Tiles(NamedTuple):
    """Sizes that change no result. None has been timed.

    Attributes:
        rows: Rows of a tile of results, 64 or 128.
        depth: Numbers that a step sums over, 64 or 128.
        columns: Columns of a tile, 64 or 128, if there is one sum and they divide the width; of two sums 64. 128 rows
            of 128 columns take half of the registers of Hopper's warpgroup.
        buffers: Bytes of shared memory for loads in flight: of 227 KiB, a program's result takes up to 64. A step has
            tiles of up to four operands, and of two there are two steps in flight.
        snake: Tiles side by side before programs go on to the next rows, so that they find operands in the cache.
    """

    rows: int = 128
    depth: int = 64
    columns: int = 128
    buffers: int = 2**17
    snake: int = 1

    def refusal(self) -> str | None:
        """Return why kernels cannot have these sizes; None if they can."""
        for name in ("rows", "depth", "columns"):
            if (size := getattr(self, name)) not in (64, 128):
                return f"{name}={size} must be 64 or 128"
        least, most = 4 * self.depth * (self.columns + max(self.rows, self.columns)), (227 - 64) << 10
        if not least <= self.buffers <= most:
            return f"buffers={self.buffers} must be from {least} to {most} for tiles of these sizes"
        return None


class Chip(NamedTuple):
    """What differs between generations.

    - `accumulator(shape)`: what a program allocates for a sum of products (`run_scoped`);
    - `add(total, x, y, number)`: begin to add x @ y, as product `number` of the sum, and wait for the one before it;
    - `finish(total, count)`: wait for the last of `count` products, at least one, and return the sum in float32;
    - `tiles`: the sizes of tiles.
    """

    accumulator: Callable[[Any], Any]
    add: Callable[[Any, Any, Any, Any], None]
    finish: Callable[[Any, Any], Array]
    tiles: Tiles = Tiles()


def _add(total: Any, x: Any, y: Any, number: Any) -> None:
    del number  # a sum begins with zeros, and products wait in order
    plgpu.wgmma(total, x, y)


HOPPER = Chip(
    plgpu.ACC,  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
    _add,
    lambda total, count: total[...],
)


def _add_in_its_memory(total: Any, x: Any, y: Any, number: Any) -> None:
    sums, done = total
    # What the memory held before is not read.
    plgpu.tcgen05_mma(sums, x, y, done.at[lax.rem(number, 2)], accumulate=number > 0)

    @pl.when(number > 0)
    def _() -> None:
        plgpu.barrier_wait(done.at[lax.rem(number + 1, 2)])


def _finish_in_its_memory(total: Any, count: Any) -> Array:
    sums, done = total
    plgpu.barrier_wait(done.at[lax.rem(jnp.asarray(count - 1, jnp.int32), 2)])
    value = plgpu.async_load_tmem(sums)
    plgpu.wait_load_tmem()
    return value


BLACKWELL = Chip(
    lambda shape: (plgpu.TMEM(shape, jnp.float32), plgpu.Barrier(num_barriers=2, orders_tensor_core=True)),
    _add_in_its_memory,
    _finish_in_its_memory,
)
