"""Formats of few bits number by number, in Python's own numbers. It shares no code with moezoo."""

import math
from typing import Any

import ml_dtypes
import numpy as np

# What the 16 codes of FP4 stand for, as the table in OCP Microscaling Formats 1.0 prints them.
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def e4m3(byte: int) -> float:
    """Return the number of a byte: 1 bit of sign, 4 of exponent with bias 7, 3 of fraction."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return math.copysign(size, -1 if byte >> 7 else 1)


def power(code: int) -> float:
    """Return the scale of an E8M0 code."""
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


def scale_of(scale: Any) -> float:
    """Return a scale that is a code, or a number."""
    return power(int(scale)) if scale.dtype == np.uint8 else float(scale)


def fp8_number(items: Any, o: int, i: int) -> float:
    """Return a number of a matrix of e4m3 bytes."""
    return e4m3(int(items[o, i]))


def fp4_number(items: Any, o: int, i: int) -> float:
    """Return a number of bytes of two FP4 codes, the first one in the low bits."""
    return FP4[int(items[o, i // 2]) >> 4 * (i % 2) & 15]


def int4_number(items: Any, o: int, i: int) -> float:
    """Return a number of words of eight integers plus 8, the first one in the lowest bits."""
    return float((int(items[o, i // 8]) & 0xFFFFFFFF) >> 4 * (i % 8) & 15) - 8


def widen(number: Any, items: Any, scale: Any, shape: Any, block: Any, dtype: Any) -> np.ndarray:
    """Return the matrix [outputs, inputs], each number times the scale of its block, rounded to float32 and `dtype`."""
    result = np.zeros(shape, np.float32)
    for o in range(shape[0]):
        for i in range(shape[1]):
            result[o, i] = np.float32(number(items, o, i) * scale_of(scale[o // block[0], i // block[1]]))
    return result.astype(ml_dtypes.bfloat16).astype(dtype) if dtype == ml_dtypes.bfloat16 else result


def nearest(x: float, numbers: list[float]) -> float:
    """Return the nearest of the non-negative `numbers`, in the order of their codes; of two the even code's."""
    distances = [abs(x - number) for number in numbers]
    best = [code for code, distance in enumerate(distances) if distance == min(distances)]
    return numbers[next(code for code in best if code % 2 == 0 or len(best) == 1)]
