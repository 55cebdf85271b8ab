"""Rotary positions as a value: which dimensions rotate together, and how fast."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.positions import Context
from moezoo.nn.rope import Pairs, RotaryScaling, Turn, Unscaled, make_turn, rotate


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
            return self._turned(x, context)
        return jnp.concatenate([self._turned(x[..., : self.dims], context), x[..., self.dims :]], axis=-1)

    def turn(self, context: Context) -> Turn:
        """Return the turn of the tokens of this device. The layers of a stack share it, unless their bases differ."""
        base = self.base if context.numbers is None else context.numbers.rope_base
        return make_turn(context.queries.position, self.scaling.frequencies(self.dims, base))

    def _turned(self, x: Array, context: Context) -> Array:
        turn = self.turn(context) if context.turn is None else context.turn
        turned, magnitude = rotate(x, turn, pairs=self.pairs), self.scaling.magnitude
        return turned if magnitude == 1 else turned * jnp.asarray(magnitude, turned.dtype)
