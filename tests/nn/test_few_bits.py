"""Formats of few bits against loops over their numbers: what files hold, containers made from it, and rounding."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import few_bit_oracle as oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from moezoo.nn.block_fp8 import BlockFP8
from moezoo.nn.containers import store
from moezoo.nn.few_bits import FewBits, as_float32, first_of_pieces
from moezoo.nn.int4 import PackedInt4
from moezoo.nn.linear import project
from moezoo.nn.mlp import MLP
from moezoo.nn.mxfp4 import MXFP4
from moezoo.parallel.axes import Axes, Role, count_parameters, parameter_table, trainable_mask

BF16 = ml_dtypes.bfloat16


class Format(NamedTuple):
    """A matrix as a file of one format holds it, and what its numbers are by the oracle."""

    kind: type[FewBits]
    shape: tuple[int, int]
    block: tuple[int, int]
    stored: np.ndarray  # the scales
    items: np.ndarray
    number: Any

    @property
    def scale(self) -> np.ndarray:
        """The scales, with codes as bytes."""
        return self.stored.view(np.uint8) if self.stored.dtype.itemsize == 1 else self.stored

    def by_hand(self, dtype: Any) -> np.ndarray:
        return oracle.widen(self.number, self.items, self.scale, self.shape, self.block, dtype)

    def widen(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return some numbers of the matrix in float32; the columns are all those of some bytes."""
        per = self.kind.PER_BYTE
        items = self.items.view(np.uint8)[rows][:, columns[::per] // per]
        return self.kind.widen(items, self.stored[rows // self.block[0]], columns // self.block[1])

    def container(self, axes: Axes, moved: Callable[[np.ndarray], np.ndarray]) -> Any:
        """Return the container of what one array has of the matrix, with pieces as large as they can be."""
        (rows, columns), block = self.shape, self.block
        codes, last = self.items, len(axes.inputs) - 1
        if self.kind is not BlockFP8:
            nibbles = [codes.view(np.uint8) >> shift & 15 for shift in (0, 4)]
            codes = np.stack(nibbles, -1).reshape(rows, columns)
        codes = moved(codes)
        if self.kind is not BlockFP8:
            first, second = (codes.take(range(i, codes.shape[last], 2), last) for i in (0, 1))
            codes = first | second << 4
        scale = self.scale[np.arange(rows)[:, None] // block[0], np.arange(columns) // block[1]]
        scale = functools.reduce(one_per_piece, range(moved(scale).ndim), moved(scale))
        values = np.ascontiguousarray(codes).view(np.uint8)
        return self.kind(values=values, scale=scale, outputs=len(axes.outputs), block=block, dtype=np.dtype(BF16))


def one_per_piece(scale: np.ndarray, dim: int) -> np.ndarray:
    """Return one scale for the largest pieces along a dimension that have one."""
    size = scale.shape[dim]
    for length in (n for n in range(size, 0, -1) if size % n == 0):
        pieces = np.moveaxis(scale, dim, -1).reshape(-1, size // length, length)
        if (pieces == pieces[..., :1]).all():
            break
    return scale.take(range(0, size, length), dim)


@functools.cache
def formats() -> dict[str, Format]:
    """Return random matrices of 28 outputs and 72 inputs. No last block is whole."""
    rng, (outputs, inputs) = np.random.default_rng(0), (28, 72)
    bytes_ = rng.integers(0, 256, (outputs, inputs), np.uint8)
    bytes_ -= (bytes_ & 127) == 127  # no NaN
    halves = rng.integers(0, 256, (outputs, inputs // 2), np.uint8)
    words = rng.integers(-(2**31), 2**31, (outputs, inputs // 8), np.int32)

    def blocks(rows: int, columns: int) -> tuple[int, int]:
        return math.ceil(outputs / rows), math.ceil(inputs / columns)

    numbers = (rng.standard_normal(blocks(12, 16)) * 10.0 ** rng.integers(-6, 3, blocks(12, 16))).astype(np.float32)
    codes = rng.integers(100, 150, blocks(8, 20), np.uint8).view(ml_dtypes.float8_e8m0fnu)
    of_groups = rng.integers(100, 150, blocks(1, 32), np.uint8)
    shape = (outputs, inputs)
    return {
        "fp8": Format(BlockFP8, shape, (12, 16), numbers, bytes_, oracle.fp8_number),
        "fp8 e8m0": Format(BlockFP8, shape, (8, 20), codes, bytes_, oracle.fp8_number),
        "mxfp4": Format(MXFP4, shape, (1, 32), of_groups, halves, oracle.fp4_number),
        "int4": Format(
            PackedInt4,
            shape,
            (1, 32),
            rng.standard_normal(blocks(1, 32)).astype(BF16),
            words,
            oracle.int4_number,
        ),
    }


NAMES = ("fp8", "fp8 e8m0", "mxfp4", "int4")
FLAT = Axes(Role.WEIGHT, (), ("embed",), ("mlp",))
HEADS = Axes(Role.WEIGHT, (), ("embed",), ("heads", "head_dim"))
FROM_HEADS = Axes(Role.WEIGHT, (), ("heads", "head_dim"), ("embed",))
# What one of our arrays has of a tensor [28, 72]: all of it; one of two that alternate; heads whose ends are within
# blocks; each head's last outputs, as of DeepSeek's `kv_b_proj`; inputs by heads.
MOVES = {
    "transposed": (FLAT, lambda x: x.T),
    "alternating": (FLAT, lambda x: x[1::2].T),
    "heads": (HEADS, lambda x: x.T.reshape(72, 4, 7)),
    "parts of heads": (HEADS, lambda x: x.reshape(2, 14, 72)[:, 4:].transpose(2, 0, 1)),
    "inputs": (FROM_HEADS, lambda x: x.T.reshape(4, 18, 28)),
}


def bits(x: Any) -> np.ndarray:
    """Return the bits of float32 or bfloat16, so that -0 is not 0."""
    x = np.asarray(x)
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


widened = jax.jit(lambda container: (container.materialise(jnp.float32), container.materialise(jnp.bfloat16)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_any_rows_and_columns(name, dtype):
    """Some rows and columns of a stored matrix, read with the bytes that hold them, have the loop's bits."""
    f = formats()[name]
    wanted, per = f.by_hand(dtype), f.kind.PER_BYTE

    def some(size: int) -> st.SearchStrategy[np.ndarray]:
        return st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(lambda numbers: np.sort(numbers))

    @given(some(28), some(72 // per))
    def check(rows: np.ndarray, items: np.ndarray) -> None:
        columns = (items[:, None] * per + np.arange(per)).reshape(-1)
        found = f.widen(rows, columns).astype(dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(bits(found), bits(wanted[rows][:, columns]))

    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("move", MOVES)
def test_containers(name, move):
    """Their arrays are equal to the bit to the moved ones of the loop, in bfloat16 and in float32."""
    f, (axes, moved) = formats()[name], MOVES[move]
    container = f.container(axes, moved)
    assert container.shape == moved(f.by_hand(np.float32)).shape
    for found, dtype in zip(widened(container), (np.float32, BF16), strict=True):
        np.testing.assert_array_equal(bits(found), bits(np.ascontiguousarray(moved(f.by_hand(dtype)))))


@pytest.mark.parametrize(
    ("blocks", "pieces"),
    [
        ([[0, 0, 0, 1, 1, 1]], [[0, 1]]),  # whole blocks
        ([[0, 0, 0, 0, 1, 1]], [[0, 0, 1]]),  # the last one is smaller
        ([[0, 0, 0], [1, 1, 1]], [[0], [1]]),  # a dimension before the last has one number in a piece
        ([[0, 0, 0, 0], [0, 0, 1, 1]], [[0, 0], [0, 1]]),
        ([[0, 1, 1], [1, 1, 2]], [[0, 1, 1], [1, 1, 2]]),
        ([[5, 5]], [[5]]),
    ],
)
def test_pieces_are_as_large_as_blocks_allow(blocks, pieces):
    np.testing.assert_array_equal(first_of_pieces(np.array(blocks)), pieces)


def everything(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all rows and all columns."""
    return np.arange(shape[0]), np.arange(shape[1])


def test_all_codes_of_fp8():
    items = np.arange(256, dtype=np.uint8).reshape(2, 128)
    made = Format(BlockFP8, (2, 128), (128, 128), np.ones((1, 1), np.float32), items, None)
    wanted = np.array([[oracle.e4m3(int(byte)) for byte in row] for row in items], np.float32)
    assert np.isnan(wanted).sum() == 2
    np.testing.assert_array_equal(made.widen(*everything((2, 128))), wanted)
    found, _ = widened(made.container(FLAT, np.transpose))
    np.testing.assert_array_equal(found, wanted.T)
    finite = ~np.isnan(wanted.T)
    np.testing.assert_array_equal(bits(found)[finite], bits(np.ascontiguousarray(wanted.T))[finite])


@pytest.mark.parametrize("kind", [np.uint8, ml_dtypes.float8_e8m0fnu])
def test_all_scales_and_numbers_of_mxfp4(kind):
    """Row s has the scale of code s. A compiled program may take a result below 2^-126, the least normal, for zero."""
    items = np.tile((np.arange(0, 16, 2) | np.arange(1, 16, 2) << 4).astype(np.uint8), (256, 2))
    made = Format(MXFP4, (256, 32), (1, 32), np.arange(256, dtype=np.uint8)[:, None].view(kind), items, None)
    with np.errstate(over="ignore"):  # 6 * 2^127 is infinity
        wanted = oracle.widen(
            oracle.fp4_number, items, np.arange(256, dtype=np.uint8)[:, None], (256, 32), (1, 32), np.float32
        )
    assert np.isnan(wanted[255]).all()
    assert not np.isnan(wanted[:255]).any()
    assert wanted[0, 1] == 2.0**-128
    for dtype in (np.float32, BF16):
        with np.errstate(over="ignore"):
            found = made.widen(*everything((256, 32))).astype(dtype)
        np.testing.assert_array_equal(found.astype(np.float32), wanted)
        np.testing.assert_array_equal(bits(found)[:255], bits(wanted.astype(dtype))[:255])
    for found in widened(made.container(FLAT, np.transpose)):
        found, tiny = np.asarray(found, np.float32).T, np.abs(wanted) < 2.0**-126
        np.testing.assert_array_equal(found[~tiny], wanted[~tiny])
        assert ((found[tiny] == wanted[tiny]) | (found[tiny] == 0)).all()


def test_all_scales_of_fp8():
    """A result is exact where it is normal, also if its scale is not: 2^-127."""
    codes = np.arange(256, dtype=np.uint8)[:, None]
    wanted = np.array([oracle.power(int(code)) for code in codes[:, 0]], np.float32)
    np.testing.assert_array_equal(as_float32(codes)[:, 0], wanted)
    items = np.full((256, 1), 0x40, np.uint8)  # 2
    found, _ = widened(Format(BlockFP8, (256, 1), (1, 1), codes, items, None).container(FLAT, np.transpose))
    np.testing.assert_array_equal(found[0], [*(2 * wanted[:254].astype(np.float64)), np.inf, np.nan])


def test_an_odd_number_of_inputs_is_refused():
    with refused("MXFP4: 3 numbers along the last input dimension, expected an even number"):
        jax.eval_shape(lambda x: MXFP4.rounded(x, FLAT), np.ones((3, 2), np.float32))


STACKED = Axes(Role.WEIGHT, ("layer", "expert"), ("expert_embed",), ("expert_mlp",))


def hard_weight() -> np.ndarray:
    """Return [2, 2, 40, 28] of very different magnitude, with a block of zeros, in which all formats round."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((2, 2, 40, 28)) * 10.0 ** rng.uniform(-4, 2, (2, 2, 40, 28))).astype(np.float32)
    weight[0, 1, :32, :12] = 0
    return weight


def check_blocks(weight: np.ndarray, found: np.ndarray, block: tuple[int, int], wanted: Any) -> None:
    """Compare each block [inputs, outputs] of each matrix with `wanted(block)`; the sizes are of outputs and inputs."""
    for index in np.ndindex(weight.shape[:-2]):
        for i in range(0, weight.shape[-2], block[1]):
            for o in range(0, weight.shape[-1], block[0]):
                at = (*index, slice(i, i + block[1]), slice(o, o + block[0]))
                np.testing.assert_array_equal(bits(np.ascontiguousarray(found[at])), bits(wanted(weight[at])))


E4M3 = [oracle.e4m3(byte) for byte in range(127)]


@pytest.mark.parametrize("scales", ["float32", "e8m0"])
def test_rounding_to_fp8(scales):
    """Each number is the nearest multiple of its block's scale that e4m3 has, ties to the even code."""
    weight = hard_weight()
    make = jax.jit(functools.partial(BlockFP8.rounded, size=(12, 16), scales=scales), static_argnums=1)
    stored = make(weight, STACKED)
    found = np.asarray(widened(stored)[0])

    def block(x: np.ndarray) -> np.ndarray:
        largest = float(np.abs(x).max())
        if scales == "e8m0":
            scale = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
        else:
            scale = float(np.float32(largest) * np.float32(1 / 448)) if largest else 1.0
        result = np.zeros_like(x)
        for at, number in np.ndenumerate(x):
            code = oracle.nearest(min(float(np.float32(abs(float(number)) / scale)), 448.0), E4M3)
            result[at] = np.float32(math.copysign(code, float(number))) * np.float32(scale)
            # The bound of docs/numbers.md; the last factor allows for the roundings of quotient and product.
            assert abs(float(result[at]) - float(number)) <= max(abs(number) / 16, scale / 1024) * (1 + 1e-5)
        return result

    check_blocks(weight, found, (12, 16), block)
    assert stored.scale.dtype == (jnp.uint8 if scales == "e8m0" else jnp.float32)
    if scales == "e8m0":  # with float32 scales, the quotient of the largest number by 448 may round
        np.testing.assert_array_equal(widened(make(found, STACKED))[0], found)


def test_rounding_to_mxfp4():
    """A group's scale is 2^(floor(log2(largest)) - 2); numbers above 6 times it become 6."""
    weight = hard_weight()
    make = jax.jit(MXFP4.rounded, static_argnums=1)
    found = np.asarray(widened(make(weight, STACKED))[0])

    def block(x: np.ndarray) -> np.ndarray:
        largest = float(np.abs(x).max())
        scale = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 1.0
        result = np.zeros_like(x)
        for at, number in np.ndenumerate(x):
            code = oracle.nearest(min(abs(float(number)) / scale, 6.0), oracle.FP4[:8])
            result[at] = math.copysign(code * scale, float(number))
            assert abs(float(result[at]) - float(number)) <= max(abs(float(number)), scale) / 4
        return result

    check_blocks(weight, found, (1, 32), block)
    np.testing.assert_array_equal(widened(make(found, STACKED))[0], found)
    # Ties: 1.25 lies between the codes 2 and 3, 1.75 between 3 and 4, and so on. The scale is 1.
    ties = np.array([4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, 7.9], np.float32)
    rounded, _ = widened(make(ties[:, None], FLAT))
    np.testing.assert_array_equal(rounded[:, 0], [4, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -4, 6])


@pytest.mark.parametrize(
    "round_", [BlockFP8.rounded, functools.partial(BlockFP8.rounded, scales="e8m0"), MXFP4.rounded]
)
def test_a_weight_that_is_not_finite_stays_visible(round_):
    """Its whole block is NaN; others are not."""
    make = jax.jit(lambda weight: round_(weight, FLAT).materialise(jnp.float32))
    length = 32 if round_ == MXFP4.rounded else 128
    for bad in (np.nan, np.inf, -np.inf):
        weight = np.full((256, 2), 0.3, np.float32)
        weight[1, 1] = bad
        whole = np.asarray(make(weight))
        assert np.isnan(whole[:length, 1]).all()
        np.testing.assert_allclose(whole[length:], 0.3, rtol=0.25)


def test_axes_training_and_products():
    """Both arrays have the weight's axes; no filter trains them; a product is that of the widened array."""
    mlp = MLP(8, 6, out_std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0))
    round_ = functools.partial(BlockFP8.rounded, size=(4, 4))
    stored: Any = jax.jit(lambda mlp: store(mlp, lambda path: path != ".up", round_))(mlp)
    assert parameter_table(stored) == parameter_table(mlp)
    assert count_parameters(stored, 1) == count_parameters(mlp, 1)
    assert jax.tree.leaves(trainable_mask(stored)) == [False, False, True, False, False]
    with refused("trained chooses .gate.scale, which is a frozen part; choose only"):
        trainable_mask(stored, [".gate.scale"])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.float32)
    np.testing.assert_array_equal(project(x, stored.gate), project(x, stored.gate.materialise(jnp.float32)))
