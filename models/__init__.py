"""The model families: one file each, readable top to bottom beside its paper."""

import dataclasses

from moezoo.hub import Hub
from moezoo.models import deepseek_hub, mixtral_hub
from moezoo.models.deepseek import DeepSeek, DeepSeekConfig
from moezoo.models.mixtral import Mixtral, MixtralConfig

ModelConfig = MixtralConfig | DeepSeekConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's configuration class and model class, and how it lies in a Hugging Face folder."""

    config: type
    model: type
    hub: Hub


FAMILIES = {
    "deepseek": Family(DeepSeekConfig, DeepSeek, deepseek_hub),
    "mixtral": Family(MixtralConfig, Mixtral, mixtral_hub),
}

__all__ = ["FAMILIES", "DeepSeek", "DeepSeekConfig", "Family", "Mixtral", "MixtralConfig", "ModelConfig"]
