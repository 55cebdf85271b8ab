"""A model before it is made: what its configuration and the settings of its parameters describe."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, PyTree

from moezoo.errors import UserError, check_type, describe_class
from moezoo.models import ModelConfig, build_model
from moezoo.models.base import LanguageModel
from moezoo.nn.linear import draws_numbers
from moezoo.parallel.axes import trainable_mask


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What a model is: its arrays, how they are made, and which of them are trained.

    Attributes:
        config: The configuration of a registered family.
        dtype: The dtype of the parameters: float32, bfloat16 or float16.
        change: What is done to a fresh model, such as `lambda model: store(model, matches)`; None for nothing.
        trained: A function of the path of an array that returns whether it is trained
            (`moezoo.parallel.axes.trainable_mask`); None for all except buffers and the parts of containers.
    """

    config: ModelConfig
    dtype: str = "float32"
    change: Callable[[LanguageModel], LanguageModel] | None = None
    trained: Callable[[str], bool] | None = None

    def __post_init__(self):
        for name in ("change", "trained"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise UserError(f"blueprint: {name} is {describe_class(value)}, expected a function, or None")

    def make(self, key: Array) -> LanguageModel:
        """Return a model with random parameters drawn from `key`.

        Raises:
            UserError: As `moezoo.models.build_model`, and if `change` returns something else than a model.
        """
        model = build_model(self.config, key=key, dtype=self.dtype)
        if self.change is None:
            return model
        changed = self.change(model)
        check_type("blueprint: what change returns", changed, LanguageModel, "return the changed model")
        return changed

    @functools.cached_property
    def shapes(self) -> LanguageModel:
        """The model with a `jax.ShapeDtypeStruct` for each array. This uses no device and no memory for arrays."""
        with draws_numbers(False):
            return jax.eval_shape(lambda: self.make(jax.random.key(0)))

    @functools.cached_property
    def mask(self) -> PyTree:
        """A tree like the model: True for each array that is trained. Raises as `trainable_mask` does."""
        return trainable_mask(self.shapes, self.trained)
