"""Rotary positions as a value: which dimensions rotate together, and how fast."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.nn.rope import Pairs, RotaryScaling, Turn, Unscaled


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation of the first `dims` dimensions of each head by the position. The others do not change.

    Pair i of n rotates by base ** (-i / n) radians per position, before `scaling`. Pairs of the result are halves,
    whatever `pairs` are. Queries and keys are reordered in the same way, which changes no score.
    """

    dims: int
    base: float
    scaling: RotaryScaling = dataclasses.field(default_factory=Unscaled)
    pairs: Pairs = "halves"

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], turn: Turn
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Rotate queries or keys by the `turn` of their tokens, in float32."""
        if self.dims == x.shape[-1]:
            return self._turned(x, turn)
        return jnp.concatenate([self._turned(x[..., : self.dims], turn), x[..., self.dims :]], axis=-1)

    def turn(self, positions: Int[Array, "batch seq"]) -> Turn:
        """Return the turn of tokens at these positions."""
        frequency = self.scaling.frequencies(self.dims, self.base)
        angle = positions.astype(jnp.float32)[:, :, None] * frequency[None, None]
        return Turn(jnp.cos(angle), jnp.sin(angle))

    def _turned(self, x: Array, turn: Turn) -> Array:
        half = self.dims // 2
        cos, sin = (t[:, :, None] for t in turn)
        wide = x.astype(jnp.float32)
        if self.pairs == "halves":
            first, second = wide[..., :half], wide[..., half:]
        else:
            first, second = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
        magnitude = self.scaling.magnitude
        return turned if magnitude == 1 else turned * jnp.asarray(magnitude, turned.dtype)
