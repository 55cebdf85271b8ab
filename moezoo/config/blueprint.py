"""What the model of a configuration is, before it exists: its shapes, how it is made, and what a step trains."""

import dataclasses
import functools
from collections.abc import Callable

from jaxtyping import Array, PyTree

from moezoo.config.settings import TrainConfig
from moezoo.models import ModelConfig, build_model, model_shapes
from moezoo.models.base import LanguageModel
from moezoo.parallel.axes import trainable_mask

# Whether to train the array at a path, as in `moezoo.parallel.axes.trainable_mask`.
Trained = Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What a configuration means.

    Attributes:
        shapes: The model with a `jax.ShapeDtypeStruct` for each array, or the model itself if one was given.
        make: `make(key)` returns the model with random parameters, which may be traced.
        trained: A tree of booleans like the model: which arrays a step trains.
    """

    shapes: LanguageModel
    make: Callable[[Array], LanguageModel]
    trained: PyTree


def blueprint(cfg: TrainConfig, model: LanguageModel | None = None, trained: Trained = None) -> Blueprint:
    """Return what `cfg` means. No device is used.

    Args:
        cfg: The configuration.
        model: A model, or its shapes, that differs from what `cfg.model` describes, for example by containers.
        trained: Whether the array at a path is trained; None for all except buffers and the parts of containers.

    Raises:
        UserError: `trained` chooses no array, or one that cannot be trained.
    """
    dtype = cfg.execution.param_dtype
    shapes = _shapes(cfg.model, dtype) if model is None else model
    make = functools.partial(build_model, cfg.model, dtype=dtype)
    return Blueprint(shapes, lambda key: make(key=key), trainable_mask(shapes, trained))


@functools.lru_cache(maxsize=64)
def _shapes(config: ModelConfig, dtype: str) -> LanguageModel:
    return model_shapes(config, dtype)
