"""Writing the files of a folder: each header first, then one tensor after the other, by all processes together."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import jax
import numpy as np

from moezoo.errors import UserError
from moezoo.host.files import open_file
from moezoo.hub.plan import Entry, File, Plan, Span
from moezoo.hub.tensors import Tensor
from moezoo.hub.unfinished import becoming, writing
from moezoo.hub.values import Values
from moezoo.parallel import distributed

_BLOCK = 2**24  # bytes that are copied at a time
# How long the processes may take for one file each, before one that waits gives up.
_SECONDS = 3600

# What is called with the name and the numbers of each tensor of the model, by the process that writes it.
Seen = Callable[[str, np.ndarray], None]


def ignore(name: str, value: np.ndarray) -> None:
    """Do nothing."""
    del name, value


def as_bits(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in one dimension."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _Place(NamedTuple):
    """Where a tensor goes: a file, and the byte at which it begins there."""

    path: Path
    start: int
    entry: Entry


def write_folder(
    folder: Path, plan: Plan, seen: Seen = ignore, existing: Literal["refuse", "replace"] = "refuse"
) -> None:
    """Write all files; `folder` has them when all are whole, the last of the plan last. All processes call this.

    Each process writes its own files of weights, the first one all others too. The model's tensors are read in an order
    that is the same in every process, and each process keeps one at a time.

    Args:
        folder: The new folder, or one that exists.
        plan: The files.
        seen: Sees the numbers that are written.
        existing: What is done where the folder has one of the files.

    Raises:
        UserError: On all processes, if a file cannot be written by one of them, and as `becoming` does.
    """
    with becoming(folder, plan.sizes, existing) as work:
        count = distributed.count()
        size = len(plan.weights) if count == 1 else count
        for first in range(0, len(plan.weights), size):
            group = plan.weights[first : first + size]
            with distributed.within(_SECONDS, f"{folder}: the processes did not write a file each in {_SECONDS} s"):
                failure = _write_group(work, group, plan.values, seen)
                distributed.together(lambda failure=failure: _raise(failure, folder))
        distributed.together(lambda: _write_others(work, plan, folder))


def _raise(failure: Exception | None, folder: Path) -> None:
    """Raise what this process failed of as a `UserError`."""
    with writing(folder):
        if failure is not None:
            raise failure


def _write_group(work: Path, group: Sequence[File], values: Values, seen: Seen) -> Exception | None:
    """Write files, of which each process has one and a single process has all. Return what this process failed of.

    After a failure the process still takes part in reading, because the others would wait for it.
    """
    me = jax.process_index()
    places = [list(_places(work, file)) for file in group]
    if distributed.several():
        mine, rows = group[me : me + 1], itertools.zip_longest(*places)
    else:
        key = lambda source: values.key(source) if isinstance(source, Tensor) else ()  # noqa: E731
        ordered = sorted(itertools.chain.from_iterable(places), key=lambda place: key(place.entry.source))
        mine, rows = group, ((place,) for place in ordered)
    failure = None
    try:
        with contextlib.closing(_Output(work)) as output:
            for file in mine:
                output.begin(file)
            for row in rows:
                read = _read_row(row, values)
                if me < len(row) and (own := row[me]) is not None:
                    output.write(own, read[me])
                    if (value := read[me]) is not None:
                        seen(own.entry.name, value)
    except (OSError, UserError) as error:
        failure = error
        for row in rows if distributed.several() else ():
            _read_row(row, values)
    return failure


def _read_row(row: Sequence[_Place | None], values: Values) -> list[np.ndarray | None]:
    """Return what goes to the files of all processes from the model: a process has what goes to its own.

    None in a row stands for no tensor.
    """
    return [None if place is None else place.entry.read(values, process) for process, place in enumerate(row)]


def _places(work: Path, file: File) -> Iterator[_Place]:
    start = len(file.header)
    for entry in file.entries:
        yield _Place(work / file.name, start, entry)
        start += entry.size


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
        source = place.entry.source
        if isinstance(source, Span):
            with open_file(source.path) as before:
                before.seek(source.start)
                _copy_bytes(before, self._file, place.entry.size)
        elif value is not None:
            self._file.write(as_bits(value).data)
        elif isinstance(source, bytes):
            self._file.write(source)

    def close(self) -> None:
        """Close the file that is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _write_others(work: Path, plan: Plan, folder: Path) -> None:
    """Write what is no file of weights, on the first process."""
    if not distributed.is_first():
        return
    with writing(folder):
        for name, content in plan.others.items():
            with (work / name).open("xb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    with open_file(content) as before:
                        _copy_bytes(before, file, content.stat().st_size)


def _copy_bytes(before: BinaryIO, file: BinaryIO, size: int) -> None:
    while size > 0 and (block := before.read(min(size, _BLOCK))):
        file.write(block)
        size -= len(block)
