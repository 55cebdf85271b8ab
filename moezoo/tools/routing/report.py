"""What `moezoo routing` prints and writes of its numbers: lines, JSON, pictures and a page."""

import base64
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moezoo.tools.routing.counted import RoutingAgreement, TextRouting
from moezoo.tools.routing.tally import SpecificToken
from moezoo.training.files import replace_text, writing_to
from moezoo.training.pictures import load_picture, relative_picture, routing_picture

_PAIRS, _PARTNERS = 16, 3  # the strongest pairs of a layer in JSON, and those of an expert on the page
# The page is smaller than 5 MB: pictures and layers that would not fit are left to the other files.
_MOST_BYTES, _MOST_PICTURES = 4_800_000, 2_400_000
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } th, td { text-align: left; vertical-align: top; padding: .15rem .7rem .15rem 0 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
thead th, tr.expert > * { border-top: 1px solid color-mix(in srgb, currentColor 25%, transparent) }
img { max-width: 100%; background: white } bdi { font-family: ui-monospace, monospace; white-space: pre-wrap }
mark { font-family: ui-monospace, monospace; white-space: pre } summary { cursor: pointer; margin: .5rem 0 }
.dim { opacity: .65 }
"""
# Nothing is loaded or run, whatever the text holds.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_LAYERS = (
    "Entropy is that of the load, divided by log E: 1 is balanced. Violation is the largest load / mean load - 1: 0 is "
    "balanced. Dead experts get no token of this text. A further column is the share of choices that differ from those "
    "of what its head names."
)
_EXPERTS = (
    "With experts: those that are chosen with it most often, relative to independence (1). Its most specific tokens "
    "have the highest z-scores of log-odds ratios, of its choices against those of the other experts of its layer "
    "(Monroe et al., 2008). Chosen: how many of all occurrences went to it; context: the first of these."
)
_MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def numbers(
    model: str,
    documents: str,
    text: TextRouting,
    agreements: Mapping[str, RoutingAgreement],
    loads: Mapping[int, np.ndarray],
    top: int,
) -> dict[str, Any]:
    """Return what `routing.json` has, of which all else is made.

    Args:
        model: The name of the model, and `documents` that of what was read.
        text: The routing of the text.
        agreements: What was compared -> how far it routes alike.
        loads: The step of a checkpoint -> the load [layer, experts] of the same text.
        top: The number of specific tokens per expert.
    """
    tally, co_activation, layers = text.tally, text.tally.co_activation, []
    found = zip(text.layers, tally.balance_by_layer, text.specific_tokens(top), strict=True)
    for row, (layer, balance, experts) in enumerate(found):
        pairs = [divmod(at, len(experts)) for at in _strongest(np.triu(co_activation[row], 1), _PAIRS)]
        layers.append(
            {
                "layer": layer,
                "load": tally.load[row].tolist(),
                "entropy": float(balance.mean_entropy),
                "violation": float(balance.mean_violation),
                "dead": np.flatnonzero(tally.dead[row]).tolist(),
                "pairs": [
                    {"experts": [*at], "together": int(tally.pairs[row, *at]), "relative": co_activation[row, *at]}
                    for at in pairs
                ],
                "tokens": [[_in_context(token, text) for token in expert] for expert in experts],
                "agreement": {name: float(each.agreement[row]) for name, each in agreements.items()},
                "load_by_step": {step: load[row].tolist() for step, load in loads.items()},
            }
        )
    return {
        "model": f"{model}: {len(layers)} layers with {tally.load.shape[1]} experts, {tally.k} per token",
        "text": f"{documents}: {tally.tokens:,} {text.rows.unit}s",
        "tokens": tally.tokens,
        "experts_per_token": tally.k,
        "balance": {name: float(value) for name, value in tally.balance._asdict().items()},
        "layers": layers,
    }


def _in_context(token: SpecificToken, text: TextRouting) -> dict[str, Any]:
    """Return the numbers of a token and its text; [number] in place of a text without characters."""
    context = text.context(token.place)
    return token._asdict() | context._asdict() | {"token": context.token or f"[{token.token}]"}


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


def write(model: str, report: Mapping[str, Any], text: TextRouting, history: list[Any], folder: Path) -> list[Path]:
    """Write all files to the folder, and return their paths. `history` are the logged steps of a run."""
    with writing_to("out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        pictures = _draw(report, text, history, folder)
        page, table = folder / "routing.html", folder / "routing.json"
        replace_text(table, json.dumps(report, indent=1))
        replace_text(page, make_page(model, report, text.tally.co_activation, pictures))
    return [page, table, *pictures.values()]


def _draw(report: Mapping[str, Any], text: TextRouting, history: list[Any], folder: Path) -> dict[str, Path]:
    """Draw the pictures; return them by what they show."""
    pictures, tally, layers = {}, text.tally, [f"layer {number}" for number in text.layers]

    def draw(title: str, name: str, across: str, panels: np.ndarray, columns: Iterable[object] = ()) -> None:
        pictures[title], by_layer = folder / name, dict(zip(layers, panels, strict=True))
        relative_picture(by_layer, folder / name, title=title, labels=("expert", across), columns=[*columns])

    pictures["Load of each expert, relative to the mean of its layer"] = folder / "load.png"
    load_picture(tally.load, text.layers, folder / "load.png", steps=f"{tally.tokens:,} {text.rows.unit}s of text")
    if not np.isnan(tally.co_activation).all():
        draw("Experts chosen together, relative to independence", "pairs.png", "expert", tally.co_activation)
    by_step = [each["load_by_step"] for each in report["layers"]]
    if len(by_step[0]) > 1:
        loads = np.array([[*each.values()] for each in by_step]).swapaxes(1, 2)  # [layer, expert, step]
        relative = loads * loads.shape[1] / np.maximum(loads.sum(1, keepdims=True), 1)
        draw("Load of each expert by checkpoint, on the same text", "load_by_step.png", "step", relative, by_step[0])
    if history:
        pictures["Balance by step, of the batches of training"] = folder / "balance.png"
        routing_picture(history, folder / "balance.png")
    return pictures


def escape(text: str) -> str:
    """Return text as HTML shows it: markup escaped, and characters that print nothing as signs or numbers.

    These are control characters, those that change the direction of writing, and halves of characters.
    """
    visible = "".join(_MARKS.get(c) or (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)
    return html.escape(visible)


def make_page(model: str, report: Mapping[str, Any], co_activation: np.ndarray, pictures: Mapping[str, Path]) -> str:
    """Return one HTML file without scripts that loads nothing; `pictures` are PNG files by title."""
    layers = zip(report["layers"], co_activation, strict=True)
    parts = [_beginning(model, report, pictures), *(_layer(number == 0, *each) for number, each in enumerate(layers))]
    sizes = np.cumsum([len(part.encode()) for part in parts])
    left = int((sizes[1:] > _MOST_BYTES).sum())
    more = f"<p>{left} layers more are in routing.json.</p>" if left else ""
    return f"{''.join(parts[: len(parts) - left])}{more}</body></html>\n"


def _cells(values: Iterable[object], tag: str = "td") -> str:
    """Return cells of a table: the first has text, the others numbers."""
    return "".join(f"<{tag}{' class=n' * (at > 0)}>{value}</{tag}>" for at, value in enumerate(values))


def _beginning(model: str, report: Mapping[str, Any], pictures: Mapping[str, Path]) -> str:
    """Return what stands before the experts."""
    rows, images, size, title = [], [], 0, f"Routing of {escape(model)}"
    for each in report["layers"]:
        values = each["layer"], f"{each['entropy']:.3f}", f"{each['violation']:.2f}", len(each["dead"])
        rows.append(f"<tr>{_cells([*values, *(f'{1 - share:.3%}' for share in each['agreement'].values())])}</tr>")
    for name, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        size += len(data)
        image = f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'
        images.append(f"<h2>{escape(name)}</h2>{image if size < _MOST_PICTURES else escape(path.name)}")
    head = ["layer", "entropy", "violation", "dead", *map(escape, report["layers"][0]["agreement"])]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1>{''.join(f'<p>{name}: {escape(report[name])}</p>' for name in ('model', 'text'))}"
        f"<h2>Layers</h2><p>{_LAYERS}</p><table><thead><tr>{_cells(head, 'th')}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{''.join(images)}<h2>Experts</h2><p>{_EXPERTS}</p>"
    )


def _layer(is_open: bool, layer: Mapping[str, Any], co_activation: np.ndarray) -> str:
    """Return the experts of one layer."""
    mean, rows = max(np.mean(layer["load"]), 1e-9), []
    for number, (load, tokens, related) in enumerate(zip(layer["load"], layer["tokens"], co_activation, strict=True)):
        partners = ", ".join(f"{at} ({related[at]:.2f})" for at in _strongest(related, _PARTNERS))
        span = f" rowspan={max(len(tokens), 1)}"
        rows.append(
            f"<tr class=expert><th{span}>{number}</th><td{span} class=n>{load:,}</td>"
            f"<td{span} class=n>{load / mean:.2f}</td><td{span}>{partners}</td>"
            f"{'</tr><tr>'.join(map(_token, tokens)) or '<td colspan=4></td>'}</tr>"
        )
    names = ("expert", "load", "load / mean", "with experts", "token", "score", "chosen", "context")
    return (
        f"<details{' open' * is_open}><summary>Layer {layer['layer']}</summary><table><thead><tr>"
        f"{''.join(f'<th>{name}</th>' for name in names)}</tr></thead><tbody>{''.join(rows)}</tbody></table></details>"
    )


def _token(token: Mapping[str, Any]) -> str:
    """Return the cells of one token."""
    before, text, after = (escape(token[name]) for name in ("before", "token", "after"))
    return (
        f"<td><mark>{text}</mark></td><td class=n>{token['score']:.1f}</td>"
        f"<td class=n>{token['chosen']:,} of {token['occurrences']:,}</td>"
        f"<td><bdi><span class=dim>{before}</span><mark>{text}</mark><span class=dim>{after}</span></bdi></td>"
    )


def _strongest(co_activation: np.ndarray, count: int) -> list[int]:
    """Return the places, in the flat array, of up to `count` of its largest numbers above 0, the largest first."""
    flat = np.nan_to_num(co_activation).ravel()
    return [int(at) for at in np.argsort(-flat, kind="stable")[:count] if flat[at] > 0]
