"""docs/parity.md: what the whole product showed, a section a test that leaves one."""

from collections.abc import Iterable, Sequence
from pathlib import Path

FILE = Path(__file__).parents[2] / "docs" / "parity.md"
_TITLE = "# Every way to run a model, against plain loops\n"
# Sections in the order in which they stand, and what leaves them.
SECTIONS = {
    "Training": "python -m pytest -n 0 -m full tests/parity/test_step_parity.py",
    "Evaluation and generation": "python -m pytest -n 0 -m full tests/parity/test_forward_parity.py",
}


def leave(section: str, text: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a section and keep the others."""
    found = {}
    if FILE.exists():
        for part in FILE.read_text().split("\n## ")[1:]:
            title, _, rest = part.partition("\n")
            found[title] = rest.strip()
    lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
    found[section] = "\n".join([text.strip(), "", f"Written by `{SECTIONS[section]}`.", "", *lines])
    parts = [f"\n## {title}\n\n{found[title]}\n" for title in SECTIONS if title in found]
    FILE.write_text(_TITLE + "".join(parts))
