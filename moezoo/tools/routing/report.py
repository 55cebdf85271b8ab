"""What `moezoo routing` prints and writes of its numbers: lines, JSON, pictures and a page of Markdown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import moezoo.tables as tables
from moezoo.tools.routing.counted import RoutingAgreement, TextRouting
from moezoo.tools.routing.tally import SpecificToken
from moezoo.training.files import replace_text, writing_to
from moezoo.training.pictures import load_picture, relative_picture
from moezoo.typed import counted, show

_PAIRS = 16  # the strongest ones of a layer
_MOST_BYTES = 2_000_000  # of a page: what shows Markdown takes long for more
_ESCAPES = str.maketrans({"`": r"\x60", "|": r"\x7c"})
_EXPLANATION = """
docs/routing.md of the repository defines the numbers. Below the name of another way, model or checkpoint stands the
share of choices that differ. The number behind a pair of experts says how often both are chosen for a token; with
independent choices it is 1. Texts are written as in Python.
"""


def numbers(
    model: str,
    documents: str,
    text: TextRouting,
    agreements: Mapping[str, RoutingAgreement],
    loads: Mapping[int, np.ndarray],
    top: int,
) -> dict[str, Any]:
    """Return what `routing.json` has, of which all else is made, with up to `top` specific tokens per expert.

    `documents` names what was read. `agreements` are by what was compared, and `loads` [layer, experts], of the same
    text, by the step of a checkpoint.
    """
    tally, layers, num_experts = text.tally, [], text.tally.load.shape[1]
    counts = text.layers, tally.balance_by_layer, tally.pairs, tally.co_activation, text.specific_tokens(top)
    for row, (layer, balance, both, co_activation, experts) in enumerate(zip(*counts, strict=True)):
        relative = np.nan_to_num(np.triu(co_activation, 1)).ravel()
        layers.append(
            {
                "layer": layer,
                "load": tally.load[row].tolist(),
                "entropy": float(balance.mean_entropy),
                "violation": float(balance.mean_violation),
                "dead": np.flatnonzero(tally.dead[row]).tolist(),
                "pairs": [
                    {"experts": divmod(at, num_experts), "together": int(both.flat[at]), "relative": relative[at]}
                    for at in np.argsort(-relative, kind="stable")[:_PAIRS].tolist()
                    if relative[at] > 0
                ],
                "tokens": [[_in_context(each, text) for each in tokens] for tokens in experts],
                "agreement": {name: float(each.agreement[row]) for name, each in agreements.items()},
                "load_by_step": {step: load[row].tolist() for step, load in loads.items()},
            }
        )
    return {
        "model": f"{model}: {len(layers)} layers with {num_experts} experts, {tally.k} per token",
        "text": f"{documents}: {tally.tokens:,} {text.rows.unit}s",
        "tokens": tally.tokens,
        "experts_per_token": tally.k,
        "balance": {name: float(value) for name, value in tally.balance._asdict().items()},
        "layers": layers,
    }


def _in_context(token: SpecificToken, text: TextRouting) -> dict[str, Any]:
    around = text.context(token.place)
    return token._asdict() | around._asdict() | {"token": around.token or f"[{token.token}]"}  # some have no characters


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines that the command prints."""
    rows = [(name, report[name]) for name in ("model", "text")]
    for each in report["layers"]:
        figures = f"entropy {each['entropy']:.3f}  violation {each['violation']:.2f}"
        rows.append((f"layer {each['layer']}", f"{figures}  dead {len(each['dead'])} of {len(each['load'])}"))
    for name in report["layers"][0]["agreement"]:
        share = 1 - np.array([each["agreement"][name] for each in report["layers"]])
        figures = f"{share.mean():.3%} of choices (layers {share.min():.3%} to {share.max():.3%})"
        rows.append(("differ", f"{figures}: {name}"))
    return [f"{name:<11} {text}" for name, text in rows]


def write(report: Mapping[str, Any], text: TextRouting, loads: Mapping[int, np.ndarray], folder: Path) -> list[Path]:
    """Write all files to the folder, and return their paths. `loads` are as in `numbers`."""
    tally, layers = text.tally, [f"layer {number}" for number in text.layers]
    names = ["routing.md", "routing.json", "load.png"]
    with writing_to("out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        load_picture(tally.load, text.layers, folder / "load.png", steps=f"{tally.tokens:,} {text.rows.unit}s of text")
        if not np.isnan(tally.co_activation).all():
            names.append("pairs.png")
            panels = dict(zip(layers, tally.co_activation, strict=True))
            title = "Experts chosen together, relative to independence"
            relative_picture(panels, folder / names[-1], title=title, labels=("expert", "expert"))
        if len(loads) > 1:
            names.append("load_by_step.png")
            relative = np.stack([load / np.maximum(load.mean(1, keepdims=True), 1e-9) for load in loads.values()], 2)
            panels = dict(zip(layers, relative, strict=True))
            title, labels = "Load of each expert by checkpoint, on the same text", ("expert", "step")
            relative_picture(panels, folder / names[-1], title=title, labels=labels, columns=[*loads])
        replace_text(folder / "routing.md", make_page(report, names[2:]))
        replace_text(folder / "routing.json", json.dumps(report, indent=1))
    return [folder / name for name in names]


def code(text: str) -> str:
    """Return printable text as code of Markdown, which ends neither early nor at the end of a table's cell."""
    return f"`{text.translate(_ESCAPES)}`"


def make_page(report: Mapping[str, Any], pictures: list[str]) -> str:
    """Return the page: Markdown in which all text is code. `pictures` are names of files beside it."""
    compared, rows = (code(show(name)) for name in report["layers"][0]["agreement"]), []
    head = "layer", "entropy", "violation", "dead", *compared
    for each in report["layers"]:
        figures = f"{each['layer']}", f"{each['entropy']:.3f}", f"{each['violation']:.2f}", f"{len(each['dead'])}"
        rows.append([*figures, *(f"{1 - share:.3%}" for share in each["agreement"].values())])
    beginning = ["# Routing of a text\n", *(f"- {name}: {code(show(report[name]))}" for name in ("model", "text"))]
    beginning += ["", *tables.markdown(head, rows, right=range(len(head))), _EXPLANATION]
    parts = ["\n".join(beginning + [f"![{name}]({name})" for name in pictures]), *map(_section, report["layers"])]
    left = int((np.cumsum([len(part.encode()) for part in parts])[1:] > _MOST_BYTES).sum())
    more = [f"\n{counted(left, 'layer')} more: see routing.json."] * (left > 0)
    return "\n".join([*parts[: len(parts) - left], *more, ""])


def _section(layer: Mapping[str, Any]) -> str:
    """Return the section of a layer, with one for each of its experts."""
    mean = max(np.mean(layer["load"]), 1e-9)
    pairs = ("{} and {} ({:.2f})".format(*pair["experts"], pair["relative"]) for pair in layer["pairs"])
    found = [f"\n## Layer {layer['layer']}", f"\nPairs: {', '.join(pairs) or 'none'}."]
    for number, (load, tokens) in enumerate(zip(layer["load"], layer["tokens"], strict=True)):
        found.append(f"\n### Expert {number}\n\nLoad {load:,}, {load / mean:.2f} times the mean.\n")
        rows = []
        for token in tokens:
            chosen = f"{token['chosen']:,} of {token['occurrences']:,}"
            texts = (code(repr(token[name])) for name in ("before", "token", "after"))
            rows.append([f"{token['score']:.1f}", chosen, *texts])
        found += tables.markdown(("score", "chosen", "before", "token", "after"), rows, right=range(3))
    return "\n".join(found)
