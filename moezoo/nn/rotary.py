"""Rotary positions as a value: which dimensions rotate together, and how fast."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.nn.rope import Pairs, RotaryScaling, Turn, Unscaled, make_turn, rotate


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation of the first `dims` dimensions of each head by the position. The others do not change.

    Pair i of n rotates by base ** (-i / n) radians per position, before `scaling`.
    """

    dims: int
    base: float
    scaling: RotaryScaling = dataclasses.field(default_factory=Unscaled)
    pairs: Pairs = "halves"

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], turn: Turn
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Rotate queries or keys by the `turn` of their tokens."""
        if self.dims == x.shape[-1]:
            return self._turned(x, turn)
        return jnp.concatenate([self._turned(x[..., : self.dims], turn), x[..., self.dims :]], axis=-1)

    def turn(self, positions: Int[Array, "batch seq"]) -> Turn:
        """Return the turn of tokens at these positions."""
        return make_turn(positions, self.scaling.frequencies(self.dims, self.base))

    def _turned(self, x: Array, turn: Turn) -> Array:
        turned, magnitude = rotate(x, turn, pairs=self.pairs), self.scaling.magnitude
        return turned if magnitude == 1 else turned * jnp.asarray(magnitude, turned.dtype)
