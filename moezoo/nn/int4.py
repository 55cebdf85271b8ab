"""4-bit integers with scales, as Kimi K2 Thinking and others release them (compressed-tensors `pack-quantized`)."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from moezoo.nn.few_bits import FewBits

GROUP = 32
# A nibble holds the integer plus this.
OFFSET = 8


class PackedInt4(FewBits):
    """A weight as integers from -8 to 7, two in a byte, and one scale per group of inputs, or per piece of a group.

    weight[o, i] = (nibble[o, i] - 8) * scale[o, i // group], in float32 and rounded once. With bfloat16 scales and a
    result in bfloat16 this is what compressed-tensors computes for symmetric integers of 4 bits. Numbers with a zero
    point, which have a tensor `weight_zero_point`, are another format.
    """

    PER_BYTE: ClassVar[int] = 2
    NUMBERS: ClassVar[np.ndarray] = np.arange(16, dtype=np.float32) - OFFSET

    def _numbers(self, codes: UInt8[Array, "..."]) -> Float32[Array, "..."]:
        return codes.astype(jnp.float32) - OFFSET
