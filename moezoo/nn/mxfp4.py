"""MXFP4 weights, as gpt-oss and DeepSeek-V4 release them: FP4 numbers, 32 of which share a power of two."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8

from moezoo.nn.few_bits import (
    Encoding,
    FewBits,
    block_maxima,
    e8m0,
    inverse_e8m0,
    pack,
    times_scale,
    unpack,
)
from moezoo.parallel.roles import Axes

GROUP = 32
# What the codes 0 to 7 stand for (e2m1); bit 3 is the sign, and code 8 is -0.
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True, eq=False)
class MXFP4Encoding(Encoding):
    """A tensor of bytes [outputs, inputs / 2] and a tensor of E8M0 codes [outputs, inputs / 32].

    A byte holds two neighbours along the inputs, the first one in its low bits.

        weight[o, i] = e2m1[o, i] * 2^(code[o, i // 32] - 127)

    It is exact in bfloat16. This is `convert_moe_packed_tensors` of transformers, where gpt-oss has the bytes as
    [experts, outputs, inputs / 32, 16]: give those of one expert as [outputs, inputs / 2]. Code 255 is NaN as in the
    standard (OCP Microscaling Formats 1.0); transformers reads infinity.
    """

    PER_ITEM: ClassVar[int] = 2
    ITEMS: ClassVar[tuple[Any, ...]] = (np.uint8, np.int8)
    SCALES: ClassVar[tuple[Any, ...]] = (np.uint8, ml_dtypes.float8_e8m0fnu)

    @property
    def block(self) -> tuple[int, int]:
        """One output and 32 inputs."""
        return 1, GROUP

    def codes(self, items: np.ndarray) -> np.ndarray:
        """Return the four bits of each number."""
        return unpack(items.view(np.uint8))

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        """Look the codes up."""
        return np.array([*NUMBERS, *(-x for x in NUMBERS)], np.float32).take(codes, mode="clip")


class MXFP4(FewBits):
    """A weight as FP4 numbers, two in a byte, and one E8M0 code per 32 numbers along the inputs, or per piece of 32."""

    PER_BYTE: ClassVar[int] = 2

    def _numbers(self, codes: UInt8[Array, "..."]) -> Float32[Array, "..."]:
        """Compute twice the number as an integer from its two bits of exponent and one of fraction."""
        wide = codes.astype(jnp.int32)
        exponent, fraction = (wide >> 1) & 3, wide & 1
        doubled = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
        number = doubled.astype(jnp.float32) / 2
        return jnp.where(wide >= 8, -number, number)

    @classmethod
    def rounded(cls, weight: Float[Array, "..."], axes: Axes) -> "MXFP4":
        """Round an array: a container for `moezoo.nn.containers.store`. The definition is in `docs/numbers.md`.

        Args:
            weight: [*stacked, *inputs, *outputs]; the last input dimension is even.
            axes: The axes of the weight's field.

        Raises:
            UserError: The last input dimension is odd.
        """
        largest, per_piece = block_maxima(weight, axes, (1, GROUP))
        scale = per_piece(e8m0(largest, 2, 2.0))
        x = jnp.abs(times_scale(weight.astype(jnp.float32), inverse_e8m0(scale)))
        # The middle between two numbers goes to the one with an even code.
        below, from_ = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
        code = sum((x > middle).astype(jnp.uint8) for middle in below)
        code += sum((x >= middle).astype(jnp.uint8) for middle in from_)
        code += jnp.signbit(weight).astype(jnp.uint8) << 3
        outputs = len(axes.outputs)
        values = pack(code, weight.ndim - outputs - 1, "MXFP4")
        return cls(values=values, scale=scale, outputs=outputs, block=(1, GROUP), dtype=np.dtype(weight.dtype))
