"""The safetensors files of a Hugging Face folder. Headers are checked before any tensor is read."""

import contextlib
import math
import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moezoo.errors import UserError
from moezoo.host.files import LARGEST, open_file, parse_json, read_json
from moezoo.hub.regions import Box, Region
from moezoo.typed import show

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST = 255  # characters of a file's name
# Files in which models are too, by the ends of their names, and how they become safetensors.
_SAVE = "AutoModelForCausalLM.from_pretrained"
_OTHERS = {
    "adapter_model.safetensors": "it is an adapter: name the folder of its base, and this one with adapter=",
    "adapter_model.bin": "it is an adapter: save it again with PEFT's save_pretrained, which writes safetensors",
    ".safetensors": f"download {INDEX} or {SINGLE} too",
    ".gguf": f"convert it with transformers: {_SAVE}(FOLDER, gguf_file=NAME).save_pretrained(NEW)",
    ".bin": f"convert it with transformers: {_SAVE}(FOLDER).save_pretrained(NEW)",
    (".pt", ".pth"): f"convert it: safetensors.torch.save_file(torch.load(NAME, weights_only=True), '{SINGLE}')",
}
# What a trainer leaves beside a model.
_NO_MODELS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", "scaler.pt")
_METADATA = "__metadata__"  # an entry of a header that is no tensor
# What a file may hold, and the dtype in which a model has it: JAX computes in float32 at most.
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float32}
# The names of these dtypes, as config.json has them.
DTYPE_NAMES = tuple(np.dtype(kind).name for kind in dict.fromkeys(DTYPES.values()))
# What numbers of few bits and their scales are read as (`moezoo.hub.few_bits`).
_BITS = {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "U8": np.uint8, "I32": np.int32}
_STORED = DTYPES | {"F64": np.float64} | _BITS


class StoredTensor(NamedTuple):
    """One tensor of a folder: its file, its dtype in safetensors' words, its shape, and where its numbers begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    at: int


def read_header(path: Path) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Return the header of a file: all its bytes, the entry of metadata, if any, and those of the tensors by name.

    Only `WeightFiles` checks the entries. Raises `UserError` where there is no header.
    """
    with open_file(path) as file:
        first = file.read(8)
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(first, "little")
        if not 8 <= 8 + length <= min(size, LARGEST):
            raise UserError(f"{path} cannot be read (it has {size} bytes and no whole header); download it again")
        text = file.read(length)
    entries = parse_json(text, f"{path}: its header")
    metadata = {_METADATA: entries.pop(_METADATA)} if _METADATA in entries else {}
    return first + text, metadata, entries


def common_dtype(counts: Iterable[tuple[np.dtype, int]]) -> np.dtype:
    """Return the dtype that most numbers have; `counts` has a dtype and how many numbers have it, of each tensor."""
    sizes: dict[np.dtype, int] = {}
    for dtype, count in counts:
        sizes[dtype] = sizes.get(dtype, 0) + count
    return max(sizes, key=lambda dtype: sizes[dtype])


def describe_others(folder: Path) -> str:
    """Return the end of a message about a folder without safetensors: another file of weights, and what to do."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in _NO_MODELS) if folder.is_dir() else []
    usual = SINGLE in names or INDEX in names
    for end, advice in _OTHERS.items():
        if not usual and (name := next((name for name in names if name.lower().endswith(end)), None)):
            return f"; there is {show(name)}: {advice}"
    return ""


class WeightFiles:
    """The tensors of a folder, in one file or in the files that an index names.

    The files stay open, and nothing of them is mapped: pages of a mapped file count as memory of the process.

    Attributes:
        folder: The folder.
        tensors: All tensors by name, as the headers of the files describe them.
        names: The names that those have in the files which `rename` has given other ones.
        metadata: The entries of the headers that describe no tensor.

    Raises:
        UserError: A file is missing, damaged or outside the folder, or there is no tensor.
    """

    def __init__(self, folder: Path, single: str | None = None):
        """Open the files of a folder, or the one that `single` names."""
        self.folder, self._open = folder, dict[Path, _Open]()
        self.metadata: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        weakref.finalize(self, _close, self._open)
        if single is not None:
            self.tensors = self._read_header(folder / single)
        elif (folder / INDEX).exists():
            places = _read_index(folder / INDEX)
            if (folder / SINGLE).exists() and folder / SINGLE not in places.values():
                both = f"{SINGLE} and {INDEX}, which does not name it"
                raise UserError(f"{folder} has {both}; libraries differ in which they read, so take one out")
            headers = {path: self._read_header(path) for path in sorted(set(places.values()))}
            if lost := [name for name, path in places.items() if name not in headers[path]]:
                path, name = places[lost[0]], show(lost[0])
                raise UserError(f"{path} has no {name} but the index places it there; download it again")
            self.tensors = {name: headers[path][name] for name, path in places.items()}
        elif (folder / SINGLE).exists():
            self.tensors = self._read_header(folder / SINGLE)
        else:
            others = describe_others(folder)
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors are read{others}")
        if not self.tensors:
            raise UserError(f"{folder}: the safetensors hold no tensor; download the folder again")

    def _read_header(self, path: Path) -> dict[str, StoredTensor]:
        """Return the tensors of a file by name."""
        from safetensors import SafetensorError, safe_open

        with open_file(path) as file:
            self._open[path] = _Open(os.dup(file.fileno()), _state(file.fileno()))
        begin, metadata, entries = read_header(path)
        self.metadata |= metadata.get(_METADATA) or {}
        try:
            with safe_open(path, framework="numpy"):  # checks types, sizes and places
                pass
        except (SafetensorError, OSError) as error:
            reason = show(str(error).partition("\n")[0])
            with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):  # an entry may hold anything
                end = len(begin) + max(int(about["data_offsets"][1]) for about in entries.values())
                if (size := path.stat().st_size) < end:
                    reason = f"it has {size:,} bytes, expected {end:,} by its header: it is cut"
            raise UserError(f"{path} cannot be read ({reason}); download it again") from error
        return {
            name: StoredTensor(path, about["dtype"], tuple(about["shape"]), len(begin) + about["data_offsets"][0])
            for name, about in entries.items()
        }

    def rename(self, names: Mapping[str, str]) -> None:
        """Call the tensors otherwise from now on. `names`: their names by the new ones."""
        self.names |= {new: name for new, name in names.items() if new != name}
        self.tensors = {new: self.tensors[name] for new, name in names.items()}

    def samples(self, count: int = 32, size: int = 4096) -> Iterator[bytes]:
        """Yield `count` blocks of `size` bytes of each file, evenly spaced, in the order of their names.

        Raises `UserError` for a file that cannot be read.
        """
        for path, (file, (total, _)) in sorted(self._open.items()):
            for i in range(count):
                try:
                    yield os.pread(file, size, max(0, total - size) * i // (count - 1))
                except OSError as error:
                    raise UserError(f"{path} cannot be read ({error.strerror}); download it again") from error

    def guess_dtype(self) -> np.dtype:
        """Return the dtype that most numbers have, with float32 for float64 and bfloat16 for few bits."""
        kinds = ((DTYPES.get(tensor.dtype, ml_dtypes.bfloat16), tensor.shape) for tensor in self.tensors.values())
        return common_dtype((np.dtype(kind), math.prod(shape)) for kind, shape in kinds)

    def check(self, name: str, shape: tuple[int, ...], kinds: Collection[str] = DTYPES) -> None:
        """Raise `UserError` unless the tensor has this shape, and one of these dtypes in safetensors' words."""
        _, dtype, found, _ = self.tensors[name]
        if found != shape:
            raise UserError(
                f"{self.folder}: {name} has shape {list(found)}, expected {list(shape)} by config.json; "
                "the two files belong to different models"
            )
        if dtype not in kinds:
            raise UserError(f"{self.folder}: {name} is {dtype}, expected {', '.join(kinds)}; convert it first")

    def stored_dtype(self, name: str) -> np.dtype:
        """Return the dtype in which a tensor is stored, after `check`."""
        return np.dtype(_STORED[self.tensors[name].dtype])

    def region(self, name: str, dims: tuple[int, ...], boxes: Iterable[Box], dtype: np.dtype | None = None) -> Region:
        """Return the smallest part of a tensor, seen with the dimensions `dims`, that holds `boxes`.

        `dtype` is that of the items, by default the stored one.
        """
        stored = self.tensors[name]
        return Region.of(dims, dtype or self.stored_dtype(name), stored.at, boxes)

    def read(self, name: str, region: Region | None = None) -> np.ndarray:
        """Return a part of a tensor, or all of it, in the dtype in which it is stored.

        Raises:
            UserError: The file cannot be read, or has changed since it was opened.
        """
        stored = self.tensors[name]
        if region is None:
            region = self.region(name, stored.shape, [tuple((0, size) for size in stored.shape)])
        file, state = self._open[stored.path]
        try:
            numbers = region.read(file)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or "it has become shorter"
            raise UserError(f"{stored.path}: {name} cannot be read ({reason}); download the file again") from error
        if _state(file) != state:
            raise UserError(f"{stored.path}: the file changed while {name} was read; load it when it is complete")
        return numbers


class _Open(NamedTuple):
    """An open file: its descriptor, and its state when it was opened."""

    file: int
    state: tuple[int, int]


def _state(file: int) -> tuple[int, int]:
    """Return the size of an open file and the time of its last change."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def _close(files: dict[Path, _Open]) -> None:
    for opened in files.values():
        os.close(opened.file)


def _read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(f"{path} has no weight_map; download the folder again")
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file or not file.isprintable() or len(file) > _LONGEST:
            raise UserError(
                f"{path} places {show(name)} in {show(file)[:80]}, outside the folder or in no file; do not trust it"
            )
    return {name: path.parent / file for name, file in where.items()}
