"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.parallel.axes import Scale
from moezoo.parallel.collectives import ALONE, InnerGroup, own_block


def normalise(x: Float[Array, "*dims size"], epsilon: float) -> Float[Array, "*dims size"]:
    """Return x / sqrt(mean(x**2) + epsilon) over the last dimension, computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


class RMSNorm(eqx.Module):
    """x / sqrt(mean(x**2) + epsilon) * scale over the last dimension, computed in float32, returned in x's dtype.

    With `around_one` the factor is 1 + scale, and `scale` starts at 0 in place of 1. Most released models multiply by
    the scale after the cast, in the dtype of x; with `cast_last`, and around one, the cast comes after the factor.

    The last dimension may be split over devices. The scale is whole, and the mean is over the whole dimension.
    """

    scale: Scale[Array, "norm"]
    epsilon: float = eqx.field(static=True)
    around_one: bool = eqx.field(static=True)
    cast_last: bool = eqx.field(static=True)

    def __init__(
        self, size: int, epsilon: float, *, around_one: bool = False, cast_last: bool = False, dtype: jnp.dtype
    ):
        self.scale = (jnp.zeros if around_one else jnp.ones)((size,), dtype)
        self.epsilon, self.around_one, self.cast_last = epsilon, around_one, cast_last

    def __call__(self, x: Float[Array, "*dims part"], group: InnerGroup = ALONE) -> Float[Array, "*dims part"]:
        """Return the normalised vectors.

        Args:
            x: This device's part of the vectors.
            group: The devices that have the other parts; with more devices than parts, several have the same one. The
                scale varies over it.
        """
        wide, scale = x.astype(jnp.float32), self.scale
        blocks = scale.shape[0] // x.shape[-1]
        if blocks > 1:
            scale = own_block(scale, group.axes, 0, blocks)
        # Each part is counted once, however many devices have it.
        squares = group.leave(jnp.sum(wide**2, axis=-1, keepdims=True)) / (self.scale.shape[0] * (group.size // blocks))
        inverse = jax.lax.rsqrt(squares + self.epsilon)
        scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
        if self.around_one or self.cast_last:
            factor = scale.astype(jnp.float32)
            return (wide * inverse * (1 + factor if self.around_one else factor)).astype(x.dtype)
        return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)
