"""Folders with weights of few bits against transformers, which widens FP8 and MXFP4: folders by hand and our own."""

import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from few_bit_folders import WHOLE, Written, tensors_of
from peer_results import torch, transformers

import moezoo
from moezoo.nn.mxfp4 import MXFP4
from moezoo.tools.parity import compare as parity
from moezoo.tools.parity.peer import class_of

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
        for name in wanted:
            # Routers stay in float32 there; of them only the choice bias does here.
            x, y, z = (each[name].astype(dtype).astype(np.float32).view(np.uint32) for each in (wanted, found, again))
            np.testing.assert_array_equal(x, y, name)
            np.testing.assert_array_equal(x, z, name)


@pytest.mark.parametrize("name", WHOLE)
def test_fp8(few_bits, tmp_path, monkeypatch, name):
    """transformers refuses blocks that are not whole."""
    # It wants accelerate, which it does not use here.
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    check(few_bits(name), transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8)), tmp_path)


def test_mxfp4(few_bits, tmp_path):
    check(few_bits("mxfp4"), transformers.Mxfp4Config(dequantize=True), tmp_path)


@pytest.mark.parametrize("name", ["mxfp4", "fp8 whole"])
def test_modules_agree(few_bits, monkeypatch, name):
    """`parity` compares the widened models."""
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    result = parity.compare(few_bits(name).few)
    assert result.first is None, result
    assert result.worst.difference < 1e-5


def test_all_codes_of_mxfp4():
    """With all scales but 0, whose subnormal products PyTorch may take for zero, and 255, where it reads infinity."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = np.tile(np.arange(16, dtype=np.uint8) * 16 + np.arange(16, dtype=np.uint8)[::-1], (254, 1, 1))
    scales = np.arange(1, 255, dtype=np.uint8)[:, None]
    with torch.no_grad():
        wanted = convert_moe_packed_tensors(torch.tensor(codes)[None], torch.tensor(scales)[None])[0].float().numpy().T
    found = MXFP4.widen(codes[:, 0], scales, np.zeros(32, int)).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), np.ascontiguousarray(wanted).view(np.uint32))
