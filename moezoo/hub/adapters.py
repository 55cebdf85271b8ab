"""Folders with low-rank adapters as PEFT has them: adapter_config.json and adapter_model.safetensors.

Written is one pair per matrix, with a name for each expert:

    base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_A.weight    [rank, inputs]
    base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_B.weight    [outputs, rank]

A tensor that holds several of our weights, such as `kv_b_proj`, has one pair of all their ranks together: A has their
rows below each other, and B is zero where a row belongs to another weight. `rank_pattern` and `alpha_pattern` have its
rank and its scale.

Read are also the two matrices that PEFT (0.19 and later) has for all experts of a layer, `target_parameters`:

    ...mlp.experts.lora_A.weight   [experts * rank, inputs]    row e * rank + j is row j of expert e
    ...mlp.experts.lora_B.weight   [outputs, rank * experts]   column j * experts + e is column j of expert e
"""

import collections
import dataclasses
import functools
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError, check_type
from moezoo.hub.adapter_copies import Copies
from moezoo.hub.adapter_settings import CONFIG, PEFT, WEIGHTS, AdapterSettings
from moezoo.hub.card import README, Facts, is_replaced, license_of, prompt_of, read_card, write_card
from moezoo.hub.opening import describe_download, folder_argument
from moezoo.hub.peft import describe_unread
from moezoo.hub.plan import Entry, Plan, entry_in_numbers, make_file
from moezoo.hub.public_names import Named, name_of_model
from moezoo.hub.tensors import Tensor, arrays_by_path, list_names, tensors
from moezoo.hub.values import ModelValues
from moezoo.hub.weight_files import DTYPES, WeightFiles
from moezoo.hub.writing import write_folder
from moezoo.models import family_of, name_of
from moezoo.models.base import LanguageModel
from moezoo.models.hub import Hub
from moezoo.parallel import distributed
from moezoo.parallel.axes import Role, is_stored
from moezoo.parallel.execution import Execution
from moezoo.parallel.fetch import fetch
from moezoo.parallel.low_rank import LowRank, is_low_rank, without_pairs
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.typed import convert, show

_BASE = "base_sha256"  # the entry of the file's metadata with the hash of the folder that the adapter is for
_PREFIX = "base_model.model."
# lora_A [rank, inputs] and lora_B [outputs, rank]
_Matrices = tuple[np.ndarray, np.ndarray]


def places(model: Any, hub: Hub) -> Iterator[Tensor]:
    """Yield the weights of layers and of the head that a pair is beside, by the names of modules in a folder.

    One for each expert, also where the folder has all experts in one tensor.
    """
    for tensor in tensors(model, hub):
        if tensor.axes.role is not Role.WEIGHT:
            continue
        if tensor.layout == "plain":
            yield dataclasses.replace(tensor, name=tensor.name.removesuffix(".weight"))
            continue
        above = tensor.name.rpartition(".")[0]
        for (path, index), shape in zip(tensor.parts, tensor.shapes, strict=True):
            for expert in range(shape[0]):
                module = f"{above}.{expert}.{path.rpartition('.')[2]}_proj"
                yield Tensor(module, ((path, (*index, expert)),), tensor.axes, (shape[1:],))


def save_adapter(
    model: LanguageModel,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    base_sha256: str | None = None,
    existing: Literal["refuse", "replace"] = "refuse",
) -> None:
    """Write a model's low-rank pairs as a folder that PEFT loads, with float32 tensors and a name for each expert.

    The folder gets a model card, README.md, unless it has one that moezoo did not write. With several processes all of
    them call this, and the first one writes. A warning names pairs that PEFT would not read.

    Args:
        model: A model with `LowRank` weights, as a run with `adapter=lora` has.
        folder: Is made if it does not exist.
        base: Where the weights beside which the pairs were trained are. `base_model_name_or_path` is their name on the
            Hub, if `base` shows it (`moezoo.hub.public_names`), or else the last name of this folder.
        base_sha256: The hash of that folder, `TrainConfig.init_sha256`, by which another one is refused.
        existing: What is done where `folder` has an adapter already.

    Raises:
        UserError: The model has no pairs, or `folder` has an adapter already or cannot be written.
    """
    where = write_adapter(model, folder, base=base, base_sha256=base_sha256, existing=existing)
    if distributed.is_first() and (unread := describe_peers(model)):
        warnings.warn(f"{where}: {unread}", stacklevel=2)


def write_adapter(
    model: LanguageModel,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    base_sha256: str | None = None,
    existing: Literal["refuse", "replace"] = "refuse",
    facts: Facts | None = None,
) -> Path:
    """Do the same as `save_adapter` without a warning, with the `facts` of a run in the card. Return the folder."""
    check_type("save_adapter: the first argument", model, LanguageModel, "take one from moezoo.train, or load_adapter")
    convert(Literal["refuse", "replace"], existing, "existing")
    where = folder_argument(folder)
    pairs = {path: x for path, x in arrays_by_path(model).items() if is_low_rank(x)}
    if not pairs:
        raise UserError("save_adapter: the model has no low-rank pairs; train it with adapter=lora")
    if existing == "refuse" and ((where / CONFIG).exists() or (where / WEIGHTS).exists()):
        raise UserError(f"{where} already holds an adapter; name another folder")
    sizes, named = _Sizes.of(model), None if base is None else name_of_model(base)
    card = _write_card(facts or Facts(where.name, ""), model, sizes, named, base)
    config = sizes.config() | {"base_model_name_or_path": (named.name or None) if named else None}
    texts = {README: card.encode()} if is_replaced(read_card(where)) else {}
    texts |= {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    metadata = {"__metadata__": {"format": "pt"} | ({_BASE: base_sha256} if base_sha256 else {})}
    adapted = [place for place in places(model, family_of(model.config).hub) if place.name in sizes.ranks]
    entries = itertools.chain.from_iterable(_entries(place, pairs, sizes) for place in adapted)
    plan = Plan([make_file(WEIGHTS, entries, metadata)], texts, ModelValues({}))
    write_folder(where, plan, existing="replace")  # also a card that moezoo wrote, where there is no adapter
    return where


def _write_card(
    facts: Facts, model: LanguageModel, sizes: "_Sizes", named: Named | None, base: str | Path | None
) -> str:
    """Return the model card of an adapter, which is read beside the folder `base`."""
    config, folder = sizes.config(), Path(base or "")
    what = (
        f"Low-rank pairs (LoRA) for {name_of(model.config)}, by moezoo: rank {config['r']}, alpha "
        f"{config['lora_alpha']:g}, beside {', '.join(f'`{name}`' for name in config['target_modules'])}."
    )
    files = {path.name: path for path in folder.iterdir()} if base is not None and folder.is_dir() else {}
    return write_card(
        facts._replace(
            what=what,
            base=named,
            relation="adapter",
            license=license_of(read_card(folder)) if files else [],
            prompt=prompt_of(files, facts.prompt),
            note=describe_peers(model),
        )
    )


class _Pair(NamedTuple):
    """One matrix's pair on the host: [*inputs, rank], [rank, *outputs], and the factor of the product."""

    a: np.ndarray
    b: np.ndarray
    scale: float


def _entries(place: Tensor, pairs: Mapping[str, LowRank], sizes: "_Sizes") -> Iterator[Entry]:
    """Yield lora_A [rank, inputs] and lora_B [outputs, rank] of a module that has some of the `pairs`."""
    rank, scale = sizes.ranks[place.name], sizes.scales[place.name]
    outputs, inputs = place.shape
    for part, shape, read in (
        ("A", (rank, inputs), functools.partial(_read_a, place, pairs)),
        ("B", (outputs, rank), functools.partial(_read_b, place, pairs, scale)),
    ):
        name = f"{_PREFIX}{place.name}.lora_{part}.weight"
        yield entry_in_numbers(name, np.dtype(np.float32), shape, read)


def _read_a(place: Tensor, pairs: Mapping[str, LowRank], process: int) -> np.ndarray | None:
    """Return lora_A on `process`: the rows of all pairs below each other."""
    found = [fetch(pairs[path].a, index, process) for path, index in place.parts if path in pairs]
    rows = [a.reshape(-1, a.shape[-1]).T for a in found if a is not None]
    return np.ascontiguousarray(np.concatenate(rows), np.float32) if rows else None


def _read_b(place: Tensor, pairs: Mapping[str, LowRank], scale: float, process: int) -> np.ndarray | None:
    """Return lora_B for a module with this scale on `process`: each pair has its own columns and rows."""
    blocks, first = [], 0
    rank = sum(pairs[path].rank for path, _ in place.parts if path in pairs)
    for (path, index), shape in zip(place.parts, place.shapes, strict=True):
        blocks.append(np.zeros((rank, *shape[place.split[1] :]), np.float32))
        if (pair := pairs.get(path)) is not None:
            if (b := fetch(pair.b, index, process)) is not None:
                blocks[-1][first : first + pair.rank] = b.astype(np.float32) * np.float32(pair.scale / scale)
            first += pair.rank
    whole = np.concatenate(blocks, axis=-1).reshape(rank, -1)
    return np.ascontiguousarray(whole.T) if process == jax.process_index() else None


class _Sizes(NamedTuple):
    """The modules that could have a pair, and the rank and the scale of each that has one."""

    modules: Sequence[str]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]

    @classmethod
    def of(cls, model: Any) -> "_Sizes":
        """Return those of a model, which may have shapes in place of arrays."""
        pairs = {path: x for path, x in arrays_by_path(model).items() if is_low_rank(x)}
        modules, ranks, scales = [], {}, {}
        for place in places(model, family_of(model.config).hub):
            here = [pairs[path] for path, _ in place.parts if path in pairs]
            modules.append(place.name)
            if here:
                ranks[place.name], scales[place.name] = sum(pair.rank for pair in here), here[0].scale
        return cls(modules, ranks, scales)

    @property
    def usual(self) -> tuple[int, float]:
        """The rank that most pairs have, and the alpha that most of these have."""
        rank = collections.Counter(self.ranks.values()).most_common(1)[0][0]
        alphas = (self.scales[name] * rank for name in self.ranks if self.ranks[name] == rank)
        return rank, collections.Counter(alphas).most_common(1)[0][0]

    def odd(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return the ranks and the alphas that are not the usual ones."""
        rank, alpha = self.usual
        alphas = {name: self.scales[name] * self.ranks[name] for name in self.ranks}
        return (
            {name: own for name, own in self.ranks.items() if own != rank},
            {name: own for name, own in alphas.items() if own != alpha},
        )

    def config(self) -> dict[str, Any]:
        """Return adapter_config.json."""
        (rank, alpha), (ranks, alphas) = self.usual, self.odd()
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "peft_version": ".".join(map(str, (*PEFT, 0))),
            "r": rank,
            "lora_alpha": _plain(alpha),
            "use_rslora": False,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            "target_modules": _ends(self.modules, self.ranks.keys()),
            "rank_pattern": _short(ranks, self.ranks),
            "alpha_pattern": {name: _plain(value) for name, value in _short(alphas, self.ranks).items()},
        }


def describe_peers(model: LanguageModel) -> str:
    """Return a sentence about the pairs of a model, or of its shapes, that PEFT would not read; empty without any."""
    sizes = _Sizes.of(model)
    if not sizes.ranks:
        return ""
    try:
        model_type = family_of(model.config).hub.write(model.config)["model_type"]
    except UserError:  # transformers has no such model
        return ""
    return describe_unread(model_type, sizes.ranks, {name for odd in sizes.odd() for name in odd})


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _by_end(names: Iterable[str], words: int = 1) -> dict[str, list[str]]:
    """Return names by their last words."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(".".join(name.split(".")[-words:]), []).append(name)
    return found


def _ends(modules: Iterable[str], adapted: Iterable[str]) -> list[str]:
    """Return the shortest ends of names, so that the `adapted` modules are those whose names have such an end."""
    found, words, left = [], 0, {*adapted}
    while left:
        words += 1
        for end, names in _by_end(modules, words).items():
            if left.issuperset(names):
                found.append(end)
                left -= {*names}
    return found


def _short(values: Mapping[str, Any], adapted: Iterable[str]) -> dict[str, Any]:
    """Return values by the last words of names where all with it have the same, or else by whole names."""
    found = {}
    for last, names in _by_end(adapted).items():
        some = [values.get(name) for name in names]
        if some[0] is not None and all(value == some[0] for value in some):
            found[last] = some[0]
        else:
            found |= {name: value for name, value in zip(names, some, strict=True) if value is not None}
    return found


class Adapter(NamedTuple):
    """An adapter of a folder: for each path of a weight, the pair of each layer and expert that has one.

    Attributes:
        folder: The folder.
        pairs: The path of a weight -> the index of its layer and expert -> the pair.
        base_sha256: The hash of the folder that it is for, if the adapter has one.
        copies: Weights of the base that it also has; whoever uses it checks that they are the same.
    """

    folder: Path
    pairs: Mapping[str, Mapping[tuple[int, ...], _Pair]]
    base_sha256: str | None
    copies: Copies

    def check_base(self, sha256: str | None) -> None:
        """Raise `UserError` where the adapter was trained beside a folder with another hash, if both are known."""
        if sha256 is not None and self.base_sha256 not in (None, sha256):
            raise UserError(
                f"adapter={self.folder} was trained beside weights with sha256 {self.base_sha256}, and these have "
                f"{sha256}; load it beside the former"
            )

    def attach(self, model: LanguageModel) -> LanguageModel:
        """Return the model, of arrays or of their shapes, with a pair of zeros beside each weight that has one."""

        def put(path: Any, base: Any) -> Any:
            pairs = self.pairs.get(jax.tree_util.keystr(path).lstrip("."))
            if pairs is None:
                return base
            some = next(iter(pairs.values()))
            lead = tuple(base.shape[: len(next(iter(pairs)))])
            rank = max(len(pair.b) for pair in pairs.values())
            return LowRank(
                base=base,
                a=jnp.zeros((*lead, *some.a.shape[:-1], rank), jnp.float32),
                b=jnp.zeros((*lead, rank, *some.b.shape[1:]), jnp.float32),
                scale=some.scale,
                inputs=some.a.ndim - 1,
                dtype=base.dtype,
            )

        return jax.tree_util.tree_map_with_path(put, model, is_leaf=is_stored)

    def product(self, path: str, index: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        """Return scale A B of a weight's part of this shape, in float32; zero without a pair.

        `index` has the layer, and the expert where the shape is not that of all experts.
        """
        found = np.zeros(shape, np.float32)
        for at, pair in self.pairs.get(path, {}).items():
            if at[: len(index)] == index:
                rank = len(pair.b)
                whole = pair.a.reshape(-1, rank) @ pair.b.reshape(rank, -1)
                found[at[len(index) :]] = np.float32(pair.scale) * whole.reshape(found[at[len(index) :]].shape)
        return found

    def describe(self) -> str:
        """Return the number of pairs, and their ranks."""
        pairs = [pair for of_path in self.pairs.values() for pair in of_path.values()]
        ranks = sorted({len(pair.b) for pair in pairs})
        return f"{self.folder}: {len(pairs):,} low-rank pair{'s' * (len(pairs) != 1)} of rank {show(ranks)[1:-1]}"

    def numbers(self, path: str, shape_a: tuple[int, ...], shape_b: tuple[int, ...], scale: float) -> Any:
        """Return both matrices of a weight for all layers and experts: zero where there is no pair."""
        a, b = np.zeros(shape_a, np.float32), np.zeros(shape_b, np.float32)
        for index, pair in self.pairs[path].items():
            rank = len(pair.b)
            a[index][..., :rank] = pair.a
            b[index][:rank] = pair.b * np.float32(pair.scale / scale)
        return a, b


def load_adapter(
    model: LanguageModel, adapter: str | Path, execution: Execution | None = None, *, base_sha256: str | None = None
) -> LanguageModel:
    """Return a model with the low-rank pairs of a folder beside its weights, in place of those that it has.

    Nothing of the model is copied. A program that was compiled for one adapter runs with every other of the same
    targets, ranks and scales.

    Args:
        model: A model, whose arrays may lie on a mesh.
        adapter: A folder with adapter_config.json and adapter_model.safetensors, as PEFT and `save_adapter` write them.
        execution: The mesh and rules that lay out the model; None for one device.
        base_sha256: The hash of the folder that the model is from (`TrainConfig.init_sha256`). An adapter that names
            another hash is refused.

    Raises:
        UserError: There is no adapter, it is damaged or for another model, or computes something else.
    """
    if not isinstance(model, LanguageModel):
        raise UserError(f"load_adapter: the first argument is a {type(model).__name__}, expected a model")
    bare = without_pairs(model)
    read = read_adapter(adapter, bare)
    read.check_base(base_sha256)
    read.copies.check(ModelValues(arrays_by_path(bare)))
    shapes = jax.eval_shape(read.attach, bare)
    shardings = on_mesh(execution or Execution()).shardings(shapes)

    def fill(path: Any, pair: Any, base: Any, shardings: Any) -> Any:
        if not is_low_rank(pair):
            return base
        name = jax.tree_util.keystr(path).lstrip(".")
        numbers = read.numbers(name, pair.a.shape, pair.b.shape, pair.scale)
        a, b = (
            jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
            for x, sharding in zip(numbers, (shardings.a, shardings.b), strict=True)
        )
        return dataclasses.replace(pair, base=base, a=a, b=b)

    return jax.tree_util.tree_map_with_path(fill, shapes, bare, shardings, is_leaf=is_low_rank)


def read_adapter(folder: str | Path, model: Any) -> Adapter:
    """Read the adapter in a folder for a model, which may be its shapes.

    Raises:
        UserError: There is no adapter, it is damaged, computes something else than low-rank pairs beside weights of
            this model, or its sizes are those of another model.

    A warning names modules that `target_modules` name and that have no pair.
    """
    where = folder_argument(folder, "adapter")
    if not where.exists():
        raise UserError(f"adapter={where}: there is no such folder; name one with {CONFIG}{describe_download(where)}")
    for name in (CONFIG, WEIGHTS):
        if not (where / name).exists():
            raise UserError(f"adapter={where}: no {name}; name a folder that PEFT or moezoo wrote")
    settings = AdapterSettings.read(where / CONFIG)
    files = WeightFiles(where, WEIGHTS)
    left = {_module(name): name for name in files.tensors}
    if len(left) < len(files.tensors):
        raise UserError(f"{where}: two tensors of {WEIGHTS} have the same name but for a prefix; keep one of them")
    found: dict[str, dict[tuple[int, ...], _Pair]] = {}

    def read(module: str) -> _Matrices | None:
        names = [left.pop(f"{module}.lora_{part}", None) for part in "AB"]
        if names == [None, None]:
            return None
        if None in names:
            raise UserError(f"{where}: {module} has only one of lora_A and lora_B; save the adapter again")
        for stored in (files.tensors[str(name)] for name in names):
            if stored.dtype not in DTYPES or len(stored.shape) != 2 or 0 in stored.shape:
                raise UserError(
                    f"{where}: {module} has a matrix of shape {list(stored.shape)} in {stored.dtype}, expected two "
                    f"dimensions in {', '.join(DTYPES)}; save the adapter again"
                )
        a, b = (files.read(str(name)).astype(np.float32) for name in names)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise UserError(f"{where}: the pair of {module} has NaN or infinities; save the adapter again")
        return a, b

    hub = family_of(model.config).hub
    alternate = any(tensor.layout == "alternating" for tensor in tensors(model, hub))
    packed = _Packed(settings, read, model.config.experts, alternate)
    lacking: list[str] = []
    of_experts = False  # whether single experts have pairs
    for place in places(model, hub):
        own = read(place.name)
        named = (place.name, own) if own is not None else packed.pair(place)
        of_experts |= own is not None and ".experts." in place.name
        if named is None:
            lacking += [place.name] * settings.names(place.name)
            continue
        name, pair = named
        scale = settings.scale(name, len(pair[0]))
        for (path, index), part in zip(place.parts, _split(place, *pair, where), strict=True):
            found.setdefault(path, {})[index] = _Pair(*part, scale)
    copies = Copies.find(files, left.values(), _PREFIX, model, hub)
    if unknown := sorted({*left.values()} - {*copies.tensors}):
        raise UserError(
            f"{where}: no weight of this model has these: {list_names(unknown)}; the adapter is for another model, or "
            "adapts what moezoo has in another form: merge with PEFT, then load the merged folder"
        )
    # Where a library has all experts of a layer in one tensor, names of target_modules do not mean them.
    if lost := sorted(name for name in lacking if of_experts or ".experts." not in name):
        warnings.warn(
            f"{where}: target_modules of {CONFIG} name modules without a pair in {WEIGHTS}, which stay as they are: "
            f"{list_names(lost)}; if that was not intended, save or copy the adapter again",
            stacklevel=2,
        )
    return Adapter(where, found, files.metadata.get(_BASE), copies)


def _module(name: str) -> str:
    """Return the name of a tensor as `MODULE.lora_A` or `MODULE.lora_B`."""
    short = name.removeprefix(_PREFIX).removesuffix(".weight")
    return short.removesuffix(".default")


def _split(place: Tensor, a: np.ndarray, b: np.ndarray, where: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the matrices [*inputs, rank] and [rank, *outputs] of each part of a place."""
    cut, last = place.split[1], [shape[-1] for shape in place.shapes]
    inputs, outputs = place.shapes[0][:cut], place.shapes[0][cut:-1]
    rank, (rows, columns) = len(a), place.shape
    if (a.shape[1], b.shape[0]) != (columns, rows) or b.shape[1] != rank:
        raise UserError(
            f"{where}: {place.name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected [rank, "
            f"{columns}] and [{rows}, rank] for this model; the adapter is for another one"
        )
    whole_a = np.ascontiguousarray(a.T).reshape(*inputs, rank)
    whole_b = np.ascontiguousarray(b.T).reshape(rank, *outputs, sum(last))
    bs = np.split(whole_b, np.cumsum(last)[:-1], axis=-1)
    count = len(bs)
    if count > 1 and rank % count == 0:  # a block of ranks for each part, as `save_adapter` writes them
        size = rank // count
        spans = [slice(i * size, (i + 1) * size) for i in range(count)]
        others = (b[~np.isin(np.arange(rank), np.arange(rank)[span])] for b, span in zip(bs, spans, strict=True))
        if not any(other.any() for other in others):
            return [(whole_a[..., span], b[span]) for b, span in zip(bs, spans, strict=True)]
    return [(whole_a, b) for b in bs]


class _Packed:
    """The pairs that PEFT has for all experts of a layer. That of `gate_up_proj` is inside that of `down_proj`.

    `alternate`: whether transformers has gate and up in turns in one tensor.
    """

    def __init__(
        self, settings: AdapterSettings, read: Callable[[str], _Matrices | None], experts: int, alternate: bool
    ):
        self._settings, self._read, self._experts, self._alternate = settings, read, experts, alternate
        self._open: dict[str, _Matrices | None] = {}

    def pair(self, place: Tensor) -> tuple[str, _Matrices] | None:
        """Return the pair of one expert, and the name of the tensor that it is a part of; None without one."""
        layer = re.match(r"model\.layers\.\d+\.", place.name)
        path, index = place.parts[0]
        if ".experts." not in path or layer is None:
            return None
        kind, expert = path.rpartition(".")[2], index[-1]
        above, name = f"{layer[0]}mlp.experts", "down_proj" if kind == "down" else "gate_up_proj"
        whole = self._find(above, name, place)
        if whole is None:
            return None
        self._settings.check_packed()
        a, b = whole
        if len(a) % self._experts or b.shape[1] != len(a):
            raise UserError(
                f"{self._settings.where}: the pair of {above}.{name} has {len(a)} rows in lora_A and {b.shape[1]} "
                f"columns in lora_B, expected as many in both, a multiple of the {self._experts} experts"
            )
        a = a.reshape(self._experts, -1, a.shape[1])[expert]
        b = b.reshape(len(b), -1, self._experts)[:, :, expert]
        if kind != "down":
            part = ("gate", "up").index(kind)
            b = b[part::2] if self._alternate else np.split(b, 2)[part]
        return f"{above}.{name}", (a, b)

    def _find(self, above: str, name: str, place: Tensor) -> _Matrices | None:
        for module in (f"{above}.base_layer", above):
            if module not in self._open:
                self._open[module] = self._read(module)
        inner, outer = self._open[f"{above}.base_layer"], self._open[above]
        if inner is not None:
            return inner if name == "gate_up_proj" else outer
        targets = {target for target in ("gate_up_proj", "down_proj") if target in self._settings.parameters}
        if outer is not None and len(targets) != 1:
            raise UserError(
                f"{self._settings.where}: the pair of {above} is for all experts, and target_parameters name "
                f"{' and '.join(sorted(targets)) or 'none'} of their two matrices, expected one; save it with PEFT"
            )
        return outer if targets == {name} else None
