"""Folders in the form that transformers 5 has in memory, written by it: read to the bit, and copied for it."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_models import CONFIGS

import moezoo
from moezoo.models import family_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")
from peer_results import load  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

TYPES = {family_of(config).hub.write(config)["model_type"]: config for config in reversed(CONFIGS.values())}


def write(folder: Path, form: str, theirs: Any) -> None:
    """Write transformers' model in a form."""
    theirs.save_pretrained(folder, save_original_format=False)
    if form != "save_original_format=False":
        begin = "" if form == "state dict" else "_orig_mod."
        named = (torch.compile(theirs, backend="eager") if begin else theirs).state_dict()
        assert all(name.startswith(begin) for name in named)
        tensors = {
            name: x.contiguous()
            for name, x in named.items()
            if not (theirs.config.tie_word_embeddings and "lm_head" in name)
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in TYPES for form in ("save_original_format=False", "state dict")]
    + [("qwen3_moe", "compiled state dict")],
)
def test_read_to_the_bit_and_copied(save, peer, tmp_path, name, form):
    model, theirs = save(TYPES[name]).model, peer(TYPES[name])
    write(tmp_path / "m", form, theirs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* for sparse attention's index")
        again = moezoo.from_pretrained(tmp_path / "m")
        moezoo.save_pretrained(again, tmp_path / "new", like=tmp_path / "m")
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))
    # Published names may have other tensors; these have those of transformers' memory.
    found = load_file(tmp_path / "new/model.safetensors")
    # What names begin with is as published.
    assert {name.replace("backbone.", "model.") for name in found} <= theirs.state_dict().keys()
    read = load(tmp_path / "new").state_dict()
    assert all(torch.equal(read[key], x) for key, x in theirs.state_dict().items() if ".indexer." not in key)
    assert json.loads((tmp_path / "new/config.json").read_text())["model_type"] == name
