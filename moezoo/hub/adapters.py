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
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from moezoo.errors import UserError, check_type
from moezoo.hub.adapter_copies import Copies
from moezoo.hub.adapter_settings import CONFIG, PEFT, WEIGHTS, AdapterSettings
from moezoo.hub.card import README, Facts, is_replaced, license_of, prompt_of, read_card, write_card
from moezoo.hub.opening import describe_download, folder_argument
from moezoo.hub.peft import describe_unread
from moezoo.hub.public_names import Named, name_of_model
from moezoo.hub.tensors import arrays_by_path, list_names, tensors
from moezoo.hub.values import ModelValues
from moezoo.hub.weight_files import DTYPES, WeightFiles
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


class Place(NamedTuple):
    """A pair in a folder.

    Attributes:
        module: The name of the module that it is beside.
        parts: The weights of ours that it holds, joined along their last dimension: the path of each, and the index of
            its layer and expert.
        shapes: The shape of each part.
        cut: The number of input dimensions.
        alternates: Whether transformers has gate and up in turns in one tensor.
    """

    module: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    shapes: tuple[tuple[int, ...], ...]
    cut: int
    alternates: bool = False


def places(model: Any, hub: Hub) -> Iterator[Place]:
    """Yield the place of every weight of layers and of the head, by the names of a folder of the model."""
    for tensor in tensors(model, hub):
        if tensor.axes.role is not Role.WEIGHT:
            continue
        if tensor.layout == "plain":
            yield Place(tensor.name.removesuffix(".weight"), tensor.parts, tensor.shapes, len(tensor.axes.inputs))
            continue
        above = tensor.name.rpartition(".")[0]
        for (path, index), shape in zip(tensor.parts, tensor.shapes, strict=True):
            for expert in range(shape[0]):
                module = f"{above}.{expert}.{path.rpartition('.')[2]}_proj"
                yield Place(module, ((path, (*index, expert)),), (shape[1:],), 1, tensor.layout == "alternating")


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
    sizes, numbers = _Sizes.of(model), {}
    named = None if base is None else name_of_model(base)
    card = _write_card(facts or Facts(where.name, ""), model, sizes, named, base)
    for place in places(model, family_of(model.config).hub):
        if place.module in sizes.ranks:
            parts = [_fetch(pairs.get(path), index) for path, index in place.parts]
            a, b = _join(place, parts, sizes.scales[place.module])
            numbers[f"{_PREFIX}{place.module}.lora_A.weight"] = a
            numbers[f"{_PREFIX}{place.module}.lora_B.weight"] = b

    def write() -> None:
        from safetensors.numpy import save_file

        metadata = {"format": "pt"} | ({_BASE: base_sha256} if base_sha256 else {})
        config = sizes.config() | {"base_model_name_or_path": (named.name or None) if named else None}
        try:
            where.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{where} cannot be made ({error.strerror}); name another folder") from error
        _replace(where / WEIGHTS, lambda new: save_file(numbers, new, metadata))
        _replace(where / CONFIG, lambda new: new.write_text(json.dumps(config, indent=2) + "\n"))
        if is_replaced(read_card(where)):
            _replace(where / README, lambda new: new.write_text(card))

    distributed.first(write)
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


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Make or replace a file in one operation."""
    from safetensors import SafetensorError

    new = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        new.touch()
        mode = new.stat().st_mode  # safetensors lets nobody else read its files
        write(new)
        new.chmod(mode)
        os.replace(new, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written ({getattr(error, 'strerror', None) or error})") from error
    finally:
        new.unlink(missing_ok=True)


class _Pair(NamedTuple):
    """One matrix's pair on the host: [*inputs, rank], [rank, *outputs], and the factor of the product."""

    a: np.ndarray
    b: np.ndarray
    scale: float


def _fetch(pair: LowRank | None, index: tuple[int, ...]) -> _Pair | None:
    if pair is None:
        return None
    a, b = (fetch(part, index, 0) for part in (pair.a, pair.b))
    if a is None or b is None:  # another process has it; only shapes are needed here
        a, b = (np.zeros(part.shape[len(index) :], np.float32) for part in (pair.a, pair.b))
    return _Pair(a.astype(np.float32), b.astype(np.float32), pair.scale)


def _join(place: Place, parts: Sequence[_Pair | None], scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return lora_A [rank, inputs] and lora_B [outputs, rank] of a module with this scale."""
    some = [part for part in parts if part is not None]
    inputs = math.prod(place.shapes[0][: place.cut])
    a = np.concatenate([part.a.reshape(inputs, -1).T for part in some])
    blocks = []
    for part, shape in zip(parts, place.shapes, strict=True):
        rows = [
            one.b * np.float32(one.scale / scale) if one is part else np.zeros((len(one.b), *shape[place.cut :]))
            for one in some
        ]
        blocks.append(np.concatenate(rows).astype(np.float32))
    b = np.concatenate(blocks, axis=-1)
    return np.ascontiguousarray(a), np.ascontiguousarray(b.reshape(len(a), -1).T)


class _Sizes(NamedTuple):
    """The rank and the scale of each module that has a pair, and whether each that could have one does."""

    modules: Mapping[str, bool]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]

    @classmethod
    def of(cls, model: Any) -> "_Sizes":
        """Return those of a model, which may have shapes in place of arrays."""
        pairs = {path: x for path, x in arrays_by_path(model).items() if is_low_rank(x)}
        modules, ranks, scales = {}, {}, {}
        for place in places(model, family_of(model.config).hub):
            here = [pairs[path] for path, _ in place.parts if path in pairs]
            modules[place.module] = bool(here)
            if here:
                ranks[place.module], scales[place.module] = sum(pair.rank for pair in here), here[0].scale
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
            "target_modules": _ends(self.modules),
            "rank_pattern": _short(ranks, self.modules),
            "alpha_pattern": {name: _plain(value) for name, value in _short(alphas, self.modules).items()},
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
    return describe_unread(model_type, sizes.modules, {name for odd in sizes.odd() for name in odd})


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _by_end(names: Iterable[str], words: int = 1) -> dict[str, list[str]]:
    """Return names by their last words."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(".".join(name.split(".")[-words:]), []).append(name)
    return found


def _ends(modules: Mapping[str, bool]) -> list[str]:
    """Return the shortest ends of names, so that modules with a pair are those whose names have such an end."""
    found, words, left = [], 0, {name for name, adapted in modules.items() if adapted}
    while left:
        words += 1
        for end, names in _by_end(modules, words).items():
            if left.issuperset(names):
                found.append(end)
                left -= {*names}
    return found


def _short(values: Mapping[str, Any], modules: Mapping[str, bool]) -> dict[str, Any]:
    """Return values by the last words of names where all modules with it have the same, or else by whole names."""
    found = {}
    for last, names in _by_end(name for name, adapted in modules.items() if adapted).items():
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
    if execution is None or execution.mesh is None:
        here = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: here, shapes)
    else:
        shardings = on_mesh(execution).shardings(shapes)

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

    packed, hub = _Packed(settings, read, model.config.experts), family_of(model.config).hub
    lacking: list[str] = []
    of_experts = False  # whether single experts have pairs
    for place in places(model, hub):
        own = read(place.module)
        named = (place.module, own) if own is not None else packed.pair(place)
        of_experts |= own is not None and ".experts." in place.module
        if named is None:
            lacking += [place.module] * settings.names(place.module)
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


def _split(place: Place, a: np.ndarray, b: np.ndarray, where: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the matrices [*inputs, rank] and [rank, *outputs] of each part of a place."""
    inputs, outputs = place.shapes[0][: place.cut], place.shapes[0][place.cut : -1]
    last = [shape[-1] for shape in place.shapes]
    rank, expected = len(a), (math.prod(inputs), math.prod(outputs) * sum(last))
    if (a.shape[1], b.shape[0]) != expected or b.shape[1] != rank:
        raise UserError(
            f"{where}: {place.module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected [rank, "
            f"{expected[0]}] and [{expected[1]}, rank] for this model; the adapter is for another one"
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
    """The pairs that PEFT has for all experts of a layer. That of `gate_up_proj` is inside that of `down_proj`."""

    def __init__(self, settings: AdapterSettings, read: Callable[[str], _Matrices | None], experts: int):
        self._settings, self._read, self._experts = settings, read, experts
        self._open: dict[str, _Matrices | None] = {}

    def pair(self, place: Place) -> tuple[str, _Matrices] | None:
        """Return the pair of one expert, and the name of the tensor that it is a part of; None without one."""
        layer = re.match(r"model\.layers\.\d+\.", place.module)
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
            b = b[part::2] if place.alternates else np.split(b, 2)[part]
        return f"{above}.{name}", (a, b)

    def _find(self, above: str, name: str, place: Place) -> _Matrices | None:
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
