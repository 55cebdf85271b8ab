"""The model families: one file each, in the order of its paper."""

import dataclasses

import jax
from jaxtyping import PyTree

from moezoo.errors import UserError, describe_class
from moezoo.models import deepseek_hub, gpt_oss_hub, grouped_hub, mixtral_hub, olmoe
from moezoo.models.arguments import check_key
from moezoo.models.base import Hub, LanguageModel
from moezoo.models.config import ModelConfig
from moezoo.models.deepseek import DeepSeek, DeepSeekConfig
from moezoo.models.gpt_oss import GptOss, GptOssConfig
from moezoo.models.grouped import Grouped, GroupedConfig
from moezoo.models.mixtral import Mixtral, MixtralConfig
from moezoo.models.olmoe import Olmoe, OlmoeConfig
from moezoo.parallel.execution import StoredDType, check_dtype


@dataclasses.dataclass(frozen=True)
class Family:
    """The configuration class and model class of a family, and its mapping to Hugging Face folders."""

    config: type[ModelConfig]
    model: type
    hub: Hub


FAMILIES = {
    "deepseek": Family(DeepSeekConfig, DeepSeek, deepseek_hub),
    "mixtral": Family(MixtralConfig, Mixtral, mixtral_hub),
    "olmoe": Family(OlmoeConfig, Olmoe, olmoe),
    "grouped": Family(GroupedConfig, Grouped, grouped_hub),
    "gpt_oss": Family(GptOssConfig, GptOss, gpt_oss_hub),
}


def family_of(config: ModelConfig) -> Family:
    """Return the family of a configuration. Raises `UserError` when no registered family has its class."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    kinds = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise UserError(f"config is {describe_class(config)}, expected one of {kinds}, such as cfg.model")


def name_of(config: ModelConfig) -> str:
    """Return the name of a configuration's family, and which model of the family it is where there are several."""
    family = family_of(config)
    name = next(name for name, registered in FAMILIES.items() if registered is family)
    return f"{name} ({config.variant})" if config.variant else name


def build_model(config: ModelConfig, *, key: jax.Array, dtype: str = "float32") -> LanguageModel:
    """Return a model of the family of `config`, with random parameters in `dtype` drawn from `key`.

    Args:
        config: the configuration of a registered family.
        key: one random key.
        dtype: float32, bfloat16 or float16.

    Raises:
        UserError: an argument is something else.
    """
    family = family_of(config)
    check_key(key)
    return family.model(config, dtype=check_dtype("dtype", dtype, StoredDType), key=key)


def model_shapes(config: ModelConfig, dtype: str = "float32") -> PyTree:
    """Return the model with a `jax.ShapeDtypeStruct` for each array. This uses no device and no memory for arrays."""
    return jax.eval_shape(lambda: build_model(config, key=jax.random.key(0), dtype=dtype))


__all__ = [
    "FAMILIES",
    "DeepSeek",
    "DeepSeekConfig",
    "Family",
    "GptOss",
    "GptOssConfig",
    "Grouped",
    "GroupedConfig",
    "Mixtral",
    "MixtralConfig",
    "ModelConfig",
    "Olmoe",
    "OlmoeConfig",
    "build_model",
    "family_of",
    "model_shapes",
    "name_of",
]
