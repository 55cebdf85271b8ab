"""The model families: one file each, readable top to bottom beside its paper."""

import dataclasses

from moezoo.models.deepseek import DeepSeek, DeepSeekConfig
from moezoo.models.mixtral import Mixtral, MixtralConfig

ModelConfig = MixtralConfig | DeepSeekConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's configuration class and model class."""

    config: type
    model: type


FAMILIES = {"deepseek": Family(DeepSeekConfig, DeepSeek), "mixtral": Family(MixtralConfig, Mixtral)}

__all__ = ["FAMILIES", "DeepSeek", "DeepSeekConfig", "Family", "Mixtral", "MixtralConfig", "ModelConfig"]
