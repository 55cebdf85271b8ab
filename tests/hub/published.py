"""Tries published chat templates, tokenizers, configurations and indexes against transformers.

    python tests/hub/published.py FOLDER [--write FILE] [--compare FILE]

prints a table of each kind, with a row for every file below FOLDER, and then why something was refused. Files are known
by what they hold, and may be packed by gzip. `--write` saves hashes of what was rendered and trained, and `--compare`
shows which of them differ from saved ones.

In the columns of a template: `=` the same text, `r` both refuse, `R` moezoo alone refuses, `T` transformers alone,
`D` other texts. moezoo joins the parts of a content and reads arguments that are JSON text; transformers does neither.
In those of a loss: `ok` all that the assistant wrote and nothing of others is trained, `R` refused, otherwise how many
of the assistant's texts are trained, `leak` where others' text is, `lost` where the template leaves something out.
`before` and `after` is what is trained around an answer.
"""

import argparse
import collections
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).parents[1]))

from published_chats import try_template, try_tokenizer
from published_models import try_config, try_index
from tries import limited, read_text, words

_TRIES = {"template": try_template, "tokenizer": try_tokenizer, "config": try_config, "index": try_index}


class Row(NamedTuple):
    """What trying a file gave: the columns of its table, lines that explain them, and hashes by what was encoded."""

    kind: str
    name: str
    cells: dict[str, str]
    notes: list[str]
    hashes: dict[str, list[str]]


def kind_of(path: Path) -> str:
    """Return what a file holds. A tokenizer_config.json is a template if it has one, and is read with its tokenizer."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".jinja"):
        return "template"
    found = json.loads(read_text(path)) if name.endswith(".json") else None
    if not isinstance(found, dict):
        return "other"
    if "weight_map" in found:
        return "index"
    if "added_tokens" in found and "model" in found:
        return "tokenizer"
    if "chat_template" in found:
        return "template"
    return "config" if {"model_type", "architectures"} & found.keys() else "other"


def try_file(path: Path, name: str) -> Row:
    """Return the row of a file, whatever it holds."""
    row = Row("other", name, {}, [], {})
    try:
        row = row._replace(kind=kind_of(path))
        with limited() as work:
            for column, value in _TRIES[row.kind](path, work) if row.kind in _TRIES else ():
                if isinstance(value, list):
                    row.hashes[column] = value
                elif column:
                    row.cells[column] = value
                else:
                    row.notes.append(value)
    except Exception as error:  # every file gets a row
        row.cells["fault"] = "fault"
        row.notes.append(words(error))
    return row


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a table, and how often each cell occurs in columns of short cells."""
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    lines = [["file", *columns], *([row.name, *(row.cells.get(each, "") for each in columns)] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    for line in lines:
        yield " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(" |")
    for column in columns:
        counts = collections.Counter(row.cells.get(column) or "none" for row in rows)
        if max(map(len, counts)) < 9:
            yield f"{column}: {', '.join(f'{count} {cell}' for cell, count in counts.most_common())}"


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Print what differs; return 1 if anything does."""
    pairs = [(file, name) for file in before for name in before[file] if name in now.get(file, {})]
    different = [(file, name) for file, name in pairs if before[file][name] != now[file][name]]
    print(f"\n# Compared: {len(pairs)}, different: {len(different)}\n")
    for file, name in different:
        (one, *rest), (other, *others) = before[file][name], now[file][name]
        if not others:
            what = f"is refused, before {'otherwise' if not rest else 'read'}: {other}"
        else:
            what = "is read, before refused" if not rest else "other text" if one != other else "other mask or ids"
        print(f"{file}: {name}: {what}")
    return int(bool(different))


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return 1 if hashes differ from those compared with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what is tried, with all folders in it")
    parser.add_argument("--write", type=Path, help="a file for hashes of texts and of what is trained")
    parser.add_argument("--compare", type=Path, help="such a file, of another version")
    given = parser.parse_args(arguments)
    paths = sorted(path for path in given.folder.rglob("*") if path.is_file())
    rows = [try_file(path, str(path.relative_to(given.folder))) for path in paths]
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        print(f"\n# {kind}: {len(own)}\n", *table(own), sep="\n")
    print("\n# Notes\n", *(f"{row.name}: {note}" for row in rows for note in row.notes), sep="\n")
    hashes = {row.name: row.hashes for row in rows if row.hashes}
    if given.write:
        given.write.write_text(json.dumps(hashes, indent=1))
    return compare(json.loads(given.compare.read_text()), hashes) if given.compare else 0


if __name__ == "__main__":
    sys.exit(main())
