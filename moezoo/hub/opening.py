"""Opening a Hugging Face folder: its config.json and the headers of its files, compared before any tensor is read."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moezoo.errors import UserError, locating
from moezoo.host.files import INFINITY, check_name, read_json
from moezoo.hub.few_bits import ACTIVATION_SCALES, CACHE_SCALES, find_few_bits, read_modelopt_file, read_quantization
from moezoo.hub.formats.base import CONFIG, Format
from moezoo.hub.holdings import FewBits, Holding, Numbers
from moezoo.hub.kept import keep
from moezoo.hub.other_names import (
    NESTED,
    TIED,
    Nesting,
    describe_names,
    find_names,
    find_nesting,
    find_rows,
    table_of_text,
    text_config,
)
from moezoo.hub.tensors import Tensor, count, list_names, tensors
from moezoo.hub.unknown_types import PAGE, describe_type
from moezoo.hub.upcycling import NOT_UPCYCLED, Upcycle
from moezoo.hub.weight_files import DTYPE_NAMES, WeightFiles, common_dtype, describe_others
from moezoo.models import Family, ModelConfig, families
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.models.hub import Hub
from moezoo.typed import convert, show

_DIFFERENT = "the files belong to different models"
_PIECE = 2**24  # bytes of two tables that are compared at a time


@dataclasses.dataclass(frozen=True)
class Described:
    """A folder as its config.json describes it.

    Attributes:
        folder: The folder of config.json.
        mapping: Its config.json.
        is_nested: Whether that is of a model around the text model.
        family: The family of the text model.
        hub: The family's mapping for it.
        config: Its configuration.
        quantization: The format of its weights of few bits; None where none is stated.
        keys: Our settings and the keys that hold their values, for messages.
        upcycle: What becomes of a dense model.
        dtype: The dtype that config.json names for its other weights; None where it names none that is read.
    """

    folder: Path
    mapping: Mapping[str, Any]
    is_nested: bool
    family: Family
    hub: Hub
    config: ModelConfig
    quantization: Format | None
    keys: Mapping[str, str]
    upcycle: Upcycle
    dtype: str | None

    @property
    def usual_dtype(self) -> str:
        """`dtype`, or where there is none that of most released models."""
        return self.dtype or "bfloat16"


@dataclasses.dataclass(frozen=True)
class OpenFolder(Described):
    """A folder before its tensors are read.

    Attributes:
        files: Its files of weights. `hub` has the rows of their tensors.
        nesting: Where its text model is.
    """

    files: WeightFiles
    nesting: Nesting

    @property
    def tables(self) -> tuple[str, str]:
        """The names of the embedding and the unembedding in this folder."""
        names = {row.ours[0]: self.nesting.to_folder(row.name) for row in self.hub.rows(self.config)}
        return names["embedding.weight"], names["unembedding.weight"]

    @property
    def stores_tied(self) -> bool:
        """Whether the folder has an unembedding although it is the embedding."""
        return self.config.tied_embeddings and self.files.tensors.keys() >= set(self.tables)

    @property
    def sha256(self) -> str:
        """The hash of config.json, of tensors' names, shapes and dtypes, and of the sizes and samples of their files.

        Of each file 32 blocks of 4 KiB are read, so that a folder of any size takes moments.
        """
        stored = self.files.tensors.items()
        names = sorted((name, each.dtype, each.shape, each.path.name) for name, each in stored)
        sizes = sorted((path.name, path.stat().st_size) for path in {each.path for _, each in stored})
        found = hashlib.sha256(json.dumps([self.mapping, names, sizes], sort_keys=True).encode())
        for block in self.files.samples():
            found.update(block)
        return found.hexdigest()

    def tensors(self, model: Any) -> Iterator[Tensor]:
        """Yield the tensors of `model`, which may hold shapes in place of arrays, by their names in this folder."""
        for tensor in tensors(model, self.hub):
            yield dataclasses.replace(tensor, name=self.nesting.to_folder(tensor.name))


def folder_argument(folder: str | Path, argument: str = "folder") -> Path:
    """Return the folder that the user named as an argument. Raises `UserError` for what is no path."""
    path = Path(os.path.expanduser(convert(str, folder, argument)))
    return check_name(path, show(f"{argument}={folder}"))


def describe_download(folder: Path) -> str:
    """Return the end of a message about a `folder` that is not there: how to download it, if its name is a model's."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(folder)) or folder.parent.exists():
        return ""
    return f"; a model of this name is downloaded with: hf download {folder} --local-dir {folder.name}"


def read_config(folder: Path, upcycle: Upcycle = NOT_UPCYCLED) -> Described:
    """Return what the config.json of a folder describes, with `upcycle` as the mixture of experts that it becomes.

    Raises `UserError` for a key or a value that moezoo does not have.
    """
    if not folder.exists():
        advice = f"name a Hugging Face model folder{describe_download(folder)}"
        raise UserError(f"{folder}: there is no such folder; {advice}")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: no config.json; name a Hugging Face model folder{describe_others(folder)}")
    return describe(folder / "config.json", upcycle)


def describe(file: Path, upcycle: Upcycle = NOT_UPCYCLED) -> Described:
    """Return what a config.json of any name describes, with ModelOpt's file beside it. Raises as `read_config` does."""
    mapping = read_json(file, constants=INFINITY)
    try:
        text = text_config(mapping)
    except UserError as error:
        raise UserError(f"{file}{str(error).removeprefix('config.json')}") from error
    inside = table_of_text(mapping)
    family = _family(text, inside, file, upcycle)
    hub = family.dense if upcycle.experts else family.hub
    assert hub is not None
    keys = hub.keys(text["model_type"])
    try:
        config = hub.read(family.config, text)
        inner = read_quantization(text)
    except UserError as error:
        # A configuration refuses values by our names of the settings; the user sees those of config.json.
        words = re.sub(r"\bmodel\.([a-z_0-9]+(?:\.[a-z_]+)?)", lambda match: keys.get(match[1], match[0]), str(error))
        words = words.removeprefix("config.json: ")
        table = "" if text is mapping or words.startswith(TIED) else f"{inside}."  # the tie is the outer model's
        raise UserError(f"{file}: {table}{words}") from error
    try:
        quantization = read_quantization(mapping)
    except UserError as error:
        raise UserError(f"{file}{str(error).removeprefix('config.json')}") from error
    if quantization and inner and quantization != inner:
        raise UserError(f"{file}: {CONFIG} and {inside}.{CONFIG} are one setting and differ; delete the wrong one")
    quantization = quantization or inner or read_modelopt_file(file.parent)
    config = upcycle.widen(config) if upcycle.experts else config
    named = [table.get(key) for table in (text, mapping) for key in ("dtype", "torch_dtype")]
    dtype = next((name for name in named if name in DTYPE_NAMES), None)
    is_nested = text is not mapping
    return Described(file.parent, mapping, is_nested, family, hub, config, quantization, keys, upcycle, dtype)


def open_folder(folder: Path, upcycle: Upcycle = NOT_UPCYCLED) -> OpenFolder:
    """Return what config.json and the headers of the files describe; both have about as many layers and experts.

    With `upcycle` the folder has a dense model, which is described as the mixture of experts that it becomes.
    """
    described, files = read_config(folder, upcycle), WeightFiles(folder)
    rows = described.hub.types[described.hub.type_of(described.config)].rows
    files.rename(find_names(files.tensors, rows, described.is_nested, folder))
    nesting = find_nesting(described.mapping, files.tensors, folder) if described.is_nested else Nesting()
    hub = find_rows(described.hub, described.config, nesting, files.tensors)
    opened = OpenFolder(**vars(dataclasses.replace(described, hub=hub)), files=files, nesting=nesting)
    _check_counts(opened)
    return opened


class Found(NamedTuple):
    """The model of a folder.

    Attributes:
        shapes: The model with shapes in place of arrays.
        holdings: How the folder has its tensors.
        unused: The names of the folder's other tensors, by purpose.
    """

    shapes: LanguageModel
    holdings: list[Holding]
    unused: dict[str, list[str]]


def find_model(opened: OpenFolder, dtype: str | None) -> Found:
    """Return the model of a folder in `dtype`, by default the one that most of its numbers have.

    `stored` is that of most plain numbers, with weights of few bits in containers.

    Raises `UserError` as `check_tensors` and `keep` do.
    """
    files, is_stored = opened.files, dtype == "stored"
    dtype = None if is_stored else dtype
    # To trace a model takes longer than all else here. So its dtype is guessed first from all tensors of the folder.
    guess = dtype or files.guess_dtype().name
    shapes = Blueprint(opened.config, guess).shapes
    found = check_tensors(opened, shapes)
    counted = [each for each in found.holdings if not (is_stored and isinstance(each, FewBits))] or found.holdings
    common = dtype or common_dtype((each.dtype, math.prod(each.tensor.shape)) for each in counted).name
    shapes = shapes if common == guess else Blueprint(opened.config, common).shapes
    with locating(str(opened.folder)):
        return found._replace(shapes=keep(shapes, found.holdings) if is_stored else shapes)


def check_tensors(opened: OpenFolder, shapes: LanguageModel) -> Found:
    """Return a model of these shapes as a folder holds it.

    Raises `UserError` where the folder lacks a tensor, or has another that is not known.
    """
    # More tensors than these are not looked for, so that a wrong config.json costs neither time nor memory.
    expected = itertools.islice(opened.tensors(shapes), len(opened.files.tensors) + 100_000)
    holdings = [_holding(opened, tensor) for tensor in expected]
    unused = _check_names(opened, {name for holding in holdings for name in holding.names})
    for holding in holdings:
        holding.check()
    return Found(shapes, holdings, unused)


def _holding(opened: OpenFolder, tensor: Tensor) -> Holding:
    """Return how the folder holds a tensor; one that it does not have counts as one in numbers."""
    with locating(str(opened.folder)):
        few = find_few_bits(tensor, opened.files.tensors, opened.quantization)
    return Numbers(opened.files, tensor) if few is None else FewBits(opened.files, few)


def _family(mapping: Mapping[str, Any], inside: str, file: Path, upcycle: Upcycle) -> Family:
    """Return the family of a config.json, or of the table `inside`, or with `upcycle` what its dense model becomes."""
    sparse = {kind: family for family in reversed(families()) for kind in family.hub.types}
    dense = {kind: family for family in reversed(families()) if family.dense for kind in family.dense.types}
    kinds, others = (dense, sparse) if upcycle.experts else (sparse, dense)
    kind, valid = mapping.get("model_type"), {*kinds, *({} if inside else NESTED)}
    where = f"{file}{f': {inside}' if inside else ''}"
    if kind is None:
        raise UserError(f"{where} has no model_type; expected one of {', '.join(sorted(valid))}")
    if isinstance(kind, str) and kind in others:
        need = (
            "a dense model, and moezoo runs mixtures of experts; train with init_from=FOLDER upcycle.experts=8 "
            "upcycle.per_token=2 to copy its MLPs into experts, or pass upcycle=moezoo.Upcycle(experts=8, per_token=2)"
        )
        has = f"a mixture of experts, and upcycle is for {', '.join(sorted(dense))}; leave it out"
        raise UserError(f"{where}: model_type={kind} is {has if upcycle.experts else need}")
    if not isinstance(kind, str) or kind not in kinds:
        # Programs write this key, and a type whose name is similar is another model: it is not proposed.
        read = f"valid: {', '.join(sorted(valid))}"
        if isinstance(kind, str) and not upcycle.experts and (differs := describe_type(mapping)):
            read = f"{differs}; {PAGE} has the types that are read"
        raise UserError(f"{where}: unknown model_type '{show(kind)[:80]}'; {read}")
    return kinds[kind]


def _check_counts(opened: OpenFolder) -> None:
    """Raise `UserError` where config.json has many more layers or experts than the files, before any of them is built.

    A few are built, so that the missing tensors can be listed.
    """
    for ours, field in (("layers", "{layer}"), ("experts", "{expert}")):
        names = (opened.nesting.to_folder(row.name) for row in opened.hub.rows(opened.config))
        heads = {name.partition(field)[0] for name in names if field in name}
        ways = "|".join(re.escape(head).replace(re.escape("{layer}"), r"\d+") for head in heads)
        found = {m[1] for name in opened.files.tensors if (m := re.match(rf"(?:{ways})(\d+)", name))}
        wanted = getattr(opened.config, ours)
        if heads and wanted > len(found) + 100:
            key = opened.nesting.table + opened.keys[ours]
            raise UserError(
                f"{opened.folder}: config.json has {key}={wanted}, but the safetensors "
                f"hold {len(found)} {ours}; {describe_names(opened.files.tensors, ()) if not found else _DIFFERENT}"
            )


def _check_names(opened: OpenFolder, expected: set[str]) -> dict[str, list[str]]:
    found, folder = _without_copy(opened), opened.folder
    # transformers writes a shared MLP of no width.
    left = {name for name in found - expected if 0 not in opened.files.tensors[name].shape}
    over = opened.nesting.find_unused(opened.hub, left, expected)
    over |= {name: "products in few bits" for name in left if name.endswith(ACTIVATION_SCALES)}
    over |= {name: "caches in few bits" for name in left if name.endswith(CACHE_SCALES)}
    if missing := sorted(expected - found):
        there = describe_names(found, left - set(over))
        raise UserError(f"{folder}: {count(missing)} missing: {list_names(missing)}; {there}")
    if left := sorted(left - set(over)):
        raise UserError(f"{folder}: {count(left)} not in the model of config.json: {list_names(left)}")
    return {purpose: sorted(n for n in over if over[n] == purpose) for purpose in sorted(set(over.values()))}


def _without_copy(opened: OpenFolder) -> set[str]:
    """Return the names of the tensors, without an unembedding that is tied and stored nevertheless.

    Raises `UserError` where it is not equal to the embedding: libraries differ in which of the two they then use.
    """
    names, files, config = set(opened.files.tensors), opened.files, opened.config
    if not opened.stores_tied:
        return names
    table, copy = opened.tables
    for name in (table, copy):
        files.check(name, (config.vocab, config.embed))
    dims, whole = (config.vocab, config.embed), [((0, config.vocab), (0, config.embed))]
    first, second = (files.region(name, dims, whole) for name in (table, copy))
    pairs = ((piece, dataclasses.replace(second, chosen=piece.chosen)) for piece in first.cut(_PIECE))
    if not all(np.array_equal(files.read(table, x), files.read(copy, y)) for x, y in pairs):
        raise UserError(
            f"{opened.folder}/config.json: tie_word_embeddings=true, but {table} and {copy} differ; write false to "
            "load both, or take the second out of the files"
        )
    return names - {copy}
