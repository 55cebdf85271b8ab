"""The model families: one file each, readable top to bottom beside its paper."""

import dataclasses

from moezoo.models.mixtral import Mixtral, MixtralConfig

ModelConfig = MixtralConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's configuration class and model class."""

    config: type
    model: type


FAMILIES = {"mixtral": Family(MixtralConfig, Mixtral)}

__all__ = ["FAMILIES", "Family", "Mixtral", "MixtralConfig", "ModelConfig"]
