"""The text of `--help`, laid out for the width of the terminal."""

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moezoo.config.options import describe_keys
from moezoo.config.overrides import CONF, PACKAGE, PLUGS, defaults, groups, is_own, own_path
from moezoo.terminal.tables import pairs
from moezoo.typed import show

_LINE = re.compile(r"( *)(\w+): *([^#]*?) *(?:# *(.*))?")
# What a group takes besides its entries.
_OWN = {"rules": ("FILE.yaml", "Rules in a file of your own.")}
for _key, (_noun, _base) in PLUGS.items():
    _is = "a value of" if _key == "model" else "a frozen dataclass that derives from"
    _OWN[_key] = own_path(_key), f"Your own {_noun}: {_is} {_base}, in the current folder or an installed package."


def table(rows: Iterable[tuple[str, str]], indent: int = 2) -> list[str]:
    """Return rows as two columns; the second is wrapped at the width of the terminal."""
    return pairs(rows, terminal_width(), indent)


def own_keys(kind: type) -> list[str]:
    """Return the options of a command, which the dataclass `kind` declares."""
    return ["Keys of this command:", *table(describe_keys(kind))]


def overview(shown: Sequence[str]) -> list[str]:
    """Return the groups `shown`, by default all, with the names of their entries, and where the rest is listed."""
    rows = ((group, ", ".join([*groups()[group], *_OWN.get(group, ())[:1]])) for group in shown or defaults())
    rest = "and by single keys such as execution.dtype=bfloat16. `moezoo train --help` explains all of them."
    return ["How it runs, by groups such as mesh=ep8:", *table(rows), *textwrap.wrap(rest, terminal_width())]


def configuration(arguments: Sequence[str]) -> list[str]:
    """Return all groups with their entries, and all keys with the values that the entries in `arguments` give them."""
    from moezoo.config.compose import compose

    given = dict(a.split("=", 1) for a in arguments if "=" in a)
    chosen = {group: name for group, name in given.items() if name in groups().get(group, ()) or is_own(group, name)}
    cfg = compose(*(f"{group}={name}" for group, name in chosen.items()))
    values = dict(_values(cfg, ""))
    lines = ["Groups, set by name such as mesh=ep8; * marks the default:"]
    for group, default in defaults().items():
        name = chosen.get(group, default)
        entries = [(f"{entry}{'*' * (entry == default)}", _first_comment(group, entry)) for entry in groups()[group]]
        comments = dict(_comments(CONF / group / f"{name}.yaml", f"{group}."))
        keys = [key for key in values if key.startswith(f"{group}.")]
        plain = "  ".join(values[key] for key in keys if not comments.get(key))
        lines += ["", f"  {group}", *table([*entries, *([_OWN[group]] if group in _OWN else [])], indent=4)]
        lines += [f"    keys of {group}={name}:"] * bool(keys)
        lines += table([(values[key], comments[key]) for key in keys if comments.get(key)], indent=6)
        lines += textwrap.wrap(plain, terminal_width(), initial_indent=" " * 6, subsequent_indent=" " * 6)
    comments = _comments(CONF / "train.yaml", "")
    rows = [(values.get(key, f"{key}:"), comment) for key, comment in comments if comment or key in values]
    note = (
        "Values are those of the entries marked *, or of those you name: model=deepseek_v3 --help. "
        "--cfg job prints the configuration of a command as YAML."
    )
    return [*lines, "", "Keys and their values:", *table(rows), "", *textwrap.wrap(note, terminal_width())]


def terminal_width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 110)


def _values(settings: Any, key: str) -> Iterator[tuple[str, str]]:
    """The dotted keys below `key`, whose value is `settings`, each with KEY=VALUE; a name is not a setting."""
    if not dataclasses.is_dataclass(settings):
        yield key, key if isinstance(settings, Mapping) and settings else f"{key}={show(settings)}"
        return
    for field in dataclasses.fields(settings):
        if field.name != "name":
            yield from _values(getattr(settings, field.name), f"{key}.{field.name}".lstrip("."))


def _comments(path: Path, prefix: str) -> list[tuple[str, str]]:
    """The dotted keys of a file in `conf/` and of the sections in it, each with the comment on its line."""
    if not path.exists() or (text := path.read_text()).startswith(PACKAGE):
        return []
    found, names = [], []
    for line in text.partition("\n\n")[2].splitlines() if not prefix else text.splitlines():
        if match := _LINE.fullmatch(line):
            indent, name, _, comment = match.groups(default="")
            names = [*names[: len(indent) // 2], name]  # those of the sections around it, then its own
            found.append((prefix + ".".join(names), comment))
    return found


def _first_comment(group: str, entry: str) -> str:
    line = (CONF / group / f"{entry}.yaml").read_text().removeprefix(PACKAGE).partition("\n")[0]
    return line[1:].strip() if line.startswith("#") else ""
