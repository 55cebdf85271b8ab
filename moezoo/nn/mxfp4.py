"""MXFP4 weights, as gpt-oss and DeepSeek-V4 release them: FP4 numbers, 32 of which share a power of two."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8

from moezoo.nn.few_bits import FewBits, block_maxima, e8m0, inverse_e8m0, pack, times_scale
from moezoo.parallel.roles import Axes

GROUP = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class MXFP4(FewBits):
    """A weight as FP4 numbers, two in a byte, and one E8M0 code per 32 numbers along the inputs, or per piece of 32.

    weight[o, i] = e2m1[o, i] * 2^(code[o, i // 32] - 127), which is exact in bfloat16. This is
    `convert_moe_packed_tensors` of transformers. Code 255 is NaN as in the standard (OCP Microscaling Formats 1.0);
    transformers reads infinity.
    """

    PER_BYTE: ClassVar[int] = 2
    # e2m1; bit 3 is the sign, and code 8 is -0.
    NUMBERS: ClassVar[np.ndarray] = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)

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
