"""Damaged folders of few bits, and such that cannot be kept: one line, before any array is made."""

import json
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from few_bit_folders import BF16, write_folder
from refusals import refused

import moezoo
from moezoo.hub import loading
from moezoo.training.exporting import plan_export

Tensors = dict[str, np.ndarray]
K = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
UP = "model.layers.1.mlp.experts.2.up_proj.weight"
BLOCKS = "model.layers.1.mlp.experts.gate_up_proj"
QUANTIZATION = "quantization_config"


def put(name: str, value: Callable[[Tensors], Any]) -> Callable[..., Any]:
    """Return a change that puts a tensor into a folder, made from all of them."""
    return lambda tensors, config: tensors.update({name: np.asarray(value(tensors))})


def drop(*names: str) -> Callable[..., Any]:
    return lambda tensors, config: [tensors.pop(name) for name in names]


def state(value: Any) -> Callable[..., Any]:
    """Return a change that states `value` of few bits."""
    return lambda tensors, config: config.update({QUANTIZATION: value})


def move(old: str, new: str, cast: Any = None) -> Callable[..., Any]:
    def change(tensors: Tensors, config: Any) -> None:
        tensors[new] = tensors.pop(old).astype(cast) if cast else tensors.pop(old)

    return change


# The folder, what is done to it, and parts of the message after the folder's name.
HEADERS: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "scale of another shape": (
        "fp8",
        put(f"{K}_scale_inv", lambda t: t[f"{K}_scale_inv"].T),
        (f": {K}_scale_inv has shape [3, 2], expected [2, 3]", "config.json"),
    ),
    "scale of another rank": (
        "fp8",
        put(f"{K}_scale_inv", lambda t: t[f"{K}_scale_inv"].reshape(-1)),
        (f": {K}_scale_inv has shape [6], expected [2, 3]",),
    ),
    "blocks of another size": (
        "fp8",
        state({"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("_scale_inv has shape", "expected [1, 1]"),
    ),
    "one scale where there are blocks": (
        "fp8",
        put(f"{K}_scale_inv", lambda t: np.float32(1)),
        (f": {K}_scale_inv has shape [], expected [2, 3]",),
    ),
    "blocks where one scale is stated": (
        "fp8",
        state({"quant_method": "fp8", "weight_block_size": None}),
        ("_scale_inv has shape", "expected [1, 1]"),
    ),
    "one scale where each expert has one": (
        "fp8 one scale",
        put(f"{BLOCKS}.qscale_weight", lambda t: np.float32(1)),
        (f": {BLOCKS}.qscale_weight has shape [], expected [8, 1, 1]",),
    ),
    "scale of another dtype": (
        "fp8",
        put(f"{K}_scale_inv", lambda t: t[f"{K}_scale_inv"].astype(np.float16)),
        (f": {K}_scale_inv is F16, expected F32, BF16, F8_E8M0",),
    ),
    "numbers of another shape": (
        "fp8",
        put(K, lambda t: t[K][:, :-1]),
        (f": {K} has shape [32, 63], expected [32, 64]",),
    ),
    "numbers beside a scale": (
        "fp8",
        put(K, lambda t: t[K].astype(BF16)),
        (f": {K} is BF16, expected F8_E4M3",),
    ),
    "e5m2": ("fp8", put(K, lambda t: t[K].astype(ml_dtypes.float8_e5m2)), (f": {K} is F8_E5M2, expected F8_E4M3",)),
    "no scale": ("fp8", drop(f"{K}_scale_inv"), (f": {K} has no scales beside it, expected one of {K}_scale_inv",)),
    "no numbers": ("fp8", drop(K), (f": {K}_scale_inv: {K} is missing beside it",)),
    "neither": ("fp8", drop(K, f"{K}_scale_inv"), (f": 1 tensor is missing: {K}",)),
    "two scales": (
        "fp8",
        put(K.replace("weight", "scale"), lambda t: t[f"{K}_scale_inv"]),
        (f": {K} has {K}_scale_inv and {K.replace('weight', 'scale')} beside it",),
    ),
    "a scale of nothing": (
        "fp8",
        put("model.layers.1.mlp.norm.weight_scale_inv", lambda t: np.ones((1, 1), np.float32)),
        (": 1 tensor is not in the model of config.json: model.layers.1.mlp.norm.weight_scale_inv",),
    ),
    "a norm in few bits": (
        "fp8",
        lambda tensors, config: (
            put("model.norm.weight", lambda t: t["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn))(tensors, config),
            put("model.norm.weight_scale_inv", lambda t: np.ones(1, np.float32))(tensors, config),
        ),
        (": model.norm.weight with model.norm.weight_scale_inv: only weights of products may have few bits",),
    ),
    "an embedding of one byte": (
        "fp8",
        put("model.embed_tokens.weight", lambda t: t["model.embed_tokens.weight"].astype(ml_dtypes.float8_e4m3fn)),
        (": model.embed_tokens.weight has no scales beside it",),
    ),
    "not stated": (
        "fp8",
        state(None),
        ("_scale_inv is in the format fp8, but config.json has no quantization_config",),
    ),
    "stated as another": (
        "fp8",
        state({"quant_method": "mxfp4"}),
        ("is in the format fp8, but config.json names mxfp4",),
    ),
    "another, not stated": ("mxfp4", state(None), ("_scales is in the format mxfp4, but config.json has no",)),
    "scales of fewer groups": (
        "mxfp4",
        put(f"{BLOCKS}_scales", lambda t: t[f"{BLOCKS}_scales"][..., :1]),
        (f": {BLOCKS}_scales has shape [8, 64, 1], expected [8, 64, 2]",),
    ),
    "blocks that are not packed": (
        "mxfp4",
        put(f"{BLOCKS}_blocks", lambda t: t[f"{BLOCKS}_blocks"].reshape(8, 64, 32)),
        (f": {BLOCKS}_blocks has shape [8, 64, 32], expected [8, 64, 2, 16]",),
    ),
    "no blocks": ("mxfp4", drop(f"{BLOCKS}_blocks"), (f": {BLOCKS}_scales: {BLOCKS}_blocks is missing",)),
    "no scales": ("mxfp4", drop(f"{BLOCKS}_scales"), (f": {BLOCKS}_blocks has no scales beside it",)),
    "blocks and numbers": (
        "mxfp4",
        put(BLOCKS, lambda t: np.zeros((8, 64, 64), np.float32)),
        (f": 1 tensor is not in the model of config.json: {BLOCKS}",),
    ),
    "groups of another size": (
        "int4",
        lambda tensors, config: config[QUANTIZATION]["config_groups"]["group_0"]["weights"].update(group_size=16),
        ("weight_scale has shape", "expected"),
    ),
    "no words": ("int4", drop(f"{UP}_packed"), (f": {UP}_scale: {UP}_packed is missing beside it",)),
    "words without scale": ("int4", drop(f"{UP}_scale"), (f": {UP}_packed has no scales beside it",)),
    "words of another width": (
        "int4",
        put(f"{UP}_packed", lambda t: t[f"{UP}_packed"].view(np.uint8)),
        (f": {UP}_packed has shape [32, 32], expected [32, 8]",),
    ),
    "a zero point": (
        "int4",
        put(f"{UP}_zero_point", lambda t: np.zeros((4, 2), np.int32)),
        (f": {UP}_zero_point: integers with a zero point are not read; moezoo reads fp8, mxfp4, and",),
    ),
    "an order": (
        "int4",
        put(f"{UP}_g_idx", lambda t: np.arange(64, dtype=np.int32)),
        (f": {UP}_g_idx: integers in another order are not read",),
    ),
    "nvfp4": (
        "int4",
        put(f"{UP}_global_scale", lambda t: np.ones(1, np.float32)),
        (f": {UP}_global_scale: numbers of NVFP4 are not read",),
    ),
    "nvfp4 of another maker": (
        "fp8",
        lambda tensors, config: (
            put(f"{K}_scale_2", lambda t: np.float32(1))(tensors, config),
            move(f"{K}_scale_inv", f"{K}_scale")(tensors, config),
        ),
        (f": {K}_scale_2: numbers of NVFP4 are not read",),
    ),
}


@pytest.fixture
def spoil(few_bits, tmp_path):
    """Return a function that writes a changed folder."""

    def write(name: str, change: Callable[..., Any]) -> Any:
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

    monkeypatch.setattr(loading._Arriving, "begin", begin)


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.usefixtures("no_arrays")
def test_damage_that_headers_show(spoil, case):
    name, change, parts = HEADERS[case]
    folder = spoil(name, change)
    for dtype in (None, "stored"):
        with refused(str(folder), *parts):
            moezoo.from_pretrained(folder, dtype=dtype)


@pytest.mark.usefixtures("no_arrays")
def test_a_short_file(spoil):
    folder = spoil("fp8", lambda tensors, config: None)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)
    with refused(f"{folder}/model.safetensors cannot be read (", "download it again"):
        moezoo.from_pretrained(folder, dtype="stored")


def spoil_last(name: str, value: Any) -> Callable[..., Any]:
    """Return a change that puts a value into the last place of a tensor."""

    def change(tensors: Tensors, config: Any) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[-1] = value

    return change


SCALES = {
    "fp8": (f"{K}_scale_inv", np.inf),
    "fp8 codes": (K.replace("weight", "scale"), np.nan),  # code 255
    "fp8 bfloat16": ("model.layers.1.self_attn.k_proj.weight_scale_inv", np.nan),
    "mxfp4": (f"{BLOCKS}_scales", 255),
    "int4": (f"{UP}_scale", -np.inf),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_that_are_not_finite(spoil, name):
    scale, value = SCALES[name]
    folder = spoil(name, spoil_last(scale, value))
    for dtype in ("float32", "stored"):
        with refused(f"{folder}/model.safetensors: {scale} has NaN or infinite scales; download the file again"):
            moezoo.from_pretrained(folder, dtype=dtype)
    with refused(f"{folder}/model.safetensors: {scale} has NaN or infinite scales"):
        plan_export(str(folder), str(folder.parent / "copied")).write()


@pytest.mark.parametrize("dtype", ["bfloat16", "stored"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_numbers_that_are_not_finite_are_named(spoil, dtype, code):
    """e4m3 has two codes of NaN, one with each sign."""
    folder = spoil("fp8", spoil_last(K, np.uint8(code).view(ml_dtypes.float8_e4m3fn)))
    with pytest.warns(UserWarning, match=f"tensors with NaN or infinities: {K}$"):
        moezoo.from_pretrained(folder, dtype=dtype)


LARGE = {
    "fp8": (f"{K}_scale_inv", K, 3e38),
    "fp8 codes": (K.replace("weight", "scale"), K, 2.0**127),
    "mxfp4": (f"{BLOCKS}_scales", BLOCKS, 254),
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
        spoil_last(f"{K}_scale_inv", 3e38)(tensors, config)
        tensors[K] = tensors[K].copy()
        tensors[K][-16:, -24:] = 0.5

    moezoo.from_pretrained(spoil("fp8", change), dtype="stored")


# Folders that can be widened and not kept: the folder, what is done to it, and parts of the message.
MIXED: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "an expert in numbers": (
        "fp8",
        lambda tensors, config: (
            put(UP, lambda t: t[UP].astype(np.float32))(tensors, config),
            drop(f"{UP}_scale_inv")(tensors, config),
        ),
        (
            "has fp8 with blocks of 16 x 24",
            f"{UP}, which is in the same array, has plain numbers",
        ),
    ),
    "scales of two dtypes": (
        "fp8",
        put(f"{UP}_scale_inv", lambda t: t[f"{UP}_scale_inv"].astype(BF16)),
        (
            "scales in float32",
            f"{UP}, which is in the same array, has fp8",
            "scales in bfloat16",
        ),
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_arrays_of_two_formats_are_widened_and_not_kept(spoil, monkeypatch, case):
    name, change, parts = MIXED[case]
    folder = spoil(name, change)
    moezoo.from_pretrained(folder, dtype="float32")
    monkeypatch.setattr(loading._Arriving, "begin", None)
    with refused(f"{folder}: few bits cannot be kept: ", *parts, "write dtype=bfloat16"):
        moezoo.from_pretrained(folder, dtype="stored")
