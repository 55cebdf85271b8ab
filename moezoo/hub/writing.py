"""Writing the files of a folder: each header first, then one tensor after the other, by all processes together."""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.formats.base import FewBitTensor
from moezoo.hub.tensors import Tensor
from moezoo.hub.unfinished import becoming, writing
from moezoo.hub.values import Values
from moezoo.hub.weight_files import DTYPES
from moezoo.json_files import open_file
from moezoo.parallel import distributed

METADATA = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
# In the order in which safetensors has the tensors of a file: wide numbers first, so that each tensor is aligned.
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "U8")
_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()} | {np.dtype(np.float64): "F64"}
_NAMES[np.dtype(np.float32)] = "F32"  # which a model has for F64 too
_BLOCK = 2**24  # bytes that are copied at a time
# How long the processes may take for one file each, before one that waits gives up.
_SECONDS = 3600


# What is called with the name and the numbers of each tensor of the model, by the process that writes it.
Seen = Callable[[str, np.ndarray], None]


def ignore(name: str, value: np.ndarray) -> None:
    """Do nothing."""
    del name, value


class Span(NamedTuple):
    """Where the bytes of a tensor begin in a file that is copied from."""

    path: Path
    start: int


class Piece(NamedTuple):
    """A tensor of a file: `own`, one of the model, bytes that are copied from a `span`, or these `bits`.

    `dtype` is in safetensors' words, and `size` in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    own: Tensor | None = None
    span: Span | None = None
    bits: bytes = b""


class File(NamedTuple):
    """A file of weights: its name, the bytes in front of the tensors, and these in order."""

    name: str
    header: bytes
    pieces: Sequence[Piece]

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(piece.size for piece in self.pieces)


GENERATION = "generation_config.json"


class Plan(NamedTuple):
    """All files of a folder: those of weights, copies by their names, and texts by their names, config.json last."""

    weights: Sequence[File]
    copies: Mapping[str, Path]
    texts: Mapping[str, bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file by its name, in the order in which they appear in the folder."""
        return {
            **{file.name: len(file.header) + file.tensor_bytes for file in self.weights},
            **{name: path.stat().st_size for name, path in self.copies.items()},
            **{name: len(text) for name, text in self.texts.items()},
        }

    def with_texts(self, texts: Mapping[str, bytes]) -> "Plan":
        """Return the plan with `texts` too, in place of files of their names; config.json stays the last."""
        found = {**self.texts, **texts}
        found["config.json"] = found.pop("config.json")
        return self._replace(copies={k: path for k, path in self.copies.items() if k not in texts}, texts=found)


def own_piece(tensor: Tensor, dtype: np.dtype) -> Piece:
    """Return a tensor of the model in `dtype`. Raises `UserError` for a dtype that a folder cannot have."""
    if dtype not in _NAMES:
        valid = ", ".join(kind.name for kind in _NAMES)
        raise UserError(f"{tensor.name} is {dtype.name}, and a folder has {valid}; convert the model's arrays first")
    return Piece(tensor.name, _NAMES[dtype], tensor.shape, int(np.prod(tensor.shape)) * dtype.itemsize, tensor)


def few_bit_pieces(few: FewBitTensor, scale_dtype: np.dtype) -> list[Piece]:
    """Return the tensors of a weight that is written in few bits, given the dtype of its container's scales."""
    form = few.format
    codes = (kind for kind in form.SCALE_KINDS if kind in ("U8", "F8_E8M0"))
    word = next(codes) if scale_dtype == np.uint8 else _NAMES[scale_dtype]
    numbers, scale = math.prod(few.tensor.shape), math.prod(few.scale_shape) * scale_dtype.itemsize
    shape = few.scale_shape if form.has_blocks or few.lead else ()
    pieces = [
        Piece(few.values, form.KIND, few.values_shape, numbers // form.CONTAINER.PER_BYTE, few.kept_values),
        Piece(few.scale, word, shape, scale, few.kept_scale),
    ]
    bits = np.array(few.matrix, "<i8").tobytes()
    pieces += [Piece(few.tensor.name + end, "I64", (2,), len(bits), bits=bits) for end in form.SHAPES]
    return pieces


def sort_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the tensors of a file in the order of safetensors."""
    return sorted(pieces, key=lambda piece: (_ORDER.index(piece.dtype), piece.name))


def make_header(pieces: Iterable[Piece], metadata: Mapping[str, Any]) -> bytes:
    """Return the bytes in front of the tensors, padded to a multiple of eight."""
    entries, end = dict(metadata), 0
    for piece in pieces:
        place = [end, end := end + piece.size]
        entries[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": place}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def as_bits(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in one dimension."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _Place(NamedTuple):
    """Where a tensor goes: a file, and the byte at which it begins there."""

    path: Path
    start: int
    piece: Piece


def write_folder(folder: Path, plan: Plan, values: Values, seen: Seen = ignore) -> None:
    """Write all files; `folder` has them when all are whole, config.json last. All processes call this.

    Each process writes its own files of weights, the first one all others too. The model's tensors are read in an order
    that is the same in every process, and each process keeps one at a time.

    Args:
        folder: The new folder, or one that exists and has none of the files.
        plan: The files.
        values: The numbers of the model's tensors.
        seen: Sees the numbers that are written.

    Raises:
        UserError: On all processes, if a file cannot be written by one of them, and as `becoming` does.
    """
    with becoming(folder, plan.sizes) as work:
        count = distributed.count()
        size = len(plan.weights) if count == 1 else count
        for first in range(0, len(plan.weights), size):
            group = plan.weights[first : first + size]
            with distributed.within(_SECONDS, f"{folder}: the processes did not write a file each in {_SECONDS} s"):
                failure = _write_group(work, group, values, seen)
                distributed.together(lambda failure=failure: _check(failure, folder))
        distributed.together(lambda: _write_others(work, plan, folder))


def _write_group(work: Path, group: Sequence[File], values: Values, seen: Seen) -> Exception | None:
    """Write files, of which each process has one and a single process has all. Return what this process failed of.

    After a failure the process still takes part in reading, because the others would wait for it.
    """
    me = jax.process_index()
    places = [list(_places(work, file)) for file in group]
    if distributed.several():
        mine, rows = group[me : me + 1], itertools.zip_longest(*places)
    else:
        ordered = sorted(itertools.chain.from_iterable(places), key=lambda place: _key(place, values))
        mine, rows = group, ((place,) for place in ordered)
    failure = None
    try:
        with contextlib.closing(_Output(work)) as output:
            for file in mine:
                output.begin(file)
            for row in rows:
                _write_row(row, me, output, values, seen)
    except (OSError, UserError) as error:
        failure = error
        for row in rows if distributed.several() else ():
            for process, place in enumerate(row):
                _read(place, values, process)
    return failure


def _write_row(
    row: Sequence[_Place | None],
    me: int,
    output: "_Output",
    values: Values,
    seen: Seen,
) -> None:
    """Read the tensors that go to the files of all processes, and write that of this one. None stands for no tensor."""
    read = [_read(place, values, process) for process, place in enumerate(row)]
    if me < len(row) and (own := row[me]) is not None:
        output.write(own, read[me])
        if (value := read[me]) is not None:
            seen(own.piece.name, value)


def _read(place: _Place | None, values: Values, process: int) -> np.ndarray | None:
    """Return the tensor of the model that goes to this place, on `process` alone."""
    return None if place is None or place.piece.own is None else values.read(place.piece.own, process)


def _places(work: Path, file: File) -> Iterator[_Place]:
    start = len(file.header)
    for piece in file.pieces:
        yield _Place(work / file.name, start, piece)
        start += piece.size


def _key(place: _Place, values: Values) -> tuple[Any, ...]:
    return () if place.piece.own is None else values.key(place.piece.own)


class _Output:
    """Files of a folder, of which one is open at a time."""

    def __init__(self, work: Path):
        self._work, self._path, self._file = work, Path(), None

    def begin(self, file: File) -> None:
        """Make a file with its header."""
        with (self._work / file.name).open("xb") as new:
            new.write(file.header)

    def write(self, place: _Place, value: np.ndarray | None) -> None:
        """Write a tensor of the model, or copy another one."""
        if self._file is None or self._path != place.path:
            self.close()
            self._path, self._file = place.path, place.path.open("r+b")
        self._file.seek(place.start)
        if place.piece.span is not None:
            with open_file(place.piece.span.path) as before:
                before.seek(place.piece.span.start)
                _copy_bytes(before, self._file, place.piece.size)
        elif value is not None:
            self._file.write(as_bits(value).data)
        else:
            self._file.write(place.piece.bits)

    def close(self) -> None:
        """Close the file that is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _check(failure: Exception | None, folder: Path) -> None:
    """Raise what this process failed of as a `UserError`."""
    with writing(folder):
        if failure is not None:
            raise failure


def _write_others(work: Path, plan: Plan, folder: Path) -> None:
    """Write what is no file of weights, on the first process."""
    if not distributed.is_first():
        return
    with writing(folder):
        for name, path in plan.copies.items():
            with open_file(path) as before, (work / name).open("xb") as file:
                _copy_bytes(before, file, path.stat().st_size)
        for name, text in plan.texts.items():
            with (work / name).open("xb") as file:
                file.write(text)


def _copy_bytes(before: BinaryIO, file: BinaryIO, size: int) -> None:
    while size > 0 and (block := before.read(min(size, _BLOCK))):
        file.write(block)
        size -= len(block)
