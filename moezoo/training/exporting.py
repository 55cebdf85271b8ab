"""Write the model of a run, or of a Hugging Face folder, as a new Hugging Face folder, also in another dtype.

No device holds the model: the arrays are read from the files part by part, and written tensor by tensor.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from moezoo.config.build import blueprint_of
from moezoo.config.compose import check_same, folder_path, from_saved, read_origin, read_run
from moezoo.config.own import saved_own
from moezoo.config.run_folders import find, run_folder
from moezoo.config.settings import TrainConfig
from moezoo.data.chat_template import CONFIG as TOKENIZER_CONFIG
from moezoo.data.chat_template import TEMPLATE, TOKENS
from moezoo.data.tokenizer import is_same_tokenizer
from moezoo.errors import UserError
from moezoo.hub.adapter_files import MergedValues, read_adapter
from moezoo.hub.card import README, Facts, license_of, prompt_of, read_card, training_of, write_card
from moezoo.hub.carry import ModelFolder
from moezoo.hub.few_bits import format_argument
from moezoo.hub.folders import end_of_text, find_tokenizer, tokenizer_config
from moezoo.hub.formats.base import CONFIG
from moezoo.hub.opening import describe_download, find_model, open_folder
from moezoo.hub.plan import Plan
from moezoo.hub.public_names import last_name, name_of_model, without_paths
from moezoo.hub.saving import lost_warnings, plan_model
from moezoo.hub.tensors import count, list_names
from moezoo.hub.values import FolderValues, Values
from moezoo.hub.weight_files import DTYPES, WeightFiles, common_dtype
from moezoo.models import family_of, name_of
from moezoo.models.adapters import NoAdapter
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import count_parameters
from moezoo.training.checkpoint import read_about
from moezoo.training.facts import run_facts
from moezoo.training.initial import load_elsewhere
from moezoo.training.metrics import read_metrics
from moezoo.training.saved import check_model
from moezoo.training.saved_arrays import SavedValues
from moezoo.typed import counted, flatten, show

_TITLE_WIDTH = 12


class _Origin(NamedTuple):
    """Where a model is read from.

    Attributes:
        where: The folder, or the checkpoint of a run.
        wanted: The shapes of the model as they are written.
        values: Its numbers, in the dtypes of `wanted`.
        facts: What is known for a model card, without the title.
        tokenizer: The tokenizer of a run's data, if there is one.
        text_ends: The tokens that end its texts, as far as they are known.
        chat_files: The files of its chat template, by their names in a folder.
        adapter: The adapter that is merged into it, in words; empty for none.
    """

    where: Path
    wanted: LanguageModel
    values: Values
    facts: Facts
    tokenizer: Path | None = None
    text_ends: Sequence[int] = ()
    chat_files: Mapping[str, Path] = MappingProxyType({})
    adapter: str = ""


class _Dtypes(NamedTuple):
    """The dtype of numbers where they are read from, and as they are written."""

    stored: np.dtype
    written: np.dtype


@dataclasses.dataclass(frozen=True)
class Export:
    """A folder that is ready to be written to `target`. `like` is the folder that it is a copy of; None for none."""

    origin: _Origin
    target: Path
    folder: ModelFolder
    like: Path | None

    def describe(self) -> list[str]:
        """Return lines about what is read and what is written."""
        saved, wanted = (dtype.name for dtype in self._common_dtypes)
        leaves, rounded = self.folder.leaves, self.folder.leaves.rounded
        kept = len(leaves.few) - len(rounded)
        few_bits = f" and {leaves.format.NAME}" if leaves.format is not None else ""
        config, sizes, weights = self.origin.wanted.config, self.folder.plan.sizes, self.folder.plan.weights
        total, _ = count_parameters(self.origin.wanted, config.experts_per_token)
        others = len(sizes) - len(weights)
        lines = [
            (
                "from",
                f"{self.origin.where}: {family_of(config).name}, {total:,} parameters in {saved}"
                f"{few_bits if kept else ''}",
            ),
            (
                "to",
                f"{self.target}: {sum(sizes.values()):,} bytes, {counted(len(weights), 'file')} of weights in "
                f"{wanted}{few_bits} and {counted(others, 'other')}",
            ),
        ]
        if self.origin.adapter:
            lines.append(("adapter", f"{self.origin.adapter}, merged"))
        if leaves.format is not None:
            counts = ((len(rounded), "rounded to"), (kept, "kept in"))
            some = (f"{counted(number, 'weight')} {what} {leaves.format.NAME}" for number, what in counts if number)
            lines.append(("few bits", ", ".join(some)))
        if narrowed := collections.Counter(dtypes for dtypes, _ in self._sizes if not np.can_cast(*dtypes)):
            some = (
                f"{counted(n, 'tensor')} from {before.name} to {after.name}" for (before, after), n in narrowed.items()
            )
            lines.append(("rounds", ", ".join(some)))
        if (tokenizer := self.origin.tokenizer) is not None and self.like is None:
            gone = "" if tokenizer.is_file() else " is not there any more, so the folder has none"
            lines.append(("tokenizer", f"{tokenizer}{gone}"))
        if self.like is None:
            if self.origin.text_ends:
                lines.append(("texts", f"end with token {' or '.join(map(str, self.origin.text_ends))}"))
            elif tokenizer is not None:
                lines.append(("texts", "no token is known to end them"))
        if self.folder.like is not None:
            lines += [("config.json", change) for change in self._changes]
            for use, names in self.folder.like.carried.tensors.items():
                lines.append(("copied", f"{count(names)} as in {self.like}, for {use}: {list_names(names)}"))
        lines.append((README, self._describe_card()))
        return [f"{title:<{_TITLE_WIDTH}}{text}" for title, text in lines]

    def _describe_card(self) -> str:
        """Return whose model card the folder gets."""
        if isinstance(own := self.folder.plan.others.get(README), Path):
            return f"that of {own.parent}"
        if self.like is None or not (self.like / README).exists():
            return "a model card"
        return f"a model card; that of {self.like} is of other weights, and is not copied"

    @property
    def _changes(self) -> list[str]:
        """The keys of config.json that differ from those of `like`, without those of few bits."""
        assert self.like is not None
        written = self.folder.plan.others["config.json"]
        assert isinstance(written, bytes)
        before, after = (flatten(json.loads(text)) for text in ((self.like / "config.json").read_bytes(), written))
        return [
            f"{key}={show(after.get(key))} ({show(before.get(key))} there)"
            for key in before | after
            if before.get(key) != after.get(key) and not key.startswith(f"{CONFIG}.")
        ]

    @functools.cached_property
    def _sizes(self) -> list[tuple[_Dtypes, int]]:
        """The dtypes of each tensor that is written in numbers, and how many it has."""
        values, few = self.origin.values, self.folder.leaves.few
        own = (tensor for tensor in self.folder.leaves.own if tensor.name not in few)
        return [(_Dtypes(values.stored_dtype(t), values.dtype(t)), math.prod(t.shape)) for t in own]

    @property
    def _common_dtypes(self) -> _Dtypes:
        """Those that most numbers have."""
        return _Dtypes(*(common_dtype((dtypes[i], n) for dtypes, n in self._sizes) for i in range(2)))

    def write(self) -> list[str]:
        """Write the folder, and return what a user should know of it. Raises `UserError` if it cannot be written."""
        odd = list[str]()

        def look(name: str, value: np.ndarray) -> None:
            if not np.isfinite(value).all():
                odd.append(name)

        carried = self.folder.write(self.target, look)
        if not np.can_cast(*self._common_dtypes):  # the user has asked for less precision
            carried = dataclasses.replace(carried, rounded=())
        notes = [f"tensors with NaN or infinities: {list_names(odd)}"] if odd else []
        notes += self.folder.notes(carried)
        return notes if self.like is not None else [*notes, *lost_warnings(self.origin.wanted.config)]


def plan_export(
    source: str,
    target: str,
    dtype: str | None = None,
    like: str | None = None,
    max_shard_size: str | None = None,
    format: str | None = None,
    init_from: str | None = None,
    adapter: str | None = None,
) -> Export:
    """Return how to write the model in `source` to `target`. Nothing is written, and no number is read.

    Args:
        source: A run's folder, of which the newest checkpoint is taken, one of its `checkpoints/STEP`, or a Hugging
            Face folder. The latter is copied with its tokenizer and all tensors, unless `like` names another.
        target: The folder to make.
        dtype: The dtype of the parameters; by default as they are in `source`, weights of few bits included, and of
            pairs as in the folder that they were trained beside. Choice biases are always float32.
        like: A folder of the same model, which has tensors or files that `source` lacks, as in `save_pretrained`.
        max_shard_size: As in `save_pretrained`, for a run without `like`.
        format: As in `save_pretrained`.
        init_from: Where the weights are now that a run with `checkpoint_frozen=false` began with.
        adapter: A folder with low-rank pairs, which are merged into the weights of a Hugging Face folder. Those of few
            bits are then written in numbers, unless `format` rounds them. The pairs of a run are always merged.

    Raises:
        UserError: `source` is neither, or damaged. `target` exists. Otherwise as `save_pretrained` does.
    """
    path, new = folder_path(source, "source"), folder_path(target, "target")
    if os.path.lexists(new):
        raise UserError(f"{show(target)} exists; name a new folder for the model")
    is_run = (run_folder(path) / "config.yaml").exists()
    if not is_run and not path.exists():
        raise UserError(
            f"{show(source)}: there is no such folder; name a run or a Hugging Face folder{describe_download(path)}"
        )
    if not is_run and not (path / "config.json").exists():
        raise UserError(
            f"{show(source)}: neither a run (config.yaml is missing) nor a Hugging Face folder (config.json is "
            "missing); name one of these"
        )
    if not is_run and init_from is not None:
        raise UserError(f"init_from={show(init_from)}: {show(source)} is no run; leave init_from out")
    if is_run and adapter is not None:
        raise UserError(f"adapter={show(adapter)}: {show(source)} is a run; name the folder that it began with instead")
    origin = _open_run(path, dtype, init_from) if is_run else _open_folder(path, dtype, adapter)
    base, rounds_to = None if is_run else path, format_argument(format)
    if like is not None:
        base = folder_path(like, "like")
    folder = plan_model(origin.wanted, new, base, origin.values, max_shard_size, rounds_to, origin.text_ends)
    plan = without_paths(_with_tokenizer(folder.plan, origin) if base is None else folder.plan)
    # A copy keeps the card of its folder, which describes the same weights.
    if README not in plan.others or base != path or adapter is not None or rounds_to is not None:
        config = origin.wanted.config
        total, active = count_parameters(origin.wanted, config.experts_per_token)
        sizes = f"{total:,} parameters, of which {active:,} are active per token"
        what = f"{origin.facts.what} It is of the family {name_of(config)} and has {sizes}."
        facts = origin.facts._replace(name=last_name(new), what=what)
        if rounds_to is not None:
            rounded = f"{what} Weights of layers are rounded to {rounds_to.NAME}."
            facts = facts._replace(what=rounded, relation=facts.relation or "quantized")
        if base is not None and not facts.license:
            facts = facts._replace(license=license_of(read_card(base)))
        facts = facts._replace(prompt=prompt_of(plan.others, facts.prompt))
        plan = plan.with_files({README: write_card(facts).encode()})
    return Export(origin, new, folder._replace(plan=plan), base)


def _with_tokenizer(plan: Plan, origin: _Origin) -> Plan:
    """Return a plan with the tokenizer of a run's data, if the file is there, its class and its chat template."""
    if origin.tokenizer is None or not origin.tokenizer.is_file():
        return plan
    beside = {name: origin.tokenizer.parent / name for name in (TOKENIZER_CONFIG, TOKENS, TEMPLATE)}
    copies = {**beside, **origin.chat_files}
    if (template := copies.pop(TOKENIZER_CONFIG)) != beside[TOKENIZER_CONFIG]:  # data.template is a .json file
        del copies[TEMPLATE]
    else:
        template = None
    own = beside[TOKENIZER_CONFIG] if beside[TOKENIZER_CONFIG].is_file() else None
    copies = {"tokenizer.json": origin.tokenizer, **{k: path for k, path in copies.items() if path.is_file()}}
    return plan.with_files({**copies, TOKENIZER_CONFIG: tokenizer_config(own, template)})


def _open_run(path: Path, dtype: str | None, init_from: str | None) -> _Origin:
    mapping = read_run(path, "source")
    own = saved_own(mapping)
    if "model" in own:
        raise UserError(
            f"{path}: model={show(own['model'])} is a family of your own; in Python, import it, and write "
            "moezoo.save_pretrained(moezoo.load_run(...)[0], TO)"
        )
    cfg = from_saved(mapping)  # a strategy or a rule of the user's own has no part in this
    if init_from is not None:
        began = read_origin(init_from, cfg.upcycle)
        check_same(began, cfg.init_from, cfg.init_sha256)
        cfg = dataclasses.replace(cfg, init_from=str(began.path))
    checkpoints, step = find(path, "source")
    about, checkpoint = read_about(checkpoints, step), checkpoints / str(step)
    check_model(cfg, about, checkpoint)
    saved, dtype = blueprint_of(cfg).shapes, dtype or _base_dtype(cfg)
    wanted = saved if dtype is None else Blueprint(cfg.model, dtype).shapes
    values = SavedValues(checkpoint, about, saved, wanted, load_elsewhere(cfg))
    rows = read_metrics(checkpoints.parent / "metrics.jsonl", until=step)
    facts = run_facts(about, rows, step, cfg.init_from)
    tokenizer = cfg.data.tokenizer_file()
    return _Origin(checkpoint, wanted, values, facts, tokenizer, _text_ends(cfg), cfg.data.chat_files())


def _base_dtype(cfg: TrainConfig) -> str | None:
    """Return the dtype of the folder beside which pairs were trained, without weights of few bits; None for others."""
    folder = Path(cfg.init_from or "")
    if isinstance(cfg.adapter, NoAdapter) or not (folder / "config.json").is_file():
        return None
    files = WeightFiles(folder)
    return files.guess_dtype().name if all(each.dtype in DTYPES for each in files.tensors.values()) else None


def _text_ends(cfg: TrainConfig) -> Sequence[int]:
    """Return the tokens that end a text: those of a run's data, or else of the folder that it began with.

    None are known where tokenizer or template are gone or damaged, or the folder has another tokenizer.
    """
    tokenizer = cfg.data.tokenizer_file()
    if tokenizer is not None and not tokenizer.is_file():
        return ()
    with contextlib.suppress(UserError):  # `Export.describe` says that none are known
        if ends := cfg.data.text_ends():
            return ends
    folder = Path(cfg.init_from or "")
    if tokenizer is None or not cfg.init_from or not (own := find_tokenizer(folder)):
        return ()
    return end_of_text(folder) if is_same_tokenizer(own, tokenizer) else ()


def _open_folder(path: Path, dtype: str | None, adapter: str | None) -> _Origin:
    source = open_folder(path)
    if adapter is not None:
        found, shapes = (
            find_model(source, "float32"),
            Blueprint(source.config, dtype or source.files.guess_dtype().name).shapes,
        )
        pairs = read_adapter(adapter, shapes)
        whole = FolderValues(found.holdings, found.shapes)
        pairs.check_base(whole, source.sha256)
        values = MergedValues(whole, pairs, shapes)
        merged = Facts(
            "",
            "The base, with low-rank pairs merged into its weights.",
            name_of_model(path),
            "finetune",
            training=training_of(read_card(pairs.folder)) or None,
        )
        return _Origin(path, shapes, values, merged, adapter=pairs.describe())
    found = find_model(source, dtype or "stored")
    training = training_of(read_card(path)) or None
    facts = Facts("", "A copy of the base, written by moezoo.", name_of_model(path), training=training)
    return _Origin(path, found.shapes, FolderValues(found.holdings, found.shapes), facts)
