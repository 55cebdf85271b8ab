"""YaRN: rotary positions extended to longer texts (Peng et al., 2023, arXiv:2309.00071)."""

import dataclasses
import math
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moezoo.nn.rope import RotaryScaling, frequencies
from moezoo.typed import Positive, Range, Size, check_fields


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
