"""Rotary position embedding (Su et al., 2021), in the half-split order of the released Mixtral weights."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "batch seq"], base: float
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate the pair (x[i], x[i + head_dim / 2]) by the angle position * base ** (-2 i / head_dim), in float32."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency.reshape(1, 1, 1, half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
