"""Blueprints of models that exist."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint


def as_blueprint(model: LanguageModel, trained: Callable[[str], bool] | None = None) -> Blueprint:
    """Return the blueprint of a model, which may be shapes; what it makes is zeros."""
    zeros: Any = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model)  # noqa: E731
    return Blueprint(model.config, change=zeros, trained=trained)
