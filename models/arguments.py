"""Checks of the arrays that users pass to models: tokens, their coordinates, and random keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from moezoo.errors import UserError


def as_integers(name: str, value: Any, like: Any = None) -> Array | np.ndarray:
    """Return the argument `name` as an array of integers [batch, seq], of the shape of the tokens `like` if given.

    Raises `UserError` for anything else, also for an array without entries.
    """
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:
        raise UserError(f"{name} have rows of different lengths; pad the shorter ones") from None
    if array.ndim != 2 or not array.size or not jnp.issubdtype(array.dtype, jnp.integer):
        hint = f"; for one text write {name}[None]" * (array.ndim == 1)
        hint = "; give at least one token" if array.ndim == 2 and not array.size else hint
        hint = "; encode texts with a tokenizer first" if array.dtype.kind in "US" else hint
        raise UserError(f"{name} are {array.dtype}{list(array.shape)}, expected integers [batch, seq]{hint}")
    if like is not None and array.shape != like.shape:
        raise UserError(f"{name} are {list(array.shape)} and tokens are {list(like.shape)}; give both the same shape")
    return array


def known(array: Any) -> np.ndarray | None:
    """Return the numbers of an array; None while it is traced, and where other processes hold a part of it."""
    if isinstance(array, jax.Array) and (isinstance(array, Tracer) or not array.is_fully_addressable):
        return None
    return np.asarray(array)


def check_inside(name: str, values: np.ndarray, limit: int, why: str) -> None:
    """Raise `UserError` unless all `values` are from 0 to `limit` - 1; `why` names the setting that limits them."""
    if (outside := values[(values < 0) | (values >= limit)]).size:
        raise UserError(f"{name} contains {outside[0]}, expected 0 to {limit - 1} ({why})")


def check_key(key: Any) -> None:
    """Raise `UserError` unless `key` is one random key."""
    try:
        jax.eval_shape(lambda key: jax.random.bits(key, (2,)), key)
    except (TypeError, ValueError) as error:
        raise UserError("key is not one random key; write key=jax.random.key(SEED)") from error
