"""Folders of tiny dense models, written by hand from random numbers. No code of moezoo."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50.0,
}
# One pair of a head of 8 keeps its frequency, one is between, two are divided.
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
WITH = {
    "qwen3": {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3 window": {"head_dim": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen3 yarn": {
        "head_dim": 8,
        "sliding_window": 5,  # without effect
        "max_window_layers": 1,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "mistral": {"head_dim": 8, "sliding_window": 5},
    "mistral whole": {"sliding_window": None, "tie_word_embeddings": True},
    "llama scaled": {"head_dim": 8, "rope_scaling": LLAMA3},
    "llama": {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None},
}


class Dense(NamedTuple):
    """A folder, its config.json and its tensors."""

    folder: Path
    keys: dict[str, Any]
    tensors: dict[str, np.ndarray]


def write_dense(folder: Path, name: str, **others: Any) -> Dense:
    """Write the folder of a name in `WITH`, with `others` in place of its keys."""
    kind = name.split()[0]
    keys = {"model_type": kind, **SMALL, **WITH[name], **others}
    rng = np.random.default_rng(len(name))
    embed, mlp, heads = keys["hidden_size"], keys["intermediate_size"], keys["num_attention_heads"]
    size = keys.get("head_dim") or embed // heads
    inner, kv = heads * size, keys["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (keys["vocab_size"], embed),
        "model.norm.weight": (embed,),
    }
    if not keys.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (keys["vocab_size"], embed)
    for layer in range(keys["num_hidden_layers"]):
        inside = {
            "input_layernorm.weight": (embed,),
            "post_attention_layernorm.weight": (embed,),
            "self_attn.q_proj.weight": (inner, embed),
            "self_attn.k_proj.weight": (kv, embed),
            "self_attn.v_proj.weight": (kv, embed),
            "self_attn.o_proj.weight": (embed, inner),
            "mlp.gate_proj.weight": (mlp, embed),
            "mlp.up_proj.weight": (mlp, embed),
            "mlp.down_proj.weight": (embed, mlp),
        }
        if kind == "qwen3":
            inside |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        if keys.get("attention_bias"):
            inside |= {f"self_attn.{x}_proj.bias": (n,) for x, n in zip("qkvo", (inner, kv, kv, embed), strict=True)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    tensors = {name: (0.4 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    write_config(folder, keys)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Dense(folder, keys, tensors)


def write_config(folder: Path, keys: dict[str, Any]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(keys))
