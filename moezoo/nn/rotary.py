"""Positions in queries and keys: rotation (Su et al., 2021, arXiv:2104.09864), and what extends it to longer texts.

| class | source |
|---|---|
| `Rotary` | the rotation, with one of the following as `scaling` |
| `Unscaled` | no extension |
| `Yarn` | Peng et al., 2023, arXiv:2309.00071 |
| `Proportional` | none: only the first pairs rotate; Gemma 4 (Google, 2026) |
| `Llama3` | Llama 3.1; Grattafiori et al., 2024, arXiv:2407.21783 |
| `QueryScale` | a factor on queries; Mistral 4 has it in all layers |
| `CountScale` | the same of Llama 4 (Meta, 2025), which has it in layers without rotation |
"""

import abc
import dataclasses
import math
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moezoo.nn.positions import Context
from moezoo.typed import AtMost, NotNegative, Positive, Range, Size, check_fields

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


@dataclasses.dataclass(frozen=True)
class Proportional(RotaryScaling):
    """Only the first `share` of the pairs rotate, with the frequencies that they have where all do.

    `Rotary.dims` less than a head rotates fewer pairs too, with frequencies over these alone.
    """

    share: float

    def frequencies(self, size: int, base: float) -> Float[Array, " half"]:
        """Return base ** (-2 i / size), and 0 for pairs that do not rotate."""
        rotated = int(self.share * size // 2)
        return jnp.where(jnp.arange(size // 2) < rotated, frequencies(size, base), 0)


class Turn(NamedTuple):
    """The cosine and the sine of each pair's angle, float32."""

    cos: Float[Array, "batch seq half"]
    sin: Float[Array, "batch seq half"]


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


@dataclasses.dataclass(frozen=True)
class Yarn(RotaryScaling):
    """The settings of YaRN. Frequencies depend on how often a pair rotates within the training length:

    | rotations in `length` tokens | frequency |
    |---|---|
    | more than `beta_fast` | unchanged |
    | fewer than `beta_slow` | divided by `factor` |
    | between | a linear ramp between the two |

    With m(s) = 0.1 s ln(factor) + 1, rotated queries and keys are multiplied by m(mscale) / m(mscale_all), or by m(1)
    where either is 0; scores of latent attention by m(mscale_all) ** 2.

    Args:
        factor: How many times longer than `length` texts may be; 1 is no extension.
        length: The tokens per text in training.
        attention_factor: What rotated queries and keys are multiplied by, in place of the quotient above.
        truncate: Whether the ramp begins and ends at whole pairs, the nearest outside.

    Raises:
        UserError: A value has a wrong type, or a number is out of its range.
    """

    factor: Annotated[float, Range(at_least=1)] = 1.0
    length: Size = 4096
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: float = 1.0
    mscale_all: float = 1.0
    attention_factor: Positive | None = None
    truncate: bool = True

    def __post_init__(self):
        check_fields("model.yarn", self)

    @property
    def is_plain(self) -> bool:
        """Whether nothing differs from no extension."""
        return self.factor == 1 and self.attention_factor is None

    @property
    def reach(self) -> int:
        """The tokens that texts may have by the factor; 0 without an extension."""
        return int(self.factor * self.length) if self.factor > 1 else 0

    @property
    def magnitude(self) -> float:
        """The factor on rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all)
        return self._mscale(1.0)

    @property
    def score_scale(self) -> float:
        """The factor on scores of latent attention."""
        return self._mscale(self.mscale_all) ** 2 if self.mscale_all else 1.0

    def _mscale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def frequencies(self, size: int, base: float) -> Float[Array, " half"]:
        """Return the radians per position of each of `size` / 2 pairs, computed in float64 and rounded to float32."""
        if self.factor == 1:
            return frequencies(size, base)
        plain = base ** (-np.arange(0, size, 2) / size)

        def pair_that_turns(times: float) -> float:
            return size * math.log(self.length / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / (high - low or 0.001), 0, 1)
        return jnp.asarray(plain * (1 - ramp) + plain / self.factor * ramp, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Llama3(RotaryScaling):
    """The settings of Llama 3.1's extension. Frequencies depend on how often a pair rotates within the training length:

    | rotations in `length` tokens | frequency |
    |---|---|
    | more than `high` | unchanged |
    | fewer than `low` | divided by `factor` |
    | between | a linear ramp, in rotations, between the two |

    Where `low` is `high`, nothing is between.

    Args:
        factor: What slow frequencies are divided by; 1 is no extension.
        length: The tokens per text in training.

    Raises:
        UserError: A value has a wrong type, a number is out of its range, or `low` is above `high`.
    """

    factor: Annotated[float, Range(at_least=1)] = 1.0
    length: Size = 8192
    low: Annotated[Positive, AtMost("high")] = 1.0
    high: Positive = 4.0

    def __post_init__(self):
        check_fields("model.llama3", self)

    def frequencies(self, size: int, base: float) -> Float[Array, " half"]:
        """Return the radians per position of each of `size` / 2 pairs, computed in float64 and rounded to float32."""
        if self.factor == 1:
            return frequencies(size, base)
        plain = base ** (-np.arange(0, size, 2) / size)
        rotations = self.length * plain / (2 * math.pi)
        # Both limits are one number in Llama 4 Scout.
        width = max(self.high - self.low, 1e-12)
        kept = np.clip((rotations - self.low) / width, 0, 1)
        return jnp.asarray(plain * kept + plain / self.factor * (1 - kept), jnp.float32)


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """Queries are multiplied by 1 + `beta` * ln(1 + floor(position / `length`)).

    Args:
        beta: The strength; 0 is no factor.
        length: The tokens per text in training; the factor is 1 for that many.

    Raises:
        UserError: A value has a wrong type, or a number is out of its range.
    """

    beta: NotNegative = 0.0
    length: Size = 8192

    def __post_init__(self):
        check_fields("model.query_scale", self)

    def __call__(
        self, queries: Float[Array, "batch seq heads head_dim"], context: Context
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Return the queries of the tokens of this device times their factors; the product is rounded once."""
        if not self.beta:
            return queries
        # At padding a position may be any number, and a logarithm must not become NaN.
        periods = (self.counted(jnp.maximum(context.queries.position, 0)) // self.length).astype(jnp.float32)
        factor = 1 + self.beta * jnp.log1p(periods)
        return (queries.astype(jnp.float32) * factor[:, :, None, None]).astype(queries.dtype)

    def counted(self, position: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
        """Return what is divided by the length."""
        return position


@dataclasses.dataclass(frozen=True)
class CountScale(QueryScale):
    """The same with the number of tokens up to the query, itself included: position + 1."""

    beta: NotNegative = 0.1

    def counted(self, position: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
        """Return position + 1."""
        return position + 1


NO_QUERY_SCALE = QueryScale()
