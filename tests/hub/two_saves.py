"""Models laid out over two processes, saved and loaded by both: `python two_saves.py PORT PROCESS FOLDER`."""

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from adapter_cases import with_pairs
from tiny_models import CONFIGS

import moezoo
from moezoo.hub import writing
from moezoo.hub.adapters import save_adapter
from moezoo.models.blueprint import Blueprint
from moezoo.nn.containers import store
from moezoo.parallel import distributed
from moezoo.parallel.distributed import Manual
from moezoo.parallel.mesh_execution import on_mesh

# A family, the dtype, and the most bytes in a file. Sizes that eight devices can store, heads and latents included.
SAVED = {
    "mixtral": ("mixtral", "bfloat16", None),
    "deepseek": ("v3", "bfloat16", 3000),  # its choice biases are float32
    "gpt_oss": ("gpt_oss layers", "float32", 6000),
    "tied": ("qwen3 mscales, tied", "float32", None),
}


def model(name: str) -> Any:
    """Return the model as NumPy arrays: the same in every process. Some numbers are negative zeros."""
    family, dtype, _ = SAVED[name]
    config = CONFIGS[family]
    if name == "deepseek":
        config = dataclasses.replace(config, kv_lora=16, q_lora=24)
    rng = np.random.default_rng(3)

    def leaf(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        numbers = rng.standard_normal(shape.shape).astype(shape.dtype)
        numbers[rng.random(shape.shape) < 0.1] = -0.0
        return numbers

    return jax.tree.map(leaf, Blueprint(config, dtype).shapes)


def lay_out(numbers: Any, mesh: moezoo.MeshShape, rules: str = "fsdp_ep") -> Any:
    """Return the model on a mesh, also of several processes."""
    execution = moezoo.Execution(moezoo.make_mesh(mesh), moezoo.compose(f"rules={rules}").rules)

    def leaf(x: Any, sharding: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), numbers)
    return jax.tree.map(leaf, numbers, on_mesh(execution).shardings(shapes))


def contained(numbers: Any) -> Any:
    """Return the model with its experts in containers, as NumPy arrays."""
    return jax.tree.map(np.asarray, store(jax.tree.map(jax.numpy.asarray, numbers), lambda path: ".experts." in path))


def adapted(numbers: Any) -> Any:
    """Return the model with low-rank pairs, as NumPy arrays."""
    return jax.tree.map(np.asarray, with_pairs(jax.tree.map(jax.numpy.asarray, numbers)))


def load(folder: Path, saved: Any) -> list[int]:
    """Load a model as it is laid out here, compare it with that one, and return the bytes read and the bytes held."""
    read, preadv = [], os.preadv

    def record(*arguments: Any) -> int:
        read.append(preadv(*arguments))
        return read[-1]

    os.preadv = record
    mesh = saved.embedding.weight.sharding.mesh
    model = moezoo.from_pretrained(folder, moezoo.Execution(mesh, moezoo.compose().rules))
    os.preadv = preadv
    held = 0
    for array, other in zip(jax.tree.leaves(model), jax.tree.leaves(saved), strict=True):
        assert array.sharding == other.sharding
        for one, two in zip(array.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(one.data, two.data)
        held += sum({str(shard.index): shard.data.nbytes for shard in array.addressable_shards}.values())
    return [sum(read), held]


def fail_to_load(folder: Path, process: int, mesh: moezoo.MeshShape) -> dict[str, str]:
    """Load where process 1 has another folder, and where its disk fails; return the messages."""
    execution = moezoo.Execution(moezoo.make_mesh(mesh), moezoo.compose().rules)
    found, preadv = {}, os.preadv

    def failing(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    for key, name in (("two folders", "tied" if process else "mixtral"), ("failed read", "mixtral")):
        os.preadv = failing if process and key == "failed read" else preadv
        try:
            moezoo.from_pretrained(folder / name, execution)
        except moezoo.UserError as error:
            found[key] = str(error)
    os.preadv = preadv
    return found


def main(port: str, process: int, folder: Path) -> None:
    """Save every model, then again where this process fails, or has another model than the other."""
    distributed.start(Manual(f"localhost:{port}", 2, process), 4)
    mesh = moezoo.MeshShape(fsdp=2, expert=2)
    placed = {name: lay_out(model(name), mesh) for name in SAVED}
    for name, (_, _, most) in SAVED.items():
        moezoo.save_pretrained(placed[name], folder / name, max_shard_size=most)
    moezoo.save_pretrained(lay_out(contained(model("tied")), mesh), folder / "contained")
    save_adapter(lay_out(adapted(model("mixtral")), mesh), folder / "adapter")
    moezoo.save_pretrained(placed["deepseek"], folder / "rounded", max_shard_size=3000, format="fp8")
    execution = moezoo.Execution(moezoo.make_mesh(mesh), moezoo.compose().rules)
    kept = moezoo.from_pretrained(folder / "rounded", execution, "stored")
    moezoo.save_pretrained(kept, folder / "kept", like=folder / "rounded")
    carried = moezoo.save_pretrained(placed["deepseek"], folder / "like", like=folder / "deepseek")
    loaded = {name: load(folder / name, placed[name]) for name in SAVED}
    found: dict[str, Any] = {"changed": carried.changed, "loaded": loaded, **fail_to_load(folder, process, mesh)}

    def failing(self: Any, place: Any, value: Any) -> None:
        raise OSError(28, "No space left on device")

    if process == 1:
        writing._Output.write = failing
    other = placed["mixtral" if process else "tied"]
    for key, saved in (("full", placed["deepseek"]), ("other", other)):
        try:
            moezoo.save_pretrained(saved, folder / key, max_shard_size=3000)
        except moezoo.UserError as error:
            found[key] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
