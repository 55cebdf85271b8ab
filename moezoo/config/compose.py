"""A configuration from `conf/` and a list of overrides. Hydra is wrapped here and nowhere else.

Hydra composes the groups that the overrides choose; single keys are then set by hand, where the section they belong to
and the keys that are valid there are known, so an error can name them. Nothing is written, no folder is changed to.
Errors are raised `from None`: a notebook would print Hydra's text above ours.
"""

import contextlib
import copy
import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from moezoo.config.renamed import BEFORE, RENAMED
from moezoo.config.settings import TAG, TrainConfig
from moezoo.convert import Checks, Range, complete, convert, plain, set_key, show, types_of
from moezoo.errors import UserError, nearest
from moezoo.parallel.rules import Rules

CONF = Path(str(importlib.resources.files("moezoo.conf")))
PACKAGE = "# @package _global_\n"  # Hydra's mark of an entry that is laid over the whole configuration

# `model`, `mesh`, `rules` and `data` check their numbers themselves.
_CHECKS = Checks(
    TAG,
    {
        "steps": Range(at_least=1, at_most=2**31 - 1),
        "seed": Range(at_least=0, at_most=2**32 - 1),
        "batch_size": Range(at_least=1),
        "seq_len": Range(at_least=2),
        "eval_every": Range(at_least=0),
        "checkpoint_minutes": Range(at_least=0),
        "checkpoint_every": Range(at_least=0),
        "checkpoint_keep": Range(at_least=1),
        "log_every": Range(at_least=0),
        "guard.loss": Range(above=1),
        "guard.gradient_norm": Range(above=1),
        "guard.patience": Range(at_least=1),
        "execution.microbatches": Range(at_least=1),
        "optimizer.learning_rate": Range(above=0),
        "optimizer.beta1": Range(at_least=0, below=1),
        "optimizer.beta2": Range(at_least=0, below=1),
        "optimizer.epsilon": Range(above=0),
        "optimizer.weight_decay": Range(at_least=0),
        "optimizer.clip_norm": Range(above=0),
        "schedule.warmup_steps": Range(at_least=0),
        "schedule.final_ratio": Range(at_least=0, at_most=1),
    },
    RENAMED,
)

_OWN_RULES = "_own"  # the name under which Hydra meets a user's own rules file
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class _Asked(NamedTuple):
    choices: dict[str, str]  # group -> entry, or the path of a rules file
    changes: dict[str, Any]  # dotted key -> value


def compose(*overrides: str) -> TrainConfig:
    """The configuration of a run: `conf/train.yaml` with `overrides` such as "mesh=ep8" or "model.layers=2".

    `rules` also takes the path of your own YAML file. A value takes the place of what was there, nothing is merged; the
    last one holds where a key is set twice. With `resume=FOLDER` the configuration saved there takes the place of
    `conf/train.yaml`. Works the same inside a program that uses Hydra itself.

    Raises `UserError` for every mistake in `overrides`.
    """
    asked = _read(overrides)
    if isinstance(folder := asked.changes.get("resume"), str):
        return compose_onto(read_run(folder, "resume"), *overrides)
    return _finish(_compose_groups(asked.choices), asked.changes)


def compose_onto(mapping: Mapping[str, Any], *overrides: str) -> TrainConfig:
    """The saved configuration `mapping` with `overrides` on top: the chosen groups replaced, then single keys set.

    What a chosen entry sets beside its group, such as a preset's dtype, is set too.

    Raises `UserError` as `compose` does, and where `mapping` is not the whole configuration of a run.
    """
    asked, base = _read(overrides), as_mapping(from_mapping(mapping))
    if asked.choices:
        composed = _compose_groups(asked.choices)
        for group, name in asked.choices.items():
            base[group] = composed[group]
            for key, value in _beside_its_group(group, name).items():
                base[key] = {**base[key], **value} if isinstance(value, dict) else value
    return _finish(base, asked.changes)


def run_folder(path: str | Path) -> Path:
    """The run that `path` is, or one of whose `checkpoints/STEP` it is."""
    path = Path(path)
    return path.parent.parent if path.parent.name == "checkpoints" and path.name.isdecimal() else path


def read_run(folder: str | Path, key: str) -> dict[Any, Any]:
    """The configuration saved in a run's folder, which the user set `key` to.

    Raises `UserError` when there is none, and for a run of a version whose keys were renamed since.
    """
    saved = run_folder(Path(folder).expanduser()) / "config.yaml"
    if not saved.exists():
        raise UserError(f"{key}={show(str(folder))}: no run there (config.yaml is missing); name a run's folder")
    mapping = read_yaml(saved)
    for old, new in RENAMED.items():
        group, _, name = old.partition(".")
        if isinstance(section := mapping.get(group), dict) and name in section:
            raise UserError(
                f"{key}={show(str(folder))}: moezoo {BEFORE} saved this run, and reads and continues it ({old} is now "
                f"{new})"
            )
    return mapping


def from_mapping(mapping: Mapping[str, Any]) -> TrainConfig:
    """The configuration that `mapping` holds. Raises `UserError` for keys, types and numbers that cannot be."""
    return convert(TrainConfig, mapping, "", _CHECKS)


def as_mapping(cfg: TrainConfig) -> dict[str, Any]:
    """What `from_mapping` takes: plain dicts, lists, numbers and text, with nothing left to a default."""
    return plain(cfg, "", _CHECKS)


def to_yaml(mapping: Mapping[str, Any]) -> str:
    """`mapping` as YAML, which `read_yaml` reads back."""
    return OmegaConf.to_yaml(dict(mapping))


def read_yaml(path: str | Path, key: str | None = None) -> dict[Any, Any]:
    """The mapping that a YAML file holds; `key` is what the user set to `path`, if they did.

    Raises `UserError` when the file is missing, unreadable, no YAML or no mapping.
    """
    name = show(str(path) if key is None else f"{key}={path}")
    try:
        mapping = OmegaConf.to_container(
            OmegaConf.create(Path(path).expanduser().read_text(encoding="utf-8")), resolve=False
        )
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except YAMLError as error:
        line = f" in line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        problem = " ".join(str(getattr(error, "problem", None) or "unreadable").split())
        raise UserError(f"{name}: broken YAML{line} ({problem}); correct the file") from None
    except (OmegaConfBaseException, RecursionError, AssertionError) as error:
        where = f" of '{at}'" if (at := getattr(error, "full_key", None)) else ""
        raise UserError(f"{name}: the value{where} cannot be read; correct the file") from None
    except ValueError:
        raise UserError(f"{name}: is not UTF-8 text; give the path of a YAML file") from None
    if not isinstance(mapping, dict):
        raise UserError(f"{name}: expected keys and their values, found a list; correct the file")
    return mapping


def groups() -> dict[str, list[str]]:
    """Group -> the names to choose from: the folders of `conf/` and the files in them."""
    found: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return found


def defaults() -> dict[str, str]:
    """Group -> the name that `conf/train.yaml` chooses, in its order."""
    entries = [entry for entry in read_yaml(CONF / "train.yaml")["defaults"] if isinstance(entry, dict)]
    return {group: name for entry in entries for group, name in entry.items()}


def _beside_its_group(group: str, name: str) -> dict[str, Any]:
    """What an entry sets outside its group, if it is a file that is laid over the whole configuration."""
    path = CONF / group / f"{name}.yaml"
    if not path.exists() or not path.read_text().startswith(PACKAGE):
        return {}
    return {key: value for key, value in read_yaml(path).items() if key != group}


def _read(overrides: Sequence[str]) -> _Asked:
    known, asked = groups(), _Asked({}, {})
    for text in overrides:
        key, value = _parse(text, known)
        if key not in known:
            asked.changes[key] = value
            continue
        if key in asked.choices:
            raise UserError(f"{show(text)}: {key}={show(asked.choices[key])} is asked for too; choose one {key}")
        if not isinstance(value, str) or not (value in known[key] or (key == "rules" and _is_path(value))):
            path = " (or give the path of a .yaml file)" * (key == "rules")
            raise UserError(f"{key}={show(value)}: no such {key}; {nearest(show(value), known[key])}{path}")
        asked.choices[key] = value
    return asked


def _is_path(rules: str) -> bool:
    return "/" in rules or rules.endswith((".yaml", ".yml"))


def _parse(text: str, known: Mapping[str, list[str]]) -> tuple[str, Any]:
    """The key and the value of one override."""
    shown = show(text)
    key, equals, value = text.lstrip("+~").partition("=")
    prefix = text[: len(text) - len(text.lstrip("+~"))]
    if prefix.startswith("~"):
        raise UserError(f"{shown}: nothing can be removed; set it to something else with {show(key)}=VALUE")
    if not equals:
        homes = [group for group, names in known.items() if key in names]
        write = f"{homes[0]}={key}" if homes else f"{key if key in types_of(TrainConfig) else 'KEY'}=VALUE"
        raise UserError(f"{shown}: expected KEY=VALUE, found no '='; write {write}")
    if not _KEY.fullmatch(key):
        found = f"'{show(key)}'" if key else "nothing"
        raise UserError(f"{shown}: expected a key such as steps or model.layers before '=', found {found}")
    if prefix and not (prefix == "+" and key.startswith(("rules.store.", "rules.compute."))):
        raise UserError(f"{shown}: keys are fixed and '{prefix}' cannot add one; write {show(f'{key}={value}')}")
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")
    except (HydraException, ValueError, RecursionError):
        quoted = show(f'{key}="{value}"')
        raise UserError(
            f"{shown}: the value cannot be read; close its brackets, or quote it twice: '{quoted}'"
        ) from None
    if parsed.is_sweep_override():
        or_list = "" if key in known else f"; a list is written {key}=[a,b]"
        loop = f"for x in A B; do COMMAND {key}=$x; done"
        raise UserError(f"{shown}: expected one value, found several; one job runs at a time, so loop: {loop}{or_list}")
    return key, parsed.value()


def _compose_groups(choices: Mapping[str, str]) -> dict[str, Any]:
    """`train.yaml` with the chosen groups and all defaults, as plain values; `${...}` is left as it is."""
    rules = choices.get("rules", "")
    own = rules if _is_path(rules) else None
    names = {**choices, "rules": _OWN_RULES} if own else choices
    with _store_rules(own) if own else contextlib.nullcontext(), _hydra():
        try:
            cfg = hydra.compose("train", [f"{group}={name}" for group, name in names.items()])
            mapping: Any = OmegaConf.to_container(cfg, resolve=False)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, OSError):
            # What was asked for exists, so a file is broken: find it.
            for group, name in {**defaults(), **choices}.items():
                read_yaml(name if name == own else CONF / group / f"{name}.yaml")
            shown = show(" ".join(f"{group}={name}" for group, name in choices.items())) or "conf/train.yaml"
            raise UserError(f"{shown}: these files do not fit together; check their defaults and sections") from None
    if own:
        try:
            convert(Rules, _resolve(mapping)["rules"], "rules")
        except UserError as error:
            raise UserError(f"rules={show(own)}: {error}") from None
    return complete(TrainConfig, mapping, "", _CHECKS)


@contextlib.contextmanager
def _store_rules(own: str) -> Iterator[None]:
    """A user's own rules file among the group's entries, for as long as Hydra composes."""
    node = {"name": Path(own).stem, **read_yaml(own, "rules")}
    under, known = node.get("defaults", []), groups()["rules"]
    if not isinstance(under, list):
        raise UserError(f"rules={show(own)}: defaults={show(under)} must be a list such as [fsdp_ep, _self_]")
    for name in under:
        if name not in ("_self_", *known):
            raise UserError(
                f"rules={show(own)}: defaults has {show(name)}, no such rules; {nearest(show(name), known)}"
            )
    store = ConfigStore.instance()
    store.store(name=_OWN_RULES, node=OmegaConf.create(node), group="rules")
    try:
        yield
    finally:
        del store.repo["rules"][f"{_OWN_RULES}.yaml"]


@contextlib.contextmanager
def _hydra() -> Iterator[None]:
    """Hydra for us alone. It is one global, which a notebook or `hydra.main` around us may be using: put back after."""
    instance, version, job = GlobalHydra.instance(), VersionBase.instance(), JobRuntime.instance()
    theirs = instance.hydra, version.version_base, job.get("name")
    instance.hydra = None
    try:
        with hydra.initialize_config_module("moezoo.conf", version_base="1.3"):
            yield
    finally:
        instance.hydra, version.version_base, name = theirs
        job.set("name", name)
        GlobalHydra.set_instance(instance)


def _finish(mapping: dict[str, Any], changes: Mapping[str, Any]) -> TrainConfig:
    mapping = copy.deepcopy(mapping)
    for key, value in changes.items():
        set_key(TrainConfig, mapping, key, value, _CHECKS)
    return from_mapping(_resolve(mapping))


def _resolve(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """`mapping` with each `${...}` replaced by what it stands for."""
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(dict(mapping)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key, value = str(error.full_key).partition("[")[0], mapping
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else value
        raise UserError(
            f"{key}={show(value)}: this refers to nothing; write a value, or ${{KEY}} with a key such as seed"
        ) from None
    return resolved
