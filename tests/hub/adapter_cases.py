"""Tiny models with low-rank pairs of random numbers, made without a compilation."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from moezoo.models.adapters import Lora
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.low_rank import LowRank, is_low_rank

PREFIX = "base_model.model.model.layers."


def numbers(shapes: Any, seed: int = 0, dtype: Any = None) -> Any:
    """Return arrays of multiples of 1/16 below 1: sums of a few products of them are exact in float32."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.integers(-15, 16, x.shape) / 16, dtype or x.dtype)  # noqa: E731
    return jax.tree.map(draw, shapes)


def model_of(config: Any, seed: int = 0) -> Any:
    """Return a random model."""
    return numbers(Blueprint(config).shapes, seed)


def with_pairs(model: Any, *targets: str, rank: int = 2, alpha: float = 3.0, seed: int = 1, size: float = 1) -> Any:
    """Return a model with random pairs, of numbers below `size`, beside the weights that `targets` choose."""
    lora = Lora(rank=rank, alpha=alpha, targets=targets or ("all",))
    shapes = jax.eval_shape(lambda: lora.adapt(model, jax.random.key(0)))
    drawn = numbers(shapes, seed)
    keep = lambda have, new: (  # noqa: E731
        LowRank(have, new.a * size, new.b * size, new.scale, new.inputs, new.dtype) if is_low_rank(new) else have
    )
    return jax.tree.map(keep, model, drawn, is_leaf=lambda x: is_low_rank(x))


def pairs_of(model: Any) -> dict[str, LowRank]:
    """Return the pairs of a model by the paths of their weights."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_low_rank)
    return {jax.tree_util.keystr(path).lstrip("."): x for path, x in leaves if is_low_rank(x)}


def delta(pair: LowRank) -> np.ndarray:
    """Return scale A B of all layers and experts, in float64: [*stacked, inputs, outputs]."""
    a, b = np.asarray(pair.a, np.float64), np.asarray(pair.b, np.float64)
    lead = a.ndim - 1 - pair.inputs
    a, b = a.reshape(*a.shape[:lead], -1, a.shape[-1]), b.reshape(*b.shape[: lead + 1], -1)
    return pair.scale * (a @ b)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the two files of an adapter."""
    return json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], **metadata: str) -> Path:
    """Write the two files of an adapter."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    save_file(tensors, folder / "adapter_model.safetensors", metadata or None)
    return folder
