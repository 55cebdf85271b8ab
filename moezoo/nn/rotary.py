"""Rotary positions as a value: which dimensions rotate together, and how fast."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.positions import Context
from moezoo.nn.rope import Pairs, RotaryScaling, Unscaled, rotate


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation of the first `dims` dimensions of each head by the position. The others do not change.

    Pair i of n rotates by base ** (-i / n) radians per position, before `scaling`. Where layers differ
    (`moezoo.nn.positions.LayerNumbers`), the layer's base replaces `base`.
    """

    dims: int
    base: float
    scaling: RotaryScaling = dataclasses.field(default_factory=Unscaled)
    pairs: Pairs = "halves"

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], context: Context
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Rotate queries or keys of the tokens of this device."""
        if self.dims == x.shape[-1]:
            return self._turn(x, context)
        return jnp.concatenate([self._turn(x[..., : self.dims], context), x[..., self.dims :]], axis=-1)

    def _turn(self, x: Array, context: Context) -> Array:
        base = self.base if context.numbers is None else context.numbers.rope_base
        frequency, magnitude = self.scaling.frequencies(self.dims, base), self.scaling.magnitude
        turned = rotate(x, context.queries.position, frequency, pairs=self.pairs)
        return turned if magnitude == 1 else turned * jnp.asarray(magnitude, turned.dtype)
