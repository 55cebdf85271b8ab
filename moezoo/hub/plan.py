"""What a folder will hold: the tensors of each file, where the bytes of each come from, and all other files.

A plan is made before a number is read. `moezoo.hub.writing` writes it.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moezoo.errors import UserError
from moezoo.hub.formats.base import FewBitTensor
from moezoo.hub.rounding import rounded_scale, rounded_values
from moezoo.hub.tensors import Tensor
from moezoo.hub.values import Values
from moezoo.hub.weight_files import DTYPES

GENERATION = "generation_config.json"
METADATA = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
# In the order in which safetensors has the tensors of a file: wide numbers first, so that each tensor is aligned.
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "U8")
_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()} | {np.dtype(np.float64): "F64"}
_NAMES[np.dtype(np.float32)] = "F32"  # which a model has for F64 too


class Span(NamedTuple):
    """Where the bytes of a tensor begin in a file that is copied from."""

    path: Path
    start: int


class Made(NamedTuple):
    """What `make` makes of a tensor of the model."""

    tensor: Tensor
    make: Callable[[np.ndarray], np.ndarray]


class Entry(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: Its name.
        dtype: Its dtype in safetensors' words.
        shape: Its shape.
        size: Its bytes.
        source: Where these come from: a tensor of the model, what is made of one, a function that returns the numbers
            on the process of a number, and None in the others, a part of another file, or the bytes themselves.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    source: Tensor | Made | Callable[[int], np.ndarray | None] | Span | bytes

    @property
    def own(self) -> Tensor | None:
        """The tensor of the model that is read; None where there is none."""
        source = self.source.tensor if isinstance(self.source, Made) else self.source
        return source if isinstance(source, Tensor) else None

    def read(self, values: Values, process: int) -> np.ndarray | None:
        """Return what is written of the model, on `process` alone. All must make the same calls."""
        if callable(self.source):
            return self.source(process)
        found = None if self.own is None else values.read(self.own, process)
        return self.source.make(found) if isinstance(self.source, Made) and found is not None else found


class File(NamedTuple):
    """A file of weights: its name, the bytes in front of the tensors, and these in order."""

    name: str
    header: bytes
    entries: Sequence[Entry]

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(entry.size for entry in self.entries)


class Plan(NamedTuple):
    """All files of a folder.

    Attributes:
        weights: The files of weights.
        copies: Files that are copied, by the names that they get.
        texts: Contents of files by their names, config.json last.
        values: The numbers of the model's tensors.
    """

    weights: Sequence[File]
    copies: Mapping[str, Path]
    texts: Mapping[str, bytes]
    values: Values

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


def entry_in_numbers(name: str, dtype: np.dtype, shape: tuple[int, ...], source: Any) -> Entry:
    """Return a tensor whose numbers are not of few bits. Raises `UserError` for a dtype that a folder cannot have."""
    if dtype not in _NAMES:
        valid = ", ".join(kind.name for kind in _NAMES)
        raise UserError(f"{name} is {dtype.name}, and a folder has {valid}; convert the model's arrays first")
    return Entry(name, _NAMES[dtype], shape, math.prod(shape) * dtype.itemsize, source)


def few_bit_entries(few: FewBitTensor, values: Values) -> list[Entry]:
    """Return the tensors of a weight that is written in few bits: those of its container, or rounded to it."""
    form, kept = few.format, values.has(few.kept_scale)
    scale_dtype = values.dtype(few.kept_scale) if kept else form.SCALE_DTYPE
    codes = (kind for kind in form.SCALE_KINDS if kind in ("U8", "F8_E8M0"))
    word = next(codes) if scale_dtype == np.uint8 else _NAMES[scale_dtype]
    numbers, scale = math.prod(few.tensor.shape), math.prod(few.scale_shape) * scale_dtype.itemsize
    shape = few.scale_shape if form.has_blocks or few.lead else ()
    of_values, of_scale = few.kept_values, few.kept_scale
    if not kept:
        of_values, of_scale = (
            Made(few.plain, functools.partial(make, few)) for make in (rounded_values, rounded_scale)
        )
    entries = [
        Entry(few.values, form.KIND, few.values_shape, numbers // form.CONTAINER.PER_BYTE, of_values),
        Entry(few.scale, word, shape, scale, of_scale),
    ]
    bits = np.array(few.matrix, "<i8").tobytes()
    return entries + [Entry(few.tensor.name + end, "I64", (2,), len(bits), bits) for end in form.SHAPES]


def make_file(name: str, entries: Iterable[Entry], metadata: Mapping[str, Any] = METADATA) -> File:
    """Return a file with its tensors in the order of safetensors."""
    ordered = sorted(entries, key=lambda entry: (_ORDER.index(entry.dtype), entry.name))
    return File(name, make_header(ordered, metadata), ordered)


def make_header(entries: Iterable[Entry], metadata: Mapping[str, Any]) -> bytes:
    """Return the bytes in front of the tensors, padded to a multiple of eight."""
    table, end = dict(metadata), 0
    for entry in entries:
        assert entry.name not in table, f"the plan of a file has {entry.name} twice"
        place = [end, end := end + entry.size]
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": place}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
