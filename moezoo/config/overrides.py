"""The groups of `conf/` and the overrides that a user types, such as mesh=ep8 or model.layers=2.

Nothing here imports JAX, so `read` answers a mistyped word quickly.
"""

import functools
import importlib.resources
import itertools
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moezoo.config.other_names import check_name, suggest_axes
from moezoo.errors import UserError, describe_class, nearest
from moezoo.host.files import read_text
from moezoo.host.remote import as_path
from moezoo.typed import show

CONF = Path(str(importlib.resources.files("moezoo.conf")))
PACKAGE = "# @package _global_\n"  # Hydra's mark of an entry that is merged into the whole configuration

# The largest file that is read as YAML, and the most values in it after its aliases are expanded.
_MOST_BYTES, _MOST_VALUES = 2**20, 10**5

# What a user may plug in by the path of its class (of a family: of the value), `package.module.Class`: the word for it,
# and what it derives from.
PLUGS = {
    "model": ("family", "moezoo.models.Family"),
    "dispatch": ("strategy", "moezoo.moe.dispatch.Dispatch"),
    "optimizer": ("update rule", "moezoo.optim.UpdateRule"),
    "schedule": ("schedule", "moezoo.optim.Schedule"),
    "data": ("data source", "moezoo.data.DataSettings"),
    "tracker": ("tracker", "moezoo.trackers.Tracker"),
    "execution.context_parallel": ("context parallelism", "moezoo.parallel.context_parallel.ContextParallel"),
}

# The group that takes several entries, and where its entry `several` has them.
_LISTED, MEMBERS = "tracker", "tracker.members"
_SOURCES = "data.sources"  # of a mixture; a text is the path of a YAML file with them

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_KEY_LINE = re.compile(r"^ *(\w+):", re.MULTILINE)


class Asked(NamedTuple):
    """What a list of overrides asks for."""

    choices: dict[str, str]  # group -> entry, or the path of a rules file; one of `PLUGS` -> the path of a class
    changes: dict[str, Any]  # dotted key -> value


def read(overrides: Sequence[str], own: Collection[str] = ()) -> Asked:
    """Parse overrides into choices of groups and values of keys; `own` are the keys of the command itself.

    Raises `UserError` for the mistakes that the files of `conf/` show; composing finds the others. These are overrides
    that cannot be parsed, unknown entries of groups, and unknown keys at the top or in a section whose keys do not
    depend on its entry.
    """
    known, asked, members = groups(), Asked({}, {}), {}
    for text in overrides:
        if not isinstance(text, str):
            apart = "; write * before it to pass its items" if isinstance(text, list | tuple) else ""
            raise UserError(f'an override is {describe_class(text)}, expected text such as "mesh=ep8"{apart}')
        key, value = _parse(text, known)
        if key not in known:
            _check_key(key, own)
            asked.choices.pop(key, None)
            asked.changes.pop(key, None)
            if isinstance(value, str) and key in PLUGS and is_own(key, value):
                asked.choices[key] = value
            else:
                asked.changes[key] = read_yaml(value, key) if isinstance(value, str) and key == _SOURCES else value
            continue
        if key in asked.choices:
            raise UserError(f"{show(text)}: {key}={show(asked.choices[key])} is given too; choose one {key}")
        if key == _LISTED and isinstance(value, list):
            members = {MEMBERS: _listed(text, value, known[key])}
            value = "several"
        if not isinstance(value, str) or not (value in known[key] or is_own(key, value)):
            own = dict.fromkeys(PLUGS, f" (or {own_path(key)} of your own)") | {
                "rules": " (or give the path of a .yaml file)",
                "mesh": " (or set its axes, such as mesh.expert=4)",
            }
            hint = f"{nearest(show(value), known[key])}{own.get(key, '')}"
            if key == "mesh" and (axes := suggest_axes(show(value))):
                hint = f"write {axes}"
            raise UserError(f"{key}={show(value)}: no such {key}; {hint}")
        asked.choices[key] = value
    return asked._replace(changes={**members, **asked.changes})


def _check_key(key: str, own: Collection[str] = ()) -> None:
    """Raise `UserError` for a key that no configuration has."""
    check_name(key, top_keys())
    name, _, rest = key.partition(".")
    below, top = rest.partition(".")[0], [*own, *top_keys()]
    # Composing finds the section that a key at the top belongs to, such as model.layers for layers.
    if name not in top and (rest or name not in _every_word()):
        raise UserError(f"{key}: there is no key '{name}'; {nearest(name, top)}")
    if below and below not in (valid := _section_keys().get(name, [below])):
        raise UserError(f"{key}: there is no key '{below}' in {name}; {nearest(below, valid)}")


def _listed(text: str, names: list[Any], known: Collection[str]) -> dict[str, dict[str, str]]:
    """Return sections for the entries in a list; one of a class of the user's own has the class's name.

    Raises `UserError` for what is no entry, and for one that is there twice.
    """
    valid = [name for name in known if name not in ("none", "several")]
    for name in names:
        if name not in valid and not (isinstance(name, str) and is_own(_LISTED, name)):
            raise UserError(f"{show(text)}: {show(name)} is no {_LISTED} for a list; {nearest(show(name), valid)}")
    found = {name.rpartition(".")[2]: {"name": name} for name in names}
    if not found or len(found) < len(names):
        raise UserError(f"{show(text)}: expected each {_LISTED} once; write {_LISTED}=[tensorboard,wandb]")
    return found


def read_value(text: str) -> Any:
    """Return the value of one override, of any key. Raises `UserError` for what cannot be parsed."""
    return _parse(text, {})[1]


def list_values(text: str, most: int) -> tuple[str, dict[str, Any]] | None:
    """Return the key and the values of an override that lists several, each with its text; None for any other.

    Values are listed with commas, or by Hydra's `choice(...)`, `range(...)` or `sort(...)`.

    Raises `UserError` for what cannot be parsed, for a value that is listed twice, and for more than `most`.
    """
    known = groups()
    key, parsed = _parse_values(text, known)
    if not parsed.is_sweep_override():
        return None
    found, shown = parsed.value(), show(text)
    if isinstance(found, Glob) or not isinstance(found, ChoiceSweep | RangeSweep) or found.shuffle:
        raise UserError(f"{shown}: expected values that are the same each time; list them: {key}=A,B, or as range(0,4)")
    values: dict[str, Any] = {}
    try:
        for each in itertools.islice(parsed.sweep_string_iterator(), most + 1):
            value = _parse(f"{key}={each}", known)[1]
            if value in values.values():
                raise UserError(f"{shown}: {show(value)} is listed twice; leave one out")
            values[each] = value
    except ValueError as error:  # of a range, such as a step of 0
        raise error if isinstance(error, UserError) else UserError(f"{shown}: {error}; list the values") from None
    if not 0 < len(values) <= most:
        raise UserError(f"{shown}: {f'more than {most} values; list fewer' if values else 'no value; list some'}")
    return key, values


def replace(words: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return `words` with `changes`. A group that these name anew loses the entry and the keys that it was given."""
    anew = {change.partition("=")[0] for change in changes} & groups().keys()
    kept = [word for word in words if word.lstrip("+").partition("=")[0].partition(".")[0] not in anew]
    return [*kept, *changes]


def words_of(key: str, text: str, own: Collection[str] = ()) -> list[str]:
    """Return the overrides in a text of several, which the option `key` has; `own` are keys of the command itself.

    Raises `UserError` as `read` does.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        raise UserError(f"{key}={show(text)}: a quote is not closed; close it") from None
    read([word for word in words if word.partition("=")[0] not in own], own)
    return words


def quote(key: str, value: str) -> str:
    """Return the override that sets a key to a text, whatever it holds."""
    # A backslash stands for itself, except before a quote.
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ("\\" + found[2] if found[2] else ""), value)
    return f'{key}="{escaped}"'


def as_typed(word: str) -> str:
    """Return what to type in a shell for an argument, on one line."""
    if word.isprintable():
        return shlex.quote(word)
    escape = lambda found: "".join(f"\\x{byte:02x}" for byte in found[0].encode(errors="surrogateescape"))  # noqa: E731
    return "$'" + "".join(x if x.isprintable() else escape([x]) for x in re.sub(r"([\\'])", r"\\\1", word)) + "'"


def is_own(group: str, value: str) -> bool:
    """Whether the value of a key names the user's own entry: a rules file, or the path of one of `PLUGS`."""
    if group == "rules":
        return "/" in value or value.endswith((".yaml", ".yml"))
    return group in PLUGS and "." in value


def own_path(key: str) -> str:
    """Return what to write for one of `PLUGS`."""
    return f"package.module.{'Family' if key == 'model' else 'Class'}"


def groups() -> dict[str, list[str]]:
    """Return the names to choose from for each group: the folders of `conf/` and the files in them."""
    found: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return found


def defaults() -> dict[str, str]:
    """Return the name that `conf/train.yaml` chooses for each group, in its order."""
    entries = [entry for entry in _train_yaml()["defaults"] if isinstance(entry, dict)]
    return {group: name for entry in entries for group, name in entry.items()}


def top_keys() -> list[str]:
    """Return the groups and the keys at the top of a configuration."""
    return [*defaults(), *(key for key in _train_yaml() if key != "defaults")]


def read_yaml(path: str | Path, key: str | None = None, *, advice: str = "correct the file") -> dict[Any, Any]:
    """Read the mapping that a YAML file holds; `key` is the key that the user set to `path`, if any.

    Raises `UserError`, with `advice` at its end, when the file is missing, unreadable, not YAML, not a mapping, or when
    its aliases make it much larger.
    """
    name = show(str(path) if key is None else f"{key}={path}")
    other = advice if key is None else "give the path of a YAML file"
    text = read_text(as_path(os.path.expanduser(path)), name, other, most=_MOST_BYTES)
    try:
        if "*" in text and (root := yaml.compose(text, yaml.SafeLoader)) and _count_values(root, {}) > _MOST_VALUES:
            raise UserError(f"{name}: its aliases stand for more than {_MOST_VALUES} values; {advice}")
        mapping = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except UserError:
        raise
    except yaml.YAMLError as error:
        line = f" in line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        problem = " ".join(str(getattr(error, "problem", None) or "unreadable").split())
        raise UserError(f"{name}: broken YAML{line} ({problem}); {advice}") from None
    except (OmegaConfBaseException, RecursionError, AssertionError) as error:
        where = f" of '{at}'" if (at := getattr(error, "full_key", None)) else ""
        raise UserError(f"{name}: the value{where} cannot be read; {advice}") from None
    except ValueError as error:
        raise UserError(f"{name}: a value cannot be read ({str(error).partition(';')[0]}); {advice}") from None
    if not isinstance(mapping, dict):
        raise UserError(f"{name}: expected keys and their values, found a list; {advice}")
    return mapping


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values below a node; too many if it holds itself."""
    if id(node) not in counts:
        counts[id(node)] = _MOST_VALUES + 1
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        counts[id(node)] = 1 + sum(_count_values(part, counts) for part in below)
    return counts[id(node)]


@functools.cache
def _train_yaml() -> Mapping[str, Any]:
    return read_yaml(CONF / "train.yaml")


@functools.cache
def _every_word() -> set[str]:
    """Every word that is a key somewhere in `conf/`."""
    return {word for path in CONF.rglob("*.yaml") for word in _KEY_LINE.findall(path.read_text())}


@functools.cache
def _section_keys() -> dict[str, list[str]]:
    """The keys of each section whose keys do not depend on the entry that is chosen."""
    found = {key: list(value) for key, value in _train_yaml().items() if isinstance(value, dict)}
    # An entry of the group model lists only what differs from the defaults of its dataclass.
    for group in groups().keys() - {"model"}:
        entries = [list(read_yaml(path)) for path in CONF.glob(f"{group}/*.yaml")]
        if all(entry == entries[0] for entry in entries):
            found[group] = entries[0]
    return found


def _parse(text: str, known: Mapping[str, list[str]]) -> tuple[str, Any]:
    """Return the key and the value of one override."""
    key, parsed = _parse_values(text, known)
    if parsed.is_sweep_override():
        or_list = "" if key in known else f"; a list is written {key}=[a,b]"
        loop = f"for x in A B; do COMMAND {key}=$x; done, or train with each: moezoo sweep {show(text)}"
        problem = "expected one value, found several; a command runs one configuration, so loop"
        raise UserError(f"{show(text)}: {problem}: {loop}{or_list}")
    return key, parsed.value()


def _parse_values(text: str, known: Mapping[str, list[str]]) -> tuple[str, Override]:
    """Return the key of an override, which may list several values, and what Hydra reads."""
    shown = show(text)
    key, equals, value = text.lstrip("+~").partition("=")
    prefix = text[: len(text) - len(text.lstrip("+~"))]
    if prefix.startswith("~"):
        raise UserError(f"{shown}: nothing can be removed; set it to something else with {show(key)}=VALUE")
    if not equals:
        homes = [group for group, names in known.items() if key in names]
        write = f"{homes[0]}={key}" if homes else f"{key if key in top_keys() else 'KEY'}=VALUE"
        raise UserError(f"{shown}: expected KEY=VALUE, found no '='; write {write}")
    if not _KEY.fullmatch(key):
        found = f"'{show(key)}'" if key else "nothing"
        raise UserError(f"{shown}: expected a key such as steps or model.layers before '=', found {found}")
    if prefix and not (prefix == "+" and key.startswith(("rules.store.", "rules.compute."))):
        _check_key(key)
        raise UserError(f"{shown}: keys are fixed and '{prefix}' cannot add one; write {show(f'{key}={value}')}")
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")
    except (HydraException, ValueError, RecursionError):
        words = text.split()
        if len(words) > 1 and all("=" in word and _KEY.fullmatch(word.partition("=")[0]) for word in words):
            apart = ", ".join(f'"{show(word)}"' for word in words)
            raise UserError(f"{shown}: expected one KEY=VALUE, found {len(words)}; pass each apart: {apart}") from None
        quoted = as_typed(quote(key, value))
        raise UserError(f"{shown}: the value cannot be read; close its brackets, or quote it twice: {quoted}") from None
    return key, parsed
