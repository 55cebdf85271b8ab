"""The tasks of the kernels for NVIDIA's tensor cores: which rows each program computes and stores."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.kernels import group_sizes
from benchmarks.shapes import ACCELERATOR
from moezoo.kernels.grouped_matmul import tensor_cores
from moezoo.kernels.grouped_matmul.chips import HOPPER

ROWS, HEIGHT = 304, 64
tasks_of = jax.jit(tensor_cores._tasks, static_argnums=(1, 2))


def stored(sizes: tuple[int, ...], rows: int, height: int) -> list[tuple[int, int, int]]:
    """Return the group, the first row and the number of rows of each task that stores any."""
    tasks = [np.asarray(x) for x in tasks_of(jnp.asarray(sizes, jnp.int32), rows, height)]
    found = []
    for group, begin, first, size in zip(*tasks, strict=True):
        if size:
            assert begin % 8 == 0
            assert first >= 0
            assert first + size <= height
            found.append((int(group), int(begin + first), int(size)))
    return found


@given(sizes=st.lists(st.integers(0, 100), min_size=1, max_size=6).filter(lambda x: sum(x) <= ROWS).map(tuple))
@example(sizes=(ROWS,))
@example(sizes=(0, 0))
@example(sizes=(7, 1, 8, 65, 0, 127))
@example(sizes=(63, 1, 63, 1, 65, 63))  # as many tasks as there can be
def test_every_row_is_stored_once_and_by_its_group(sizes):
    owner = np.full(ROWS, -1)
    for group, first, size in stored(sizes, ROWS, HEIGHT):
        assert (owner[first : first + size] == -1).all()
        owner[first : first + size] = group
    np.testing.assert_array_equal(owner, np.repeat(np.arange(len(sizes) + 1), (*sizes, ROWS - sum(sizes))))


@pytest.mark.parametrize(("name", "extra"), [("L1", 0.14), ("S2", 0.04)])
def test_few_rows_are_computed_in_vain(name, extra):
    """A group of n rows has little more than n / height tasks."""
    shape = ACCELERATOR[name]
    height, sizes = HOPPER.tiles.rows, group_sizes(shape, "uniform")
    found = len(stored(tuple(sizes), shape.rows, height)) / math.ceil(shape.rows / height)
    print(f"\n{name}: {found - 1:.1%} more tasks than blocks of {height} rows")
    assert found - 1 < extra
