"""What `watch=true` draws on a terminal below the bar: the loss, speed, memory, and the load of experts, in text."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moezoo.host.machine import in_gib
from moezoo.trackers import MetricsRow, Writer

_HEIGHT = 8  # lines of the curve
_MOST_LAYERS = 8
_DOTS = ((1, 8), (2, 16), (4, 32), (64, 128))  # bits of a braille character, by row and column
_LEVELS, _PLAIN_LEVELS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"  # loads from none to twice the mean


class LiveView(Writer):
    """What rich draws of logged rows, as wide as the terminal and with characters that the terminal has.

    `layers`: the numbers of the layers with experts.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._rows: list[MetricsRow] = []
        self._load: np.ndarray | None = None

    def row(self, row: MetricsRow, load: np.ndarray | None) -> None:
        """Draw this row too from now on."""
        self._rows.append(row)
        self._load = load

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for line in self.lines(options.max_width, plain=options.ascii_only or options.legacy_windows):
            yield Text(line, no_wrap=True, overflow="crop")

    def lines(self, width: int, *, plain: bool) -> list[str]:
        """Return the lines of `width` columns; only ASCII if `plain`."""
        rows = self._rows
        if not rows:
            return []
        last = rows[-1]
        figures = [f"loss {last['loss']:.4f}"]
        if evaluated := [row for row in rows if "val_loss" in row]:
            figures.append(f"validation {evaluated[-1]['val_loss']:.4f} at step {evaluated[-1]['step']:,}")
        figures += [f"{last['tokens_per_second']:,.0f} tokens/s", f"memory {in_gib(last['peak_bytes'])}"]
        parts = {name: last[f"seconds_{name}"] for name in ("computing", "waiting", "saving")}
        whole = sum(parts.values()) or 1.0
        figures += [f"{name} {value / whole:.0%}" for name, value in parts.items()]
        lines = wrap(figures, width)
        points = [(row["step"], row["loss"]) for row in rows if np.isfinite(row["loss"])]
        if len({step for step, _ in points}) > 1:
            lines += ["", *curve(points, width, plain=plain)]
        if self._load is not None:
            lines += ["", *load_lines(self._load, self._layers, width, plain=plain)]
        return lines


def wrap(parts: Sequence[str], width: int) -> list[str]:
    """Join parts with two spaces into lines of at most `width` columns; no part is broken."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def curve(points: Sequence[tuple[int, float]], width: int, *, plain: bool) -> list[str]:
    """Draw values by step, joined by lines; where several share a column of dots, their mean.

    The axis has the largest value and the smallest.
    """
    steps, values = np.array(points, float).T
    names = [f"{values.max():.3f}", f"{values.min():.3f}"]
    edge, room = max(map(len, names)) + 2, 1 if plain else 2  # columns of labels; dots in a column
    across, down = max(width - edge, 1) * room, _HEIGHT * (1 if plain else 4)
    column = np.round((steps - steps[0]) / (steps[-1] - steps[0]) * (across - 1)).astype(int)
    at = np.unique(column)
    heights = np.interp(np.arange(across), at, [values[column == x].mean() for x in at])
    span = (values.max() - values.min()) or 1.0
    cells = np.zeros((_HEIGHT, across // room), int)
    for x, value in enumerate(heights):
        y = round((values.max() - value) / span * (down - 1))
        cells[y // (down // _HEIGHT), x // room] |= _DOTS[y % (down // _HEIGHT)][x % room]
    labels = [names[0], *[""] * (_HEIGHT - 2), names[1]]
    bar = "|" if plain else "│"
    drawn = ["".join(" " if not each else "*" if plain else chr(0x2800 + each) for each in line) for line in cells]
    first, last = f"step {int(steps[0]):,}", f"{int(steps[-1]):,}"
    axis = f"{'':{edge}}{first}{last:>{max(across // room - len(first), 0)}}"
    return [*(f"{label:>{edge - 2}} {bar}{line}" for label, line in zip(labels, drawn, strict=True)), axis]


def load_lines(load: np.ndarray, layers: Sequence[int], width: int, *, plain: bool) -> list[str]:
    """Draw the load of the experts of each layer: the mean in the middle, at the top twice the mean or more.

    `layers` are the numbers of the layers. Where there are more experts than columns, a column shows the most loaded of
    several. Of many layers, those with the largest load of an expert are drawn.
    """
    levels = _PLAIN_LEVELS if plain else _LEVELS
    relative = load * load.shape[1] / np.maximum(load.sum(1, keepdims=True), 1)
    order = sorted(np.argsort(-relative.max(1), kind="stable")[:_MOST_LAYERS])
    title = f"load of {load.shape[1]} experts ({levels[4]} mean)"
    if len(order) < len(load):
        title += f", {len(order)} of {len(load)} layers"
    edge = len(f"layer {max(layers)} ")
    columns = min(load.shape[1], max(width - edge, 1))
    wide = max(1, min(4, (width - edge) // columns))
    lines = [title]
    for row in order:
        tops = [part.max() for part in np.array_split(relative[row], columns)]
        marks = (levels[0 if top == 0 else min(8, max(1, round(4 * top)))] for top in tops)
        lines.append(f"{f'layer {layers[row]}':<{edge}}" + "".join(mark * wide for mark in marks))
    return lines
