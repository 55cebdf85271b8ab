"""Parts of arrays in files: which bytes of a file hold a part, each of them read once.

A box is a part of an array: for each dimension, the indices from a first one up to the end.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Interval = tuple[int, int]
Box = tuple[Interval, ...]

LEAST = 2**16  # Runs of fewer bytes are read together with what lies between them.


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of an array that a file holds in C order.

    Attributes:
        shape: The shape of the array.
        dtype: The dtype of its numbers in the file.
        at: The offset of its first byte in the file.
        chosen: For each dimension, the intervals of indices that are read, in ascending order and disjoint.
        contiguous: The first dimension after which every dimension is read whole.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    at: int
    chosen: tuple[tuple[Interval, ...], ...]
    contiguous: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype, at: int, boxes: Iterable[Box]) -> "Region":
        """Return the smallest region of an array that holds `boxes` and is read in runs of at least `LEAST` bytes."""
        chosen = [_union(intervals) for intervals in zip(*boxes, strict=True)]
        split = [dim for dim, size in enumerate(shape) if chosen[dim] != ((0, size),)]
        dim = max(split, default=0)
        while dim > 0 and min(end - start for start, end in chosen[dim]) * _bytes(shape[dim + 1 :], dtype) < LEAST:
            chosen[dim] = ((0, shape[dim]),)
            dim -= 1
        return cls(shape, dtype, at, tuple(chosen), dim)

    @property
    def read_shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        return tuple(sum(end - start for start, end in intervals) for intervals in self.chosen)

    @property
    def size(self) -> int:
        """The number of bytes that are read."""
        return _bytes(self.read_shape, self.dtype)

    def cut(self, most: int) -> Iterator["Region"]:
        """Yield regions of at most `most` bytes that make up this one, in order; one run may have more."""
        dim = next((d for d in range(self.contiguous + 1) if self.read_shape[d : d + 1] > (1,)), None)
        if self.size <= most or dim is None:
            yield self
            return
        rows = max(1, most * self.read_shape[dim] // self.size)
        for start, end in self.chosen[dim]:
            for first in range(start, end, rows):
                some = ((first, min(first + rows, end)),)
                chosen = (*self.chosen[:dim], some, *self.chosen[dim + 1 :])
                yield from dataclasses.replace(self, chosen=chosen).cut(most)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and the number of bytes of each run of the file, in order."""
        strides = [_bytes(self.shape[dim + 1 :], self.dtype) for dim in range(len(self.shape))]
        if not strides:
            yield self.at, self.dtype.itemsize
            return
        outer = (itertools.chain(*(range(*i) for i in intervals)) for intervals in self.chosen[: self.contiguous])
        for index in itertools.product(*outer):
            at = self.at + sum(i * stride for i, stride in zip(index, strides, strict=False))
            for start, end in self.chosen[self.contiguous]:
                yield at + start * strides[self.contiguous], (end - start) * strides[self.contiguous]

    def read(self, file: int) -> np.ndarray:
        """Return the numbers [`read_shape`] in the open file with this descriptor. Raises `EOFError` if it is short."""
        numbers = np.empty(self.size, np.uint8)
        left: Any = numbers.data
        for offset, size in self.runs():
            end = offset + size
            while offset < end:
                got = os.preadv(file, [left[: end - offset]], offset)
                if not got:
                    raise EOFError
                left, offset = left[got:], offset + got
        return numbers.view(self.dtype).reshape(self.read_shape)

    def find(self, box: Box) -> tuple[Box, tuple[slice, ...]] | None:
        """Return the part of `box` that this region holds, and where it is in what is read; None if there is none.

        The box is one of those that `of` was given.
        """
        inside, where = [], []
        for (first, last), intervals in zip(box, self.chosen, strict=True):
            before = 0
            for start, end in intervals:
                low, high = max(first, start), min(last, end)
                if low < high:
                    inside.append((low, high))
                    where.append(slice(before + low - start, before + high - start))
                    break
                before += end - start
            else:
                return None
        return tuple(inside), tuple(where)


def _bytes(shape: Sequence[int], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return disjoint intervals in ascending order; those that touch become one."""
    found: list[Interval] = []
    for start, end in sorted(set(intervals)):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)
