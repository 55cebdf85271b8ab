"""The naive backend: one token after another. Its gradient keeps a state per token."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moezoo.kernels.delta_rule.base import Operands, Recalled, Start


def rule(operands: Operands, start: Start) -> Recalled:
    """Read token after token."""
    o = operands
    decay = o.decay if o.per_channel else o.decay[..., None]
    before = jnp.concatenate([start.segment[:, None], o.segment[:, :-1]], axis=1)
    floats = (o.q[:, :, :, None], o.k[:, :, :, None], o.v, decay, o.strength)
    floats = jax.tree.map(lambda x: x.astype(jnp.float32), floats)
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (*floats, o.segment == before))

    def read(state: Array, token: tuple[Any, ...]) -> tuple[Array, Array]:
        q, k, v, decay, strength, continues = token
        state = jnp.where(continues[:, None, None, None, None], state * jnp.exp(decay)[..., None], 0)
        if strength is not None:
            error = v - (state * k[..., None]).sum(-2)
            v = strength[..., None] * error
        state = state + k[..., None] * v[..., None, :]
        return state, (state * q[..., None]).sum(-2)

    state, result = lax.scan(read, start.state, by_token)
    return Recalled(jnp.moveaxis(result, 0, 1).astype(o.v.dtype), state)
