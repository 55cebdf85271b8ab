"""Contexts of parts of a block that are called alone."""

from typing import Any

import jax.numpy as jnp

from moezoo.nn.positions import Context
from moezoo.parallel.context_parallel import Coordinates


def context_of(valid: Any) -> Context:
    """Return the context of tokens at position 0, of which those that are not `valid` [batch, seq] are padding."""
    segments = jnp.asarray(valid, jnp.int32)
    coordinates = Coordinates(jnp.zeros_like(segments), segments)
    return Context(coordinates, coordinates)
