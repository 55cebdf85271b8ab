"""4-bit integers with scales, as Kimi K2 Thinking and others release them (compressed-tensors `pack-quantized`)."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float32, UInt8

from moezoo.nn.few_bits import Encoding, FewBits, unpack

GROUP = 32
# A nibble holds the integer plus this.
OFFSET = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Int4Encoding(Encoding):
    """A tensor `weight_packed` of int32 [outputs, inputs / 8] and a tensor `weight_scale` [outputs, inputs / 32].

    A word holds eight neighbours along the inputs, the first one in its lowest bits.

        weight[o, i] = (nibble[o, i] - 8) * scale[o, i // 32]

    in float32 and rounded once. With bfloat16 scales and a result in bfloat16 this is what compressed-tensors computes
    for symmetric integers of 4 bits. Numbers with a zero point, which have a tensor `weight_zero_point`, are another
    format.

    Attributes:
        group: The number of neighbours along the inputs that share a scale.
    """

    group: int = GROUP

    PER_ITEM: ClassVar[int] = 8
    ITEMS: ClassVar[tuple[Any, ...]] = (np.int32,)
    SCALES: ClassVar[tuple[Any, ...]] = (ml_dtypes.bfloat16, np.float16, np.float32)

    @property
    def block(self) -> tuple[int, int]:
        """One output and a group of inputs."""
        return 1, self.group

    def codes(self, items: np.ndarray) -> np.ndarray:
        """Return the four bits of each number. The bytes of a word go from its lowest to its highest bits."""
        return unpack(np.ascontiguousarray(items.astype("<i4", copy=False)).view(np.uint8))

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        """Return the integers, -8 to 7."""
        return codes.astype(np.float32) - OFFSET


class PackedInt4(FewBits):
    """A weight as integers from -8 to 7, two in a byte, and one scale per group of inputs, or per piece of a group."""

    PER_BYTE: ClassVar[int] = 2

    def _numbers(self, codes: UInt8[Array, "..."]) -> Float32[Array, "..."]:
        return codes.astype(jnp.float32) - OFFSET
