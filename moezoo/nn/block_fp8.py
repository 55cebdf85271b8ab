"""FP8 weights whose blocks share a scale, as DeepSeek-V3, Kimi K2, Qwen3 and others release them."""

from typing import ClassVar, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8

from moezoo.nn.few_bits import FewBits, block_maxima, e8m0, inverse_e8m0, spread, times_scale
from moezoo.parallel.roles import Axes

# The largest number of e4m3.
LARGEST = 448


class BlockFP8(FewBits):
    """A weight as e4m3 numbers and one scale per block, or per piece of one: numbers or E8M0 codes (uint8).

    weight[o, i] = e4m3[o, i] * scale[o // b, i // b'], in float32 and rounded once, with blocks of b x b'. The last
    block along a dimension may be smaller. Scales are float32, bfloat16 (Qwen3), or E8M0 codes (`scale_fmt: ue8m0`).
    This is `weight_dequant` of DeepSeek-V3's `kernel.py`, and what transformers does where blocks are whole.
    """

    # A sign, four bits of exponent of bias 7, three bits of fraction; 0x7f is NaN.
    NUMBERS: ClassVar[np.ndarray] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

    def _numbers(self, codes: UInt8[Array, "..."]) -> Float32[Array, "..."]:
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)

    @classmethod
    def rounded(
        cls,
        weight: Float[Array, "..."],
        axes: Axes,
        *,
        size: tuple[int, int] = (128, 128),
        scales: Literal["float32", "e8m0"] = "float32",
    ) -> "BlockFP8":
        """Round an array: a container for `moezoo.nn.containers.store`. The definition is in `docs/numbers.md`.

        Args:
            weight: [*stacked, *inputs, *outputs].
            axes: The axes of the weight's field.
            size: The size of a block along outputs and inputs, each with its dimensions joined.
            scales: float32 numbers, the largest value of a block times 1 / 448; or the least power of two that is not
                below, as E8M0 codes.
        """
        largest, per_piece = block_maxima(weight, axes, size)
        if scales == "e8m0":
            scale = per_piece(e8m0(largest, 8, LARGEST / 2**8))
            quotient = times_scale(weight.astype(jnp.float32), inverse_e8m0(scale))
        else:
            # Not a division, which XLA would turn into this product in some programs.
            scale = largest * np.float32(1 / LARGEST)
            scale = per_piece(jnp.where(scale == 0, 1, scale))
            quotient = weight.astype(jnp.float32) / spread(scale, weight.shape)
        numbers = jnp.clip(quotient, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        values = lax.bitcast_convert_type(numbers, jnp.uint8)
        return cls(values=values, scale=scale, outputs=len(axes.outputs), block=size, dtype=np.dtype(weight.dtype))
