"""Adapters that PEFT reads and writes: the logits of both libraries, and what PEFT does not read merged instead."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_cases import delta, pairs_of, read, with_pairs
from peer_results import load, torch

from moezoo.hub.adapters import load_adapter, write_adapter
from moezoo.training.exporting import plan_export

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install -e '.[peers]'")

# PEFT's own, and those of transformers that it causes.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning", "RuntimeWarning")
]
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 11)).astype(np.int32)
# float32 rounds about forty operations in a row to 1e-6 of logits of about 4.
TOLERANCE = 1e-5


@functools.cache
def forward() -> Any:
    return jax.jit(lambda model: model(jnp.asarray(TOKENS)).logits)


def logits(model: Any) -> np.ndarray:
    return np.asarray(forward()(model))


def logits_of(theirs: Any) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()


def in_peft(base: Path, adapter: Path) -> Any:
    """Load both with PEFT."""
    return peft.PeftModel.from_pretrained(load(base), adapter).eval()


def adapt(save: Any, name: str, targets: tuple[str, ...], tmp_path: Path) -> tuple[Any, Path]:
    """Return a model with pairs, small enough for logits as those of a model, and the folder of the pairs."""
    adapted = with_pairs(save(name).model, *targets, size=0.25)
    return adapted, write_adapter(adapted, tmp_path / "adapter")


_OF_MAMBA = tuple(f"*.attention.{name}" for name in ("gate", "value", "write", "read", "step"))
READ = {
    "mixtral": ("attention", "experts"),
    "qwen3": ("attention", "experts"),
    "qwen2": ("attention", "shared", "mlp"),
    "olmoe": ("attention", "*.experts.down"),
    "v3": ("attention", "experts"),
    "glm": ("attention", "experts", "*.router.weight"),
    "next plain": ("attention", "experts"),
    "lfm2": ("attention", "mlp"),
    "solar": ("attention", "experts"),
    "nemotron": (*_OF_MAMBA, "*.attention.query", "shared", "mlp"),
    "gemma4": ("attention", "shared", "*.router.weight"),
    "llama4": ("attention", "shared"),
    "mimo": ("attention", "mlp"),
    "exaone": ("attention", "experts"),
}


@pytest.mark.parametrize("name", READ)
def test_peft_computes_the_same(save, name, tmp_path):
    """And the folder that PEFT writes of it, with one pair for all experts, is read to the same numbers."""
    adapted, folder = adapt(save, name, READ[name], tmp_path)
    theirs = in_peft(save(name).folder, folder)
    found = logits_of(theirs)
    np.testing.assert_allclose(found, logits(adapted), rtol=0, atol=TOLERANCE)
    with theirs.disable_adapter():
        assert abs(found - logits_of(theirs)).max() > 0.05
    theirs.save_pretrained(tmp_path / "theirs")
    config, tensors = read(tmp_path / "theirs")
    is_packed = any("expert" in target for target in READ[name])
    assert bool(config["target_parameters"]) == any(".mlp.experts.lora_A" in key for key in tensors) == is_packed
    again, wanted = (pairs_of(x) for x in (load_adapter(save(name).model, tmp_path / "theirs"), adapted))
    assert again.keys() == wanted.keys()
    for path, pair in wanted.items():
        # PEFT has the ranks of gate and up together, half of them zeros in each. Products are exact in float32.
        np.testing.assert_array_equal(delta(again[path]), delta(pair), err_msg=path)


def test_the_router_and_the_head_of_mixtral(save, tmp_path):
    adapted, folder = adapt(save, "mixtral", ("*.router.weight", ".unembedding.weight"), tmp_path)
    theirs = logits_of(in_peft(save("mixtral").folder, folder))
    np.testing.assert_allclose(theirs, logits(adapted), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "whole", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_whole_weights_that_peft_writes(save, whole, tmp_path):
    """Of the head, which PEFT copies where it has a pair, or is told to save."""
    model, base = save("mixtral")
    theirs = peft.get_peft_model(load(base), peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **whole}))
    theirs.save_pretrained(tmp_path)
    assert any("lora_" not in name for name in read(tmp_path)[1])
    assert pairs_of(load_adapter(model, tmp_path))


MERGED = {
    "gpt_oss": ("experts",),
    "mistral 4": ("experts",),
    "gemma4": ("experts",),
    "llama4": ("experts", "*.router.weight"),
    "glm": ("mlp", "shared"),
}


@pytest.mark.parametrize("name", MERGED)
def test_merged_folders_are_transformers(save, name, tmp_path):
    """Of pairs that PEFT does not read."""
    adapted, folder = adapt(save, name, MERGED[name], tmp_path)
    plan_export(str(save(name).folder), str(tmp_path / "merged"), adapter=str(folder)).write()
    np.testing.assert_allclose(logits_of(load(tmp_path / "merged")), logits(adapted), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gpt_oss", "mistral 4", "hy"])
def test_packed_pairs_that_peft_made_itself(save, name, tmp_path):
    """Of the types for which it reads no pairs of single experts."""
    model, base = save(name)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "q_a_proj"], target_parameters=targets)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(load(base), config).eval()
    for key, x in theirs.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(x, std=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    found = load_adapter(model, tmp_path / "adapter")
    assert {path.rpartition(".")[2] for path in pairs_of(found)} >= {"gate", "up", "down"}
    np.testing.assert_allclose(logits(found), logits_of(theirs), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "targets", "outcome"),
    [
        ("glm", ("shared",), "ignored"),
        ("qwen3", ("mlp",), "ignored"),
        ("mixtral", ("*.experts.gate", "*.experts.up"), "ignored"),
        ("olmoe", ("*.experts.gate",), "Cannot convert"),
        ("gpt_oss", ("experts",), "not found in the base model"),
        ("qwen3.5", ("experts",), "not found in the base model"),
        ("qwen2", ("experts",), "not found in the base model"),
        ("gpt_oss", ("attention", "*.router.weight"), "is not supported"),
        ("kimi linear", ("experts",), "not found in the base model"),
        ("lfm2", ("experts",), "not found in the base model"),
        ("nemotron", ("experts",), "not found in the base model"),
        ("nemotron", ("attention",), "is incompatible with Mamba-based models"),
        ("mimo", ("experts",), "not found in the base model"),
        ("sarvam", ("attention",), "not found in the base model"),
        ("afmoe", ("attention",), "Cannot convert"),
    ],
)
def test_what_peft_does_not_read(save, name, targets, outcome, tmp_path):
    """The warning of `save_adapter` holds. If this fails, PEFT reads it now: change `moezoo.hub.peft`."""
    _, folder = adapt(save, name, targets, tmp_path)
    if outcome != "ignored":
        with pytest.raises((ValueError, RuntimeError), match=re.escape(outcome)):
            in_peft(save(name).folder, folder)
        return
    theirs = in_peft(save(name).folder, folder)
    found = logits_of(theirs)
    with theirs.disable_adapter():
        np.testing.assert_array_equal(found, logits_of(theirs))
