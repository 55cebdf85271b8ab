"""Results of any part: rows, printed as tables or JSON, and written to a folder with a picture.

A row maps names to plain values; docs/benchmarks.md defines them. A part declares the columns of its tables and the
panels of its picture.
"""

import contextlib
import datetime
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import moezoo.terminal.tables as tables
from moezoo.errors import UserError
from moezoo.training.files import making, writing_to

Row = dict[str, Any]
# A key of a row, or a function of the row.
Value = str | Callable[[Row], Any]


def get(row: Row, value: Value) -> Any:
    """Return a value of a row."""
    return value(row) if callable(value) else row[value]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: Its title.
        value: What it shows of a row; None leaves the cell empty.
        form: How the value is printed, as `format` takes it; without one it is a word, at the left.
        unit: What the value is divided by first.
    """

    title: str
    value: Value
    form: str = ""
    unit: float = 1

    def cell(self, row: Row) -> str:
        """Return the text of a row."""
        value = get(row, self.value)
        return tables.cell(value if value is None or self.unit == 1 else value / self.unit, self.form)


class Table(NamedTuple):
    """Some rows under a title."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    caption: str | None = None


class Panel(NamedTuple):
    """One plot of a picture: a value by category and series.

    Categories are words down the left side, next to bars; or numbers along the bottom, below lines with two logarithmic
    axes. A series has one color in all panels, and an entry of the legend unless its name is empty.
    """

    label: str
    values: Mapping[Any, Mapping[str, float | None]]  # category -> series -> value
    stacked: bool = False
    lines: str = ""  # what the numbers at the bottom are; empty for bars

    @property
    def series(self) -> list[str]:
        """The names of all series."""
        return list(dict.fromkeys(name for values in self.values.values() for name in values))

    @property
    def height(self) -> float:
        """Its height in inches."""
        bars = 1 if self.stacked else len(self.series)
        return 3.2 if self.lines else 0.5 + len(self.values) * (0.12 + 0.14 * bars)


class Report(NamedTuple):
    """What a part found: rows and how they are shown. `panels` are lines of panels; without any there is no picture."""

    rows: Sequence[Row]
    tables: Sequence[Table]
    panels: Sequence[Sequence[Panel]] = ()
    title: str = ""


def split(rows: Sequence[Row], by: Value) -> dict[Any, list[Row]]:
    """Return the rows of each value of `by`, in the order in which these appear."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(get(row, by), []).append(row)
    return found


def points(rows: Sequence[Row], category: Value, series: Value, value: Value) -> dict[Any, dict[str, Any]]:
    """Return a value of each row by category and series."""
    return {at: {get(row, series): get(row, value) for row in some} for at, some in split(rows, category).items()}


def spread(form: str) -> Callable[[Row], str]:
    """Return the function that gives a row's milliseconds with their interquartile range."""
    return lambda row: " ± ".join(format(row[key], form) for key in ("ms", "ms_spread") if row[key] is not None)


def ratio(above: str, below: str) -> Callable[[Row], float | None]:
    """Return the function that divides one value of a row by another; None where that is 0."""
    return lambda row: row[above] / row[below] if row[below] else None


def log(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def new_folder(out: str | None, key: str = "out") -> Iterator[None]:
    """Make the folder that the key `key` names, if it does; it is removed again if nothing is written there.

    A folder with files is refused.
    """
    with contextlib.ExitStack() as held:
        if out is not None:
            with writing_to(key, out):
                held.enter_context(making(Path(out)))
                if any(Path(out).iterdir()):
                    raise UserError(f"{key}={out} is not empty; name a new folder")
        yield


def show(part: str, report: Report, as_json: bool, out: str | None) -> None:
    """Print the rows as tables or as JSON, and write them and their picture to a folder.

    Without `out` JSON is only printed, and what has no picture too.
    """
    if as_json:
        print(_text(report))
    else:
        print_tables(report.tables)
    if out is not None or (report.panels and not as_json):
        write(report, folder_of(part, out))


def folder_of(part: str, out: str | None) -> Path:
    """Make and return the folder `out`, by default a new one in runs/."""
    folder = Path(out or f"runs/bench_{part}_{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _text(report: Report) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in report.rows) + "\n]"


def write(report: Report, folder: Path) -> None:
    """Write the rows and their picture to a folder."""
    (folder / "rows.json").write_text(_text(report) + "\n")
    if report.panels:
        draw(report.panels, report.title, folder / "speed.png")
    log(f"wrote {folder}/rows.json" + f" and {folder}/speed.png" * bool(report.panels))


def print_tables(shown: Sequence[Table]) -> None:
    """Print tables as wide as the terminal, or as 160 characters."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    for each in shown:
        rows = [[column.cell(row) for column in each.columns] for row in each.rows]
        right = {number for number, column in enumerate(each.columns) if column.form}
        lines = tables.plain([column.title for column in each.columns], rows, right, width=width)
        about = textwrap.wrap(each.caption or "", width)
        print("\n".join([*textwrap.wrap(each.title, width), "", *lines, *([""] if about else []), *about, ""]))


def draw(panels: Sequence[Sequence[Panel]], title: str, path: Path) -> None:
    """Draw lines of panels, which share their categories, with one legend, and write them to a PNG file."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    every = list(itertools.chain(*panels))
    names = dict.fromkeys(name for panel in every for name in panel.series if name)
    pairs: Any = colormaps["tab20"]  # ten colors, each followed by a lighter one
    colors = dict(zip(names, itertools.cycle((*pairs.colors[::2], *pairs.colors[1::2])))) | {"": "0.45"}
    heights = [max(panel.height for panel in line) for line in panels]
    figure = Figure(figsize=(9.5, 1.2 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), len(panels[0]), squeeze=False, sharey="row", height_ratios=heights)
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, every, strict=True):
        axes.tick_params(labelsize=7)
        axes.set_xlabel(panel.lines or panel.label, fontsize=8)
        axes.grid(axis="both" if panel.lines else "x", alpha=0.3)
        if panel.lines:
            axes.set_title(panel.label, fontsize=8)
            for name in panel.series:
                known = [(at, values[name]) for at, values in panel.values.items() if name in values]
                (handles[name],) = axes.loglog(*zip(*known, strict=True), marker="o", color=colors[name])
        else:
            axes.locator_params(axis="x", nbins=6)
            handles |= _draw_bars(axes, panel, colors)
    if names := [name for name in names if name in handles]:  # the others have no value
        labels = [textwrap.fill(name, 150) for name in names]
        columns = min(4, 160 // max(map(len, labels)) + 1)
        key = {"fontsize": 7, "ncols": columns, "loc": "outside lower center"}
        figure.legend([handles[name] for name in names], labels, **key)
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.savefig(path, dpi=120)


def _draw_bars(axes: Any, panel: Panel, colors: Mapping[str, str]) -> dict[str, Any]:
    """Draw the bars of each category below each other, or end to end; return a handle of each series."""
    handles, number, most = {}, 1 if panel.stacked else len(panel.series), 0.0
    for at, values in enumerate(panel.values.values()):
        end = 0.0
        for turn, name in enumerate(panel.series):
            if (value := values.get(name)) is not None:
                shift = 0 if panel.stacked else (turn - (number - 1) / 2) * 0.8 / number
                handles[name] = axes.barh(at + shift, value, 0.8 / number, left=end, color=colors[name])
                end += value * panel.stacked
                most = max(most, end, value)
    axes.set_yticks(range(len(panel.values)), panel.values)
    axes.set_ylim(len(panel.values) - 0.5, -0.5)
    axes.set_xlim(0, 1.03 * most or None)
    return handles
