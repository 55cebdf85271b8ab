"""Compose a configuration from `conf/` and a list of overrides. Only this module composes with Hydra.

Hydra composes the groups that the overrides choose. Single keys are then set without Hydra, where the section and its
valid keys are known, so an error can name them. Composing writes nothing and stays in the current folder. Errors are
raised `from None`, because a notebook would print Hydra's text above ours.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moezoo.config.origin import Origin, check_settings, described_origin, first_settings, folder_origin, run_origin
from moezoo.config.other_names import BEFORE, RENAMED
from moezoo.config.overrides import CONF, MEMBERS, PLUGS, Asked, defaults, groups, is_own, read, read_yaml
from moezoo.config.own import (
    TAGS,
    check_class,
    import_own,
    name_in,
    names_of,
    path_of,
    refuse_saved,
    saved_own,
    without_own,
)
from moezoo.config.run_folders import AUTO, run_folder, steps
from moezoo.config.settings import INNER_TAG, TAG, TrainConfig
from moezoo.config.text_copies import with_copies
from moezoo.data.file_settings import fill_in
from moezoo.errors import UserError, describe_class, locating, nearest
from moezoo.host.files import check_name
from moezoo.host.remote import as_path, is_url
from moezoo.hub.kept import Form
from moezoo.hub.upcycling import Upcycle
from moezoo.models.adapters import NoAdapter
from moezoo.parallel.rules import Rules
from moezoo.typed import Checks, complete, convert, flatten, get, put, show, to_plain

_CHECKS = Checks({**TAG, **INNER_TAG}, RENAMED)
_OF_RUNS = ("run_dir", "resume")  # folders that may be in an object store
FOLDER = "folder="  # of `compose_described`
_LENGTHS = ("steps", "epochs")  # one of them is set by the user; a run that knows its data records both


def compose(*overrides: str, **keywords: Any) -> TrainConfig:
    """Compose the configuration of a run: `conf/train.yaml` with `overrides` such as "mesh=ep8" or "model.layers=2".

    `rules` also takes the path of a YAML file. `dispatch`, `data`, `optimizer`, `schedule` and
    `execution.context_parallel` also take the path of a class, `package.module.Class`, and `model` that of a family;
    these are imported. A value replaces the previous one; nothing is merged. The last value of a key holds. With
    `resume=FOLDER` the configuration saved in that folder replaces `conf/train.yaml`; `resume=auto` names that of
    `run_dir` if it has a checkpoint, and remains "auto" otherwise. With `init_from=FOLDER` the model
    is that of a Hugging Face folder or a run, and so are the defaults of the tokenizer and its end token; the learning
    rate is one for trained weights, and what balances loads is off. This also works inside a program that uses Hydra.

    Raises `UserError` for every mistake in `overrides`, and for `keywords`, which are none.
    """
    if keywords:
        words = ", ".join(f'"{name}={show(value)}"' for name, value in keywords.items())
        raise UserError(f"compose takes text and no keyword {next(iter(keywords))}; write compose({words})")
    asked = read(overrides)
    folder, key = asked.changes.get("resume"), "resume"
    if folder == AUTO and (folder := _run_to_resume(asked)) is not None:
        asked.changes["resume"], key = folder, "run_dir"
    return _compose(asked, read_run(folder, key) if isinstance(folder, str) else None)


def _run_to_resume(asked: Asked) -> str | None:
    """Return the `run_dir` of a command with `resume=auto` if it has a checkpoint."""
    folder = asked.changes.get("run_dir")
    if folder is None:
        raise UserError("resume=auto needs the folder that the run starts in and continues from; add run_dir=FOLDER")
    return folder if steps(folder_path(folder, "run_dir") / "checkpoints") else None


def compose_onto(mapping: Mapping[str, Any], *overrides: str) -> TrainConfig:
    """Apply `overrides` to the saved configuration `mapping`: replace the chosen groups, then set single keys.

    What a chosen entry sets outside its group, such as a preset's dtype, is set too. A `mapping` with an entry of the
    user's own, such as a strategy, needs its key among the overrides; the same name again keeps the saved options.

    Raises `UserError` as `compose` does, and where `mapping` is not the whole configuration of a run.
    """
    return _compose(read(overrides), mapping)


def compose_described(*overrides: str) -> TrainConfig:
    """Compose what a tool lays out, without weights: as `compose`, and `folder=F` among `overrides` names a model.

    F is a Hugging Face folder, or the path of its config.json. Everything is as with `init_from=F`, except that only
    config.json is read, and ModelOpt's file beside it. The settings of data are not those of the folder.

    Raises `UserError` as `compose` does, and for a model that is named twice.
    """
    folders = [word for word in overrides if word.startswith(FOLDER)]
    rest = [word for word in overrides if word not in folders]
    if not folders:
        return compose(*rest)
    asked = read(rest)
    for key in ("init_from", "resume"):
        if (other := asked.changes.get(key)) is not None:
            raise UserError(f"{show(folders[-1])} and {key}={show(other)} name two models; leave one of them out")
    asked.changes["init_from"] = folders[-1].removeprefix(FOLDER)
    return _compose(asked, None, read_described)


def read_described(folder: Any, upcycle: Upcycle) -> Origin:
    """Return what the config.json of a folder says, with `upcycle` for a dense model.

    Raises `UserError` as `moezoo.config.origin.described_origin` does.
    """
    return described_origin(folder_path(folder, "folder"), str(folder), upcycle)


def _compose(
    asked: Asked, saved: Mapping[str, Any] | None, find: Callable[[Any, Upcycle], Origin] | None = None
) -> TrainConfig:
    """Merge what a run starts from (defaults, `saved`, weights of a folder) with what was asked, and convert it."""
    checks = _import_own(asked)
    base = _compose_groups(asked.choices, checks) if saved is None else _replace_groups(saved, asked, checks)
    base = complete(TrainConfig, base, "", checks)
    origin = None
    if (folder := asked.changes.get("init_from")) is not None:
        upcycle = convert(Upcycle, _set(base, asked, checks)["upcycle"], "upcycle", checks)
        origin = (find or read_origin)(folder, upcycle)
        if saved is None:
            base |= _for_weights(origin, base, asked, checks)
        else:  # where the weights are now
            check_same(origin, base["init_from"], base["init_sha256"])
        asked = _at(origin, asked)
    cfg = convert(TrainConfig, _resolve(_set(base, asked, checks)), "", checks)
    if origin is not None and saved is None:
        if origin.described is None:
            cfg = dataclasses.replace(cfg, data=fill_in(cfg.data, flatten(asked.changes), origin.text_settings))
        if cfg.execution.param_dtype == "stored":
            cfg = dataclasses.replace(cfg, init_forms=origin.forms(cfg))
    return cfg


def _import_own(asked: Asked) -> Checks:
    """Return the checks; import what the user named of their own, and add the classes."""
    own = {}
    members = [("tracker", name) for name in names_of(asked.changes.get(MEMBERS))]
    for key, name in [*asked.choices.items(), *members]:
        if key in PLUGS and is_own(key, name):
            kind = import_own(key, name)
            own.setdefault(key, {}).update({name: kind, path_of(kind): kind})
    return _checks_with(own)._replace(asked=asked.changes)


def _checks_with(own: Mapping[str, Mapping[str, type]]) -> Checks:
    tags = {key: (TAGS[key][0], {**classes, **TAGS[key][1]}) for key, classes in own.items()}
    if "tracker" in tags:
        tags[f"{MEMBERS}.*"] = tags["tracker"]
    return _CHECKS._replace(tags={**_CHECKS.tags, **tags}) if own else _CHECKS


def _compose_groups(choices: Mapping[str, str], checks: Checks) -> dict[str, Any]:
    """Compose `train.yaml` with the chosen groups, as plain values; leave `${...}` as it is."""
    own = {key: name for key, name in choices.items() if is_own(key, name)}
    names = {group: name for group, name in choices.items() if group not in own}
    try:
        with _hydra():
            mapping: Any = OmegaConf.to_container(
                hydra.compose("train", [f"{group}={name}" for group, name in names.items()]), resolve=False
            )
    except Exception:
        # Every chosen entry exists, so one of the files is broken; `read_yaml` names it.
        for group, name in {**defaults(), **names}.items():
            read_yaml(CONF / group / f"{name}.yaml")
        raise
    for key, name in own.items():
        mapping = put(mapping, key, _own_rules(name) if key == "rules" else {checks.tags[key][0]: name})
    if "rules" in own:
        with locating(f"rules={show(own['rules'])}"):
            convert(Rules, _resolve(mapping)["rules"], "rules")
    return mapping


def _own_rules(path: str) -> dict[str, Any]:
    """Return the rules in a user's own file, merged with the shipped ones that its `defaults` name."""
    node = {"name": Path(path).stem, **read_yaml(path, "rules")}
    under, known, shown = node.pop("defaults", ["_self_"]), groups()["rules"], f"rules={show(path)}"
    if not isinstance(under, list):
        raise UserError(f"{shown}: defaults={show(under)} must be a list such as [fsdp_ep, _self_]")
    for name in under:
        if name not in ("_self_", *known):
            raise UserError(f"{shown}: defaults has {show(name)}, no such rules; {nearest(show(name), known)}")
    under = under if "_self_" in under else [*under, "_self_"]
    layers = [node if name == "_self_" else read_yaml(CONF / "rules" / f"{name}.yaml") for name in under]
    try:
        if under.count("_self_") > 1:
            raise ValueError
        merged: Any = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=False)
    except (OmegaConfBaseException, ValueError, TypeError):
        raise UserError(f"{shown}: these files do not fit together; check their defaults and sections") from None
    return merged


@contextlib.contextmanager
def _hydra() -> Iterator[None]:
    """Give Hydra's one global state to moezoo, then restore it: a notebook or `hydra.main` may be using it."""
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


def _set(mapping: Mapping[str, Any], asked: Asked, checks: Checks) -> Mapping[str, Any]:
    """Return `mapping` with the values of the keys that were asked for."""
    lengths = {key: asked.changes[key] for key in _LENGTHS if asked.changes.get(key) is not None}
    if len(lengths) > 1:
        given = " ".join(f"{key}={show(value)}" for key, value in lengths.items())
        raise UserError(f"{given}: each says how long the run is; leave one of them out")
    if any(mapping.get(key) != value for key, value in lengths.items()):
        mapping = {**mapping, **dict.fromkeys(_LENGTHS)}
    for key, value in asked.changes.items():
        (at, _, name), (tag, _) = key.rpartition("."), checks.tags.get(key, ("", None))
        if name == checks.tags.get(at, ("",))[0]:
            raise UserError(f"{key}={show(value)}: {at} is chosen together with its keys; write {at}=NAME")
        # Its class by name, with the defaults of its keys.
        mapping = put(mapping, key, {tag: value} if tag and isinstance(value, str) else value)
    return mapping


def _resolve(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mapping` with each `${...}` replaced by its value."""
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(dict(mapping)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key).partition("[")[0]
        raise UserError(
            f"{key}={show(get(mapping, key))}: refers to nothing; write a value, or ${{KEY}} with a key such as seed"
        ) from None
    return resolved


def _replace_groups(saved: Mapping[str, Any], asked: Asked, checks: Checks) -> dict[str, Any]:
    """Return the configuration of a run with the groups that were chosen, and with what their entries set beside."""
    own, named = saved_own(saved), {**asked.choices, **asked.changes}
    if missing := {key: name for key, name in own.items() if key not in named}:
        raise refuse_saved(missing)
    if not asked.choices:
        return dict(saved)
    base, composed, usual = dict(saved), _compose_groups(asked.choices, checks), _compose_groups({}, checks)
    # An entry may choose those of other groups, and set keys of sections.
    for group in asked.choices.keys() | {group for group in defaults() if composed[group] != usual[group]}:
        if own.get(group) not in checks.tags.get(group, ("", {}))[1]:  # the same class again keeps its options
            base = put(base, group, get(composed, group))
    for key, value in flatten({key: composed[key] for key in composed.keys() - defaults().keys()}).items():
        if value != get(usual, key) and key.rpartition(".")[0] not in asked.choices:
            base = put(base, key, value)
    return base


def _for_weights(origin: Origin, base: Mapping[str, Any], asked: Asked, checks: Checks) -> dict[str, Any]:
    """Return the sections of a run that starts from weights which differ: their model, and defaults for them."""
    family, shown = origin.model["family"], origin.shown
    named = asked.choices.get("model", family)
    if named != family or ("model" in asked.choices and not is_own("model", family)):
        raise UserError(f"model={show(named)} but {shown} has its own model; leave model out")
    if (kind := checks.tags["model"][1].get(family)) is None:
        raise refuse_saved({"model": family})
    model = complete(kind, origin.model)
    check_settings(kind, model, asked.changes, origin.shown)
    found: dict[str, Any] = {"model": first_settings(kind, model)}
    rule = checks.tags["optimizer"][1].get(base["optimizer"].get("name"))
    if rule is not None and "learning_rate" in base["optimizer"]:
        adapter = checks.tags["adapter"][1][base["adapter"]["name"]]
        found["optimizer"] = {**base["optimizer"], "learning_rate": rule.tuning_rate * adapter.rate_factor}
        found["checkpoint_frozen"] = adapter is NoAdapter
    return found


def _at(origin: Origin, asked: Asked) -> Asked:
    """Return `asked` with the path of the weights, and their hash."""
    given = asked.changes.get("init_sha256", origin.sha256)
    if given != origin.sha256:
        raise UserError(
            f"init_sha256={show(given)} but init_from={origin.path} has {origin.sha256}; name the folder with the "
            "former, or leave init_sha256 out"
        )
    return asked._replace(changes={**asked.changes, "init_from": str(origin.path), "init_sha256": origin.sha256})


def check_same(origin: Origin, init_from: str | None, sha256: str | None) -> None:
    """Raise `UserError` unless a run that began with `init_from` finds the weights with this hash at `origin`."""
    if origin.sha256 != sha256:
        raise UserError(
            f"init_from={origin.path} but the run began with init_from={show(init_from)}, which holds something else; "
            "leave it out, or start a new run"
        )


def read_origin(folder: Any, upcycle: Upcycle) -> Origin:
    """Return what the user set `init_from` to, with `upcycle` for a dense model.

    Raises `UserError` where it is no Hugging Face folder and no run, or a run that `upcycle` is for.
    """
    path = folder_path(folder, "init_from")
    if not (run_folder(path) / "config.yaml").exists():
        return folder_origin(path, str(folder), upcycle)
    if upcycle.experts:
        raise UserError(
            f"upcycle.experts={upcycle.experts} but init_from={show(str(folder))} is a run, whose model has experts; "
            "leave upcycle out"
        )
    mapping = read_run(path, "init_from")
    return run_origin(path, mapping, from_saved(mapping))


def given_keys(*overrides: str) -> set[str]:
    """Return the keys that `overrides` set, one by one: also those inside others, such as in the file of a mixture."""
    return set(flatten(read(overrides).changes))


def folder_path(folder: Any, key: str) -> Path:
    """Return the folder that the user set `key` to; ~ stands for a home folder.

    Raises `UserError` for no path, and for one in an object store where `key` is not that of a run.
    """
    if is_url(folder):
        if key not in _OF_RUNS:
            raise UserError(
                f"{key}={folder}: only {' and '.join(_OF_RUNS)} may be in an object store; copy it to a disk"
            )
        return as_path(folder)
    if not isinstance(folder, str | Path):
        raise UserError(f"{key} is {describe_class(folder)}, expected the path of a folder")
    try:
        return check_name(Path(folder).expanduser(), show(f"{key}={folder}"))
    except RuntimeError:
        raise UserError(f"{key}={show(str(folder))}: there is no home folder of that user; write the path") from None


def read_run(folder: str | Path, key: str) -> dict[Any, Any]:
    """Read the configuration saved in a run's folder, which the user set `key` to, with the run's copies of tokenizers.

    Raises `UserError` when the folder holds no run, when the file is damaged, which the message then names, and for a
    run of a version with other names of keys.
    """
    saved = run_folder(folder_path(folder, key)) / "config.yaml"
    if not saved.exists():
        raise UserError(f"{key}={show(str(folder))}: no run there (config.yaml is missing); name the folder of a run")
    advice = f"correct the file, or set {key} to another run"
    mapping = read_yaml(saved, advice=advice)
    for old in (old for old in RENAMED if old in flatten(mapping)):
        raise UserError(
            f"{key}={show(str(folder))}: moezoo {BEFORE} saved this run; read or continue it with that version "
            f"({old} is now {RENAMED[old]})"
        )
    try:
        from_saved(mapping)
    except UserError as error:
        raise UserError(f"{show(str(saved))}: {error}; {advice}") from None
    return with_copies(with_defaults(mapping), saved.parent)


def from_saved(mapping: Mapping[str, Any]) -> TrainConfig:
    """Return a saved configuration with something of moezoo's in place of what is of the user's own.

    Raises `UserError` for unknown keys, wrong types and invalid numbers.
    """
    return convert(TrainConfig, without_own(with_defaults(mapping)), "", _CHECKS)


def with_defaults(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration with the defaults of settings that moezoo has had since.

    Its `init_forms` are sections; earlier versions saved texts.
    """
    if isinstance(forms := mapping.get("init_forms"), Mapping):
        forms = {at: to_plain(Form.from_text(form)) if isinstance(form, str) else form for at, form in forms.items()}
        mapping = {**mapping, "init_forms": forms}
    return complete(TrainConfig, mapping, "", _CHECKS)


def as_mapping(cfg: TrainConfig) -> dict[str, Any]:
    """Return `cfg` as plain dicts, lists, numbers and text, with every default written out.

    Raises `UserError` for a class of the user's own that a configuration cannot record.
    """
    own = {}
    values = [(key, operator.attrgetter(key)(cfg)) for key in TAGS]
    for key, value in [*values, *(("tracker", each) for each in cfg.tracker.active().values())]:
        if not isinstance(value, str) and (kind := type(value)) not in TAGS[key][1].values():
            check_class(key, kind, f"{key}={name_in(value)}")
            own.setdefault(key, {})[name_in(value)] = kind
    return to_plain(cfg, "", _checks_with(own))


def to_yaml(mapping: Mapping[str, Any]) -> str:
    """Return `mapping` as YAML."""
    return OmegaConf.to_yaml(dict(mapping))
