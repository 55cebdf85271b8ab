"""The files of `moezoo routing`: pictures, JSON, and the page."""

from pathlib import Path

import numpy as np

from moezoo.tools.routing.page import make_page
from moezoo.tools.routing.text import Found, as_json, shown_tokens
from moezoo.training.files import check_writable, replace_text, writing_to
from moezoo.training.metrics import read_metrics
from moezoo.training.pictures import load_picture, relative_picture, routing_picture


def check_folder(folder: Path, key: str) -> None:
    """Raise `UserError` unless files can be written to `folder`, the value of the option `key`."""
    with writing_to(key, folder):
        check_writable(folder)


def write(found: Found, run: Path | None, folder: Path) -> list[Path]:
    """Write all files to the folder, and return their paths. `run` is the folder of the run, if it is one."""
    with writing_to("out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        pictures = _draw(found, run, folder)
        tokens = shown_tokens(found)
        page, numbers = folder / "routing.html", folder / "routing.json"
        replace_text(numbers, as_json(found, tokens))
        replace_text(page, make_page(found, tokens, pictures))
    return [page, numbers, *pictures.values()]


def _draw(found: Found, run: Path | None, folder: Path) -> dict[str, Path]:
    """Draw the pictures; return them by what they show."""
    tally, layers = found.routing.tally, [f"layer {number}" for number in found.routing.layers]
    pictures = {"Load of each expert, relative to the mean of its layer": folder / "load.png"}
    load_picture(
        tally.load,
        found.routing.layers,
        folder / "load.png",
        steps=f"{tally.tokens:,} {found.routing.rows.unit}s of text",
    )
    if not np.isnan(tally.co_activation).all():
        name = "Experts chosen together, relative to independence"
        pictures[name] = folder / "pairs.png"
        panels = dict(zip(layers, tally.co_activation, strict=True))
        relative_picture(panels, pictures[name], title=name, labels=("expert", "expert"))
    loads = found.loads_by_step
    if len(loads) > 1:
        name = "Load of each expert by checkpoint, on the same text"
        pictures[name] = folder / "load_by_step.png"
        by_step = np.stack([*loads.values()], axis=2)  # [layer, expert, step]
        relative = by_step * tally.load.shape[1] / np.maximum(by_step.sum(1, keepdims=True), 1)
        panels = dict(zip(layers, relative, strict=True))
        relative_picture(panels, pictures[name], title=name, labels=("expert", "step"), columns=[*loads])
    history = [] if run is None or found.step is None else read_metrics(run / "metrics.jsonl", until=found.step)
    if history:
        name = "Balance by step, of the batches of training"
        pictures[name] = folder / "balance.png"
        routing_picture(history, pictures[name])
    return pictures
