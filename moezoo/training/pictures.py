"""The pictures of a run, and bars. Only this module uses matplotlib, without a screen."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moezoo.trackers import MetricsRow
from moezoo.training.files import replace_file
from moezoo.training.reading import ReadRun, describe_unit

# The smoothed curve averages this share of the logged steps around each; it is drawn from this many logged steps on.
_SMOOTHED_SHARE, _LEAST_SMOOTHED = 1 / 10, 20
# A picture of several runs names this many of them, and ends at this multiple of the largest loss at the start.
_MOST_NAMED, _MOST_ABOVE = 20, 1.1
# The panels of the picture of routing: key of metrics.jsonl, label, color and style of each curve.
_ROUTING = (
    (
        ("mean_entropy", "entropy, mean of layers", "tab:blue", "-"),
        ("lowest_entropy", "entropy, lowest layer", "tab:blue", ":"),
        ("experts_in_use", "share of experts in use", "tab:green", "-"),
    ),
    (
        ("mean_violation", "violation, mean of layers", "tab:red", "-"),
        ("max_violation", "violation, largest layer", "tab:red", ":"),
    ),
)


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, *, share: bool = True) -> tuple[Any, Any]:
    """Return a figure and its panels, in rows and columns, with one horizontal axis if they share it."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it reports at length where it cannot write to the user's folder of settings
    from matplotlib.figure import Figure

    logger.setLevel(level)
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=share)


def _save(figure: Any, path: Path) -> None:
    replace_file(path, lambda new: figure.savefig(new, format="png", dpi=120))


def _column(history: Sequence[MetricsRow], key: str) -> np.ndarray:
    """Return a value of every row; NaN where a row has none."""
    return np.array([row.get(key) for row in history], float)


def _mark_integers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def moving_average(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Return the mean of the `width` (odd, not more than there are) values centered at each value, without NaNs.

    It is NaN where fewer than `width // 2` values come before or after: a mean of few values looks like a trend.
    """
    x, half = np.asarray(values, float), width // 2
    valid = ~np.isnan(x)
    sums, counts = (np.concatenate([[0], np.cumsum(a)]) for a in (np.where(valid, x, 0), valid))
    number = counts[width:] - counts[:-width]
    whole = np.where(number > 0, (sums[width:] - sums[:-width]) / np.maximum(number, 1), np.nan)
    return np.pad(whole, half, constant_values=np.nan)


def loss_picture(history: list[MetricsRow], path: Path, *, unit: str, baseline: float | None) -> None:
    """Write the picture that `draw_losses` returns to a PNG file."""
    _save(draw_losses(history, unit=unit, baseline=baseline), path)


def draw_losses(history: list[MetricsRow], *, unit: str, baseline: float | None) -> Any:
    """Draw the training and validation loss by step, in nats per `unit`, and return the matplotlib figure.

    `baseline` is the validation loss of a trigram model, if there is one.
    """
    figure, axes = _figure(7, 4.2)
    trained = [row for row in history if row["step"]]  # a row of step 0 is an evaluation alone
    steps, losses = [row["step"] for row in trained], _column(trained, "loss")
    smoothed = len(steps) >= _LEAST_SMOOTHED
    style = {"lw": 1, "alpha": 0.4} if smoothed else {"lw": 1.5, "marker": ".", "ms": 9}
    axes.plot(steps, losses, color="tab:blue", label="training, logged steps", **style)
    if smoothed:
        width = int(len(steps) * _SMOOTHED_SHARE) // 2 * 2 + 1
        label = f"training, centered mean of {width} logged steps"
        axes.plot(steps, moving_average(losses, width), color="tab:blue", lw=1.8, label=label)
    evaluated = [(row["step"], row["val_loss"]) for row in history if row.get("val_loss") is not None]
    if evaluated:
        at, values = zip(*evaluated, strict=True)
        best = min(range(len(values)), key=values.__getitem__)
        best_shown = f", best {values[best]:.3f} at step {at[best]:,}" * (values[best] < values[-1])
        label = f"validation ({values[-1]:.3f} at step {at[-1]:,}{best_shown})"
        axes.plot(at, values, "o-", color="tab:orange", lw=1, label=label)
    if baseline is not None:
        axes.axhline(baseline, color="gray", ls="--", lw=1, label=f"trigram model, validation ({baseline:.3f})")
    _mark_integers(axes.xaxis)
    axes.set_xlabel("training step")
    axes.set_ylabel(f"cross-entropy, nats per {unit}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def routing_picture(history: list[MetricsRow], path: Path) -> None:
    """Write the picture that `draw_routing` returns to a PNG file."""
    _save(draw_routing(history), path)


def draw_routing(history: list[MetricsRow]) -> Any:
    """Draw how evenly experts are used by step, and return the matplotlib figure.

    Above: entropy and the share of experts in use, both 1 when balanced; below: violation, 0 when balanced. Rows of
    metrics.jsonl without these keys, which older versions wrote, leave a gap.
    """
    figure, panels = _figure(7, 5.2, rows=2)
    steps = [row["step"] for row in history]
    marker = "" if len(steps) >= _LEAST_SMOOTHED else "."
    for axes, curves in zip(panels, _ROUTING, strict=True):
        for key, label, color, style in curves:
            axes.plot(steps, _column(history, key), color=color, ls=style, marker=marker, ms=9, label=label)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylim(-0.02, 1.05)
    panels[0].set_ylabel("1 is balanced")
    panels[1].set_ylim(bottom=0)
    panels[1].set_ylabel("largest load / mean load - 1")
    _mark_integers(panels[1].xaxis)
    panels[1].set_xlabel("training step")
    return figure


def load_picture(load: np.ndarray, numbers: Sequence[int], path: Path, *, steps: str) -> None:
    """Draw the load of every expert, relative to the mean load of its layer.

    `load` are assignments [layer, experts], summed over steps, of the layers with these `numbers`; the title says over
    which `steps`.
    """
    relative = load * load.shape[1] / np.maximum(load.sum(1, keepdims=True), 1)
    layers, num_experts = load.shape
    figure, axes = _figure(max(5.0, 2.2 + 0.55 * min(num_experts, 24)), max(2.8, 1.6 + 0.4 * layers))
    image = axes.imshow(relative, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    if num_experts <= 16 and layers <= 32:
        for layer, expert in np.ndindex(layers, num_experts):
            value = relative[layer, expert]
            color = "white" if abs(value - 1) > 0.7 else "black"
            axes.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(num_experts))
        axes.set_yticks(range(layers))
    else:
        _mark_integers(axes.xaxis)
        _mark_integers(axes.yaxis)
    axes.set_xlabel("expert")
    axes.yaxis.set_major_formatter(lambda row, _: str(numbers[int(row)]) if row in range(layers) else "")
    axes.set_ylabel("layer")
    axes.set_title(f"Expert load, {steps}", fontsize=10)
    figure.colorbar(image, ax=axes, extend="max", label="load / mean load of the layer")
    _save(figure, path)


def relative_picture(
    panels: Mapping[str, np.ndarray], path: Path, *, title: str, labels: tuple[str, str], columns: Sequence[object] = ()
) -> None:
    """Draw matrices of numbers of which 1 is the expected one, and NaN is left gray.

    Args:
        panels: The matrices by title. At most 12 are drawn, evenly spaced.
        path: The PNG file.
        title: What the numbers are.
        labels: What rows and columns are.
        columns: The names of the columns; by default they are numbered.
    """
    names = list(panels)
    names = [names[number * len(names) // min(len(names), 12)] for number in range(min(len(names), 12))]
    wide = min(len(names), 4)
    high = -(-len(names) // wide)
    figure, axes = _figure(1.2 + 2.6 * wide, 0.9 + 2.5 * high, high, wide, share=False)
    for axis, name in itertools.zip_longest(np.atleast_1d(axes).flat, names):
        if name is None:
            axis.set_axis_off()
            continue
        axis.set_facecolor("0.8")
        image = axis.imshow(panels[name], cmap="RdBu_r", vmin=0, vmax=2, aspect="auto", interpolation="nearest")
        axis.set_title(name, fontsize=9)
        _mark_integers(axis.xaxis)
        _mark_integers(axis.yaxis)
        if columns:
            shown = range(0, len(columns), -(-len(columns) // 4))
            axis.set_xticks(shown, [str(columns[at]) for at in shown])
    figure.suptitle(title, fontsize=10)
    figure.supylabel(labels[0], fontsize=9)
    figure.supxlabel(labels[1], fontsize=9)
    figure.colorbar(image, ax=axes, extend="max", label="1 is expected")
    _save(figure, path)


def runs_picture(runs: Mapping[str, ReadRun], path: Path, *, by_tokens: bool, best: int | None = None) -> None:
    """Write the picture that `draw_runs` returns to a PNG file."""
    _save(draw_runs(runs, by_tokens=by_tokens, best=best), path)


def draw_runs(runs: Mapping[str, ReadRun], *, by_tokens: bool, best: int | None = None) -> Any:
    """Draw training and validation losses of several runs, by name, and return the matplotlib figure.

    The horizontal axis has steps or, with `by_tokens`, tokens read. With `best`, the number of a run, that one is drawn
    above the others, which are pale. Losses far above those at the start are cut off.
    """
    figure, axes = _figure(10, 5)
    top = 0.0
    for number, (label, run) in enumerate(runs.items()):
        history, scale = run.history, float(run.tokens_per_step or 1) if by_tokens else 1.0
        emphasised, beside = best == number, best not in (None, number)
        color = "black" if emphasised else f"C{number % 10}"
        style = {"color": color, "zorder": 2 + emphasised, "ls": ("-", "--", ":")[number // 10 % 3]}
        trained = [row for row in history if row["step"]]
        steps, losses = np.array([row["step"] for row in trained]) * scale, _column(trained, "loss")
        at, values = np.array([row["step"] for row in history]) * scale, _column(history, "val_loss")
        first = losses[:1]
        if len(steps) >= _LEAST_SMOOTHED:
            losses = moving_average(losses, int(len(steps) * _SMOOTHED_SHARE) // 2 * 2 + 1)
        alone = "x" * (len(steps) == 1)  # no line would show it
        axes.plot(steps, losses, marker=alone, lw=1, alpha=0.25 if beside else 0.5, **style)
        shown = ~np.isnan(values)
        last = f" ({values[shown][-1]:.3f})" if shown.any() else ""
        name = f"{'best: ' * emphasised}{label}{last}" if number < _MOST_NAMED or emphasised else None
        axes.plot(
            at[shown], values[shown], marker="o", ms=4, lw=2.5 if emphasised else 1.3, alpha=0.5 if beside else 1,
            label=name, **style,
        )  # fmt: skip
        top = max(top, *first, *values[shown][:1])
    if top and axes.get_ylim()[1] > _MOST_ABOVE * top:
        axes.set_ylim(top=_MOST_ABOVE * top)
    _mark_integers(axes.xaxis)
    axes.set_xlabel("tokens read" if by_tokens else "training step")
    axes.set_ylabel(f"cross-entropy, {describe_unit(run.settings for run in runs.values())}")
    axes.grid(alpha=0.3)
    more = f"\n{len(runs) - _MOST_NAMED} more are not named" if len(runs) > _MOST_NAMED else ""
    title = f"with dots: validation (the last)\nwithout: training, smoothed from {_LEAST_SMOOTHED} rows on{more}"
    figure.legend(loc="outside right upper", fontsize="small", title=title, title_fontsize="small")
    return figure


class Bars(NamedTuple):
    """A panel of horizontal bars, one for each label.

    Attributes:
        name: The panel's title.
        parts: For each label, part -> its size. The parts of a bar follow each other.
        limit: Where a line is drawn; None for none.
    """

    name: str
    parts: Sequence[Mapping[str, float]]
    limit: float | None = None


def draw_bars(path: Path, title: str, labels: Sequence[str], panels: Sequence[Bars]) -> None:
    """Write a PNG file with panels one below the other."""
    figure, axes = _figure(11, 1.2 + len(panels) * (1.0 + 0.4 * len(labels)), len(panels), share=False)
    figure.suptitle(title, fontsize="medium")
    for axis, panel in zip(np.atleast_1d(axes), panels, strict=True):
        names = list(dict.fromkeys(itertools.chain.from_iterable(panel.parts)))
        start, place = np.zeros(len(labels)), np.arange(len(labels))
        for number, name in enumerate(names):
            sizes = np.array([each.get(name, 0.0) for each in panel.parts])
            axis.barh(place, sizes, left=start, label=name, color=f"C{number % 10}", hatch="//" * (number >= 10))
            start += sizes
        if panel.limit is not None:
            axis.axvline(panel.limit, color="black", linestyle="--", label="what fits")
        axis.set_yticks(place, labels)
        axis.invert_yaxis()
        axis.set_title(panel.name, loc="left")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)
    _save(figure, path)
