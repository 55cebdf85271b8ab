"""Folders with weights of few bits: widened, kept, laid out on meshes, and written back, to the bit."""

import contextlib
import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from few_bit_folders import BF16, CASES, WIDENED, tensors_of, write_few_bits
from refusals import refused

import moezoo
from moezoo.hub import holdings, loading, regions
from moezoo.hub.few_bits import stating
from moezoo.hub.formats.fp8 import FP8Blocks
from moezoo.hub.formats.fp8_channels import FP8Channels
from moezoo.hub.opening import find_model, open_folder
from moezoo.models.blueprint import Blueprint
from moezoo.nn.block_fp8 import BlockFP8
from moezoo.nn.few_bits import cut_pieces
from moezoo.parallel.axes import is_stored
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.training.exporting import plan_export

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
    for i, name in enumerate(CASES | WIDENED)
    for j, dtype in enumerate(("float32", "bfloat16", "stored"))
    if dtype != "stored" or name in CASES
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
        for array, sharding in zip(
            jax.tree.leaves(model), jax.tree.leaves(on_mesh(execution).shardings(model)), strict=True
        ):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
    host = jax.device_get(model)
    if dtype == "stored":
        assert sum(map(is_stored, jax.tree.leaves(model, is_leaf=is_stored)))
        host, dtype = widened(host, "float32"), "float32"
    assert_equal(host, moezoo.from_pretrained(made.wide, dtype=dtype))


class Part:
    """What one device holds of an array."""

    def __init__(self, array: Any, sharding: Any, device: Any):
        index = sharding.addressable_devices_indices_map(array.shape)[device]
        box = tuple(part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True))
        self.numbers = np.zeros([end - start for start, end in box], array.dtype)
        self.shape, self.boxes = array.shape, {box: self}

    def write(self, values: np.ndarray, at: tuple[int, ...]) -> bool:
        first = len(at) - values.ndim
        self.numbers[(*at[:first], *map(slice, at[first:], np.add(at[first:], values.shape)))] = values
        return True


PROCESSES = [("fp8", "expert 8"), ("fp8 joined experts", "expert 2 x tensor 4"), ("mxfp4", "fsdp 2 x tensor 4")]
PROCESSES += [("int4", "fsdp 4 x expert 2"), ("fp8 channels", "fsdp 2 x tensor 4")]


@pytest.mark.parametrize(("name", "layout"), PROCESSES)
@pytest.mark.parametrize("dtype", ["float32", "stored"])
def test_a_process_with_one_device_reads_what_it_holds(few_bits, monkeypatch, reads, name, layout, dtype):
    monkeypatch.setattr(regions, "LEAST", 1)
    monkeypatch.setattr(holdings, "_LEAST_PIECE", 250)
    execution, folder, device = execution_of(layout), few_bits(name).few, jax.devices()[5]
    found = find_model(open_folder(folder), dtype)
    shapes = jax.eval_shape(functools.partial(cut_pieces, execution=execution), found.shapes)
    parts = jax.tree.map(lambda x, where: Part(x, where, device), shapes, on_mesh(execution).shardings(shapes))
    arrays = {jax.tree_util.keystr(path).lstrip("."): x for path, x in jax.tree_util.tree_leaves_with_path(parts)}
    for piece in itertools.chain.from_iterable(holding.pieces(arrays) for holding in found.holdings):
        assert all(part.read() for part in piece.cut(2000))
    ranges = sorted(itertools.chain.from_iterable(reads.values()), key=lambda run: run.start)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
    assert sum(map(len, ranges)) < sum(x.nbytes for x in tensors_of(folder).values()) / 2
    whole = moezoo.from_pretrained(folder, execution, dtype)
    for part, array in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        (wanted,) = (np.asarray(shard.data) for shard in array.addressable_shards if shard.device == device)
        np.testing.assert_array_equal(bits(part.numbers), bits(wanted))


def assert_tensors(folder: Path, wanted: dict[str, np.ndarray]) -> None:
    """Compare names, dtypes, shapes and bytes of a folder's tensors."""
    found = tensors_of(folder)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name
        assert tensor.tobytes() == wanted[name].tobytes(), name


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def usual_name(name: str, tensors: dict[str, np.ndarray]) -> str:
    """Return the name that the scales of FP8 have in most folders."""
    stem, ending = name.rpartition(".")[::2]
    weight = stem if stem in tensors else f"{stem}.weight"
    return f"{weight}_scale_inv" if ending in ("scale", "qscale_weight") else name


# Each folder on a mesh, and the most bytes of a file.
SAVES = [(name, list(LAYOUTS)[(2 * i + 1) % 5], (None, 9000)[i % 2]) for i, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "layout", "most"), SAVES, ids=CASES)
def test_a_kept_model_is_written_with_the_bits_of_its_folder(few_bits, tmp_path, name, layout, most):
    """With `like`, its files are the same; without, its tensors. So is a folder that `convert` keeps."""
    made = few_bits(name)
    model = moezoo.from_pretrained(made.few, execution_of(layout), "stored")
    assert not moezoo.save_pretrained(model, tmp_path / "like", like=made.few).changed
    assert not plan_export(str(made.few), str(tmp_path / "converted")).write()
    for folder in (tmp_path / "like", tmp_path / "converted"):
        for file in ("config.json", "model.safetensors"):
            assert (folder / file).read_bytes() == (made.few / file).read_bytes()
    moezoo.save_pretrained(model, tmp_path / "new", max_shard_size=most)
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == 1 or most
    # Scales of a format have one name where folders are written; readers know the others.
    usual = {usual_name(key, made.tensors): x for key, x in made.tensors.items()}
    assert_tensors(tmp_path / "new", usual)
    moezoo.save_pretrained(model, tmp_path / "over", like=made.wide)
    assert_tensors(tmp_path / "over", usual)
    assert config_of(tmp_path / "over")["quantization_config"] == config_of(tmp_path / "new")["quantization_config"]
    assert_equal(
        moezoo.from_pretrained(tmp_path / "new", dtype="stored"),
        jax.device_get(moezoo.from_pretrained(made.few, dtype="stored")),
    )


@pytest.mark.parametrize("name", ["fp8", "fp8 one scale", "fp8 channels", "mxfp4", "int4", *WIDENED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_widened_model_is_written_in_numbers(few_bits, tmp_path, name, dtype):
    """As the folder in numbers, by `save_pretrained` and by `convert`; nothing says that it has few bits."""
    made = few_bits(name)
    model = moezoo.from_pretrained(made.few, dtype=dtype)
    moezoo.save_pretrained(model, tmp_path / "new")
    with pytest.warns(UserWarning, match="less precise") if dtype == "bfloat16" else contextlib.nullcontext():
        assert not moezoo.save_pretrained(model, tmp_path / "like", like=made.few).changed
    plan_export(str(made.few), str(tmp_path / "converted"), dtype=dtype).write()
    kinds = {key: np.float32 if "bias" in key and "e_score" in key else dtype for key in made.numbers}
    wanted = {key: x.astype(kinds[key]) for key, x in made.numbers.items()}
    for folder in (tmp_path / "new", tmp_path / "like", tmp_path / "converted"):
        assert_tensors(folder, wanted)
        assert "quantization_config" not in config_of(folder)
    assert config_of(tmp_path / "new")["dtype"] == dtype


@pytest.mark.parametrize(
    ("scales", "dtype", "row"),
    [
        (np.float32, np.float32, [1.885986328125, -1.131591796875]),
        (np.float32, BF16, [1.8828125, -1.1328125]),
        (BF16, BF16, [1.890625, -1.1328125]),
        # Here compressed-tensors has the row above: it rounds products to the dtype of the scales.
        (BF16, np.float32, [1.8896484375, -1.1337890625]),
    ],
)
def test_an_output_has_a_scale(scales, dtype, row):
    """The numbers of compressed-tensors 0.10.2 and 0.20.1, written down: 1.875 and -1.125 times 1.005859375."""
    scale = np.array([[1.005859375], [2 * 1.005859375]]).astype(scales)
    codes = np.array([[0x3F, 0xB9], [0x3F, 0xB9]], np.uint8)
    of_rows, of_columns = (np.arange(2) // size for size in FP8Channels().block_of((2, 2)))
    found = BlockFP8.widen(codes, scale[of_rows], of_columns).astype(dtype)
    np.testing.assert_array_equal(found, np.array([row, np.multiply(row, 2)], dtype))
    container = BlockFP8(values=codes.T, scale=scale.T, outputs=1, block=(1, 2), dtype=np.dtype(dtype))
    np.testing.assert_array_equal(bits(container.materialise(dtype)), bits(found.T))


def test_what_config_json_says_of_channels(few_bits, tmp_path):
    """Nothing of activations, and which modules are in numbers."""
    model = moezoo.from_pretrained(few_bits("fp8 channels bfloat16").few, dtype="stored")
    moezoo.save_pretrained(model, tmp_path / "m")
    table = config_of(tmp_path / "m")["quantization_config"]
    attention = [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    assert table.pop("ignore") == ["lm_head", "model.layers.0.mlp.gate", *attention]
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    weights |= {"group_size": None, "block_structure": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    assert table == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def test_blocks_that_are_channels_are_stated_by_their_scales():
    """Codes are no scales of channels, and a matrix of one output has one scale in either way."""

    def ways(scale: Any, block: tuple[int, int], matrix: tuple[int, int]) -> list[Any]:
        values = np.zeros((matrix[1], matrix[0]), np.uint8)
        kept = BlockFP8(values=values, scale=scale, outputs=1, block=block, dtype=np.dtype(np.float32))
        return list(stating(kept, matrix))

    assert ways(np.ones((1, 4), np.float32), (1, 8), (4, 8)) == [FP8Channels(), FP8Blocks((1, 8))]
    assert ways(np.full((1, 4), 127, np.uint8), (1, 8), (4, 8)) == [FP8Blocks((1, 8))]
    assert ways(np.ones((2, 4), np.float32), (1, 4), (4, 8)) == [FP8Blocks((1, 4))]
    assert ways(np.ones((1, 1), np.float32), (1, 8), (1, 8)) == [FP8Channels(), FP8Blocks((1, 8)), FP8Blocks(None)]


def test_a_matrix_of_one_output_is_written_like_the_others(tmp_path):
    """Its only scale may also be that of an output."""
    case = CASES["fp8 one scale"]
    shapes = Blueprint(dataclasses.replace(case.config, mlp=1)).shapes
    moezoo.save_pretrained(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes), tmp_path / "plain")
    made = write_few_bits(tmp_path / "plain", tmp_path, case)
    moezoo.save_pretrained(moezoo.from_pretrained(made.few, dtype="stored"), tmp_path / "new")
    table = config_of(tmp_path / "new")["quantization_config"]
    assert (table["quant_method"], table["weight_block_size"]) == ("fp8", None)
    assert_tensors(tmp_path / "new", {usual_name(key, made.tensors): x for key, x in made.tensors.items()})


def test_a_changed_model_is_written_as_it_is(few_bits, tmp_path):
    """Other codes and other scales in the same containers; what is trained beside them has its own numbers."""
    made = few_bits("fp8")
    model = moezoo.from_pretrained(made.few, dtype="stored")
    block = model.stacks[1].blocks[0]

    def change(x: Any) -> Any:
        return eqx.tree_at(lambda c: (c.values, c.scale), x, (x.values ^ 128, 2 * x.scale))

    changed = eqx.tree_at(lambda m: m.stacks[1].blocks[0].attention.out, model, change(block.attention.out))
    changed = eqx.tree_at(lambda m: m.unembedding.norm.scale, changed, model.unembedding.norm.scale + 1)
    assert moezoo.save_pretrained(changed, tmp_path / "new", like=made.few).changed
    found, name = tensors_of(tmp_path / "new"), "model.layers.1.self_attn.o_proj.weight"
    assert {key for key, x in found.items() if x.tobytes() != made.tensors[key].tobytes()} == {
        name,
        f"{name}_scale_inv",
        "model.norm.weight",
    }
    np.testing.assert_array_equal(found[name].astype(np.float32), -made.tensors[name].astype(np.float32))
    np.testing.assert_array_equal(found[f"{name}_scale_inv"], 2 * made.tensors[f"{name}_scale_inv"])


def test_scales_that_no_folder_can_have_are_refused(few_bits, tmp_path):
    """Keys and values of one block of kv_b_proj, which have it in two arrays."""
    model = moezoo.from_pretrained(few_bits("fp8").few, dtype="stored")
    where = lambda m: m.stacks[0].blocks[0].attention.value_up.scale  # noqa: E731
    name = "model.layers.0.self_attn.kv_b_proj.weight_scale_inv"
    with refused(f"{name}: numbers of one block have different scales, so the format fp8 cannot hold"):
        moezoo.save_pretrained(eqx.tree_at(where, model, 2 * where(model)), tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_one_tensor_in_two_arrays(few_bits):
    """kv_b_proj has 8 rows of keys and 7 of values for each head. Blocks of 16 rows begin and end inside of heads."""
    made = few_bits("fp8")
    attention = moezoo.from_pretrained(made.few, dtype="stored").stacks[0].blocks[0].attention
    heads = made.numbers["model.layers.0.self_attn.kv_b_proj.weight"].reshape(4, 15, 24).transpose(2, 0, 1)
    scales = made.tensors["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"][np.arange(60) // 16, 0].reshape(4, 15)
    # The second head's keys are in two blocks, so a piece has one row; no head's values are.
    for part, rows, pieces in ((attention.key_up, slice(0, 8), 8), (attention.value_up, slice(8, 15), 1)):
        np.testing.assert_array_equal(part.materialise("float32")[0], heads[:, :, rows])
        assert part.scale.shape == (1, 1, 4, pieces)
        np.testing.assert_array_equal(part.scale[0, 0], scales[:, rows][:, :pieces])
