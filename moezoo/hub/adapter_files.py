"""Folders of low-rank adapters as PEFT writes them: what their two files say, which is read beside a model's weights.

One pair per matrix, with a name for each expert, is what `moezoo.hub.adapters` writes too:

    base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_A.weight    [rank, inputs]
    base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_B.weight    [outputs, rank]

A tensor that holds several of our weights, such as `kv_b_proj`, has one pair of all their ranks together: A has their
rows below each other, and B is zero where a row belongs to another weight. `rank_pattern` and `alpha_pattern` have its
rank and its scale.

Read are also the two matrices that PEFT (0.19 and later) has for all experts of a layer, `target_parameters`:

    ...mlp.experts.lora_A.weight   [experts * rank, inputs]    row e * rank + j is row j of expert e
    ...mlp.experts.lora_B.weight   [outputs, rank * experts]   column j * experts + e is column j of expert e

What would compute something else than a low-rank pair beside each weight is refused.
"""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError
from moezoo.host.files import read_json
from moezoo.hub.opening import describe_download, folder_argument
from moezoo.hub.tensors import Tensor, arrays_by_path, list_names, tensors
from moezoo.hub.values import Values
from moezoo.hub.weight_files import DTYPES, WeightFiles
from moezoo.models import family_of
from moezoo.models.base import LanguageModel
from moezoo.models.hub import Hub
from moezoo.parallel import distributed
from moezoo.parallel.axes import Role, is_stored
from moezoo.parallel.low_rank import LowRank
from moezoo.typed import convert, show

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_sha256"  # the entry of the file's metadata with the hash of the folder that the adapter is for
PREFIX = "base_model.model."  # of all names of tensors
PEFT = (0, 19)  # the first version with this layout of packed experts
# Patterns of names are regular expressions from anybody: few repetitions, and no repeated group.
_REPEATS, _REPEATED, _MOST_REPEATS = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]"), 4
# Keys of adapter_config.json that change what is computed, and the values that have no effect; others are refused.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "layer_replication": (None,),
    "megatron_config": (None,),
    "loftq_config": (None, {}),
    # The others change the base.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# What was chosen by, and how it was trained: the tensors show the result.
_UNREAD = frozenset(
    {
        *("alora_config", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout"),
        *("lora_ga_config", "megatron_core", "modules_to_save", "monteclora_config", "peft_type", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters", "task_type"),
    }
)
_READ = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"))
# What PEFT adds to the names of whole weights: copies of the base's, of the head and of `modules_to_save`.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save(\.default)?)(?=\.)")
# lora_A [rank, inputs] and lora_B [outputs, rank]
_Matrices = tuple[np.ndarray, np.ndarray]


class _Settings(NamedTuple):
    """What adapter_config.json says of the factor of each pair."""

    where: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool
    version: str | None
    parameters: tuple[str, ...]
    targets: tuple[str, ...]
    excluded: Any
    layers: tuple[int, ...] | None

    @classmethod
    def read(cls, path: Path) -> "_Settings":
        """Read the file. Raises `UserError` for what is no LoRA, and for what would be computed in another way."""
        mapping = read_json(path)
        if mapping.get("peft_type") != "LORA":
            raise UserError(f"{path}: peft_type={show(mapping.get('peft_type'))[:40]}, expected LORA; only it is read")
        for key, value in mapping.items():
            if key in _WITHOUT_EFFECT:
                if value not in _WITHOUT_EFFECT[key]:
                    usual = show(_WITHOUT_EFFECT[key][0])
                    raise UserError(
                        f"{path}: {key}={show(value)[:80]} computes something else than a low-rank pair beside each "
                        f"weight; expected {usual}: merge the adapter with PEFT, and load the merged folder"
                    )
            elif key not in _UNREAD | _READ and value not in (None, False, [], {}, "", 0):
                raise UserError(
                    f"{path}: unknown key {show(key)[:80]}={show(value)[:80]}; what it means is not known here: merge "
                    "the adapter with PEFT, and load the merged folder"
                )
        number = lambda key, kind, of: convert(kind, of, f"{path}: {key}")  # noqa: E731
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in number(key, Mapping[str, float], mapping.get(key) or {}):
                if len(_REPEATS.findall(pattern)) > _MOST_REPEATS or _REPEATED.search(pattern):
                    raise UserError(
                        f"{path}: {key} has {show(pattern)[:80]}, whose search may never end; write the names of the "
                        "modules, or the ends of their names"
                    )
        layers = mapping.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers
        targets = mapping.get("target_modules")
        return cls(
            where=path,
            rank=number("r", int, mapping.get("r", 8)),
            alpha=number("lora_alpha", float, mapping.get("lora_alpha", 8)),
            ranks=number("rank_pattern", Mapping[str, int], mapping.get("rank_pattern") or {}),
            alphas=number("alpha_pattern", Mapping[str, float], mapping.get("alpha_pattern") or {}),
            by_root=number("use_rslora", bool, mapping.get("use_rslora", False)),
            version=number("peft_version", str | None, mapping.get("peft_version")),
            parameters=tuple(str(name).rpartition(".")[2] for name in mapping.get("target_parameters") or ()),
            # A pattern in place of names, which may search for ever, and "all-linear" are not looked at.
            targets=tuple(map(str, targets)) if isinstance(targets, list) else (),
            excluded=mapping.get("exclude_modules"),
            layers=None if layers is None else number("layers_to_transform", tuple[int, ...], layers),
        )

    def names(self, module: str) -> bool:
        """Return whether `target_modules` name a module, and nothing excludes it, as far as both are lists of names."""
        ends = lambda names: any(f".{module}".endswith(f".{name}") for name in names)  # noqa: E731
        if self.excluded and (not isinstance(self.excluded, list) or ends(self.excluded)):
            return False
        layer = re.match(r"model\.layers\.(\d+)\.", module)
        return ends(self.targets) and (self.layers is None or (layer is not None and int(layer[1]) in self.layers))

    def check_packed(self) -> None:
        """Raise `UserError` where matrices of all experts have another layout, or an unknown one."""
        found = re.match(r"(\d+)\.(\d+)", self.version or "")
        if found is None or (int(found[1]), int(found[2])) < PEFT:
            raise UserError(
                f"{self.where}: the adapter has one pair for all experts of a layer, and peft_version="
                f"{show(self.version)}; before 0.19.0 PEFT had these transposed: load it with that version, merge it, "
                "and load the merged folder"
            )

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's pair, whose matrices have so many ranks."""
        stated, alpha = (_of(module, *pair) for pair in ((self.ranks, self.rank), (self.alphas, self.alpha)))
        if stated != rank:
            raise UserError(
                f"{self.where}: the pair of {module} has rank {rank} in {WEIGHTS}, but {stated} by r or rank_pattern; "
                "the two files belong to different adapters"
            )
        if not alpha or not math.isfinite(alpha):
            raise UserError(
                f"{self.where}: lora_alpha or alpha_pattern has {alpha:g} for {module}, expected a finite number other "
                "than 0; take the right one"
            )
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _of(module: str, pattern: Mapping[str, Any], usual: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with, as PEFT does."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error:
            continue
    return usual


def places(model: Any, hub: Hub) -> Iterator[Tensor]:
    """Yield the weights of layers and of the head that a pair is beside, by the names of modules in a folder.

    One for each expert, also where the folder has all experts in one tensor.
    """
    for tensor in tensors(model, hub):
        if tensor.axes.role is not Role.WEIGHT:
            continue
        if tensor.layout in ("plain", "flat"):
            yield dataclasses.replace(tensor, name=tensor.name.removesuffix(".weight"))
            continue
        above = tensor.name.rpartition(".")[0]
        for (path, index), shape in zip(tensor.parts, tensor.shapes, strict=True):
            for expert in range(shape[0]):
                module = f"{above}.{expert}.{path.rpartition('.')[2]}_proj"
                yield Tensor(module, ((path, (*index, expert)),), tensor.axes, (shape[1:],))


class _Pair(NamedTuple):
    """One matrix's pair on the host: [*inputs, rank], [rank, *outputs], and the factor of the product."""

    a: np.ndarray
    b: np.ndarray
    scale: float


class Adapter(NamedTuple):
    """An adapter of a folder: for each path of a weight, the pair of each layer and expert that has one.

    Attributes:
        folder: The folder.
        pairs: The path of a weight -> the index of its layer and expert -> the pair.
        base_sha256: The hash of the folder that it is for, if the adapter has one.
        files: Its tensors.
        copies: The tensor of the model that a whole weight among them is a copy of, by the name of the copy.
    """

    folder: Path
    pairs: Mapping[str, Mapping[tuple[int, ...], _Pair]]
    base_sha256: str | None
    files: WeightFiles
    copies: Mapping[str, Tensor]

    def check_base(self, values: Values, sha256: str | None) -> None:
        """Raise `UserError` unless the adapter is for a model of these numbers, from a folder with this hash, if known.

        A copy of a weight that equals the base changes nothing. One that was trained is no low-rank pair.
        """
        if sha256 is not None and self.base_sha256 not in (None, sha256):
            raise UserError(
                f"adapter={self.folder} was trained beside weights with sha256 {self.base_sha256}, and these have "
                f"{sha256}; load it beside the former"
            )
        for name, tensor in self.copies.items():
            distributed.first(functools.partial(self._check_copy, name, values.read(tensor, 0)))

    def _check_copy(self, name: str, base: Any) -> None:
        """Raise `UserError` unless a copy equals the base, both in the smaller of their two dtypes."""
        self.files.check(name, base.shape)
        copy = self.files.read(name)
        dtype = min(base.dtype, copy.dtype, key=lambda kind: kind.itemsize)
        if not np.array_equal(copy.astype(dtype), base.astype(dtype)):
            raise UserError(
                f"{self.folder}: {name} is a whole weight that differs from the base's; merge with PEFT, then load the "
                "merged folder"
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
    settings = _Settings.read(where / CONFIG)
    files = WeightFiles(where, WEIGHTS)
    hub = family_of(model.config).hub
    # transformers names the layers of every model so, and some folders otherwise.
    first = next(row.name for row in hub.rows(model.config) if "{layer}" in row.name).partition(".")[0]
    left = {re.sub(r"^model\.", f"{first}.", _module(name)): name for name in files.tensors}
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
    copies = _find_copies(left.values(), model, hub) if left else {}
    if unknown := sorted({*left.values()} - copies.keys()):
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
    return Adapter(where, found, files.metadata.get(BASE), files, copies)


def _find_copies(names: Iterable[str], model: Any, hub: Hub) -> dict[str, Tensor]:
    """Return those of `names` that are tensors of the model, or of its shapes, after PEFT's words in them.

    A tied unembedding is a copy of the embedding.
    """
    by_name = {tensor.name: tensor for tensor in tensors(model, hub)}
    own = {row.ours[0]: row.name for row in hub.rows(model.config)}
    if model.config.tied_embeddings:
        by_name[own["unembedding.weight"]] = by_name[own["embedding.weight"]]
    meant = {name: _WRAPPERS.sub("", name.removeprefix(PREFIX)) for name in names}
    return {name: by_name[found] for name, found in meant.items() if found in by_name}


def _module(name: str) -> str:
    """Return the name of a tensor as `MODULE.lora_A` or `MODULE.lora_B`."""
    short = name.removeprefix(PREFIX).removesuffix(".weight")
    return short.removesuffix(".default")


def _split(place: Tensor, a: np.ndarray, b: np.ndarray, where: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the matrices [*inputs, rank] and [rank, *outputs] of each part of a place."""
    rank, (rows, columns) = len(a), place.shape
    if (a.shape[1], b.shape[0]) != (columns, rows) or b.shape[1] != rank:
        raise UserError(
            f"{where}: {place.name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected [rank, "
            f"{columns}] and [{rows}, rank] for this model; the adapter is for another one"
        )
    whole_a = np.ascontiguousarray(a.T).reshape(*place.shapes[0][: place.split[1]], rank)
    bs = [np.ascontiguousarray(b.T)[:, place.places(part)] for part in range(len(place.parts))]
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

    def __init__(self, settings: _Settings, read: Callable[[str], _Matrices | None], experts: int, alternate: bool):
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


class MergedValues(Values):
    """The numbers of a folder plus scale A B of each pair, in float32, rounded once to the dtypes of `shapes`."""

    def __init__(self, values: Values, adapter: Adapter, shapes: LanguageModel):
        """Merge `adapter` into `values`, which are read in float32."""
        super().__init__(arrays_by_path(shapes))
        self._values, self._adapter = values, adapter

    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        return self._values.stored_dtype(tensor)

    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        found = self._values.read(tensor, process)
        if found is None:
            return None
        if any(path in self._adapter.pairs for path, _ in tensor.parts):
            products = [
                self._adapter.product(path, index, shape)
                for (path, index), shape in zip(tensor.parts, tensor.shapes, strict=True)
            ]
            found = found + tensor.to_file(products)
        with np.errstate(over="ignore"):
            return found.astype(self.dtype(tensor), copy=False)
