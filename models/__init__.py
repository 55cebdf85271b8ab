"""The model families: one file each, in the order of its paper."""

import jax

from moezoo.errors import UserError, describe_class
from moezoo.models import (
    deepseek,
    deepseek_hub,
    gemma4,
    gemma4_hub,
    gpt_oss,
    grouped,
    grouped_hub,
    kimi_linear,
    kimi_linear_hub,
    lfm2_moe,
    lfm2_moe_hub,
    llama4,
    llama4_hub,
    mixtral,
    nemotron_h,
    nemotron_h_hub,
    olmoe,
    qwen3_5,
    qwen3_5_hub,
    windowed,
    windowed_hub,
)
from moezoo.models.base import LanguageModel, check_key
from moezoo.models.config import ModelConfig
from moezoo.models.deepseek import DeepSeekConfig
from moezoo.models.family import MADE, Family, alike
from moezoo.models.gemma4 import Gemma4Config
from moezoo.models.gpt_oss import GptOssConfig
from moezoo.models.grouped import GroupedConfig
from moezoo.models.kimi_linear import KimiLinearConfig
from moezoo.models.lfm2_moe import Lfm2MoeConfig
from moezoo.models.llama4 import Llama4Config
from moezoo.models.mixtral import MixtralConfig
from moezoo.models.nemotron_h import NemotronHConfig
from moezoo.models.olmoe import OlmoeConfig
from moezoo.models.qwen3_5 import Qwen35Config
from moezoo.models.windowed import WindowedConfig
from moezoo.parallel.execution import StoredDType, check_dtype

DeepSeek = Family("deepseek", DeepSeekConfig, deepseek.kinds, deepseek.make_block, deepseek_hub.HUB)
Llama4 = Family("llama4", Llama4Config, llama4.kinds, llama4.make_block, llama4_hub.HUB)
Mixtral = Family("mixtral", MixtralConfig, alike, mixtral.make_block, mixtral.HUB, mixtral.DENSE_HUB)
Olmoe = Family("olmoe", OlmoeConfig, alike, olmoe.make_block, olmoe.HUB)
Grouped = Family("grouped", GroupedConfig, grouped.kinds, grouped.make_block, grouped_hub.HUB, grouped_hub.DENSE_HUB)
GptOss = Family("gpt_oss", GptOssConfig, gpt_oss.kinds, gpt_oss.make_block, gpt_oss.HUB)
KimiLinear = Family("kimi_linear", KimiLinearConfig, kimi_linear.kinds, kimi_linear.make_block, kimi_linear_hub.HUB)
Qwen35 = Family("qwen3_5", Qwen35Config, qwen3_5.kinds, qwen3_5.make_block, qwen3_5_hub.HUB)
Lfm2Moe = Family("lfm2_moe", Lfm2MoeConfig, lfm2_moe.kinds, lfm2_moe.make_block, lfm2_moe_hub.HUB)
Gemma4 = Family("gemma4", Gemma4Config, gemma4.kinds, gemma4.make_block, gemma4_hub.HUB)
Windowed = Family("windowed", WindowedConfig, windowed.kinds, windowed.make_block, windowed_hub.HUB)
NemotronH = Family("nemotron_h", NemotronHConfig, nemotron_h.kinds, nemotron_h.make_block, nemotron_h_hub.HUB)
_HYBRIDS = (Qwen35, KimiLinear, Lfm2Moe, NemotronH)
_FAMILIES = (DeepSeek, Mixtral, Olmoe, Llama4, Grouped, GptOss, *_HYBRIDS, Gemma4, Windowed)
FAMILIES = {family.name: family for family in _FAMILIES}


def families() -> list[Family]:
    """Return the registered families, then the others that were made, from the newest on."""
    return [*FAMILIES.values(), *(family for family in reversed(MADE.values()) if family not in FAMILIES.values())]


def family_of(config: ModelConfig) -> Family:
    """Return the family of a configuration. Raises `UserError` when no family has its class."""
    for family in families():
        if type(config) is family.config:
            return family
    kinds = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise UserError(f"config is {describe_class(config)}, expected one of {kinds}, such as cfg.model")


def name_of(config: ModelConfig) -> str:
    """Return the name of a configuration's family, and which model of the family it is where there are several."""
    name = family_of(config).name
    return f"{name} ({config.variant})" if config.variant else name


def build_model(config: ModelConfig, *, key: jax.Array, dtype: str = "float32") -> LanguageModel:
    """Return a model of the family of `config`, with random parameters in `dtype` drawn from `key`.

    Args:
        config: The configuration of a family, such as cfg.model.
        key: One random key.
        dtype: float32, bfloat16 or float16.

    Raises:
        UserError: An argument is something else.
    """
    family = family_of(config)
    check_key(key)
    return family(config, dtype=check_dtype("dtype", dtype, StoredDType), key=key)
