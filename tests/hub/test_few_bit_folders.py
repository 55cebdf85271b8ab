"""Folders with weights of few bits: widened, kept, laid out on meshes, and written back, to the bit."""

import functools
import itertools
import os
from collections import defaultdict
from typing import Any

import jax
import numpy as np
import pytest
from few_bit_folders import CASES

import moezoo
from moezoo.hub import holdings, loading, regions
from moezoo.parallel.axes import is_stored

LAYOUTS: dict[str, Any] = {
    "one": None,
    "expert 8": ({"expert": 8}, "fsdp_ep"),
    "fsdp 4 x expert 2": ({"fsdp": 4, "expert": 2}, "shard_exp_on_fsdp"),
    "fsdp 2 x tensor 4": ({"fsdp": 2, "tensor": 4}, "tensor"),
    "expert 2 x tensor 4": ({"expert": 2, "tensor": 4}, "serve"),
}
# Every folder in every dtype, and every dtype in every layout; the fewest bytes of a run and the most of a piece.
LOADS = [
    (name, list(LAYOUTS)[(3 * i + j) % 5], dtype, (1, 2**16, 64)[i % 3], (2000, 2**22)[(i + j) % 2])
    for i, name in enumerate(CASES)
    for j, dtype in enumerate(("float32", "bfloat16", "stored"))
]


def execution_of(layout: str) -> Any:
    if LAYOUTS[layout] is None:
        return None
    mesh, rules = LAYOUTS[layout]
    return moezoo.Execution(moezoo.make_mesh(moezoo.MeshShape(**mesh)), moezoo.compose(f"rules={rules}").rules)


def bits(x: Any) -> np.ndarray:
    """Return the bits of numbers, so that -0 is not 0."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_equal(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(bits(x), bits(y))


@functools.partial(jax.jit, static_argnums=1)
def widened(model: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: x.materialise(dtype) if is_stored(x) else x, model, is_leaf=is_stored)


@pytest.fixture
def reads(monkeypatch):
    """Return the ranges of bytes that are read of each file."""
    found = defaultdict(list)
    preadv = os.preadv

    def record(file, buffers, offset):
        got = preadv(file, buffers, offset)
        found[os.readlink(f"/proc/self/fd/{file}")].append(range(offset, offset + got))
        return got

    monkeypatch.setattr(os, "preadv", record)
    return found


@pytest.mark.parametrize("load", LOADS, ids=lambda load: "-".join(map(str, load)).replace(" ", "_"))
def test_every_device_holds_the_numbers_of_its_part(few_bits, monkeypatch, reads, load):
    """Also from pieces that begin and end inside of blocks, words and bytes; each byte is read once."""
    name, layout, dtype, least, most = load
    monkeypatch.setattr(regions, "LEAST", least)
    monkeypatch.setattr(loading, "_LARGEST_PIECE", most)
    monkeypatch.setattr(holdings, "_LEAST_PIECE", most // 8)
    made, execution = few_bits(name), execution_of(layout)
    model = moezoo.from_pretrained(made.few, execution, dtype)
    ranges = sorted(itertools.chain.from_iterable(reads.values()), key=lambda run: run.start)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
    assert sum(map(len, ranges)) == sum(x.nbytes for key, x in made.tensors.items() if not key.endswith("_shape"))
    if execution is not None:
        for array, sharding in zip(jax.tree.leaves(model), jax.tree.leaves(execution.shardings(model)), strict=True):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
    host = jax.device_get(model)
    if dtype == "stored":
        assert sum(map(is_stored, jax.tree.leaves(model, is_leaf=is_stored)))
        host, dtype = widened(host, "float32"), "float32"
    assert_equal(host, moezoo.from_pretrained(made.wide, dtype=dtype))
