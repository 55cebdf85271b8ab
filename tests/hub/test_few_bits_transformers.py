"""Folders with weights of few bits against transformers, which widens FP8 and MXFP4: folders by hand and our own."""

import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from few_bit_folders import FP8_CONFIG, Case, Written, encode_fp8, is_projection, tensors_of, write_few_bits
from peer_results import torch, transformers
from tiny_models import deepseek_v3

import moezoo
from moezoo.hub.peer import class_of
from moezoo.nn.mxfp4 import MXFP4Encoding

DTYPES = ("float32", "bfloat16")


def theirs(folder: Path, config: Any, dtype: str) -> dict[str, np.ndarray]:
    """Return the weights of transformers' model of a folder, by its own names, in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        model, info = class_of(folder).from_pretrained(
            folder, quantization_config=config, dtype=getattr(torch, dtype), output_loading_info=True
        )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}


def ours(folder: Path, dtype: str, target: Path) -> dict[str, np.ndarray]:
    """Return what we write of a folder in `dtype`, by the names and shapes of transformers' model, in float32."""
    moezoo.save_pretrained(moezoo.from_pretrained(folder, dtype=dtype), target)
    found = {name: x.astype(np.float32) for name, x in tensors_of(target).items()}
    for layer in sorted({m[1] for name in found if (m := re.match(r"(.*\.experts\.)0\.", name))}):
        gate, up, down = (
            np.stack([found.pop(f"{layer}{expert}.{name}_proj.weight") for expert in range(8)])
            for name in ("gate", "up", "down")
        )
        found |= {f"{layer}gate_up_proj": np.concatenate([gate, up], 1), f"{layer}down_proj": down}
    return found


def check(made: Written, config: Any, tmp_path: Path) -> None:
    """Compare weights of the folder by hand, and of one that we write of the model as it is kept."""
    moezoo.save_pretrained(moezoo.from_pretrained(made.few, dtype="stored"), tmp_path / "kept")
    for dtype in DTYPES:
        wanted, found = theirs(made.few, config, dtype), ours(made.few, dtype, tmp_path / dtype)
        again = theirs(tmp_path / "kept", config, dtype)
        assert found.keys() == wanted.keys() == again.keys()
        for name, x in wanted.items():
            # Routers stay in float32 there; of them only the choice bias does here.
            a, b, c = (
                y.astype(dtype).view({2: np.uint16, 4: np.uint32}[np.dtype(dtype).itemsize])
                for y in (found[name], again[name], x)
            )
            np.testing.assert_array_equal(a, c, name)
            np.testing.assert_array_equal(b, c, name)


@pytest.mark.parametrize("scales", [np.float32, np.uint8], ids=["float32", "ue8m0"])
def test_fp8(save, tmp_path, monkeypatch, scales):
    """All blocks are whole: transformers refuses others."""
    # It wants accelerate, which it does not use here.
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    sizes: dict[str, Any] = {"embed": 64, "expert_mlp": 32, "q_lora": 40, "kv_lora": 24, "nope_dim": 8, "value_dim": 8}
    table = FP8_CONFIG | {"weight_block_size": [8, 8]} | ({"scale_fmt": "ue8m0"} if scales == np.uint8 else {})
    case = Case(deepseek_v3(**sizes, mlp=40), is_projection, encode_fp8((8, 8), scales), table)
    made = write_few_bits(save(case.config).folder, tmp_path / "by hand", case)
    check(made, transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8)), tmp_path)


def test_mxfp4(few_bits, tmp_path):
    check(few_bits("mxfp4"), transformers.Mxfp4Config(dequantize=True), tmp_path)


def test_all_codes_of_mxfp4():
    """With all scales but 0, whose subnormal products PyTorch may take for zero, and 255, where it reads infinity."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = np.tile(np.arange(16, dtype=np.uint8) * 16 + np.arange(16, dtype=np.uint8)[::-1], (254, 1, 1))
    scales = np.arange(1, 255, dtype=np.uint8)[:, None]
    with torch.no_grad():
        wanted = convert_moe_packed_tensors(torch.tensor(codes)[None], torch.tensor(scales)[None])[0].float().numpy().T
    encoding = MXFP4Encoding("w", (254, 32), scales)
    found = encoding.widen(codes[:, 0], np.arange(254), np.arange(32), ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), np.ascontiguousarray(wanted).view(np.uint32))
