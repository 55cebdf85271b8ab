"""What containers of few bits have in common: numbers of 4 or 8 bits, and scales that blocks of them share.

A *block* is a rectangle of a matrix whose numbers have one scale. Formats of files cut a matrix [outputs, inputs] into
blocks. A device, or one of several arrays that a file has in one tensor, may begin or end inside a block. So a
container has one scale per *piece*: pieces are equal in size along each dimension, and none reaches into two blocks. A
piece is often a whole block; where it is less, scales are repeated. Scales then have the logical axes of the numbers,
are split and gathered like them, and a layout that divides the number of pieces needs nothing else.

With pieces of m by n numbers, a scale of s bytes costs s / (m n) bytes per number: 4 / (128 x 128) for whole blocks of
FP8. Of 7,168 rows on 512 devices each has 14, so pieces are 2 by 128 and the scales cost 1.6% of the numbers.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

from moezoo.errors import UserError
from moezoo.parallel.axes import axes_of
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.roles import Axes, Role
from moezoo.parallel.stored import Frozen

# The code of an E8M0 scale is its exponent plus this; 255 is NaN (OCP Microscaling Formats 1.0, section 5.4.1).
E8M0_BIAS, E8M0_NAN = 127, 255


class FewBits(Frozen):
    """A weight as numbers of few bits and one scale per piece of a block.

    Attributes:
        values: The numbers. 8-bit ones as uint8 [*stacked, *inputs, *outputs], which no backend widens to send it;
            4-bit ones as uint8 with two neighbours along the last input dimension in one byte, the first one in the low
            bits.
        scale: The same dimensions. Along dimension i, `shape[i] / scale.shape[i]` neighbours have the same scale.
        outputs: The number of output dimensions.
        block: The size of a block along outputs and inputs, each with its dimensions joined, in a file.
        dtype: The dtype of the array that the container stands for.
    """

    values: UInt8[Array | np.ndarray, "..."]
    scale: Array | np.ndarray
    outputs: int = eqx.field(static=True)
    block: tuple[int, int] = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    # The numbers in a byte, and what each code stands for without a scale.
    PER_BYTE: ClassVar[int] = 1
    NUMBERS: ClassVar[np.ndarray]

    @abc.abstractmethod
    def _numbers(self, codes: UInt8[Array, "..."]) -> Float32[Array, "..."]:
        """Return what codes stand for without scales, as `NUMBERS` has it, by instructions that devices are fast at."""

    @classmethod
    def widen(cls, items: np.ndarray, scale: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return numbers of a file on the host: each times the scale of its block, in float32.

        Subnormal results are exact, which compiled programs may take for zero.

        Args:
            items: Bytes of rows, [..., rows, columns / PER_BYTE]; of two 4-bit neighbours the first is in the low bits.
            scale: The scales of blocks of the same rows, [..., rows, blocks].
            blocks: The block of each column.

        Returns:
            float32 [..., rows, columns].
        """
        codes = items
        if cls.PER_BYTE == 2:
            codes = np.stack([items & 15, items >> 4], axis=-1).reshape(*items.shape[:-1], -1)
        numbers = cls.NUMBERS.take(codes, mode="clip")  # the fastest way: without a check of each index
        with np.errstate(over="ignore", invalid="ignore"):
            numbers *= as_float32(scale)[..., blocks]
        return numbers

    def axes(self, declared: Axes) -> Mapping[str, Axes]:
        """Return the declared axes for both arrays."""
        part = Axes(Role.FROZEN, declared.stacked, declared.inputs, declared.outputs)
        return {"values": part, "scale": part}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that the container stands for."""
        sizes = list(self.values.shape)
        sizes[self._packed] *= self.PER_BYTE
        return tuple(sizes)

    @property
    def _packed(self) -> int:
        """The dimension along which bytes hold several numbers: the last input dimension."""
        return self.values.ndim - self.outputs - 1

    def materialise(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return each number times its scale, in float32, rounded once to `dtype`."""
        codes = jnp.asarray(self.values)
        if self.PER_BYTE == 2:
            codes = jnp.stack([codes & 15, codes >> 4], axis=self._packed + 1).reshape(self.shape)
        return times_scale(self._numbers(codes), jnp.asarray(self.scale)).astype(dtype)


def as_float32(scale: np.ndarray) -> np.ndarray:
    """Return scales in float32: the powers of two that E8M0 codes stand for (uint8 or float8_e8m0fnu), or the numbers.

    Code 0 is 2^-127, which float32 has as a subnormal number; code 255 is NaN.
    """
    if scale.dtype.itemsize == 1:
        codes = scale.view(np.uint8).astype(np.int32)
        powers = np.ldexp(np.float32(1), np.minimum(codes, E8M0_NAN - 1) - E8M0_BIAS)
        return np.where(codes == E8M0_NAN, np.float32(np.nan), powers)
    return scale.astype(np.float32)


def times_scale(numbers: Float32[Array, "..."], scale: Array) -> Float32[Array, "..."]:
    """Return each number times the scale of its piece, E8M0 codes or floating-point numbers, in float32."""
    if scale.dtype != jnp.uint8:
        return numbers * spread(scale.astype(jnp.float32), numbers.shape)
    for factor in _factors(scale):
        numbers = numbers * spread(factor, numbers.shape)
    return numbers


def _factors(codes: UInt8[Array, "..."]) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """Return two factors whose product is the power of two that an E8M0 code stands for.

    XLA takes subnormal numbers for zero on some processors, and 2^-127 is one. The factors are about the root.
    """
    wide = codes.astype(jnp.int32)
    first = wide // 2
    exponents = (first + 64, wide - first + 63)  # biased: 2^(first - 63) and 2^(code - first - 64)
    one, other = (lax.bitcast_convert_type(exponent << 23, jnp.float32) for exponent in exponents)
    return jnp.where(codes == E8M0_NAN, jnp.float32(jnp.nan), one), other


def e8m0(largest: Float32[Array, "..."], exponent: int, above: float) -> UInt8[Array, "..."]:
    """Return the code of 2^(floor(log2(largest)) - exponent), or of twice that where largest > above * 2^floor(...).

    It is kept between 0 and 254. The code for 0 is that of 1, and for what is not finite that of NaN.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    fraction = (bits & 0x7FFFFF).astype(jnp.float32) / 2**23
    code = jnp.clip((bits >> 23) - exponent + (1 + fraction > above).astype(jnp.int32), 0, E8M0_NAN - 1)
    code = jnp.where(largest == 0, E8M0_BIAS, code)
    return jnp.where(jnp.isfinite(largest), code, E8M0_NAN).astype(jnp.uint8)


def inverse_e8m0(codes: UInt8[Array, "..."]) -> UInt8[Array, "..."]:
    """Return the codes of the reciprocals; that of NaN is itself."""
    return 2 * E8M0_BIAS - codes  # 254 - 255 is 255 in 8 bits


def spread(scale: Array, shape: Sequence[int]) -> Array:
    """Repeat each scale for the numbers of its piece."""
    pairs = [(pieces, size // pieces) for pieces, size in zip(scale.shape, shape, strict=True)]
    scale = scale.reshape([n for pieces, _ in pairs for n in (pieces, 1)])
    return jnp.broadcast_to(scale, [n for pair in pairs for n in pair]).reshape(shape)


def first_of_pieces(blocks: np.ndarray) -> np.ndarray:
    """Return the block of each piece, given that of each input (or output), [*dims].

    Along all dimensions but the last, which a mesh may split down to one (heads), a piece has one number.
    """
    size = blocks.shape[-1]
    for length in range(size, 0, -1):
        if size % length == 0:
            pieces = blocks.reshape(*blocks.shape[:-1], size // length, length)
            if (pieces == pieces[..., :1]).all():
                return pieces[..., 0]
    raise AssertionError("a piece of one number is in one block")


def _per_piece(scale: Any, of_columns: np.ndarray, of_rows: np.ndarray) -> Any:
    """Return the scales of pieces [*inputs, *outputs] from those of blocks [..., outputs, inputs]."""
    chosen = scale[..., of_rows.reshape(-1)[:, None], of_columns.reshape(-1)[None]].swapaxes(-1, -2)
    return chosen.reshape(*scale.shape[:-2], *of_columns.shape, *of_rows.shape)


class BlockMaxima(NamedTuple):
    """The largest absolute value of each block of a weight, and a function from an array of blocks to one of pieces."""

    largest: Float32[Array, "... outputs inputs"]
    per_piece: Callable[[Array], Array]


def block_maxima(weight: Float[Array, "..."], axes: Axes, block: tuple[int, int]) -> BlockMaxima:
    """Return the largest absolute value of each block; NaN where a number is not finite.

    Blocks are those of a file that holds each matrix as [outputs, inputs], with the dimensions of each joined.

    Args:
        weight: [*stacked, *inputs, *outputs].
        axes: The axes of the weight's field.
        block: The size of a block along outputs and inputs; the last ones may be smaller.
    """
    first, last = len(axes.stacked), len(axes.stacked) + len(axes.inputs)
    stacked, inputs, outputs = weight.shape[:first], weight.shape[first:last], weight.shape[last:]
    x = jnp.abs(weight.astype(jnp.float32)).reshape(*stacked, math.prod(inputs), math.prod(outputs)).swapaxes(-1, -2)
    sizes = [min(size, length) for size, length in zip(block, x.shape[-2:], strict=True)]
    x = jnp.pad(x, [*((0, 0) for _ in stacked), *((0, -n % size) for n, size in zip(x.shape[-2:], sizes, strict=True))])
    x = x.reshape(*stacked, x.shape[-2] // sizes[0], sizes[0], x.shape[-1] // sizes[1], sizes[1])
    of_columns, of_rows = (
        first_of_pieces(np.arange(math.prod(dims)).reshape(dims) // size)
        for dims, size in ((inputs, block[1]), (outputs, block[0]))
    )
    # Compiled, the largest of NaN and a number may be the number.
    largest = jnp.where(jnp.isfinite(x).all((-3, -1)), x.max((-3, -1)), jnp.nan)
    return BlockMaxima(largest, lambda blocks: _per_piece(blocks, of_columns, of_rows))


def pack(codes: Any, dim: int, name: str) -> Any:
    """Put each two 4-bit neighbours along a dimension into one byte, the first one into the low bits."""
    if codes.shape[dim] % 2:
        raise UserError(
            f"{name}: {codes.shape[dim]} numbers along the last input dimension, expected an even number, because a "
            "byte holds two; keep this weight in bfloat16"
        )
    low, high = (codes[(slice(None),) * dim + (slice(start, None, 2),)] for start in (0, 1))
    return low | (high << 4)


def cut_pieces(model: Any, execution: Execution) -> Any:
    """Return `model` with smaller pieces in its `FewBits` where the layout of `execution` would cut a piece.

    Scales are repeated, so no number changes. The result fits every layout that divides its number of pieces.
    For shapes instead of arrays, use `jax.eval_shape`.
    """

    here = on_mesh(execution)

    def cut(x: Any, axes: Any) -> Any:
        if not isinstance(x, FewBits):
            return x
        scale, sizes = x.scale, x.shape
        for dim, mesh_axes in enumerate(here.placement(axes.scale, scale.shape).stored):
            pieces, ways = scale.shape[dim], here.ways(mesh_axes)
            if pieces % ways and sizes[dim] % ways == 0:
                length = math.gcd(sizes[dim] // pieces, sizes[dim] // ways)
                scale = jnp.repeat(scale, sizes[dim] // length // pieces, axis=dim)
        return eqx.tree_at(lambda container: container.scale, x, scale)

    return jax.tree.map(cut, model, axes_of(model), is_leaf=lambda x: isinstance(x, FewBits))


def has_few_bits(model: Any) -> bool:
    """Return whether a model has weights of few bits."""
    return any(isinstance(x, FewBits) for x in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, FewBits)))


def with_pieces_of(model: Any, other: Any, spread_over: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return `model`, whose scales have one number per piece of `other`, a model of the same weights.

    Each piece of either is within one block, so no number changes. Of scales in other pieces, those are cut that
    `spread_over` returns of the array. Arrays may be None.
    """

    def cut(x: Any, wanted: Any) -> Any:
        if not isinstance(x, FewBits) or x.scale is None or x.scale.shape == wanted.scale.shape:
            return x
        scale = spread_over(x.scale)
        for dim, (have, want) in enumerate(zip(x.scale.shape, wanted.scale.shape, strict=True)):
            if have != want:
                size = x.shape[dim]
                first = np.arange(want) * (size // want)  # the first number of each piece
                scale = jnp.take(scale, first // (size // have), axis=dim)
        return eqx.tree_at(lambda container: container.scale, x, scale)

    return jax.tree.map(cut, model, other, is_leaf=lambda x: x is None or isinstance(x, FewBits))
