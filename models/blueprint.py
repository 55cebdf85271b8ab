"""A model before it is made: what its configuration and the settings of its parameters describe."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, PyTree

from moezoo.errors import UserError, check_type, describe_class
from moezoo.models import ModelConfig, build_model
from moezoo.models.adapters import Adapter, NoAdapter
from moezoo.models.base import LanguageModel
from moezoo.nn.linear import draws_numbers
from moezoo.parallel.axes import Role, axes_of, trainable_mask
from moezoo.parallel.low_rank import without_pairs
from moezoo.typed import check_fields

_ADAPTER = 0x61  # what a model's key is folded with for its adapter


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What a model is: its arrays, how they are made, and which of them are trained.

    Attributes:
        config: The configuration of a registered family.
        dtype: The dtype of the parameters: float32, bfloat16 or float16.
        change: What is done to a fresh model, such as `lambda model: store(model, matches)`; None for nothing.
        trained: Patterns of the paths of arrays that are trained (`moezoo.parallel.axes.trainable_mask`); None for all
            except buffers and the parts of containers, or with an adapter for nothing besides it.
        frozen: Patterns of those that are not trained.
        adapter: What is trained beside the weights of the changed model.
    """

    config: ModelConfig
    dtype: str = "float32"
    change: Callable[[LanguageModel], LanguageModel] | None = None
    trained: tuple[str, ...] | None = None
    frozen: tuple[str, ...] = ()
    adapter: Adapter = dataclasses.field(default_factory=NoAdapter)

    def __post_init__(self):
        if self.change is not None and not callable(self.change):
            raise UserError(f"blueprint: change is {describe_class(self.change)}, expected a function, or None")
        check_fields("blueprint", self)

    def make(self, key: Array) -> LanguageModel:
        """Return a model with random parameters drawn from `key`.

        Raises:
            UserError: As `moezoo.models.build_model`, and if `change` returns something else than a model.
        """
        model = build_model(self.config, key=key, dtype=self.dtype)
        if self.change is not None:
            model = self.change(model)
            check_type("blueprint: what change returns", model, LanguageModel, "return the changed model")
        return self.adapt(model, key)

    def adapt(self, model: LanguageModel, key: Array) -> LanguageModel:
        """Return a model without an adapter with a fresh one, which `make` would draw from the same `key`."""
        return self.adapter.adapt(model, jax.random.fold_in(key, _ADAPTER))

    @functools.cached_property
    def shapes(self) -> LanguageModel:
        """The model with a `jax.ShapeDtypeStruct` for each array. This uses no device and no memory for arrays."""
        with draws_numbers(False):
            return jax.eval_shape(lambda: self.make(jax.random.key(0)))

    @functools.cached_property
    def mask(self) -> PyTree:
        """A tree like the model: True for each array that is trained. Raises as `trainable_mask` does."""
        beside = self.adapter.trained(self.shapes)
        trained = self.trained if beside is None else (*beside, *(self.trained or ()))
        return trainable_mask(self.shapes, trained, self.frozen)

    @functools.cached_property
    def constant(self) -> PyTree:
        """A tree like the model: True for each array that no step changes: neither trained nor a buffer."""
        axes = axes_of(self.shapes)
        return jax.tree.map(lambda learns, its: not learns and its.role is not Role.BUFFER, self.mask, axes)

    @functools.cached_property
    def constant_paths(self) -> frozenset[str]:
        """The paths, in the model without an adapter, of the arrays that `constant` chooses."""
        leaves = jax.tree_util.tree_leaves_with_path(without_pairs(self.constant))
        return frozenset(jax.tree_util.keystr(path) for path, is_constant in leaves if is_constant)
