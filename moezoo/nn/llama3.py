"""The rotary positions of Llama 3.1, extended to longer texts (Grattafiori et al., 2024, arXiv:2407.21783)."""

import dataclasses
import math
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moezoo.nn.rope import RotaryScaling, frequencies
from moezoo.typed import AtMost, Positive, Range, Size, check_fields


@dataclasses.dataclass(frozen=True)
class Llama3(RotaryScaling):
    """The settings of Llama 3.1's extension. Frequencies depend on how often a pair rotates within the training length:

    | rotations in `length` tokens | frequency |
    |---|---|
    | more than `high` | unchanged |
    | fewer than `low` | divided by `factor` |
    | between | a linear ramp, in rotations, between the two |

    Args:
        factor: What slow frequencies are divided by; 1 is no extension.
        length: The tokens per text in training.

    Raises:
        UserError: A value has a wrong type, a number is out of its range, or `low` is not below `high`.
    """

    factor: Annotated[float, Range(at_least=1)] = 1.0
    length: Size = 8192
    low: Annotated[Positive, AtMost("high", strict=True)] = 1.0
    high: Positive = 4.0

    def __post_init__(self):
        check_fields("model.llama3", self)

    def frequencies(self, size: int, base: float) -> Float[Array, " half"]:
        """Return the radians per position of each of `size` / 2 pairs, computed in float64 and rounded to float32."""
        if self.factor == 1:
            return frequencies(size, base)
        plain = base ** (-np.arange(0, size, 2) / size)
        rotations = self.length * plain / (2 * math.pi)
        kept = np.clip((rotations - self.low) / (self.high - self.low), 0, 1)
        return jnp.asarray(plain * kept + plain / self.factor * (1 - kept), jnp.float32)
