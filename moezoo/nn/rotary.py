"""Rotary positions as a value: which dimensions turn together, and how fast."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.nn.rope import Pairs, frequencies, rotate


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The first `dims` dimensions of a head turn with the position, the others stay; `base` is the slowest pair's."""

    dims: int
    base: float | Float[Array, ""]
    pairs: Pairs = "halves"

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Queries or keys with their positions."""
        if self.dims == x.shape[-1]:
            return self._turn(x, positions)
        turned = self._turn(x[..., : self.dims], positions)
        return jnp.concatenate([turned, x[..., self.dims :]], axis=-1)

    def _turn(self, x: Array, positions: Array) -> Array:
        return rotate(x, positions, frequencies(self.dims, self.base), pairs=self.pairs)
