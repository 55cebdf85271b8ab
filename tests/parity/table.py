"""Write the results of the whole product: the worst cases to `docs/parity.md`, every case to `runs/parity.md`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHORT, FULL = ROOT / "docs" / "parity.md", ROOT / "runs" / "parity.md"
COMMAND = "python -m pytest -n 0 -m full tests/parity/test_step_parity.py tests/parity/test_forward_parity.py"
SECTIONS = ("Training", "Evaluation and generation")  # in this order
HEADS = {
    "short": f"""# How far is each strategy from plain loops?

The worst cases of the whole product of strategies, meshes, rules and settings. [How do I know that it is
right?](proven.md) explains the comparison and its tolerances. This command runs the product and writes this page; it
also writes every case to `runs/parity.md`, which git does not track:

    {COMMAND}
""",
    "full": "# Every case of the whole product\n",
}


def write_section(
    title: str,
    about: str,
    settings: Sequence[str],
    figures: Sequence[str],
    cases: Mapping[Any, Sequence[float]],
    *,
    by: Sequence[str],
    short: Path = SHORT,
    full: Path = FULL,
) -> None:
    """Write one section of both files and keep their other sections.

    `cases` maps a tuple of the values of `settings` to those of `figures`, of which larger ones are worse. `short` has
    a row for each value of the settings `by`: the number of cases and the worst figures.
    """
    assert title in SECTIONS
    every = [(*values, *map(_number, found)) for values, found in cases.items()]
    groups: dict[tuple[str, ...], list[Sequence[float]]] = {}
    for values, found in cases.items():
        groups.setdefault(tuple(values[settings.index(name)] for name in by), []).append(found)
    worst = [
        (*key, str(len(some)), *(_number(max(f)) for f in zip(*some, strict=True))) for key, some in groups.items()
    ]
    _replace(full, HEADS["full"], title, [about.strip(), "", *_table((*settings, *figures), every)])
    _replace(short, HEADS["short"], title, [about.strip(), "", *_table((*by, "cases", *figures), sorted(worst))])


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.0e}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def _replace(path: Path, head: str, title: str, lines: Sequence[str]) -> None:
    found = {}
    if path.exists():
        for part in path.read_text().split("\n## ")[1:]:
            name, _, rest = part.partition("\n")
            found[name] = rest.strip()
    found[title] = "\n".join(lines)
    path.parent.mkdir(exist_ok=True)
    path.write_text(head + "".join(f"\n## {name}\n\n{found[name]}\n" for name in SECTIONS if name in found))
