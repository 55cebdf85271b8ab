"""How a folder holds the tensors of a model, and which pieces of its files fill the arrays of devices.

A holding is one tensor of the model: in numbers (`Numbers`), or in few bits (`FewBits`), which fill containers as they
are and are widened for arrays. Its pieces can be read at the same time, each by one thread.
"""

import abc
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.arrays import Boxes, OnHost, Target, are_finite
from moezoo.hub.formats.base import FewBitTensor
from moezoo.hub.regions import Box, Interval, Region
from moezoo.hub.tensors import Tensor
from moezoo.hub.weight_files import DTYPES, WeightFiles
from moezoo.nn.few_bits import as_float32

_LEAST_PIECE = 2**16  # bytes that are read at once
_SAFE_SCALE = 2.0**118  # no number of few bits times a smaller scale is infinite: the largest of all formats is 448


class Piece(NamedTuple):
    """A part of a tensor of the folder that can be read at once, or in parts.

    Attributes:
        name: The tensor of the model.
        region: What is read.
        read_region: Reads a part of the region and writes it to devices. Returns whether numbers are finite and fit.
        widens: How many bytes in memory a byte of the file becomes, about; 0 for a region that is read at once.
    """

    name: str
    region: Region
    read_region: Callable[[Region], bool]
    widens: int = 1

    @property
    def size(self) -> int:
        """The bytes that are read."""
        return self.region.size

    def cut(self, most: int) -> Iterator["Piece"]:
        """Yield parts that take about `most` bytes each in memory."""
        for region in self.region.cut(max(most // self.widens, _LEAST_PIECE)) if self.widens else (self.region,):
            yield self._replace(region=region)

    def read(self) -> bool:
        """Read the region."""
        return self.read_region(self.region)


class _Place(NamedTuple):
    """Where a part of a tensor goes.

    Attributes:
        part: The number of the part.
        index: The index of the part's layer and expert among the numbers of `target`.
        box: A box of the part, a box of the tensor too, that the target holds.
        first: Where in the part all that the target holds begins.
        target: The numbers of devices.
    """

    part: int
    index: tuple[int, ...]
    box: Box
    first: tuple[int, ...]
    target: Target

    @classmethod
    def cells(cls, tensor: Tensor, part: int, index: tuple[int, ...], box: Box, target: Target) -> "Iterator[_Place]":
        """Yield those of all that the target holds."""
        first = tuple(start for start, _ in box)
        return (cls(part, index, cell, first, target) for cell in tensor.cells(part, box))


def _places(tensor: Tensor, arrays: Mapping[str, Boxes]) -> list[_Place]:
    """Return what this process's devices hold of a tensor."""
    found = []
    for part, (path, index) in enumerate(tensor.parts):
        for box, target in arrays[path].boxes.items() if path in arrays else ():
            if all(start <= i < end for i, (start, end) in zip(index, box, strict=False)):
                own = tuple(i - start for i, (start, _) in zip(index, box, strict=False))
                found.extend(_Place.cells(tensor, part, own, box[len(index) :], target))
    return found


def _write(tensor: Tensor, region: Region, numbers: np.ndarray, places: Iterable[_Place]) -> bool:
    """Write what a region of a tensor holds to all places; return whether the numbers fit."""
    fit = True
    for part, index, box, first, target in places:
        if found := region.find(tensor.in_file(part, box)):
            inside, where = found
            ours = tensor.in_part(part, inside)
            at = (*index, *(start - begin for (start, _), begin in zip(ours, first, strict=True)))
            with np.errstate(over="ignore"):  # What a dtype cannot hold becomes infinite, which is reported.
                fit &= target.write(tensor.from_file(numbers[where], part), at)
    return fit


class Holding(abc.ABC):
    """One tensor of the model in a folder.

    Attributes:
        files: The files of the folder.
        tensor: The tensor in numbers, by its name in the folder.
    """

    def __init__(self, files: WeightFiles, tensor: Tensor):
        self.files, self.tensor = files, tensor

    @property
    def plain(self) -> Tensor:
        """The tensor as folders without few bits have it."""
        return self.tensor

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The tensors of the folder that have it, the one with most bytes first."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """The dtype that an array of it has by default."""

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype that its numbers have in the files, or `dtype` where they have few bits."""
        return self.dtype

    @property
    def size(self) -> int:
        """The bytes of its numbers and scales."""
        return sum(math.prod(self.files.tensors[n].shape) * self.files.stored_dtype(n).itemsize for n in self.names[:2])

    @property
    def begins(self) -> tuple[Any, int]:
        """The file of its first tensor, and where it begins there."""
        stored = self.files.tensors[self.names[0]]
        return stored.path, stored.at

    @abc.abstractmethod
    def check(self) -> None:
        """Raise `UserError` unless the files have it in the right shapes and dtypes."""

    def pieces(self, arrays: Mapping[str, Boxes]) -> Iterator[Piece]:
        """Yield what `arrays`, by their paths, hold of the tensor; those of other paths are not wanted."""
        places = _places(self.tensor, arrays)
        return self._pieces(places) if places else iter(())

    @abc.abstractmethod
    def _pieces(self, places: Sequence[_Place]) -> Iterator[Piece]: ...

    def read(self, dtype: np.dtype) -> np.ndarray:
        """Return `plain`. A number too large for `dtype` becomes infinite."""
        parts = [OnHost(shape, dtype) for shape in self.tensor.shapes]
        places = [
            place
            for i, part in enumerate(parts)
            for place in _Place.cells(self.tensor, i, (), tuple((0, n) for n in part.numbers.shape), part)
        ]
        for piece in self._pieces(places):
            for part in piece.cut(2**22):
                part.read()
        return self.plain.to_file([part.numbers for part in parts])


def read_part(
    holdings: Iterable[Holding], path: str, shape: tuple[int, ...], index: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Return what `holdings` have, each some of it, at an index of the array of this path and shape."""
    box = (*((i, i + 1) for i in index), *((0, n) for n in shape[len(index) :]))
    part = OnHost(tuple(end - start for start, end in box), dtype)
    for holding in holdings:
        for piece in holding.pieces({path: Boxes(shape, {box: part})}):
            for some in piece.cut(2**22):
                some.read()
    return part.numbers.reshape(shape[len(index) :])


class Numbers(Holding):
    """A tensor in numbers."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.tensor.name,)

    @property
    def dtype(self) -> np.dtype:
        """That of the tensor, or float32 for float64."""
        return np.dtype(DTYPES[self.files.tensors[self.tensor.name].dtype])

    @property
    def stored_dtype(self) -> np.dtype:
        return self.files.stored_dtype(self.tensor.name)

    def check(self) -> None:
        self.files.check(self.tensor.name, self.tensor.shape)

    def _pieces(self, places: Sequence[_Place]) -> Iterator[Piece]:
        boxes = [self.tensor.in_file(place.part, place.box) for place in places]
        region = self.files.region(self.tensor.name, self.tensor.dims, boxes)
        yield Piece(self.tensor.name, region, functools.partial(self._read_piece, places))

    def _read_piece(self, places: Sequence[_Place], region: Region) -> bool:
        numbers = self.files.read(self.tensor.name, region)
        return are_finite(numbers) & _write(self.tensor, region, numbers, places)

    def read(self, dtype: np.dtype) -> np.ndarray:
        with np.errstate(over="ignore"):
            return self.files.read(self.tensor.name).astype(dtype, copy=False)


class FewBits(Holding):
    """A weight in few bits: the arrays of containers get numbers and scales as they are, other arrays wide numbers."""

    def __init__(self, files: WeightFiles, few: FewBitTensor):
        super().__init__(files, few.tensor)
        self.few = few

    @property
    def plain(self) -> Tensor:
        return self.few.plain

    @property
    def names(self) -> tuple[str, ...]:
        factor = () if self.few.factor is None else (self.few.factor,)
        return (self.few.values, self.few.scale, *factor, *self.few.others)

    @property
    def dtype(self) -> np.dtype:
        """bfloat16, in which such models compute."""
        return jnp.dtype(jnp.bfloat16)

    def as_stored(self, entry: Any) -> Any:
        """Return an entry of a new file, with the dtype and the shape that this folder states for as many bytes."""
        stored = self.files.tensors[entry.name]
        same = math.prod(stored.shape) * self.files.stored_dtype(entry.name).itemsize == entry.size
        return entry._replace(dtype=stored.dtype, shape=stored.shape) if same else entry

    @property
    def scale_dtype(self) -> np.dtype:
        """The dtype in which the files have scales; uint8 for E8M0 codes."""
        return self.files.stored_dtype(self.few.scale)

    def check(self) -> None:
        few, found = self.few, self.files.tensors[self.few.scale]
        self.files.check(few.scale, found.shape, few.format.SCALE_KINDS)
        if few.matrix[1] % few.format.PER_ITEM:
            raise UserError(
                f"{self.files.folder}: {few.values} has {few.matrix[1]} inputs by config.json, expected a multiple of "
                f"{few.format.PER_ITEM}, the numbers in one {few.format.KIND}; the folder's format is another one"
            )
        self.files.check(few.values, few.values_shape, (few.format.KIND,))
        if few.format.has_blocks or math.prod(found.shape) != math.prod(few.scale_shape):
            self.files.check(few.scale, few.scale_shape, few.format.SCALE_KINDS)
        if few.factor is not None:
            found = self.files.tensors[few.factor]
            self.files.check(few.factor, found.shape if found.shape == () else (1,), ("F32",))

    def read_stored(self, name: str) -> np.ndarray:
        """Return the tensor of this name as the files have it. Raises `UserError` for scales that are not finite."""
        return _read_scales(self.files, self.few) if name == self.few.scale else self.files.read(name)

    def pieces(self, arrays: Mapping[str, Boxes]) -> Iterator[Piece]:
        yield from super().pieces(arrays)
        yield from self._kept_pieces(arrays)

    def _pieces(self, places: Sequence[_Place]) -> Iterator[Piece]:
        few, dims = self.few, self.tensor.dims
        boxes = [self.tensor.in_file(place.part, place.box) for place in places]
        per = few.format.CONTAINER.PER_BYTE
        # A byte holds neighbours along the last input dimension, or, where rows are then read whole, along all of them.
        whole = dims[-1] % per != 0
        at = len(dims) - (len(self.tensor.axes.inputs) if whole else 1)
        items = (*dims[:at], math.prod(dims[at:]) // per)

        def in_items(box: Box) -> Box:
            return (*box[:at], (0, items[-1]) if whole else (box[-1][0] // per, math.ceil(box[-1][1] / per)))

        def in_numbers(region: Region) -> Region:
            last = tuple((start * per, end * per) for start, end in region.chosen[-1])
            ends = [((0, n),) for n in dims[at:]] if whole else [last]
            return Region(dims, np.dtype(np.float32), 0, (*region.chosen[:at], *ends), 0)

        shapes = self.tensor.shapes
        wanted = [(place.box, few.piece_blocks(place.part, shapes[place.part], place.box)) for place in places]
        scales = _Scales(self.files, few, wanted)
        region = self.files.region(few.values, items, map(in_items, boxes), np.dtype(np.uint8))
        read = functools.partial(self._read_piece, in_numbers, places, scales)
        yield Piece(self.tensor.name, region, read, widens=4 * per)  # numbers of four bytes

    def _read_piece(
        self, in_numbers: Callable[[Region], Region], places: Sequence[_Place], scales: "_Scales", region: Region
    ) -> bool:
        wide, kind, block = in_numbers(region), self.few.format.CONTAINER, self.few.block
        experts, rows, columns = _indices(self.few, wide.chosen)
        items = self.files.read(self.few.values, region).reshape(len(experts), len(rows), -1)
        numbers = kind.widen(items, scales.read()[np.ix_(experts, rows // block[0])], columns // block[1])
        return are_finite(numbers) & _write(self.tensor, wide, numbers.reshape(wide.read_shape), places)

    def _kept_pieces(self, arrays: Mapping[str, Boxes]) -> Iterator[Piece]:
        """Yield what the arrays of containers hold."""
        few = self.few
        numbers = few.kept_values
        places = _places(numbers, arrays)
        if not places:
            return
        boxes = [numbers.in_file(place.part, place.box) for place in places]
        region = self.files.region(few.values, numbers.dims, boxes, np.dtype(np.uint8))
        yield Piece(self.tensor.name, region, functools.partial(self._read_values, places))
        scale = few.kept_scale
        shapes = {
            part: arrays[path].shape[len(index) :] for part, (path, index) in enumerate(scale.parts) if path in arrays
        }
        found = [
            (place, few.piece_blocks(place.part, shapes[place.part], place.box)) for place in _places(scale, arrays)
        ]
        scales = _Scales(self.files, few, [(place.box, blocks) for place, blocks in found])
        yield Piece(self.tensor.name, scales.region, functools.partial(self._read_scales, scales, found), 0)

    def _read_values(self, places: Sequence[_Place], region: Region) -> bool:
        items = self.files.read(self.few.values, region)
        _write(self.few.kept_values, region, items, places)
        return self.few.format.are_finite(items)

    def _read_scales(
        self, scales: "_Scales", found: Sequence[tuple[_Place, tuple[np.ndarray, np.ndarray]]], region: Region
    ) -> bool:
        del region  # all of it, once
        grid, lead = scales.read(), len(self.few.lead)
        for (_, index, box, _, target), (of_rows, of_columns) in found:
            some = grid[slice(*box[0])] if lead else grid[0]
            values = some[..., of_rows.reshape(-1)[:, None], of_columns.reshape(-1)].swapaxes(-1, -2)
            values = np.ascontiguousarray(values).reshape(*some.shape[:lead], *of_columns.shape, *of_rows.shape)
            target.write(values, (*index, *(0 for _ in box)))
        return self._are_finite(grid)

    def _are_finite(self, grid: np.ndarray) -> bool:
        """Return whether all numbers times these scales are finite in the container's dtype."""
        if float(np.abs(as_float32(grid)).max()) < _SAFE_SCALE:
            return True
        items = self.files.read(self.few.values).view(np.uint8).reshape(len(grid), self.few.matrix[0], -1)
        rows, columns = (np.arange(n) // size for n, size in zip(self.few.matrix, self.few.block, strict=True))
        widened = (
            self.few.format.CONTAINER.widen(each, scale[rows], columns) for each, scale in zip(items, grid, strict=True)
        )
        with np.errstate(over="ignore"):
            return all(are_finite(numbers.astype(self.dtype)) for numbers in widened)


def _read_scales(files: WeightFiles, few: FewBitTensor, region: Region | None = None) -> np.ndarray:
    """Return scales, or a part of them. Raises `UserError` for those that are not finite."""
    found, name = files.read(few.scale, region), few.scale
    with np.errstate(all="ignore"):
        if few.factor is not None:
            found, name = few.format.scales(found, files.read(few.factor)), f"{name} with {few.factor}"
        finite = np.isfinite(as_float32(found)).all()
    if not finite:
        raise UserError(f"{files.tensors[few.scale].path}: {name} has NaN or infinite scales; download the file again")
    return found


class _Scales:
    """The scales of a weight that its pieces need, read once, by the first piece that asks.

    `wanted`: boxes of parts, and the blocks along outputs and inputs that each touches.
    """

    def __init__(self, files: WeightFiles, few: FewBitTensor, wanted: Iterable[tuple[Box, Iterable[np.ndarray]]]):
        self.files, self._few, self._lock, self._grid = files, few, threading.Lock(), np.zeros(())
        ends = lambda blocks: (int(blocks.min()), int(blocks.max()) + 1)  # noqa: E731
        boxes = [(*box[: len(few.lead)], *map(ends, blocks)) for box, blocks in wanted]
        self.region = files.region(few.scale, few.scale_shape, boxes)

    def read(self) -> np.ndarray:
        """Return scales [experts or 1, blocks along outputs, blocks along inputs]; those that were not read are zero.

        Raises `UserError` for scales that are not finite.
        """
        with self._lock:
            if not self._grid.ndim:
                found = _read_scales(self.files, self._few, self.region)
                grid = np.zeros(self._few.scale_shape, found.dtype)
                grid[np.ix_(*map(_numbers_of, self.region.chosen))] = found
                self._grid = grid if self._few.lead else grid[None]
            return self._grid


def _numbers_of(intervals: Iterable[Interval]) -> np.ndarray:
    return np.concatenate([np.arange(*interval) for interval in intervals])


def _indices(few: FewBitTensor, chosen: Sequence[Sequence[Interval]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the experts, the outputs and the inputs of a matrix that intervals of `dims` choose."""
    lead, dims = len(few.lead), few.tensor.dims
    cut = len(dims) - len(few.tensor.axes.inputs)
    found = []
    for first, last in ((lead, cut), (cut, len(dims))):
        numbers = np.arange(math.prod(dims[first:last])).reshape(dims[first:last])
        found.append(numbers[np.ix_(*map(_numbers_of, chosen[first:last]))].reshape(-1))
    return _numbers_of(chosen[0]) if lead else np.zeros(1, int), *found
