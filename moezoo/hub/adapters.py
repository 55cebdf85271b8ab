"""Low-rank pairs of a model: saved as a folder that PEFT loads, and loaded from one (`moezoo.hub.adapter_files`)."""

import collections
import dataclasses
import functools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from moezoo.errors import UserError, check_type
from moezoo.hub.adapter_files import BASE, CONFIG, PEFT, PREFIX, WEIGHTS, places, read_adapter
from moezoo.hub.card import README, Facts, is_replaced, license_of, prompt_of, read_card, write_card
from moezoo.hub.opening import folder_argument
from moezoo.hub.peft import describe_unread
from moezoo.hub.plan import Entry, Plan, entry_in_numbers, make_file
from moezoo.hub.public_names import Named, name_of_model
from moezoo.hub.tensors import Tensor, arrays_by_path
from moezoo.hub.values import ModelValues
from moezoo.hub.writing import write_folder
from moezoo.models import family_of, name_of
from moezoo.models.base import LanguageModel
from moezoo.parallel import distributed
from moezoo.parallel.execution import Execution
from moezoo.parallel.fetch import fetch
from moezoo.parallel.low_rank import LowRank, is_low_rank, pairs_by_path, without_pairs
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.typed import convert


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
    adapted = _Adapted.of(model)
    if not adapted.pairs:
        raise UserError("save_adapter: the model has no low-rank pairs; train it with adapter=lora")
    if existing == "refuse" and ((where / CONFIG).exists() or (where / WEIGHTS).exists()):
        raise UserError(f"{where} already holds an adapter; name another folder")
    named = None if base is None else name_of_model(base)
    config = adapted.config() | {"base_model_name_or_path": (named.name or None) if named else None}
    texts = {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    if is_replaced(read_card(where)):
        card = _write_card(facts or Facts(where.name, ""), model, config, named, base)
        texts = {README: card.encode(), **texts}
    metadata = {"__metadata__": {"format": "pt"} | ({BASE: base_sha256} if base_sha256 else {})}
    plan = Plan([make_file(WEIGHTS, adapted.entries(), metadata)], texts, ModelValues({}))
    write_folder(where, plan, existing="replace")  # also a card that moezoo wrote, where there is no adapter
    return where


def _write_card(
    facts: Facts, model: LanguageModel, config: Mapping[str, Any], named: Named | None, base: str | Path | None
) -> str:
    """Return the model card of an adapter with this adapter_config.json, which is read beside the folder `base`."""
    folder = Path(base or "")
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


class _Adapted(NamedTuple):
    """The pairs of a model, and what a folder has of them.

    Attributes:
        pairs: The pairs, by the paths of their weights.
        modules: The names of all modules that could have a pair.
        places: The tensors with some of the pairs, by the names of their modules.
        ranks: The rank of each of these.
        scales: The scale of each.
    """

    pairs: Mapping[str, LowRank]
    modules: Sequence[str]
    places: Mapping[str, Tensor]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]

    @classmethod
    def of(cls, model: Any) -> "_Adapted":
        """Return those of a model, which may have shapes in place of arrays."""
        pairs = {path.lstrip("."): pair for path, pair in pairs_by_path(model)}
        modules, found, ranks, scales = [], {}, {}, {}
        for place in places(model, family_of(model.config).hub):
            here = [pairs[path] for path, _ in place.parts if path in pairs]
            modules.append(place.name)
            if here:
                found[place.name] = place
                ranks[place.name], scales[place.name] = sum(pair.rank for pair in here), here[0].scale
        return cls(pairs, modules, found, ranks, scales)

    def entries(self) -> Iterator[Entry]:
        """Yield lora_A [rank, inputs] and lora_B [outputs, rank] of each module."""
        for name, place in self.places.items():
            outputs, inputs = place.shape
            for part, shape, read in (
                ("A", (self.ranks[name], inputs), functools.partial(self._read_a, place)),
                ("B", (outputs, self.ranks[name]), functools.partial(self._read_b, place)),
            ):
                yield entry_in_numbers(f"{PREFIX}{name}.lora_{part}.weight", np.dtype(np.float32), shape, read)

    def _read_a(self, place: Tensor, process: int) -> np.ndarray | None:
        """Return lora_A of a module on `process`: the rows of all its pairs below each other."""
        found = [fetch(self.pairs[path].a, index, process) for path, index in place.parts if path in self.pairs]
        rows = [a.reshape(-1, a.shape[-1]).T for a in found if a is not None]
        return np.ascontiguousarray(np.concatenate(rows), np.float32) if rows else None

    def _read_b(self, place: Tensor, process: int) -> np.ndarray | None:
        """Return lora_B of a module on `process`: each pair has its own columns and rows."""
        first, whole = 0, np.zeros((place.shape[0], self.ranks[place.name]), np.float32)
        for part, (path, index) in enumerate(place.parts):
            if (pair := self.pairs.get(path)) is not None:
                if (b := fetch(pair.b, index, process)) is not None:
                    factor = np.float32(pair.scale / self.scales[place.name])
                    rows = b.astype(np.float32).reshape(pair.rank, -1).T * factor
                    whole[place.places(part).reshape(-1), first : first + pair.rank] = rows
                first += pair.rank
        return whole if process == jax.process_index() else None

    @property
    def usual(self) -> tuple[int, float]:
        """The rank that most modules have, and the alpha that most of these have."""
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
    adapted = _Adapted.of(model)
    if not adapted.pairs:
        return ""
    try:
        model_type = family_of(model.config).hub.write(model.config)["model_type"]
    except UserError:  # transformers has no such model
        return ""
    return describe_unread(model_type, adapted.ranks, {name for odd in adapted.odd() for name in odd})


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
    read.check_base(ModelValues(arrays_by_path(bare)), base_sha256)
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
