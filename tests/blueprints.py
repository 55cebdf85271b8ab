"""Blueprints of models that exist."""

from collections.abc import Callable

import jax

from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint


def as_blueprint(model: LanguageModel, trained: Callable[[str], bool] | None = None) -> Blueprint:
    """Return the blueprint of a model, or of its shapes, whose family need not be registered. It makes no model."""
    blueprint = Blueprint(model.config, trained=trained)
    blueprint.__dict__["shapes"] = jax.eval_shape(lambda model: model, model)  # the cached property
    return blueprint
