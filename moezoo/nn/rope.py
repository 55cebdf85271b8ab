"""Rotary position embedding (Su et al., 2021), with the YaRN extension to longer texts (Peng et al., 2023)."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Which dimensions turn together: i and i + head_dim / 2, or 2 i and 2 i + 1.
Pairs = Literal["halves", "interleaved"]


class Yarn(NamedTuple):
    """Longer by `factor` than the `length` trained on.

    A pair that turns more than `beta_fast` times in `length` keeps its frequency, one that turns less than `beta_slow`
    times has it divided by `factor`, in between is a ramp. `mscale` and `mscale_all` scale attention with the logarithm
    of the factor: the rotated part of it by their ratio, all of it by `mscale_all` squared.
    """

    factor: float
    length: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all: float

    @property
    def magnitude(self) -> float:
        """What the rotated queries and keys are multiplied with."""
        if self.mscale and self.mscale_all:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all)
        return self._mscale(1.0)

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with."""
        return self._mscale(self.mscale_all) ** 2 if self.mscale_all else 1.0

    def _mscale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def frequencies(self, size: int, base: float) -> np.ndarray:
        """Radians a position for each of `size` / 2 pairs, [size / 2] float64."""
        plain = base ** (-np.arange(0, size, 2) / size)

        def pair_that_turns(times: float) -> float:
            return size * math.log(self.length / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(self.beta_slow)), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / (high - low or 0.001), 0, 1)
        return plain * (1 - ramp) + plain / self.factor * ramp


def frequencies(size: int, base: float | Float[Array, ""]) -> Float[Array, " half"]:
    """Radians a position for each of `size` / 2 pairs: base ** (-2 i / size), float32."""
    half = size // 2
    return base ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"],
    frequency: Float[Array, " half"],
    *,
    pairs: Pairs = "halves",
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate each pair of dimensions by the angle position * frequency, in float32.

    The result has halves for pairs, whatever order `x` has: queries and keys are reordered alike, which no score sees.
    """
    half = x.shape[-1] // 2
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency.reshape(1, 1, 1, half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    wide = x.astype(jnp.float32)
    if pairs == "halves":
        first, second = wide[..., :half], wide[..., half:]
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
