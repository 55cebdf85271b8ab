"""Folders are read onto meshes: numbers, bytes, memory, and files that change meanwhile."""

import contextlib
import dataclasses
import errno
import itertools
import os
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from tiny_models import CONFIGS

import moezoo
from moezoo.hub import arrays, holdings, loading, regions
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.mesh_execution import on_mesh

ONE, EIGHT, TWO_FOUR = {}, {"expert": 8}, {"fsdp": 2, "expert": 4}
# A pairwise choice of family, mesh, rules, dtypes in the folder and of the model, the fewest bytes of a run, and the
# most bytes in a file.
CASES = [
    ("mixtral", ONE, "fsdp_ep", "float32", None, 2**16, None),
    ("mixtral", {"fsdp": 4, "expert": 2}, "shard_exp_on_fsdp", "bfloat16", "float32", 1, 2000),
    ("v3", TWO_FOUR, "fsdp_ep", "bfloat16", None, 1, 3000),
    ("v3", {"expert": 2, "tensor": 4}, "tensor", "float32", "bfloat16", 2**16, None),
    ("gpt_oss layers", {"fsdp": 4, "expert": 2}, "fsdp_ep", "bfloat16", "float32", 1, None),
    ("gpt_oss layers", {"tensor": 4}, "tensor", "bfloat16", None, 64, None),
    ("gpt_oss layers", EIGHT, "ep_as_cp", "float32", None, 2**16, 6000),
    ("qwen3 mscales, tied", EIGHT, "serve", "float32", "float16", 1, 1500),
    ("olmoe", {"fsdp": 8}, "pure_fsdp", "bfloat16", None, 64, 4000),
    ("olmoe", {"fsdp": 2, "context": 4}, "cp_as_ep", "float32", None, 1, None),
]
# As to devices with memory of their own; each array compiles a program for each of them.
SENT = ("mixtral", {"tensor": 2}, "tensor", "bfloat16", "float32", 64, None)


def config_of(family: str) -> Any:
    """Return a configuration that the meshes here divide."""
    config = CONFIGS[family]
    wider = {"kv_lora": 16, "q_lora": 24, "value_dim": 8} if family == "v3" else {}
    return dataclasses.replace(config, **wider)


def numbers_of(config: Any, dtype: str) -> Any:
    """Return a model of random numbers as NumPy arrays."""
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.standard_normal(shape.shape).astype(shape.dtype)  # noqa: E731
    return jax.tree.map(draw, Blueprint(config, dtype).shapes)


def execution_of(mesh: Any, rules: str) -> moezoo.Execution:
    return moezoo.Execution(moezoo.make_mesh(moezoo.MeshShape(**mesh)), moezoo.compose(f"rules={rules}").rules)


@pytest.mark.parametrize("case", [*CASES, SENT], ids=lambda case: "-".join(map(str, case[:3])).replace(" ", "_"))
def test_every_device_holds_its_part_and_each_byte_is_read_once(tmp_path, monkeypatch, reads, case):
    family, mesh, rules, stored, dtype, least, most = case
    if case is SENT:
        monkeypatch.setattr(arrays.Arriving, "is_on_host", property(lambda array: False))
    monkeypatch.setattr(regions, "LEAST", least)
    monkeypatch.setattr(loading, "_LARGEST_PIECE", 300)
    monkeypatch.setattr(holdings, "_LEAST_PIECE", 300)
    numbers = numbers_of(config_of(family), stored)
    moezoo.save_pretrained(jax.tree.map(jax.numpy.asarray, numbers), tmp_path / "model", max_shard_size=most)
    execution = execution_of(mesh, rules) if mesh else None
    model = moezoo.from_pretrained(tmp_path / "model", execution, dtype)
    shapes = Blueprint(model.config, dtype or stored).shapes
    wanted = jax.tree.map(lambda x, kind: x.astype(kind.dtype), numbers, shapes)
    shardings = (
        jax.tree.leaves(on_mesh(execution).shardings(shapes)) if execution else [None] * len(jax.tree.leaves(shapes))
    )
    for array, x, sharding in zip(jax.tree.leaves(model), jax.tree.leaves(wanted), shardings, strict=True):
        assert array.dtype == x.dtype
        assert sharding is None or array.sharding.is_equivalent_to(sharding, x.ndim)
        for shard in array.addressable_shards:
            assert shard.data.devices() == {shard.device}
            np.testing.assert_array_equal(shard.data, x[shard.index])
    size = 0
    for ranges in reads.values():
        ordered = sorted(ranges, key=lambda run: run.start)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(ordered))
        size += sum(map(len, ordered))
    tensors = {}
    for path in (tmp_path / "model").glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert size == sum(tensor.nbytes for tensor in tensors.values())
    assert len(reads) == len(list((tmp_path / "model").glob("*.safetensors")))


@pytest.fixture
def folder(tmp_path):
    moezoo.save_pretrained(jax.tree.map(jax.numpy.asarray, numbers_of(CONFIGS["mixtral"], "float32")), tmp_path / "m")
    return tmp_path / "m"


def test_devices_take_over_the_memory_that_was_written(folder):
    """So nothing is in memory twice; CPU devices that hold the same numbers share them."""
    model = moezoo.from_pretrained(folder, execution_of({"tensor": 4}, "tensor"))
    for array in jax.tree.leaves(model):
        places = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        assert len(places) == len({str(shard.index) for shard in array.addressable_shards})


def test_devices_that_share_numbers_do_not_change_each_others(folder):
    """A program that donates an array must not write to the memory that the others still use."""
    model = moezoo.from_pretrained(folder, execution_of({"tensor": 4}, "tensor"))
    norm = model.unembedding.norm.scale
    before = np.array(norm)
    first, *others = [shard.data for shard in norm.addressable_shards]
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(first))
    for other in others:
        np.testing.assert_array_equal(other, before)


def _shrink(path, _):
    os.truncate(path, os.path.getsize(path) - 8)


def _write(path, _):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(1, 1))


def _fail(_, patch):
    def preadv(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_shrink, r"model\.safetensors: \S+ cannot be read \(it has become shorter\); download|file changed while"),
        (_write, r"model\.safetensors: the file changed while \S+ was read; load it when it is complete"),
        (_fail, r"model\.safetensors: \S+ cannot be read \(Input/output error\); download the file again"),
    ],
)
def test_damage_that_appears_while_reading(folder, monkeypatch, damage, message):
    read, done = loading._read, []

    def late(*arguments):
        damage(folder / "model.safetensors", monkeypatch)
        done.append(True)
        return read(*arguments)

    monkeypatch.setattr(loading, "_read", late)
    with pytest.raises(moezoo.UserError, match=message):
        moezoo.from_pretrained(folder)
    assert done


def test_one_line_where_there_is_no_terminal(folder, monkeypatch, capsys):
    monkeypatch.setattr("moezoo.hub.loading._LEAST_SHOWN", 0)
    moezoo.from_pretrained(folder)
    line = capsys.readouterr().err
    assert line.startswith(f"loaded {folder}: 65 tensors, 0.00 of 0.00 GB, ")
    assert line.count("\n") == 1


def test_the_bar_counts_bytes(folder, monkeypatch):
    """The time that is left follows from them: half of the tensors may be a tenth of the bytes."""
    shown: list[dict[str, Any]] = []

    class Bar:
        def add_task(self, description, **values):
            shown.append(values)

        def update(self, task, **values):
            shown.append(values)

    monkeypatch.setattr("moezoo.hub.loading._LEAST_SHOWN", 0)
    monkeypatch.setattr("moezoo.hub.loading.bar_on", lambda stream: contextlib.nullcontext(Bar()))
    moezoo.from_pretrained(folder)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        sizes = [file.get_tensor(name).nbytes for name in file.offset_keys()]
    first, *updates = shown
    assert first == {"total": sum(sizes) / 1e6, "unit": "MB"}
    assert [each["completed"] for each in updates] == [size / 1e6 for size in itertools.accumulate(sizes)]
    assert updates[-1]["description"].startswith(f"{len(sizes)} of {len(sizes)} tensors, ")
