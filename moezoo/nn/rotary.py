"""Rotary positions as a value: which dimensions turn together, and how fast."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.positions import Context
from moezoo.nn.rope import Pairs, RotaryScaling, Unscaled, rotate


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The first `dims` dimensions of a head turn with the position, the others stay.

    `base`: pair i of n turns by base ** (-i / n) radians a position, before `scaling`; a layer's own base, where layers
    differ (`moezoo.nn.positions.LayerNumbers`), takes its place.
    """

    dims: int
    base: float
    scaling: RotaryScaling = dataclasses.field(default_factory=Unscaled)
    pairs: Pairs = "halves"

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], context: Context
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Queries or keys of this device's tokens, with their positions."""
        if self.dims == x.shape[-1]:
            return self._turn(x, context)
        return jnp.concatenate([self._turn(x[..., : self.dims], context), x[..., self.dims :]], axis=-1)

    def _turn(self, x: Array, context: Context) -> Array:
        base = self.base if context.numbers is None else context.numbers.rope_base
        frequency, magnitude = self.scaling.frequencies(self.dims, base), self.scaling.magnitude
        turned = rotate(x, context.queries.position, frequency, pairs=self.pairs)
        return turned if magnitude == 1 else turned * jnp.asarray(magnitude, turned.dtype)
