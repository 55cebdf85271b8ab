"""The page of `moezoo routing`: one HTML file without scripts that loads nothing."""

import base64
import html
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from moezoo.tools.routing.counted import Context
from moezoo.tools.routing.specific import SpecificToken
from moezoo.tools.routing.text import Found, describe, title

# The page is smaller than 5 MB: pictures and layers that would not fit are left to the other files.
_MOST_BYTES, _MOST_PICTURES = 4_800_000, 2_400_000
_PARTNERS = 3  # experts that an expert is most often chosen with
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


def escape(text: str) -> str:
    """Return text as HTML shows it: markup escaped, and characters that print nothing as signs or numbers.

    These are control characters, those that change the direction of writing, and halves of characters.
    """
    visible = (_MARKS.get(c) or (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)
    return html.escape("".join(visible))


def make_page(
    found: Found, tokens: list[list[list[tuple[SpecificToken, Context]]]], pictures: Mapping[str, Path]
) -> str:
    """Return the page. `tokens` are the specific tokens of each layer and expert, `pictures` PNG files by title."""
    begin = "".join(_beginning(found, pictures))
    size, sections, left = len(begin.encode()), [], 0
    for row, layer in enumerate(found.routing.layers):
        section = "".join(_layer(found, row, layer, tokens[row]))
        size += len(section.encode())
        if size > _MOST_BYTES:
            left += 1
        else:
            sections.append(section)
    more = f"<p>{left} layers more are in routing.json.</p>" if left else ""
    return f"{begin}{''.join(sections)}{more}</body></html>\n"


def _cells(values: Iterable[str], tag: str = "td") -> str:
    """Return cells of a table: the first has text, the others numbers."""
    return "".join(f"<{tag}{' class=n' * (at > 0)}>{value}</{tag}>" for at, value in enumerate(values))


def _beginning(found: Found, pictures: Mapping[str, Path]) -> Iterator[str]:
    """Yield what stands before the experts."""
    tally = found.routing.tally
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Routing of {escape(found.model)}</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{_STYLE}</style></head><body>'
    yield f"<h1>Routing of {escape(found.model)}</h1>"
    yield "".join(f"<p>{name}: {escape(text)}</p>" for name, text in title(found))
    yield f"<h2>Layers</h2><p>{_LAYERS}</p>"
    names = ["layer", "entropy", "violation", "dead", *(escape(name) for name in found.agreements)]
    yield f"<table><thead><tr>{_cells(names, 'th')}</tr></thead><tbody>"
    for row, (layer, balance) in enumerate(zip(found.routing.layers, tally.balance_by_layer, strict=True)):
        differ = [f"{1 - other.agreement[row]:.3%}" for other in found.agreements.values()]
        yield f"<tr>{_cells([str(layer), *describe(balance), str(tally.dead[row].sum()), *differ])}</tr>"
    yield "</tbody></table>"
    size = 0
    for name, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        size += len(data)
        image = f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'
        yield f"<h2>{escape(name)}</h2>{image if size < _MOST_PICTURES else escape(path.name)}"
    yield f"<h2>Experts</h2><p>{_EXPERTS}</p>"


def _layer(found: Found, row: int, layer: int, experts: list[list[tuple[SpecificToken, Context]]]) -> Iterator[str]:
    """Yield the experts of one layer."""
    tally = found.routing.tally
    mean = max(tally.load[row].mean(), 1e-9)
    names = ("expert", "load", "load / mean", "with experts", "token", "score", "chosen", "context")
    yield f"<details{' open' * (row == 0)}><summary>Layer {layer}</summary><table><thead><tr>"
    yield f"{''.join(f'<th>{name}</th>' for name in names)}</tr></thead><tbody>"
    for expert, shown in enumerate(experts):
        load, co = int(tally.load[row, expert]), np.nan_to_num(tally.co_activation[row, expert])
        partners = [int(at) for at in np.argsort(-co, kind="stable")[:_PARTNERS] if co[at] > 0]
        span = f" rowspan={max(len(shown), 1)}"
        yield f"<tr class=expert><th{span}>{expert}</th><td{span} class=n>{load:,}</td>"
        yield f"<td{span} class=n>{load / mean:.2f}</td>"
        yield f"<td{span}>{', '.join(f'{at} ({co[at]:.2f})' for at in partners)}</td>"
        yield "</tr><tr>".join(map(_token, shown)) or "<td colspan=4></td>"
        yield "</tr>"
    yield "</tbody></table></details>"


def _token(shown: tuple[SpecificToken, Context]) -> str:
    """Return the cells of one token."""
    token, context = shown
    before, text, after = map(escape, context)
    mark = f"<mark>{text or f'[{token.token}]'}</mark>"
    return (
        f"<td>{mark}</td><td class=n>{token.score:.1f}</td><td class=n>{token.chosen:,} of {token.occurrences:,}</td>"
        f"<td><bdi><span class=dim>{before}</span>{mark}<span class=dim>{after}</span></bdi></td>"
    )
