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
from typing import Any, NamedTuple

import numpy as np

from moezoo.errors import UserError
from moezoo.hub.few_bits import MODELOPT_FILE
from moezoo.hub.formats.base import CONFIG
from moezoo.hub.holdings import FewBits, Holding
from moezoo.hub.leaving import Leaving, leaving, modules_in_numbers, own_pieces
from moezoo.hub.nested import TEXT, text_config
from moezoo.hub.opening import OpenFolder, check_tensors
from moezoo.hub.tensors import Tensor, arrays_by_path
from moezoo.hub.values import Values
from moezoo.hub.weight_files import INDEX, WeightFiles, common_dtype, read_header
from moezoo.hub.writing import File, Piece, Plan, Seen, Span, as_bits, few_bit_pieces, ignore, make_header, write_folder
from moezoo.json_files import open_file, read_json
from moezoo.models import family_of
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.models.config_json import OLDER_ROPE
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


class Copying(NamedTuple):
    """A folder to be written as a copy of another one.

    Attributes:
        plan: The files to write.
        files: The weights of the other folder.
        holdings: The tensors of the model there, by their names.
        carried: What the new folder has from it, without the comparison of numbers.
    """

    plan: Plan
    files: WeightFiles
    holdings: Mapping[str, Holding]
    carried: Carried

    def write(self, folder: Path, values: Values, seen: Seen = ignore) -> Carried:
        """Write the folder, and return what it has from the other one. All processes call this.

        Args:
            folder: The new folder, which is made if it does not exist.
            values: The numbers of the model.
            seen: As in `write_folder`.

        Raises:
            UserError: As `write_folder` does.
        """
        found = _Comparison(self.files, self.holdings)

        def compare(name: str, value: np.ndarray) -> None:
            found.see(name, value)
            seen(name, value)

        write_folder(folder, self.plan, values, compare)
        return dataclasses.replace(self.carried, **found.agree())


def plan_copy(model: LanguageModel, opened: OpenFolder, values: Values) -> Copying:
    """Return how `model`, whose arrays may be shapes, is written as a copy of `opened`.

    Raises `UserError` where `opened` is of another model, or damaged.
    """
    found, unused = check_tensors(opened, Blueprint(opened.config).shapes)
    expected = {holding.plain.name: holding for holding in found}
    ours, theirs = _keys_of_both(model, opened)
    own = {tensor.name: tensor for tensor in opened.tensors(model)}
    _check_equal(own, {name: holding.plain for name, holding in expected.items()}, model, opened)
    leaves = leaving(own.values(), arrays_by_path(model), values.rounds_to)
    if values.rounds_to is not None and opened.nesting.names:
        raise UserError(
            f"format={values.rounds_to.NAME}: {opened.folder} has a model for images around the language model, whose "
            "modules transformers would read in few bits too; leave format out"
        )
    pieces = _pieces(own, expected, leaves, values)
    if opened.stores_tied:
        table, copy = opened.tables
        pieces[copy] = [piece._replace(name=copy) for piece in pieces[table]]
    shards = sorted({stored.path for stored in opened.files.tensors.values()})
    files, skipped = _other_files(opened.folder, {"config.json", INDEX, *(path.name for path in shards)})
    written = [_plan_shard(path, pieces, opened.files) for path in shards]
    texts = {}
    if (opened.folder / INDEX).exists():
        texts[INDEX] = _index(opened.folder / INDEX, written)
    dtypes, quantization = _common_dtypes(own, values, expected), opened.mapping
    theirs_few = {name: one.few for name, one in expected.items() if isinstance(one, FewBits)}
    if {n: few.format for n, few in leaves.few.items()} != {n: few.format for n, few in theirs_few.items()}:
        quantization = {}
        if leaves.format is not None:
            quantization = {CONFIG: leaves.format.write(modules_in_numbers(own.values(), leaves.few))}
        if MODELOPT_FILE in files:  # It would state the format that the weights had.
            files.remove(MODELOPT_FILE)
            skipped.append(MODELOPT_FILE)
    texts["config.json"] = _config_json(ours, theirs, dtypes, quantization, opened)
    copies = {name: opened.folder / name for name in files}
    for path in copies.values():
        open_file(path).close()  # refuses what is no file
    plan = Plan([shard.file for shard in written], copies, texts)
    return Copying(plan, opened.files, expected, Carried(unused, tuple(files), tuple(skipped)))


def _pieces(
    own: Mapping[str, Tensor], expected: Mapping[str, Holding], leaves: Leaving, values: Values
) -> dict[str, list[Piece]]:
    """Return what is written in place of each tensor of the folder that belongs to the model."""
    found: dict[str, list[Piece]] = {}
    for name, tensor in own.items():
        few, holding = leaves.few.get(name), expected[name]
        pieces = own_pieces(tensor, leaves, values)
        if few and isinstance(holding, FewBits) and few.format == holding.few.format:
            # With the names, and the words for dtypes and shapes, that the folder has.
            pieces = few_bit_pieces(holding.few, values.dtype(holding.few.kept_scale))
            found |= {piece.name: [holding.as_stored(piece)] for piece in pieces if piece.name in holding.names[:2]}
        else:
            found |= {holding.names[0]: pieces, **{gone: [] for gone in holding.names[1:]}}
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
        f"like={opened.folder} is not a folder of this model: {difference}; name the one that the model was loaded from"
    )


class _Dtypes(NamedTuple):
    """The dtype that most numbers of the model have where they are written, and in the original."""

    written: np.dtype
    original: np.dtype


def _common_dtypes(own: Mapping[str, Tensor], values: Values, expected: Mapping[str, Holding]) -> _Dtypes:
    sizes = [(values.dtype(t), expected[name].stored_dtype, math.prod(t.shape)) for name, t in own.items()]
    return _Dtypes(common_dtype((new, size) for new, _, size in sizes), common_dtype((old, n) for _, old, n in sizes))


def _config_json(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    dtypes: _Dtypes,
    quantization: Mapping[str, Any],
    opened: OpenFolder,
) -> bytes:
    """Return the text of config.json: that of the folder, in which keys with another value in `ours` are replaced.

    `quantization` has what is written of few bits: the keys of the folder, if that is the same.

    Raises `UserError` where the folder has another key for such a setting, which moezoo reads and does not write.
    """
    family, nesting = opened.family, opened.nesting
    changed = {key: value for key, value in ours.items() if key not in theirs or theirs[key] != value}
    outer = inner = dict(opened.mapping)
    if nesting.table:
        inner = outer[TEXT] = dict(outer[TEXT])
    gone = theirs.keys() - ours.keys()
    if "rope_parameters" in changed:  # replaces them wherever the folder has them
        changed |= {key: ours[key] for key in OLDER_ROPE if key in ours}
        gone |= {"original_max_position_embeddings"}
    for key in gone:
        inner.pop(key, None)
    inner |= changed
    if quantization is not opened.mapping:
        for table in (outer, inner):
            table.pop(CONFIG, None)
        outer |= quantization
    for table in (outer, inner) if dtypes.written != dtypes.original else ():
        table |= {key: dtypes.written.name for key in ("dtype", "torch_dtype") if key in table}
    if outer == opened.mapping:
        with open_file(opened.folder / "config.json") as file:
            return file.read()
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


class _Shard(NamedTuple):
    """A file of weights. `retyped`: whether a tensor of the model has another dtype than in the original."""

    file: File
    retyped: bool


def _plan_shard(original: Path, own: Mapping[str, list[Piece]], files: WeightFiles) -> _Shard:
    """Return a file with the model's `own` tensors in place of those of these names, and all others of the original."""
    begin, metadata, stored = read_header(original)
    ours = {name: new for new, name in files.names.items()}  # A copy has no wrapper's names, which nothing reads.
    entries = {ours.get(name, name): about for name, about in stored.items()}
    for name in entries:
        if name not in files.tensors or files.tensors[name].path != original:
            raise UserError(f"{original} has {show(name)}, which the index does not place there; download it again")
    pieces = []
    for name in sorted(entries, key=lambda name: entries[name]["data_offsets"]):
        start, end = entries[name]["data_offsets"]
        if name in own:
            pieces += own[name]
        else:
            span = Span(original, len(begin) + start)
            pieces.append(Piece(name, entries[name]["dtype"], tuple(entries[name]["shape"]), end - start, span=span))
    retyped = {piece.name: piece.dtype for piece in pieces} != {name: about["dtype"] for name, about in stored.items()}
    if retyped:
        # Wide numbers first, as in every file of safetensors, so that each tensor is aligned.
        pieces.sort(key=lambda piece: -piece.size / max(1, math.prod(piece.shape)))
    return _Shard(File(original.name, make_header(pieces, metadata) if retyped else begin, pieces), retyped)


class _Comparison:
    """The numbers that are written against those of the other folder."""

    def __init__(self, files: WeightFiles, holdings: Mapping[str, Holding]):
        self._files, self._holdings, self._changed, self._rounded = files, holdings, False, list[str]()

    def see(self, name: str, value: np.ndarray) -> None:
        """Compare a tensor of the model."""
        holding = self._holdings.get(name)
        if isinstance(holding, FewBits) and value.dtype != np.uint8:
            stored = holding.read(value.dtype)
        elif name in self._files.tensors:
            stored = self._files.read(name)
        else:
            stored = np.zeros(0, np.uint8)
        if value.dtype == np.uint8:
            same = exact = np.array_equal(as_bits(value), as_bits(stored))
        else:
            same, exact = _same_bits(value, stored), _same_bits(stored, value)
        self._changed = self._changed or not same
        self._rounded += [name] if same and not exact else []

    def agree(self) -> dict[str, Any]:
        """Return what all processes together have found, as attributes of `Carried`."""
        found = list(map(json.loads, distributed.gather_texts(json.dumps([self._changed, self._rounded]))))
        rounded = tuple(name for _, names in found for name in names)
        return {"changed": any(changed for changed, _ in found), "rounded": rounded}


def _same_bits(value: np.ndarray, stored: np.ndarray) -> bool:
    """Return whether `value` is what loading makes of a stored tensor."""
    with np.errstate(over="ignore"):
        return np.array_equal(as_bits(value), as_bits(stored.astype(value.dtype)))


def _index(original: Path, written: Sequence[_Shard]) -> bytes:
    """Return the text of the index. Its total size is corrected if tensors have another dtype."""
    if not any(shard.retyped for shard in written):
        with open_file(original) as file:
            return file.read()
    index = read_json(original)
    where = {piece.name: shard.file.name for shard in written for piece in shard.file.pieces}
    index["weight_map"] = {name: where[name] for name in [*index["weight_map"], *where] if name in where}
    if isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]:
        index["metadata"]["total_size"] = sum(shard.file.tensor_bytes for shard in written)
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
