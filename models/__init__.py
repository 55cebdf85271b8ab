"""The model families: one file each, readable top to bottom beside its paper."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.models import deepseek_hub, mixtral_hub, olmoe, qwen3_moe
from moezoo.models.base import Hub, LanguageModel
from moezoo.models.config import ModelConfig
from moezoo.models.deepseek import DeepSeek, DeepSeekConfig
from moezoo.models.mixtral import Mixtral, MixtralConfig
from moezoo.models.olmoe import Olmoe, OlmoeConfig
from moezoo.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's configuration class and model class, and how it lies in a Hugging Face folder."""

    config: type[ModelConfig]
    model: type
    hub: Hub


FAMILIES = {
    "deepseek": Family(DeepSeekConfig, DeepSeek, deepseek_hub),
    "mixtral": Family(MixtralConfig, Mixtral, mixtral_hub),
    "olmoe": Family(OlmoeConfig, Olmoe, olmoe),
    "qwen3_moe": Family(Qwen3MoeConfig, Qwen3Moe, qwen3_moe),
}


def family_of(config: ModelConfig) -> Family:
    """The family that a configuration is of."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    raise TypeError(f"{type(config).__name__} is no family's configuration")


def build_model(config: ModelConfig, *, key: jax.Array, dtype: str = "float32") -> LanguageModel:
    """A model of the family that `config` belongs to."""
    return family_of(config).model(config, dtype=jnp.dtype(dtype), key=key)


def model_shapes(config: ModelConfig, dtype: str = "float32") -> PyTree:
    """The model with shapes for arrays: costs no memory and starts no device."""
    return jax.eval_shape(lambda: build_model(config, key=jax.random.key(0), dtype=dtype))


__all__ = [
    "FAMILIES",
    "DeepSeek",
    "DeepSeekConfig",
    "Family",
    "Mixtral",
    "MixtralConfig",
    "ModelConfig",
    "Olmoe",
    "OlmoeConfig",
    "Qwen3Moe",
    "Qwen3MoeConfig",
    "build_model",
    "family_of",
    "model_shapes",
]
