"""YaRN: rotary positions extended to longer texts (Peng et al., 2023)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moezoo.errors import UserError, check_positive
from moezoo.nn.rope import RotaryScaling, frequencies


@dataclasses.dataclass(frozen=True)
class Yarn(RotaryScaling):
    """Longer by `factor` than the `length` trained on; a factor of 1 is no extension. Raises `UserError`.

    A pair that turns more than `beta_fast` times in `length` keeps its frequency, one that turns less than `beta_slow`
    times has it divided by `factor`, in between is a ramp. `mscale` and `mscale_all` scale attention with the logarithm
    of the factor: the rotated part of it by their ratio, DeepSeek's scores by `mscale_all` squared; 0 for none. The
    base of the frequencies is a number, the same in all layers.
    """

    factor: float = 1.0
    length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all: float = 1.0

    def __post_init__(self):
        check_positive("model.yarn", self, "length", "beta_fast", "beta_slow")
        if self.factor < 1:
            raise UserError(f"model.yarn.factor={self.factor} must be at least 1; 1 is no extension")

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

    def frequencies(self, size: int, base: float | Float[Array, ""]) -> Float[Array, " half"]:
        """Radians a position for each of `size` / 2 pairs, computed in float64 and rounded to float32."""
        if self.factor == 1:
            return frequencies(size, base)
        base = float(base)  # the same in all layers: not an array that a scan brings
        plain = base ** (-np.arange(0, size, 2) / size)

        def pair_that_turns(times: float) -> float:
            return size * math.log(self.length / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(self.beta_slow)), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / (high - low or 0.001), 0, 1)
        return jnp.asarray(plain * (1 - ramp) + plain / self.factor * ramp, jnp.float32)
