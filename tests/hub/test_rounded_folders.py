"""Folders whose weights are rounded to few bits while they are written, against loops over blocks by hand."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from few_bit_folders import FP4, is_projection, tensors_of
from refusals import refused
from tiny_models import deepseek_v3, gpt_oss, mistral4

import moezoo
from moezoo.models.blueprint import Blueprint
from moezoo.training.exporting import plan_export

# 136 inputs and the 10 x 15 rows of kv_b_proj are a block of 128 and a part of one.
LATENT: dict[str, Any] = {"embed": 136, "heads": 10, "expert_mlp": 32, "mlp": 40, "q_lora": 24, "kv_lora": 24}
LATENT |= {"nope_dim": 8, "layers": 2}
CONFIGS = {
    "fp8": deepseek_v3(**LATENT),
    "fp8 joined experts": mistral4(**LATENT),
    "mxfp4": gpt_oss(embed=64, expert_mlp=32, layers=2),
}
Found = dict[str, np.ndarray]


def numbers_of(config: Any) -> Any:
    """Return a model of random numbers of very different magnitude."""
    rng = np.random.default_rng(0)
    shapes = Blueprint(config).shapes
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape) * 10 ** rng.uniform(-4, 1, x.shape), x.dtype), shapes
    )


def to_fp8(name: str, weight: np.ndarray) -> Found:
    """Return e4m3 numbers and float32 scales of blocks of 128 x 128; NumPy rounds to even codes."""
    *lead, rows, columns = weight.shape
    codes = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((*lead, -(-rows // 128), -(-columns // 128)), np.float32)
    for index in np.ndindex(scales.shape):
        *expert, i, j = index
        at = (*expert, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        scales[index] = np.abs(weight[at]).max() * np.float32(1 / 448)
        codes[at] = np.clip(weight[at] / scales[index], -448, 448).astype(codes.dtype)
    return {name: codes, f"{name}_scale_inv": scales}


def to_mxfp4(name: str, weight: np.ndarray) -> Found:
    """Return pairs of codes and scales of 32 inputs of a tensor [experts, inputs, outputs]."""
    groups = weight.swapaxes(-1, -2).reshape(*weight.shape[:1], weight.shape[2], -1, 32)
    scales = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - 2
    x = np.abs(np.ldexp(groups, -scales[..., None]))
    distance = np.abs(np.minimum(x, 6)[..., None] - FP4[:8])
    best = distance == distance.min(-1, keepdims=True)
    even = best & (np.arange(8) % 2 == 0)
    codes = np.where(best.sum(-1) > 1, even.argmax(-1), best.argmax(-1)).astype(np.uint8)
    codes |= np.signbit(groups).astype(np.uint8) << 3
    return {
        f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        f"{name}_scales": (scales + 127).astype(np.uint8),
    }


def by_hand(kind: str, plain: Found) -> Found:
    """Round the weights of layers, those of routers apart."""
    found = Found()
    for name, weight in plain.items():
        chosen = is_projection(name) if kind == "fp8" else name.endswith(("gate_up_proj", "down_proj"))
        found |= (to_fp8 if kind == "fp8" else to_mxfp4)(name, weight) if chosen else {name: weight}
    return found


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore:.*transformers 5.23 and 5.24 do not read FP8 weights that")
def test_rounding(tmp_path, name):
    """From one device, from a mesh that cuts blocks, and by `convert`; the folder is kept when it is read again."""
    model, kind = numbers_of(CONFIGS[name]), name.split()[0]
    mesh = moezoo.make_mesh(moezoo.MeshShape(fsdp=4, expert=2))
    execution = moezoo.Execution(mesh, moezoo.compose("rules=fsdp_ep").rules)
    moezoo.save_pretrained(model, tmp_path / "plain")
    wanted = by_hand(kind, tensors_of(tmp_path / "plain"))
    moezoo.save_pretrained(model, tmp_path / "one", format=kind)
    moezoo.save_pretrained(moezoo.place(model, execution), tmp_path / "mesh", format=kind)
    moezoo.save_pretrained(model, tmp_path / "like", like=tmp_path / "plain", format=kind)
    plan_export(str(tmp_path / "plain"), str(tmp_path / "converted"), format=kind).write()
    kept = moezoo.from_pretrained(tmp_path / "one", execution, "stored")
    moezoo.save_pretrained(kept, tmp_path / "kept")
    for folder in ("one", "mesh", "like", "converted", "kept"):
        found = tensors_of(tmp_path / folder)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
            assert found[key].tobytes() == tensor.tobytes(), (folder, key)
        table = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert table["quant_method"] == kind
        assert table.get("weight_block_size") == ([128, 128] if kind == "fp8" else None)


def test_what_cannot_be_rounded(few_bits, tmp_path):
    with refused("format=fp4: expected one of fp8, mxfp4"):
        moezoo.save_pretrained(numbers_of(CONFIGS["mxfp4"]), tmp_path / "m", format="fp4")  # pyright: ignore
    with refused("format=mxfp4: folders of this family have no weight that fits it; leave it out"):
        moezoo.save_pretrained(numbers_of(CONFIGS["fp8"]), tmp_path / "m", format="mxfp4")
    kept = moezoo.from_pretrained(few_bits("fp8").few, dtype="stored")
    with refused("format=mxfp4: folders of this family have no weight that fits it"):
        moezoo.save_pretrained(kept, tmp_path / "m", format="mxfp4")
    with refused("format=fp8: weights of few bits are in 2 formats (fp8, int4), and a folder has one; load the folder"):
        moezoo.save_pretrained(
            moezoo.from_pretrained(few_bits("int4").few, dtype="stored"), tmp_path / "m", format="fp8"
        )
    odd = numbers_of(CONFIGS["mxfp4"])
    odd = eqx.tree_at(lambda m: m.stacks[0].blocks[0].feed_forward.experts.down, odd, replace_fn=lambda x: x / 0)
    with refused("format=mxfp4: model.layers.0.mlp.experts.down_proj has NaN or infinities"):
        moezoo.save_pretrained(odd, tmp_path / "m", format="mxfp4")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*transformers 5.23 and 5.24 do not read FP8 weights that")
def test_another_size_of_blocks(few_bits, tmp_path):
    """The new folder states its own blocks, not those of the one that it is like."""
    folder = few_bits("fp8").few
    plan_export(str(folder), str(tmp_path / "new"), dtype="bfloat16", format="fp8").write()
    assert (
        json.loads((tmp_path / "new/config.json").read_text())["quantization_config"]["weight_block_size"] == [128] * 2
    )
    wide, again = (moezoo.from_pretrained(one, dtype="float32") for one in (folder, tmp_path / "new"))
    for first, second in zip(jax.tree.leaves(wide), jax.tree.leaves(again), strict=True):
        # Rounding to FP8 moves a number by a sixteenth at most, that to bfloat16 before by 1/512.
        np.testing.assert_allclose(second, first, rtol=0, atol=float(abs(first).max()) * (1 / 16 + 1 / 512))


def test_what_transformers_does_not_read(tmp_path):
    model = numbers_of(CONFIGS["fp8"])
    with pytest.warns(
        UserWarning, match="5.24 do not read FP8 weights that have blocks that are not whole: .*kv_b_proj"
    ):
        moezoo.save_pretrained(model, tmp_path / "m", format="fp8")
