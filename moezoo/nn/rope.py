"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), and the contract of extensions to longer texts."""

import abc
import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

# The dimensions of pair i: i and i + head_dim / 2, or 2 i and 2 i + 1.
Pairs = Literal["halves", "interleaved"]


def frequencies(size: int, base: float) -> Float[Array, " half"]:
    """Return the radians per position of each of `size` / 2 pairs: base ** (-2 i / size), float32."""
    half = size // 2
    return base ** (-jnp.arange(half, dtype=jnp.float32) / half)


class RotaryScaling(abc.ABC):
    """An extension of rotary positions to texts longer than those of training."""

    @abc.abstractmethod
    def frequencies(self, size: int, base: float) -> Float[Array, " half"]:
        """Return the radians per position of each of `size` / 2 pairs, float32."""

    @property
    def magnitude(self) -> float:
        """The factor on rotated queries and keys."""
        return 1.0

    @property
    def score_scale(self) -> float:
        """The factor on attention scores. Only latent attention uses it."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class Unscaled(RotaryScaling):
    """No extension."""

    def frequencies(self, size: int, base: float) -> Float[Array, " half"]:
        """Return base ** (-2 i / size)."""
        return frequencies(size, base)


class Turn(NamedTuple):
    """The cosine and the sine of each pair's angle, float32."""

    cos: Float[Array, "batch seq half"]
    sin: Float[Array, "batch seq half"]
