"""Write a model as a copy of the Hugging Face folder that it was loaded from, with everything the model does not hold.

Each file of weights is written as it is there, with the model's own numbers in place of those of the same name. If
their dtype is the same, even the header of the file is.
"""

import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from moezoo.convert import show
from moezoo.errors import UserError
from moezoo.hub.json_files import open_file, read_json
from moezoo.hub.nested import TEXT, text_config
from moezoo.hub.opening import OpenFolder, check_tensors
from moezoo.hub.tensors import Tensor, arrays_by_path, read_part
from moezoo.hub.weight_files import DTYPES, INDEX, WeightFiles, read_header
from moezoo.models import family_of
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.models.hub import settings_of
from moezoo.parallel.mesh import with_auto_axes

_BLOCK = 2**24  # bytes that are copied at a time
# Texts, tokenizers and templates. Everything else stays: programs, weights in other formats, and what nobody knows.
_COPIED = {".json", ".jsonl", ".txt", ".md", ".jinja", ".model", ".tiktoken", ".spm", ".vocab", ".bpe", ".yaml", ".yml"}
_COPIED_NAMES = ("LICENSE", "NOTICE")
_DTYPE_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items() if name != "F64"}


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a folder has from the one that it was written like.

    Attributes:
        tensors: Names of tensors that no parameter of the model has, by their purpose.
        files: Names of files other than weights and config.json, copied as they are.
        skipped: Names in the other folder that were not copied.
        changed: Whether the model's own tensors differ from those of the other folder, as after training.
        rounded: Names of the model's tensors that are those of the other folder in a less precise dtype.
    """

    tensors: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    changed: bool = False
    rounded: tuple[str, ...] = ()


def carry(model: LanguageModel, folder: Path, opened: OpenFolder) -> Carried:
    """Write `model` to `folder` as a copy of `opened`. config.json is written last.

    Args:
        model: The model.
        folder: The new folder, which is made if it does not exist.
        opened: The folder of the same model.

    Raises:
        UserError: `opened` is of another model, or damaged.
        OSError: Something cannot be written, or exists.
    """
    expected, unused = check_tensors(opened, Blueprint(opened.config).shapes)
    ours, theirs = _keys_of_both(model, opened)
    own = {tensor.name: tensor for tensor in opened.tensors(model)}
    _check_equal(own, {tensor.name: tensor for tensor in expected}, model, opened)
    if opened.stores_tied:
        table, copy = opened.tables
        own[copy] = own[table]
    config = _config_json(ours, theirs, model.embedding.weight.dtype, opened)
    shards = sorted({stored.path for stored in opened.files.tensors.values()})
    files, skipped = _other_files(opened.folder, {"config.json", INDEX, *(path.name for path in shards)})
    arrays = arrays_by_path(with_auto_axes(model))
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write_shard(folder / path.name, path, own, arrays, opened.files) for path in shards]
    for name in files:
        _copy(opened.folder / name, folder / name)
    if (opened.folder / INDEX).exists():
        _write_index(folder / INDEX, opened.folder / INDEX, written)
    _write(folder / "config.json", config)
    rounded = tuple(name for shard in written for name in shard.rounded)
    return Carried(unused, tuple(files), tuple(skipped), any(shard.changed for shard in written), rounded)


def _keys_of_both(model: LanguageModel, opened: OpenFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of config.json for the model and for the folder's. Raises `UserError` unless of one type."""
    nesting, family = opened.nesting, opened.family
    if family_of(model.config) is not family:
        kind = text_config(opened.mapping)["model_type"]
        ours = type(model.config).__name__.removesuffix("Config")
        raise _another(opened, f"it has {nesting.table}model_type={kind} and the model is a {ours}")
    ours, theirs = (family.hub.write(config) for config in (model.config, opened.config))
    if ours["model_type"] != theirs["model_type"]:
        kinds = f"model_type={theirs['model_type']} and the model {ours['model_type']}"
        raise _another(opened, f"it has {nesting.table}{kinds}")
    return ours, theirs


def _check_equal(own: dict[str, Tensor], expected: dict[str, Tensor], model: LanguageModel, opened: OpenFolder) -> None:
    """Raise `UserError` where the model has not the tensors of the folder in the same shapes."""
    if {name: t.shape for name, t in own.items()} == {name: t.shape for name, t in expected.items()}:
        return
    keys = opened.family.hub.keys(text_config(opened.mapping)["model_type"])
    for setting in settings_of(type(model.config)):
        theirs, value = (operator.attrgetter(setting)(config) for config in (opened.config, model.config))
        if value != theirs and not dataclasses.is_dataclass(value):
            key = f"{opened.nesting.table}{keys[setting]}" if setting in keys else f"model.{setting}"
            raise _another(opened, f"it has {key}={show(theirs)} and the model {show(value)}")
    name = next(name for name in (own | expected) if name not in own or own[name].shape != expected[name].shape)
    raise _another(opened, f"{name} differs in shape")


def _another(opened: OpenFolder, difference: str) -> UserError:
    return UserError(
        f"save_pretrained: like={opened.folder} is not a folder of this model: {difference}; name the one that the "
        "model was loaded from"
    )


# Keys that a table of rotary settings replaces.
_OLDER_ROPE = ("rope_scaling", "rope_theta", "original_max_position_embeddings")


def _config_json(ours: Mapping[str, Any], theirs: Mapping[str, Any], dtype: np.dtype, opened: OpenFolder) -> bytes:
    """Return the text of config.json: that of the folder, in which keys with another value in `ours` are replaced.

    Raises `UserError` where the folder has another key for such a setting, which moezoo reads and does not write.
    """
    family, nesting = opened.family, opened.nesting
    changed = {key: value for key, value in ours.items() if key not in theirs or theirs[key] != value}
    outer = inner = dict(opened.mapping)
    if nesting.table:
        inner = outer[TEXT] = dict(outer[TEXT])
    for key in theirs.keys() - ours.keys() | (set(_OLDER_ROPE) if "rope_parameters" in changed else set()):
        inner.pop(key, None)
    inner |= changed
    stored = opened.files.tensors[opened.tables[0]]
    for table in (outer, inner) if np.dtype(DTYPES[stored.dtype]) != dtype else ():
        table |= {key: dtype.name for key in ("dtype", "torch_dtype") if key in table}
    if outer == opened.mapping:
        with open_file(opened.folder / "config.json") as file:
            return file.read()
    try:
        again = family.hub.write(family.hub.read(family.config, text_config(outer)))
    except UserError as error:
        raise UserError(
            f"save_pretrained: like={opened.folder}: the model's settings do not fit its config.json ({error}); write "
            "without like"
        ) from error
    if lost := [key for key in ours if again.get(key) != ours[key]]:
        raise UserError(
            f"save_pretrained: like={opened.folder}: its config.json sets {lost[0]} by another key, so it cannot be "
            f"made {show(ours[lost[0]])}; write {lost[0]} there"
        )
    return (json.dumps(outer, indent=2, ensure_ascii=False) + "\n").encode()


def _other_files(folder: Path, apart: set[str]) -> tuple[list[str], list[str]]:
    """Return the names of the files of a folder that are copied and of those that are not, without those in `apart`."""
    copied, skipped = [], []
    # A cache of downloads has links to its `blobs`; a link to anywhere else would make a private file public.
    root = folder.resolve()
    homes = root, root.parent.parent / "blobs"
    for path in sorted(folder.iterdir()):
        if path.name in apart:
            continue
        known = path.suffix in _COPIED or path.name.startswith(_COPIED_NAMES)
        foreign = path.name.startswith(".") or path.name.endswith(".index.json") or path.is_dir()
        foreign = foreign or not any(path.resolve().is_relative_to(home) for home in homes)
        (copied if known and not foreign else skipped).append(path.name)
    return copied, skipped


class _Written(NamedTuple):
    """A written file of weights.

    `size`: the bytes of its tensors. `retyped`, `changed`: whether a dtype, a number of the model is another.
    `rounded`: tensors whose numbers are the same but for rounding.
    """

    size: int
    retyped: bool
    changed: bool
    rounded: list[str]


def _write_shard(
    path: Path, original: Path, own: Mapping[str, Tensor], arrays: Mapping[str, Any], files: WeightFiles
) -> _Written:
    """Write a file with the model's own tensors and all others of the `original`, which is read piece by piece."""
    begin, metadata, entries = read_header(original)
    for name in entries:
        if name not in files.tensors or files.tensors[name].path != original:
            raise UserError(f"{original} has {show(name)}, which the index does not place there; download it again")
    order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
    kinds = {name: arrays[own[name].parts[0][0]].dtype for name in order if name in own}
    data, retyped = begin, any(entries[name]["dtype"] != _DTYPE_NAMES[kind] for name, kind in kinds.items())
    sizes = {name: end - start for name in order for start, end in [entries[name]["data_offsets"]]}
    if retyped:
        sizes |= {name: math.prod(own[name].shape) * kind.itemsize for name, kind in kinds.items()}
        # Wide numbers first, as in every file of safetensors, so that each tensor is aligned.
        order.sort(key=lambda name: -sizes[name] / max(1, math.prod(entries[name]["shape"])))
        places, end = dict(metadata), 0
        for name in order:
            kind = _DTYPE_NAMES[kinds[name]] if name in kinds else entries[name]["dtype"]
            places[name] = entries[name] | {"dtype": kind, "data_offsets": [end, end + sizes[name]]}
            end += sizes[name]
        text = json.dumps(places, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = len(text).to_bytes(8, "little") + text
    changed, rounded = False, []
    with path.open("xb") as file, open_file(original) as before:
        file.write(data)
        for name in order:
            if name in own:
                parts = [read_part(arrays[part], index) for part, index in own[name].parts]
                value = np.ascontiguousarray(own[name].to_file(parts))
                stored = files.read(name)
                same = _same_bits(value, stored)
                changed = changed or not same
                rounded += [name] if same and not _same_bits(stored, value) else []
                file.write(_bits(value).data)
            else:
                before.seek(len(begin) + entries[name]["data_offsets"][0])
                _copy_bytes(before, file, sizes[name])
    return _Written(sum(sizes.values()), retyped, changed, rounded)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _same_bits(value: np.ndarray, stored: np.ndarray) -> bool:
    """Return whether `value` is what loading makes of a stored tensor."""
    with np.errstate(over="ignore"):
        return np.array_equal(_bits(value), _bits(np.ascontiguousarray(stored.astype(value.dtype))))


def _write_index(path: Path, original: Path, written: Sequence[_Written]) -> None:
    """Copy the index. Its total size is corrected if tensors have another dtype."""
    if not any(shard.retyped for shard in written):
        return _copy(original, path)
    index = read_json(original)
    if isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]:
        index["metadata"]["total_size"] = sum(shard.size for shard in written)
    return _write(path, (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())


def _copy(original: Path, path: Path) -> None:
    with open_file(original) as before, path.open("xb") as file:
        _copy_bytes(before, file, original.stat().st_size)


def _copy_bytes(before: BinaryIO, file: BinaryIO, size: int) -> None:
    while size > 0 and (block := before.read(min(size, _BLOCK))):
        file.write(block)
        size -= len(block)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:  # which never follows a link that is there already
        file.write(data)
