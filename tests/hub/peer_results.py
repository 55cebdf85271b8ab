"""Logits, loss and gradients of our model and of transformers', for the same folder and tokens."""

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moezoo
from moezoo.hub.tensors import arrays_by_path, tensors
from moezoo.models import family_of
from moezoo.tools.parity.peer import class_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")


class Results(NamedTuple):
    """Results for one batch; gradients by the names in a folder."""

    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


def load(folder: Path) -> Any:
    """Load a folder with transformers; assert that it finds every weight and that none is left over.

    Only the index of sparse attention is not in our folders, and is random then; nor are tensors without numbers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        theirs, info = class_of(folder).from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    empty = {name for name, parameter in theirs.named_parameters() if not parameter.numel()}
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not [name for name in info[kind] if ".indexer." not in name and name not in empty], kind
    return theirs


def results_of_transformers(theirs: Any, tokens: np.ndarray) -> Results:
    """Return transformers' results for a batch without padding."""
    theirs.zero_grad()
    ids = torch.tensor(tokens.astype(np.int64))
    out = theirs(ids, labels=ids)
    out.loss.backward()
    return Results(out.logits.detach().numpy(), out.loss.item(), _gradients_of_transformers(theirs))


def results(model: Any, tokens: np.ndarray, execution: moezoo.Execution) -> Results:
    """Return our results, computed with `execution`."""

    def loss(model):
        logits = model(tokens, execution=execution).logits
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(tokens[:, 1:, None]), axis=-1)
        return -picked.mean(), logits

    if execution.mesh is not None:
        model = moezoo.place(model, execution)
    function = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, logits), gradients = function(model)
    return Results(np.asarray(logits), float(value), _by_name(gradients, model))


def assert_agreement(ours: Results, theirs: Results) -> None:
    """Assert equality up to float32: each result sums about a thousand products, each rounded to 6e-8."""
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=1e-4)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    # Buffers have no gradient.
    buffers = ("score_correction_bias", "expert_bias", "layer_scalar")
    trained = {name: g for name, g in ours.gradients.items() if not name.endswith(buffers)}
    assert set(theirs.gradients) == set(trained)
    for name, gradient in trained.items():
        wanted = theirs.gradients[name]
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-4 * scale + 1e-7, err_msg=name)


def _by_name(tree, model):
    """Return a tree of our model's structure as tensors by their names in a folder."""
    arrays = arrays_by_path(tree)
    return {
        t.name: t.to_file([np.asarray(arrays[p][i]) for p, i in t.parts])
        for t in tensors(tree, family_of(model.config).hub)
        if t.parts[0][0] in arrays
    }


def _gradients_of_transformers(theirs):
    """Return gradients by the names on disk; in memory transformers joins experts."""
    found: dict[str, np.ndarray] = {}
    joining = ("gpt_oss", "mistral4", "gemma4_text", "llama4_text")
    renaming = ("mixtral", "minimax_m2", "kimi_linear")
    w123 = (*renaming, "lfm2_moe")
    renamed, joined = (theirs.config.model_type in kinds for kinds in (renaming, joining))
    gate, up, down = ("w1", "w3", "w2") if theirs.config.model_type in w123 else ("gate_proj", "up_proj", "down_proj")
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None:  # a choice bias, which is a parameter in some models; what selects tokens
            continue
        gradient = parameter.grad.numpy().copy()
        if not gradient.size:  # of a shared MLP of no width
            continue
        if theirs.config.model_type == "mimo_v2_flash":
            name = name.replace("self_attn.sinks", "self_attn.attention_sink_bias")
        if joined:  # on disk too
            found[name] = gradient
        elif name.endswith("experts.gate_up_proj"):
            half = gradient.shape[1] // 2
            for e, one in enumerate(gradient):
                found[name.replace("gate_up_proj", f"{e}.{gate}.weight")] = one[:half]
                found[name.replace("gate_up_proj", f"{e}.{up}.weight")] = one[half:]
        elif name.endswith(("experts.down_proj", "experts.up_proj")):
            what, mine = ("up_proj", up) if name.endswith("up_proj") else ("down_proj", down)
            found |= {name.replace(f"experts.{what}", f"experts.{e}.{mine}.weight"): g for e, g in enumerate(gradient)}
        elif name.endswith("self_attn.conv1d.weight"):  # of queries, keys and values together
            found |= {
                name.replace("conv1d", f"{x}_conv1d"): g for x, g in zip("qkv", np.split(gradient, 3), strict=True)
            }
        else:
            found[name.replace(".forget_gate.", ".")] = gradient
    if renamed:
        is_dense = re.compile(r"\.mlp\.(gate|up|down)_proj\.")
        found = {
            name if is_dense.search(name) else name.replace(".mlp.", ".block_sparse_moe."): g
            for name, g in found.items()
        }
    if theirs.config.model_type == "nemotron_h":
        found = {re.sub(r"^model\.", "backbone.", name): g for name, g in found.items()}
    if theirs.config.model_type == "sarvam_moe":
        q_proj = "self_attn.q_proj."
        for name in [name for name in found if q_proj in name]:
            parts = [found.pop(name.replace(q_proj, f"self_attn.{x}_proj.")) for x in "qkv"]
            found[name.replace(q_proj, "self_attn.query_key_value.")] = np.concatenate(parts)
        for there, name in (("o_proj", "dense"), ("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")):
            found = {key.replace(f"self_attn.{there}", f"self_attn.{name}"): g for key, g in found.items()}
        for there, name in (("self_attn", "attention"), ("embed_tokens", "word_embeddings")):
            found = {key.replace(f".{there}.", f".{name}."): g for key, g in found.items()}
    if theirs.config.model_type == "hy_v3":
        for there, name in (("mlp.gate.", "mlp.router.gate."), ("shared_experts", "shared_mlp")):
            found = {key.replace(there, name): g for key, g in found.items()}
    return found
