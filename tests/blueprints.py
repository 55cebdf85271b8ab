"""Blueprints of models that exist."""

from collections.abc import Callable

import jax

from moezoo.models.adapters import Adapter, NoAdapter
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint


def as_blueprint(
    model: LanguageModel, trained: Callable[[str], bool] | None = None, adapter: Adapter | None = None
) -> Blueprint:
    """Return the blueprint of a model, or of its shapes, whose family need not be registered. It makes no model.

    `trained` returns whether the array at a path is trained; None for all that a blueprint trains by default. `adapter`
    is what the model has been adapted with.
    """
    shapes = jax.eval_shape(lambda model: model, model)
    paths = (jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes))
    chosen = None if trained is None else tuple(filter(trained, paths))
    blueprint = Blueprint(model.config, trained=chosen, adapter=adapter or NoAdapter())
    blueprint.__dict__["shapes"] = shapes  # the cached property
    return blueprint
