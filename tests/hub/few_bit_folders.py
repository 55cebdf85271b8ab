"""Folders with weights of few bits, written by hand from random numbers, and read by hand. No code of moezoo's hub.

A folder is made from one in numbers: each weight that is chosen gets random codes and scales in its place.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tiny_models import deepseek_v3, gpt_oss, mistral4, qwen3

FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
BF16 = ml_dtypes.bfloat16


class Written(NamedTuple):
    """Folders of one model in few bits and in numbers: the tensors of the first, and of the second in float32."""

    few: Path
    wide: Path
    tensors: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]


def _ceil(n: int, size: int) -> int:
    return -(-n // size)


def fp8(rng: np.random.Generator, shape: tuple[int, ...], block: tuple[int, int], scales: Any) -> tuple[Any, Any, Any]:
    """Return e4m3 bytes, scales of blocks, and the numbers, of a weight [..., outputs, inputs]."""
    *lead, rows, columns = shape
    block = block[0], min(block[1], columns)
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[codes & 127 == 127] = 0x38
    grid = (*lead, _ceil(rows, block[0]), _ceil(columns, block[1]))
    if scales == np.uint8:
        scale = rng.integers(112, 120, grid, np.uint8)
        wide = np.ldexp(np.float32(1), scale.astype(int) - 127)
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    else:
        scale = (rng.uniform(0.5, 2, grid) / 4096).astype(scales)
        wide = scale.astype(np.float32)
    values = codes.view(ml_dtypes.float8_e4m3fn)
    spread = np.repeat(np.repeat(wide, block[0], -2)[..., :rows, :], block[1], -1)[..., :columns]
    return values, scale, values.astype(np.float32) * spread.astype(np.float32)


def mxfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return blocks [..., outputs, inputs / 32, 16], scales [..., outputs, inputs / 32] and the numbers."""
    *lead, columns = shape
    codes = rng.integers(0, 16, shape, np.uint8)
    scale = rng.integers(114, 120, (*lead, columns // 32), np.uint8)
    wide = FP4[codes] * np.repeat(np.ldexp(np.float32(1), scale.astype(int) - 127), 32, -1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(*lead, columns // 32, 16)
    return blocks, scale, wide


def int4(rng: np.random.Generator, shape: tuple[int, int], group: int) -> tuple[Any, Any, Any]:
    """Return words [outputs, inputs / 8], scales [outputs, inputs / group] and the numbers."""
    rows, columns = shape
    codes = rng.integers(0, 16, shape).astype(np.uint32)
    words = np.bitwise_or.reduce([codes[:, i::8] << np.uint32(4 * i) for i in range(8)]).view(np.int32)
    scale = (rng.uniform(0.5, 2, (rows, columns // group)) / 128).astype(BF16)
    return words, scale, (codes.astype(np.float32) - 8) * np.repeat(scale.astype(np.float32), group, -1)


def nvfp4(rng: np.random.Generator, shape: tuple[int, int], divides: bool) -> tuple[Any, Any, Any, Any]:
    """Return bytes [outputs, inputs / 2], e4m3 scales [outputs, inputs / 16], the scale of them, and the numbers."""
    rows, columns = shape
    codes = rng.integers(0, 16, shape, np.uint8)
    scale = rng.uniform(0.002, 448, (rows, _ceil(columns, 16))).astype(ml_dtypes.float8_e4m3fn)
    factor = np.float32(rng.uniform(3000, 30000) if divides else 1 / rng.uniform(3000, 30000))
    wide = scale.astype(np.float32) / factor if divides else scale.astype(np.float32) * factor
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, factor, FP4[codes] * np.repeat(wide, 16, -1)[:, :columns]


KINDS = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(BF16),
    "F16": np.dtype("<f2"),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a folder. safetensors' own reader of NumPy arrays knows no FP8."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        for name, about in json.loads(raw[8:end]).items():
            if name != "__metadata__":
                start, stop = about["data_offsets"]
                numbers = np.frombuffer(raw[end + start : end + stop], KINDS[about["dtype"]])
                found[name] = numbers.reshape(about["shape"])
    return found


# From random numbers, the name and the weight: tensors in its place, and the numbers that they stand for.
Encode = Callable[[np.random.Generator, str, np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]


def encode_fp8(block: tuple[int, int] | None, scales: Any = np.float32, ending: str = "_scale_inv") -> Encode:
    """Return a function that gives a weight in FP8; without a block, one scale for each matrix."""

    def encode(rng: np.random.Generator, name: str, weight: np.ndarray) -> Any:
        values, scale, wide = fp8(rng, weight.shape, block or weight.shape[-2:], scales)
        beside = name.removesuffix(".weight") + ending if ending.startswith(".") else name + ending
        return {name: values, beside: scale if block or scale.size > 1 else scale.reshape(())}, wide

    return encode


def encode_mxfp4(rng: np.random.Generator, name: str, weight: np.ndarray) -> Any:
    """Give experts [experts, inputs, outputs] in MXFP4 [experts, outputs, inputs]."""
    blocks, scale, wide = mxfp4(rng, weight.swapaxes(-1, -2).shape)
    return {f"{name}_blocks": blocks, f"{name}_scales": scale}, np.ascontiguousarray(wide.swapaxes(-1, -2))


def encode_int4(group: int = 32) -> Encode:
    """Return a function that gives a weight in packed integers."""

    def encode(rng: np.random.Generator, name: str, weight: np.ndarray) -> Any:
        words, scale, wide = int4(rng, weight.shape, group)
        shape = np.array(weight.shape, np.int64)
        return {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": shape}, wide

    return encode


def encode_nvfp4(rng: np.random.Generator, name: str, weight: np.ndarray) -> Any:
    """Give a weight in NVFP4 as compressed-tensors writes it."""
    values, scale, factor, wide = nvfp4(rng, weight.shape, True)
    return {f"{name}_packed": values, f"{name}_scale": scale, f"{name}_global_scale": factor.reshape(1)}, wide


def encode_modelopt(rng: np.random.Generator, name: str, weight: np.ndarray) -> Any:
    """Give a weight in NVFP4 as ModelOpt writes it."""
    values, scale, factor, wide = nvfp4(rng, weight.shape, False)
    return {name: values, f"{name}_scale": scale, f"{name}_scale_2": factor.reshape(())}, wide


FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def int4_config(group: int = 32) -> dict[str, Any]:
    """Return the table of compressed-tensors."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "group_size": group,
        "strategy": "group",
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def fp8_channels_config() -> dict[str, Any]:
    """Return the table of compressed-tensors for FP8 with a scale per output, as GLM-4.5-FP8 has it."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "actorder": None}
    numbers |= {"block_structure": None, "observer_kwargs": {}}
    weights = numbers | {"strategy": "channel", "dynamic": False, "observer": "minmax"}
    inputs = numbers | {"strategy": "token", "dynamic": True, "observer": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return int4_config() | {
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "model.layers.0.mlp.down_proj"],
        "global_compression_ratio": None,
    }


_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
NVFP4_GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": _FP4 | {"dynamic": False, "observer": "static_minmax", "scale_dtype": "torch.float8_e4m3fn"},
    "input_activations": _FP4 | {"dynamic": "local"},
    "output_activations": None,
}
NVFP4_CONFIG = int4_config() | {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": NVFP4_GROUP}}
_MODELOPT_4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MODELOPT_CONFIG = {
    "config_groups": {
        "group_0": {"input_activations": _MODELOPT_4, "weights": _MODELOPT_4, "targets": ["Linear"]},
    },
    "ignore": ["lm_head", "model.layers.0.self_attn*"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.43.0"},
    "quant_method": "modelopt",
}


class Case(NamedTuple):
    """A model, which of its tensors have few bits, how, and what config.json says of it."""

    config: Any
    chooses: Callable[[str], bool]
    encode: Encode
    table: Mapping[str, Any]


# No last block of 16 x 24 is whole. kv_b_proj has 8 + 7 rows a head, so blocks begin and end inside of heads.
_SIZES: dict[str, Any] = {"embed": 64, "expert_mlp": 32, "layers": 2}
_LATENT: dict[str, Any] = _SIZES | {"q_lora": 40, "kv_lora": 24, "nope_dim": 8, "mlp": 40}
_BLOCKS = FP8_CONFIG | {"weight_block_size": [16, 24]}
_CHANNEL = (1, 2**31)  # one output, and all its inputs


def is_projection(name: str) -> bool:
    """Return whether a tensor is a matrix of attention, of an MLP or of experts."""
    return "proj" in name and name.endswith(("weight", "gate_up_proj", "down_proj"))


CASES = {
    "fp8": Case(deepseek_v3(**_LATENT), is_projection, encode_fp8((16, 24)), _BLOCKS),
    "fp8 codes": Case(
        deepseek_v3(**_LATENT),
        is_projection,
        encode_fp8((16, 24), np.uint8, ".scale"),
        _BLOCKS | {"scale_fmt": "ue8m0"},
    ),
    "fp8 bfloat16": Case(
        qwen3(**_SIZES, mlp=40),
        lambda name: is_projection(name) and "q_proj" not in name,
        encode_fp8((16, 24), BF16),
        _BLOCKS,
    ),
    "fp8 one scale": Case(
        mistral4(**_LATENT),
        is_projection,
        encode_fp8(None, ending=".qscale_weight"),
        FP8_CONFIG | {"weight_block_size": None, "activation_scheme": "static"},
    ),
    "fp8 joined experts": Case(mistral4(**_LATENT), is_projection, encode_fp8((16, 24)), _BLOCKS),
    "mxfp4": Case(
        gpt_oss(**_SIZES), lambda name: name.endswith(("gate_up_proj", "down_proj")), encode_mxfp4, MXFP4_CONFIG
    ),
    # Rows of o_proj are 8 heads of 4 numbers: a word has those of two.
    "int4": Case(
        deepseek_v3(**_LATENT | {"heads": 8, "value_dim": 4}),
        lambda name: ".experts." in name or "o_proj" in name,
        encode_int4(),
        int4_config(),
    ),
    "int4 groups of 16": Case(qwen3(**_SIZES), lambda name: ".experts." in name, encode_int4(16), int4_config(16)),
    "fp8 channels": Case(
        deepseek_v3(**_LATENT),
        is_projection,
        encode_fp8(_CHANNEL, ending="_scale"),
        fp8_channels_config(),
    ),
    "fp8 channels bfloat16": Case(
        qwen3(**_SIZES, mlp=40),
        lambda name: is_projection(name) and "o_proj" not in name,
        encode_fp8(_CHANNEL, BF16, "_scale"),
        fp8_channels_config(),
    ),
}
# Formats that are not kept. Rows of o_proj are 4 heads of 7 numbers, so a byte has those of two.
WIDENED = {
    "nvfp4": Case(deepseek_v3(**_LATENT), is_projection, encode_nvfp4, NVFP4_CONFIG),
    "nvfp4 of ModelOpt": Case(qwen3(**_SIZES), lambda name: ".experts." in name, encode_modelopt, MODELOPT_CONFIG),
}
# Blocks of 8 x 8 are whole everywhere.
_WHOLE = deepseek_v3(**_LATENT | {"value_dim": 8})
_TABLE = FP8_CONFIG | {"weight_block_size": [8, 8]}
WHOLE = {
    "fp8 whole": Case(_WHOLE, is_projection, encode_fp8((8, 8)), _TABLE),
    "fp8 whole codes": Case(_WHOLE, is_projection, encode_fp8((8, 8), np.uint8), _TABLE | {"scale_fmt": "ue8m0"}),
}


def write_few_bits(plain: Path, folder: Path, case: Case) -> Written:
    """Write a folder in numbers as one in few bits and as one in float32 with the numbers of the former."""
    rng, tensors, numbers = np.random.default_rng(0), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, weight in tensors_of(plain).items():
        stored, numbers[name] = case.encode(rng, name, weight) if case.chooses(name) else ({name: weight}, weight)
        tensors |= stored
    mapping = json.loads((plain / "config.json").read_text())
    write_folder(folder / "few", tensors, mapping | {"quantization_config": case.table})
    write_folder(folder / "wide", numbers, mapping)
    return Written(folder / "few", folder / "wide", tensors, numbers)


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], config: Any) -> None:
    """Write a folder of one file."""
    folder.mkdir(parents=True)
    # safetensors does not copy, and takes another order of dimensions for the usual one.
    whole = {name: np.ascontiguousarray(tensor).reshape(tensor.shape) for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
