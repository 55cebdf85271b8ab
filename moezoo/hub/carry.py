"""A folder of a model that is ready to be written: alone, or as a copy of the folder that it was loaded from.

A copy has everything that the model does not hold. Each file of weights is written as it is there, with the
model's own numbers in place of those of the same name. If their dtype is the same, even the header of the file is.
"""

import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moezoo.errors import UserError
from moezoo.host.files import json_text, open_file, read_bytes, read_json
from moezoo.hub.few_bits import MODELOPT_FILE
from moezoo.hub.formats.base import CONFIG, Format
from moezoo.hub.holdings import FewBits, Holding
from moezoo.hub.opening import OpenFolder, check_tensors
from moezoo.hub.other_names import FREQUENCIES, check_frequencies, text_config
from moezoo.hub.plan import Entry, File, Leaving, Plan, Span, few_bit_entries, leaving, make_header
from moezoo.hub.tensors import Tensor, count, list_names
from moezoo.hub.values import Values
from moezoo.hub.weight_files import INDEX, WeightFiles, common_dtype, read_header
from moezoo.hub.writing import Seen, as_bits, ignore, write_folder
from moezoo.models import family_of
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.models.config_json import FOR_IMAGES, OLDER_ROPE
from moezoo.models.hub import settings_of
from moezoo.parallel import distributed
from moezoo.typed import show

# Texts, tokenizers and templates. Everything else stays: programs, weights in other formats, and what nobody knows.
_COPIED = {".json", ".jsonl", ".txt", ".md", ".jinja", ".model", ".tiktoken", ".spm", ".vocab", ".bpe", ".yaml", ".yml"}
_COPIED_NAMES = ("LICENSE", "NOTICE")


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


class Like(NamedTuple):
    """The folder that a new one is a copy of.

    Attributes:
        files: Its weights.
        holdings: The tensors of the model there, by their names.
        carried: What the new folder has from it, without the comparison of numbers.
    """

    files: WeightFiles
    holdings: Mapping[str, Holding]
    carried: Carried

    def compare(self, name: str, value: np.ndarray) -> tuple[bool, bool]:
        """Return whether what is written of a tensor is what loading makes of that of this folder, and the reverse."""
        holding = self.holdings.get(name)
        if isinstance(holding, FewBits) and value.dtype != np.uint8:
            stored = holding.read(value.dtype)
        elif name in self.files.tensors:
            stored = self.files.read(name)
        else:
            stored = np.zeros(0, np.uint8)
        if value.dtype == np.uint8:
            same = np.array_equal(as_bits(value), as_bits(stored))
            return same, same
        return _same_bits(value, stored), _same_bits(stored, value)

    def notes(self, carried: Carried) -> Iterator[str]:
        """Yield what a user should know of a copy, given its `carried`.

        That is: which tensors are beside others than those that they were trained with, and which are those of this
        folder but for rounding.
        """
        like = self.files.folder
        if carried.changed and carried.tensors:
            parts = (
                f"{count(names)} from there, for {use}: {list_names(names)}" for use, names in carried.tensors.items()
            )
            yield f"the model's weights differ from those of {like}, but {'; '.join(parts)}"
        wide = [name for name in carried.rounded if self.files.stored_dtype(name) == np.float64]
        if wide:
            yield (
                f"{count(wide)} less precise than in {like}, which has float64; no model is more precise than float32: "
                f"{list_names(wide)}"
            )
        if names := [name for name in carried.rounded if name not in wide]:
            yield f"{count(names)} less precise than in {like}; dtype=float32 keeps them: {list_names(names)}"


class ModelFolder(NamedTuple):
    """A folder of a model that is ready to be written.

    Attributes:
        plan: Its files.
        leaves: How the tensors of the model are written.
        like: The folder that it is a copy of; None for a folder of the model alone.
    """

    plan: Plan
    leaves: Leaving
    like: Like | None = None

    def write(self, folder: Path, seen: Seen = ignore) -> Carried:
        """Write the folder, and return what it has from the one that it is like. All processes call this.

        `folder` and `seen` are those of `write_folder`. Raises `UserError` as it does.
        """
        if self.like is None:
            write_folder(folder, self.plan, seen)
            return Carried()
        like, changed, rounded = self.like, list[str](), list[str]()

        def compare(name: str, value: np.ndarray) -> None:
            same, exact = like.compare(name, value)
            changed.extend([name] * (not same))
            rounded.extend([name] * (same and not exact))
            seen(name, value)

        write_folder(folder, self.plan, compare)
        found = list(map(json.loads, distributed.gather_texts(json.dumps([bool(changed), rounded]))))
        names = tuple(name for _, names in found for name in names)
        return dataclasses.replace(like.carried, changed=any(changed for changed, _ in found), rounded=names)

    def notes(self, carried: Carried) -> Iterator[str]:
        """Yield what a user should know of the folder, given what `write` returned."""
        if self.like is not None:
            yield from self.like.notes(carried)
        yield from self.leaves.notes()


def plan_copy(model: LanguageModel, opened: OpenFolder, values: Values, rounds_to: Format | None) -> ModelFolder:
    """Return how `model`, whose arrays may be shapes, is written as a copy of `opened`.

    Raises `UserError` where `opened` is of another model, or damaged.
    """
    found = check_tensors(opened, shapes := Blueprint(opened.config).shapes)
    check_frequencies(opened.files, found.unused.get(FREQUENCIES, ()), shapes)
    expected = {holding.plain.name: holding for holding in found.holdings}
    ours, theirs = _keys_of_both(model, opened)
    own = {tensor.name: tensor for tensor in opened.tensors(model)}
    _check_equal(own, {name: holding.plain for name, holding in expected.items()}, model, opened)
    leaves = leaving([*own.values()], values, rounds_to)
    if rounds_to is not None and opened.nesting.names:
        raise UserError(
            f"format={rounds_to.NAME}: {opened.folder} has a model for images around the language model, whose "
            "modules transformers would read in few bits too; leave format out"
        )
    entries = _entries(leaves, expected)
    if opened.stores_tied:
        table, copy = opened.tables
        entries[copy] = [entry._replace(name=copy) for entry in entries[table]]
    shards = sorted({stored.path for stored in opened.files.tensors.values()})
    files, skipped = _other_files(opened.folder, {"config.json", INDEX, *(path.name for path in shards)})
    written = [_plan_shard(path, entries, opened.files) for path in shards]
    names = opened.files.names  # in the files
    stored = {names.get(name, name): tensor.dtype for name, tensor in opened.files.tensors.items()}
    retyped = _dtypes(itertools.chain.from_iterable(file.entries for file in written)) != stored
    texts = {INDEX: _index(opened.folder / INDEX, written, retyped)} if (opened.folder / INDEX).exists() else {}
    quantization = None
    theirs_few = {name: one.few.format for name, one in expected.items() if isinstance(one, FewBits)}
    if {name: few.format for name, few in leaves.few.items()} != theirs_few:
        quantization = leaves.table
        if MODELOPT_FILE in files:  # It would state the format that the weights had.
            files.remove(MODELOPT_FILE)
            skipped.append(MODELOPT_FILE)
    before = common_dtype((holding.stored_dtype, math.prod(own[name].shape)) for name, holding in expected.items())
    dtype = None if leaves.dtype == before else leaves.dtype.name
    texts["config.json"] = _config_json(ours, theirs, dtype, quantization, opened)
    copies = {name: opened.folder / name for name in files}
    for path in copies.values():
        open_file(path).close()  # refuses what is no file
    plan = Plan(written, {**copies, **texts}, values)
    return ModelFolder(plan, leaves, Like(opened.files, expected, Carried(found.unused, tuple(files), tuple(skipped))))


def _entries(leaves: Leaving, expected: Mapping[str, Holding]) -> dict[str, list[Entry]]:
    """Return what is written in place of each tensor of the folder that belongs to the model."""
    found: dict[str, list[Entry]] = {}
    for tensor in leaves.own:
        few, holding = leaves.few.get(tensor.name), expected[tensor.name]
        entries = leaves.entries(tensor)
        if few and isinstance(holding, FewBits) and few.format == holding.few.format:
            # With the names, and the words for dtypes and shapes, that the folder has.
            entries = few_bit_entries(holding.few, leaves.values)
            found |= {entry.name: [holding.as_stored(entry)] for entry in entries if entry.name in holding.names[:2]}
        else:
            found |= {holding.names[0]: entries, **{gone: [] for gone in holding.names[1:]}}
    return found


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
    for setting in settings_of(type(model.config)):
        theirs, value = (operator.attrgetter(setting)(config) for config in (opened.config, model.config))
        if value != theirs and not dataclasses.is_dataclass(value):
            theirs_key = opened.keys.get(setting)
            key = f"{opened.nesting.table}{theirs_key}" if theirs_key else f"model.{setting}"
            raise _another(opened, f"it has {key}={show(theirs)} and the model {show(value)}")
    name = next(name for name in (own | expected) if name not in own or own[name].shape != expected[name].shape)
    raise _another(opened, f"{name} differs in shape")


def _another(opened: OpenFolder, difference: str) -> UserError:
    return UserError(
        f"like={opened.folder} is not a folder of this model: {difference}; name the one that the model was loaded from"
    )


def _config_json(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    dtype: str | None,
    quantization: Mapping[str, Any] | None,
    opened: OpenFolder,
) -> bytes:
    """Return the text of config.json: that of the folder, in which keys with another value in `ours` are replaced.

    `dtype` is what most numbers now have, and `quantization` has what is written of few bits; None if it is the same.

    Raises `UserError` where the folder has another key for such a setting, which moezoo reads and does not write.
    """
    family, nesting = opened.family, opened.nesting
    changed = {key: value for key, value in ours.items() if key not in theirs or theirs[key] != value}
    outer = inner = dict(opened.mapping)
    for key in nesting.table.split(".")[:-1]:
        table = dict(inner[key])
        inner[key], inner = table, table
    gone = theirs.keys() - ours.keys()
    if "rope_parameters" in changed:  # replaces them wherever the folder has them
        changed |= {key: ours[key] for key in OLDER_ROPE if key in ours}
        for old in ("rope_scaling", "rope_parameters"):
            if kept := {key: value for key, value in (inner.get(old) or {}).items() if key in FOR_IMAGES}:
                tables = {new: changed[new] or {"rope_type": "default"} for new in ("rope_parameters", "rope_scaling")}
                changed |= {new: table | kept for new, table in tables.items()}
        gone |= {"original_max_position_embeddings"}
    for key in gone:
        inner.pop(key, None)
    inner |= changed
    if quantization is not None:
        for table in (outer, inner):
            table.pop(CONFIG, None)
        outer |= quantization
    for table in (outer, inner) if dtype is not None else ():
        table |= {key: dtype for key in ("dtype", "torch_dtype") if key in table}
    if outer == opened.mapping:
        return read_bytes(opened.folder / "config.json")
    try:
        again = family.hub.write(family.hub.read(family.config, text_config(outer)))
    except UserError as error:
        raise UserError(
            f"like={opened.folder}: the model's settings do not fit its config.json ({error}); write without like"
        ) from error
    if lost := [key for key in ours if again.get(key) != ours[key]]:
        raise UserError(
            f"like={opened.folder}: its config.json sets {lost[0]} by another key, so it cannot be "
            f"made {show(ours[lost[0]])}; write {lost[0]} there"
        )
    return json_text(outer)


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


def _plan_shard(original: Path, own: Mapping[str, list[Entry]], files: WeightFiles) -> File:
    """Return a file with the model's `own` tensors in place of those of these names, and all others of the original."""
    begin, metadata, stored = read_header(original)
    ours = {name: new for new, name in files.names.items()}  # A copy has no wrapper's names, which nothing reads.
    tensors = {ours.get(name, name): about for name, about in stored.items()}
    for name in tensors:
        if name not in files.tensors or files.tensors[name].path != original:
            raise UserError(f"{original} has {show(name)}, which the index does not place there; download it again")
    entries = []
    for name in sorted(tensors, key=lambda name: tensors[name]["data_offsets"]):
        start, end = tensors[name]["data_offsets"]
        if name in own:
            entries += own[name]
        else:
            span = Span(original, len(begin) + start)
            entries.append(Entry(name, tensors[name]["dtype"], tuple(tensors[name]["shape"]), end - start, span))
    if _dtypes(entries) == {name: about["dtype"] for name, about in stored.items()}:
        return File(original.name, begin, entries)
    # Wide numbers first, as in every file of safetensors, so that each tensor is aligned.
    entries.sort(key=lambda entry: -entry.size / max(1, math.prod(entry.shape)))
    return File(original.name, make_header(entries, metadata), entries)


def _dtypes(entries: Iterable[Entry]) -> dict[str, str]:
    return {entry.name: entry.dtype for entry in entries}


def _index(original: Path, written: Sequence[File], retyped: bool) -> bytes:
    """Return the text of the index, which is that of the original unless tensors are `retyped`: have other dtypes."""
    if not retyped:
        return read_bytes(original)
    index = read_json(original)
    where = {entry.name: file.name for file in written for entry in file.entries}
    index["weight_map"] = {name: where[name] for name in [*index["weight_map"], *where] if name in where}
    if isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]:
        index["metadata"]["total_size"] = sum(file.tensor_bytes for file in written)
    return json_text(index)


def _same_bits(value: np.ndarray, stored: np.ndarray) -> bool:
    """Return whether `value` is what loading makes of a stored tensor."""
    with np.errstate(over="ignore"):
        return np.array_equal(as_bits(value), as_bits(stored.astype(value.dtype)))
