"""Damaged folders of few bits, and such that cannot be kept: one line, before any array is made."""

import json
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from few_bit_folders import BF16, MODELOPT_CONFIG, fp8_channels_config, int4_config, write_folder
from refusals import refused

import moezoo
from moezoo.hub import arrays
from moezoo.training.exporting import plan_export

Tensors = dict[str, np.ndarray]
K = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
UP = "model.layers.1.mlp.experts.2.up_proj.weight"
BOTH = "model.layers.1.mlp.experts.gate_up_proj"
STRAY = "model.layers.1.mlp.norm.weight_scale_inv"
BLOCKS, SCALES, QSCALE, WORDS = f"{BOTH}_blocks", f"{BOTH}_scales", f"{BOTH}.qscale_weight", f"{UP}_packed"
FIRST = "model.layers.0.mlp.experts.2.up_proj.weight"
FACTOR, EXPERTS = f"{UP}_global_scale", "model.layers.0.mlp.experts.gate_up_proj"
FP8, E4M3, ONE = {"quant_method": "fp8"}, ml_dtypes.float8_e4m3fn, np.ones(1, np.float32)
QUANTIZATION = "quantization_config"


Change = Callable[[Tensors, Any], Any]
SCALE, OTHER_SCALE = f"{K}_scale_inv", K.replace("weight", "scale")
CHANNELS, CHANNEL = "fp8 channels", f"{K}_scale"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def put(name: str, value: Any) -> Change:
    return lambda tensors, config: tensors.update({name: np.asarray(value)})


def edit(name: str, function: Callable[[np.ndarray], Any]) -> Change:
    return lambda tensors, config: tensors.update({name: np.asarray(function(tensors[name]))})


def cast(name: str, dtype: Any) -> Change:
    return edit(name, lambda x: x.astype(dtype))


def drop(*names: str) -> Change:
    return lambda tensors, config: [tensors.pop(name) for name in names]


def state(value: Any) -> Change:
    """Return a change that states `value` of few bits."""
    return lambda tensors, config: config.update({QUANTIZATION: value})


def both(*changes: Change) -> Change:
    return lambda tensors, config: [change(tensors, config) for change in changes]


def groups_of_16(tensors: Tensors, config: Any) -> None:
    config[QUANTIZATION]["config_groups"]["group_0"]["weights"].update(group_size=16)


def factor_of_experts(tensors: Tensors, config: Any) -> None:
    tensors[EXPERTS], scale = tensors.pop(f"{EXPERTS}_blocks"), tensors.pop(f"{EXPERTS}_scales")
    tensors[f"{EXPERTS}_scale"], tensors[f"{EXPERTS}_scale_2"] = scale.view(E4M3), ONE
    config[QUANTIZATION] = MODELOPT_CONFIG


@pytest.fixture
def spoil(few_bits, tmp_path):
    """Return a function that writes a changed folder."""

    def write(name: str, change: Change) -> Any:
        made = few_bits(name)
        tensors, config = dict(made.tensors), json.loads((made.few / "config.json").read_text())
        change(tensors, config)
        write_folder(tmp_path / "m", tensors, config)
        return tmp_path / "m"

    return write


@pytest.fixture
def no_arrays(monkeypatch):
    def begin(array: Any) -> None:
        raise AssertionError("an array was made")

    monkeypatch.setattr(arrays.Arriving, "begin", begin)


# The folder, what is done to it, and the message after the folder's name.
@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("fp8", edit(SCALE, lambda x: x.T), f": {SCALE} has shape [3, 2], expected [2, 3] ... config.json"),
        ("fp8", edit(SCALE, lambda x: x.reshape(-1)), f": {SCALE} has shape [6], expected [2, 3]"),
        # Blocks of another size, one scale where there are blocks, blocks where one scale is stated.
        ("fp8", state(FP8 | {"weight_block_size": [128, 128]}), " ... _scale_inv has shape ... expected [1, 1]"),
        ("fp8", put(SCALE, np.float32(1)), f": {SCALE} has shape [], expected [2, 3]"),
        ("fp8", state(FP8 | {"weight_block_size": None}), " ... _scale_inv has shape ... expected [1, 1]"),
        # One scale where each expert has one.
        ("fp8 one scale", put(QSCALE, np.float32(1)), f": {QSCALE} has shape [], expected [8, 1, 1]"),
        ("fp8", cast(SCALE, np.float16), f": {SCALE} is F16, expected F32, BF16, F8_E8M0"),
        ("fp8", edit(K, lambda x: x[:, :-1]), f": {K} has shape [32, 63], expected [32, 64]"),
        ("fp8", cast(K, BF16), f": {K} is BF16, expected F8_E4M3"),
        ("fp8", cast(K, ml_dtypes.float8_e5m2), f": {K} is F8_E5M2, expected F8_E4M3"),
        ("fp8", drop(SCALE), f": {K} has no scales beside it, expected one of {SCALE}"),
        ("fp8", drop(K), f": {SCALE}: {K} is missing beside it"),
        ("fp8", drop(K, SCALE), f": 1 tensor is missing: {K}"),
        ("fp8", put(OTHER_SCALE, np.ones((2, 3))), f": {K} has {SCALE} and {OTHER_SCALE} beside it"),
        ("fp8", put(STRAY, ONE), f": 1 tensor is not in the model of config.json: {STRAY}"),
        # A norm in few bits, and an embedding of one byte.
        (
            "fp8",
            both(cast(NORM, E4M3), put(f"{NORM}_scale_inv", ONE)),
            f": {NORM} with {NORM}_scale_inv: only weights of products may have few bits",
        ),
        ("fp8", cast(EMBEDDING, E4M3), f": {EMBEDDING} has no scales beside it"),
        ("fp8", state(None), " ... _scale_inv is in the format fp8, but config.json has no quantization_config"),
        ("fp8", state({"quant_method": "mxfp4"}), " ... is in the format fp8, but config.json names mxfp4"),
        ("mxfp4", state(None), " ... _scales is in the format mxfp4, but config.json has no"),
        ("mxfp4", edit(SCALES, lambda x: x[..., :1]), f": {SCALES} has shape [8, 64, 1], expected [8, 64, 2]"),
        (
            "mxfp4",
            edit(BLOCKS, lambda x: x.reshape(8, 64, 32)),
            f": {BLOCKS} has shape [8, 64, 32], expected [8, 64, 2, 16]",
        ),
        ("mxfp4", drop(BLOCKS), f": {SCALES}: {BLOCKS} is missing"),
        ("mxfp4", drop(SCALES), f": {BLOCKS} has no scales beside it"),
        ("mxfp4", put(BOTH, np.zeros((8, 64, 64))), f": 1 tensor is not in the model of config.json: {BOTH}"),
        ("int4", groups_of_16, " ... weight_scale has shape ... expected"),
        ("int4", drop(WORDS), f": {UP}_scale: {WORDS} is missing beside it"),
        ("int4", drop(f"{UP}_scale"), f": {WORDS} has no scales beside it"),
        ("int4", edit(WORDS, lambda x: x.view(np.uint8)), f": {WORDS} has shape [32, 32], expected [32, 8]"),
        (
            "int4",
            put(f"{UP}_zero_point", np.zeros((4, 2), np.int32)),
            f": {UP}_zero_point: integers with a zero point are not read; moezoo reads fp8, mxfp4, nvfp4, and",
        ),
        ("int4", put(f"{UP}_g_idx", np.arange(64)), f": {UP}_g_idx: integers in another order are not read"),
        (CHANNELS, drop(CHANNEL), f": {K} has no scales beside it, expected one of {CHANNEL}"),
        (CHANNELS, drop(K), f": {CHANNEL}: {K} is missing beside it"),
        (CHANNELS, edit(CHANNEL, lambda x: x[:, 0]), f": {CHANNEL} has shape [32], expected [32, 1]"),
        (CHANNELS, edit(CHANNEL, lambda x: x[:1]), f": {CHANNEL} has shape [1, 1], expected [32, 1]"),
        (CHANNELS, edit(K, lambda x: x[:, :-1]), f": {K} has shape [32, 63], expected [32, 64]"),
        (CHANNELS, cast(CHANNEL, np.float16), f": {CHANNEL} is F16, expected F32, BF16"),
        (CHANNELS, cast(CHANNEL, ml_dtypes.float8_e8m0fnu), f": {CHANNEL} is F8_E8M0, expected F32, BF16"),
        (CHANNELS, cast(K, BF16), f": {K} is BF16, expected F8_E4M3"),
        # Formats share the names of scales, or of numbers.
        (CHANNELS, state(None), " ... weight_scale is in the format fp8_channels, but config.json has no"),
        (CHANNELS, state({"quant_method": "mxfp4"}), " ... is in the format fp8_channels, but config.json names mxfp4"),
        ("fp8", state(fp8_channels_config()), " ... has no scales beside it, expected one of ... weight_scale;"),
        ("int4", state(None), " ... weight_packed with ... _scale is in the format int4, but config.json has no"),
        ("int4", state(FP8), " ... weight_packed with ... _scale is in the format int4, but config.json names fp8"),
        # NVFP4, as two makers write it.
        ("int4", put(FACTOR, ONE), f": {FACTOR} is in the format nvfp4, but config.json names int4"),
        (
            "fp8",
            put(f"{K}_scale_2", ONE),
            f": {K}_scale_2 is in the format nvfp4 of ModelOpt, but config.json names fp8",
        ),
        ("nvfp4", state(None), " ... _global_scale is in the format nvfp4, but config.json has no quantization_config"),
        ("nvfp4", state(MODELOPT_CONFIG), " ... is in the format nvfp4, but config.json names nvfp4 of ModelOpt"),
        ("nvfp4", state(int4_config()), " ... is in the format nvfp4, but config.json names int4"),
        ("nvfp4", drop(FACTOR), f": {WORDS}: {FACTOR} is missing beside it; download the folder again"),
        ("nvfp4", drop(f"{UP}_scale"), f": {WORDS} has no scales beside it"),
        ("nvfp4", drop(WORDS), f": {UP}_scale: {WORDS} is missing beside it"),
        ("nvfp4", drop(WORDS, f"{UP}_scale"), f": 1 tensor is missing: {UP}"),
        ("nvfp4", put(f"{NORM}_global_scale", ONE), f": 1 tensor is not in the model of config.json: {NORM}_global"),
        ("nvfp4", put(FACTOR, np.ones(2, np.float32)), f": {FACTOR} has shape [2], expected [1]"),
        ("nvfp4", cast(FACTOR, BF16), f": {FACTOR} is BF16, expected F32"),
        ("nvfp4", cast(f"{UP}_scale", np.float32), f": {UP}_scale is F32, expected F8_E4M3"),
        ("nvfp4", edit(f"{UP}_scale", lambda x: x[:, :2]), f": {UP}_scale has shape [32, 2], expected [32, 4]"),
        ("nvfp4", edit(WORDS, lambda x: x[:, :8]), f": {WORDS} has shape [32, 8], expected [32, 32]"),
        ("nvfp4 of ModelOpt", cast(FIRST, np.int8), f": {FIRST} is I8, expected U8"),
        ("nvfp4 of ModelOpt", drop(f"{FIRST}_scale_2"), f": {FIRST}: {FIRST}_scale_2 is missing beside it"),
        ("nvfp4 of ModelOpt", drop(f"{FIRST}_scale", f"{FIRST}_scale_2"), f": {FIRST} has no scales beside it"),
        ("nvfp4 of ModelOpt", cast(FIRST, BF16), f": {FIRST} is BF16, expected U8"),
        (
            "nvfp4 of ModelOpt",
            put(f"{FIRST.removesuffix('weight')}pre_quant_scale", np.ones(64, np.float32)),
            " ... pre_quant_scale",
        ),
        (
            "mxfp4",
            factor_of_experts,
            f": {EXPERTS}: nvfp4 of ModelOpt of all experts",
        ),
    ],
)
@pytest.mark.usefixtures("no_arrays")
def test_damage_that_headers_show(spoil, name, change, line):
    folder = spoil(name, change)
    for dtype in (None, "stored"):
        with refused(f"{folder}{line}"):
            moezoo.from_pretrained(folder, dtype=dtype)


@pytest.mark.usefixtures("no_arrays")
def test_a_short_file(spoil):
    folder = spoil("fp8", lambda tensors, config: None)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)
    with refused(f"{folder}/model.safetensors cannot be read (", "download it again"):
        moezoo.from_pretrained(folder, dtype="stored")


def spoil_last(name: str, value: Any) -> Change:
    """Return a change that puts a value into the last place of a tensor."""
    return edit(name, lambda x: np.append(x.reshape(-1)[:-1], np.asarray(value, x.dtype)).reshape(x.shape))


NOT_FINITE = {
    "fp8": (SCALE, np.inf),
    "fp8 codes": (OTHER_SCALE, np.nan),  # code 255
    "fp8 bfloat16": ("model.layers.1.self_attn.k_proj.weight_scale_inv", np.nan),
    CHANNELS: (CHANNEL, np.nan),
    "mxfp4": (SCALES, 255),
    "int4": (f"{UP}_scale", -np.inf),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_scales_that_are_not_finite(spoil, name):
    scale, value = NOT_FINITE[name]
    folder = spoil(name, spoil_last(scale, value))
    for dtype in ("float32", "stored"):
        with refused(f"{folder}/model.safetensors: {scale} has NaN or infinite scales; download the file again"):
            moezoo.from_pretrained(folder, dtype=dtype)
    with refused(f"{folder}/model.safetensors: {scale} has NaN or infinite scales"):
        plan_export(str(folder), str(folder.parent / "copied")).write()


@pytest.mark.parametrize(
    ("name", "change", "scale"),
    [
        ("nvfp4", spoil_last(f"{UP}_scale", np.nan), FACTOR),
        ("nvfp4", put(FACTOR, 0 * ONE), FACTOR),
        ("nvfp4", put(FACTOR, np.nan * ONE), FACTOR),
        ("nvfp4 of ModelOpt", put(f"{FIRST}_scale_2", np.float32(np.inf)), f"{FIRST}_scale_2"),
    ],
)
def test_two_scales_whose_product_is_not_finite(spoil, name, change, scale):
    folder = spoil(name, change)
    with refused(f"{folder}/model.safetensors: model. ... .weight_scale with {scale} has NaN or infinite scales;"):
        moezoo.from_pretrained(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "stored"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_numbers_that_are_not_finite_are_named(spoil, dtype, code):
    """e4m3 has two codes of NaN, one with each sign."""
    folder = spoil("fp8", spoil_last(K, np.uint8(code).view(ml_dtypes.float8_e4m3fn)))
    with pytest.warns(UserWarning, match=f"tensors with NaN or infinities: {K}$"):
        moezoo.from_pretrained(folder, dtype=dtype)


LARGE = {
    "fp8": (SCALE, K, 3e38),
    "fp8 codes": (OTHER_SCALE, K, 2.0**127),
    CHANNELS: (CHANNEL, K, 3e38),
    "mxfp4": (SCALES, BOTH, 254),
    "int4": (f"{UP}_scale", UP, -3e38),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "stored"])
@pytest.mark.parametrize("name", LARGE)
def test_numbers_that_a_scale_makes_infinite_are_named(spoil, name, dtype):
    scale, weight, value = LARGE[name]
    folder = spoil(name, spoil_last(scale, value))
    with pytest.warns(UserWarning, match=f"tensors with NaN or infinities: {weight}$"):
        moezoo.from_pretrained(folder, dtype=dtype)


def test_a_large_scale_of_small_numbers_is_no_damage(spoil):
    """A scale of 2^118 and more is looked at with its numbers."""

    def change(tensors: Tensors, config: Any) -> None:
        spoil_last(SCALE, 3e38)(tensors, config)
        tensors[K] = tensors[K].copy()
        tensors[K][-16:, -24:] = 0.5

    moezoo.from_pretrained(spoil("fp8", change), dtype="stored")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            both(cast(UP, np.float32), drop(f"{UP}_scale_inv")),
            f"has fp8 with blocks of 16 x 24 ... {UP}, which is in the same array, has plain numbers",
        ),
        (
            cast(f"{UP}_scale_inv", BF16),
            f"scales in float32 ... {UP}, which is in the same array, has fp8 ... scales in bfloat16",
        ),
    ],
)
def test_arrays_of_two_formats_are_widened_and_not_kept(spoil, monkeypatch, change, line):
    folder = spoil("fp8", change)
    moezoo.from_pretrained(folder, dtype="float32")
    monkeypatch.setattr(arrays.Arriving, "begin", None)
    with refused(f"{folder}: few bits cannot be kept: ", line, "write dtype=bfloat16"):
        moezoo.from_pretrained(folder, dtype="stored")
