"""What a folder will hold: the tensors of each file, where the bytes of each come from, and all other files.

A plan is made before a number is read: `leaving` decides which tensors of a model are written in few bits, each gives
entries, and entries make files. `moezoo.hub.writing` writes it.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.arrays import are_finite
from moezoo.hub.few_bits import stating
from moezoo.hub.formats.base import CONFIG, FewBitTensor, Format, outputs_first
from moezoo.hub.tensors import Tensor, is_of_products
from moezoo.hub.values import Values
from moezoo.hub.weight_files import DTYPES, common_dtype
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.axes import Axes, Role

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


class Entry(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: Its name.
        dtype: Its dtype in safetensors' words.
        shape: Its shape.
        size: Its bytes.
        source: Where these come from: a tensor of the model, a function that returns the numbers on the process of a
            number, and None in the others, a part of another file, or the bytes themselves.
        make: What is made of the tensor of the model; None for itself.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    source: Tensor | Callable[[int], np.ndarray | None] | Span | bytes
    make: Callable[[np.ndarray], np.ndarray] | None = None

    def read(self, values: Values, process: int) -> np.ndarray | None:
        """Return what is written of the model, on `process` alone. All must make the same calls."""
        if callable(self.source):
            return self.source(process)
        found = values.read(self.source, process) if isinstance(self.source, Tensor) else None
        return found if found is None or self.make is None else self.make(found)


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
        others: Other files by their names, config.json last: one that is copied, or the contents.
        values: The numbers of the model's tensors.
    """

    weights: Sequence[File]
    others: Mapping[str, Path | bytes]
    values: Values

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file by its name, in the order in which they appear in the folder."""
        return {
            **{file.name: len(file.header) + file.tensor_bytes for file in self.weights},
            **{name: len(x) if isinstance(x, bytes) else x.stat().st_size for name, x in self.others.items()},
        }

    def with_files(self, files: Mapping[str, Path | bytes]) -> "Plan":
        """Return the plan with other `files` too, in place of those of their names; config.json stays the last."""
        found = {**self.others, **files}
        found["config.json"] = found.pop("config.json")
        return self._replace(others=found)


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
    of_values, of_scale, make_values, make_scale = few.kept_values, few.kept_scale, None, None
    if not kept:
        of_values = of_scale = few.plain
        make_values, make_scale = functools.partial(_rounded_values, few), functools.partial(_rounded_scale, few)
    entries = [
        Entry(few.values, form.KIND, few.values_shape, numbers // form.CONTAINER.PER_BYTE, of_values, make_values),
        Entry(few.scale, word, shape, scale, of_scale, make_scale),
    ]
    bits = np.array(few.matrix, "<i8").tobytes()
    return entries + [Entry(few.tensor.name + end, "I64", (2,), len(bits), bits) for end in form.SHAPES]


def _rounded_values(few: FewBitTensor, weight: np.ndarray) -> np.ndarray:
    """Return the numbers of a weight in few bits, as bytes, from the weight as a file has it in numbers."""
    return np.ascontiguousarray(np.asarray(_round(few, weight).values).swapaxes(-1, -2))


def _rounded_scale(few: FewBitTensor, weight: np.ndarray) -> np.ndarray:
    """Return its scales of blocks [..., outputs, inputs], from those of pieces [..., inputs, outputs]."""
    scale = np.asarray(_round(few, weight).scale).swapaxes(-1, -2)
    at = []
    for numbers, pieces, size in zip(few.matrix, scale.shape[-2:], few.block, strict=True):
        at.append(np.arange(0, numbers, size) * pieces // numbers)
    return np.ascontiguousarray(scale[..., at[0][:, None], at[1]])


def _round(few: FewBitTensor, weight: np.ndarray) -> FewBits:
    """Return a weight rounded to few bits, as `docs/numbers.md` defines it. Raises `UserError` unless it is finite."""
    if not are_finite(weight):
        raise UserError(
            f"format={few.format.NAME}: {few.plain.name} has NaN or infinities, which have no rounding; leave "
            "format out"
        )
    whole = weight if few.plain.layout == "alternating" else weight.swapaxes(-1, -2)
    axes = Axes(Role.WEIGHT, ("expert",) * len(few.lead), ("input",), ("output",))
    return _rounded(few.format.CONTAINER, jnp.asarray(whole), axes)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _rounded(container: Any, weight: jax.Array, axes: Axes) -> FewBits:
    return container.rounded(weight, axes)


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


class Leaving(NamedTuple):
    """How the tensors of a model are written.

    Attributes:
        own: All of them.
        values: Their numbers.
        few: The weights that are written in few bits, by the name that they have in numbers.
        format: Their format; None if there are none.
        refused: Why containers of few bits become numbers, in words that follow "weights of few bits"; None if none do.
    """

    own: Sequence[Tensor]
    values: Values
    few: Mapping[str, FewBitTensor]
    format: Format | None = None
    refused: str | None = None

    @property
    def rounded(self) -> list[FewBitTensor]:
        """Those of `few` that the model has in numbers."""
        return [few for few in self.few.values() if not self.values.has(few.kept_scale)]

    @property
    def dtype(self) -> np.dtype:
        """The dtype that most numbers have; those of few bits have that of their arrays."""
        return common_dtype((self.values.dtype(tensor), math.prod(tensor.shape)) for tensor in self.own)

    @property
    def table(self) -> dict[str, Any]:
        """What config.json states of few bits: nothing, or the format, and transformers' modules in numbers."""
        if self.format is None:
            return {}
        names = {tensor.name for tensor in self.own if tensor.axes.role is Role.WEIGHT} - self.few.keys()
        return {CONFIG: self.format.write(sorted({name.removesuffix(".weight") for name in names}))}

    def entries(self, tensor: Tensor) -> list[Entry]:
        """Return what a folder has of a tensor of the model: itself, or numbers of few bits and scales."""
        if (few := self.few.get(tensor.name)) is None:
            return [entry_in_numbers(tensor.name, self.values.dtype(tensor), tensor.shape, tensor)]
        return few_bit_entries(few, self.values)

    def notes(self) -> Iterator[str]:
        """Yield why weights of few bits are written in numbers, and which rounded ones transformers does not read."""
        if self.refused:
            yield f"weights of few bits {self.refused}; they are written as the arrays that they stand for"
        if self.format is not None:
            yield from self.format.unread(self.rounded)


def leaving(own: Sequence[Tensor], values: Values, rounds_to: Format | None = None) -> Leaving:
    """Return how the tensors of a model are written, and which of them in few bits.

    A folder states one format and one size of blocks, and all parts of a tensor are containers of it. Otherwise
    containers are written as the arrays that they stand for.

    Args:
        own: All tensors of the model.
        values: Their numbers.
        rounds_to: The format that weights of products in layers get, those of routers apart.

    Raises:
        UserError: No weight fits `rounds_to`, or containers have another format.
    """
    found: dict[str, tuple[Tensor, list[Format]]] = {}  # weights, and the ways to state each
    others: list[str] = []
    for tensor in own:
        parts = [values.wanted[path] for path, _ in tensor.parts]
        kinds = {(type(part), part.block) if isinstance(part, FewBits) else None for part in parts}
        if kinds == {None}:
            if rounds_to and rounds_to.has(tensor) and is_of_products(tensor):
                found[tensor.name] = tensor, [rounds_to]
            continue
        *_, rows, columns = outputs_first(tensor).shape
        ways = [way for way in stating(parts[0], (rows, columns)) if way.has(tensor)] if len(kinds) == 1 else []
        if ways:
            found[tensor.name] = tensor, ways
        else:
            others.append(tensor.name)
    first = next((ways for _, ways in found.values()), [])
    usual = [ways[0] for _, ways in found.values()]
    common = [way for way in first if all(way in ways for _, ways in found.values())]
    names = sorted({form.NAME for form in usual})
    refused = None
    if others:
        refused = f"such as {others[0]} are in a format that folders of this family do not have"
    elif not common and len(names) > 1:
        refused = f"are in {len(names)} formats ({', '.join(names)}), and a folder has one"
    elif found and not common:
        refused = f"have blocks of {len(set(usual))} sizes, and a folder has one"
    if rounds_to and rounds_to.NAME not in names:
        raise UserError(f"format={rounds_to.NAME}: folders of this family have no weight that fits it; leave it out")
    if rounds_to and refused:
        raise UserError(f"format={rounds_to.NAME}: weights of few bits {refused}; load the folder with dtype=bfloat16")
    if refused or not found:
        return Leaving(own, values, {}, None, refused)
    few = {name: common[0].tensor(tensor) for name, (tensor, _) in found.items()}
    return Leaving(own, values, few, common[0])
