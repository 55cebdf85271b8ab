"""The output of `moezoo sharding`: tables that do not depend on the terminal, or JSON."""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import moezoo.tables as tables
from moezoo.config.build import blueprint_of
from moezoo.config.own import path_of
from moezoo.config.settings import TrainConfig
from moezoo.models import name_of
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.mesh import AXES
from moezoo.parallel.traffic import Traffic
from moezoo.tools.calls import CallName
from moezoo.tools.sharding.describe import Change, CollectiveRow, Differences, ParameterRow, Sharding
from moezoo.typed import show

_IN_A_BLOCK = re.compile(r"(\.stacks\[\d+\]\.blocks\[\d+\])(\..+)")

_SIGNS = ("- ", "+ ")  # of the rows of one of two layouts
Signed = tuple[str, Any]  # a sign, or "" with one layout, and a row


def as_json(found: Sharding | Differences) -> str:
    """Return the rows as JSON. Of differences, each entry has the rows of both layouts, or null."""

    def to_dict(entry: Any) -> Any:
        return {k: v._asdict() if hasattr(v, "_asdict") else v for k, v in entry._asdict().items()}

    return json.dumps({name: [to_dict(entry) for entry in getattr(found, name)] for name in Sharding._fields}, indent=1)


def describe_run(cfg: TrainConfig, call: CallName) -> str:
    """Return two lines on what is laid out."""
    total, _ = count_parameters(blueprint_of(cfg).shapes, cfg.model.experts_per_token)
    sizes = {f"mesh.{axis}": size for axis, size in cfg.mesh.sizes.items() if size > 1} or {"mesh": "single"}
    options = {
        f"dispatch.{field.name}": value
        for field in dataclasses.fields(cfg.dispatch)
        if (value := getattr(cfg.dispatch, field.name)) != field.default
    }
    chosen = {**sizes, "rules": cfg.rules.name, "dispatch": path_of(type(cfg.dispatch)), **options}
    settings, shown = cfg.execution, " ".join(f"{key}={show(value)}" for key, value in chosen.items())
    micro = f" execution.microbatches={settings.microbatches}" * (call == "train" and settings.microbatches > 1)
    if cfg.mesh.stage > 1 and call in ("train", "evaluate"):
        count = settings.pipeline.count(cfg.mesh.stage)
        order = {"microbatches": count, "chunks": settings.pipeline.chunks, "gather": settings.pipeline.gather}
        micro += "".join(f" execution.pipeline.{key}={value}" for key, value in order.items())
    return (
        f"{call} {name_of(cfg.model)}: {total:,} parameters in {settings.param_dtype}, computed in {settings.dtype}; "
        f"batch_size={cfg.batch_size} seq_len={cfg.seq_len}{micro}\n"
        f"{cfg.mesh.devices:,} device{'s' * (cfg.mesh.devices != 1)}: {shown}"
    )


def render(title: str, layout: Sharding) -> str:
    """Return the tables of a layout."""
    parameters, activations, collectives, memory = ([("", row) for row in rows] for rows in layout)
    parts = [title, _arrays("parameter", parameters, {"": layout.parameters})]
    if activations:
        parts.append(_arrays("activation", activations, {}))
        parts += _collectives(collectives, {"": layout.collectives}) if collectives else ["no collective"]
        parts.append(_memory(memory))
    return "\n\n".join(parts)


def render_differences(titles: Sequence[str], layouts: Sequence[Sharding], found: Differences) -> str:
    """Return the tables of what differs: rows with - are of the first layout, rows with + of the second."""
    heads = [f"{sign}{line}" for sign, title in zip(_SIGNS, titles, strict=True) for line in title.splitlines()]
    parameters, activations, collectives, memory = (list(_signed(changes)) for changes in found[:-1])
    signed = dict(zip(_SIGNS, layouts, strict=True))
    shown = [
        [_arrays("parameter", parameters, {sign: each.parameters for sign, each in signed.items()})],
        [_arrays("activation", activations, {})],
        _collectives(collectives, {sign: each.collectives for sign, each in signed.items()}),
        [_memory(memory)],
    ]
    parts = ["\n".join(heads)]
    for name, rows, same, part in zip(Sharding._fields, found, found.same, shown, strict=False):
        parts += part if rows else []
        if rows or same:
            parts.append(f"{same} {'other ' * bool(rows)}rows of {name} are the same")
    return "\n\n".join(parts)


def _signed(changes: Iterable[Change]) -> Iterator[Signed]:
    for change in changes:
        yield from ((sign, row) for sign, row in zip(_SIGNS, change, strict=True) if row is not None)


def _arrays(kind: str, rows: Sequence[Signed], summed: Mapping[str, Sequence[ParameterRow]]) -> str:
    """Return a table of parameters or activations. Rows of a block of layers stand below its path."""
    lines, above = [], ""
    for sign, row in rows:
        inside = _IN_A_BLOCK.fullmatch(row.name)
        block, name = (inside[1], inside[2]) if inside else ("", row.name)
        if block != above and inside:
            lines.append([f"{' ' * len(sign)}{block}, {row.shape[0]} layer{'s' * (row.shape[0] != 1)}"])
        above = block
        axes = [f"{axis}({' '.join(over)})" if over else axis for axis, over in zip(row.axes, row.spec, strict=True)]
        frozen = " (not trained)" * (not getattr(row, "trained", True))
        shapes = ("x".join(map(str, shape)) for shape in (row.shape, row.local_shape))
        indent = "  " * bool(block)
        both = f"{sign}{indent}{name}{frozen}", f"{' ' * len(sign)}{indent}  {' '.join(axes)}"
        lines.append(["\n".join(both), *shapes, f"{row.bytes_per_device:,}"])
    for sign, every in summed.items():
        lines.append([f"{sign}all", "", "", f"{sum(row.bytes_per_device for row in every):,}"])
    return _table([f"{kind}\n  axes (mesh axes that split them)", "shape", "on a device", "bytes per device"], lines)


def _collectives(rows: Sequence[Signed], summed: Mapping[str, Sequence[CollectiveRow]]) -> list[str]:
    """Return a table of collectives, and one of their sums over each set of mesh axes; of two, where they differ."""
    scopes = [
        [sign + row.scope, row.op, " ".join(row.mesh_axes), f"{row.count:,}", f"{row.bytes:,}"] for sign, row in rows
    ]
    sums: dict[str, dict[str, Traffic]] = {}
    for sign, every in summed.items():
        for row in every:
            for axes in (" ".join(sorted(row.mesh_axes, key=AXES.index)), "all"):
                by_sign = sums.setdefault(axes, {})
                by_sign[sign] = by_sign.get(sign, Traffic(0, 0)) + Traffic(row.count, row.bytes)
    everything = sums.pop("all", {})
    ranked = sorted(sums.items(), key=lambda item: -max(traffic.bytes for traffic in item[1].values()))
    differing = [item for item in ranked if len(summed) == 1 or len({item[1].get(sign) for sign in summed}) > 1]
    totals = [
        [sign + axes, f"{traffic.count:,}", f"{traffic.bytes:,}"]
        for axes, by_sign in [*differing, ("all", everything)]
        for sign, traffic in by_sign.items()
    ]
    return [
        _table(["scope", "collective", "mesh axes", "times", "bytes received"], scopes),
        _table(["sums over mesh axes", "times", "bytes received"], totals),
    ]


def _memory(rows: Sequence[Signed]) -> str:
    """Return a table of what a device holds besides activations."""
    lines = [[sign + row.name, f"{row.bytes_per_device:,}"] for sign, row in rows]
    return _table(["memory besides activations", "bytes per device"], lines)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    right = {number for number, title in enumerate(titles) if title.startswith(("times", "bytes"))}
    return "\n".join(tables.plain(titles, rows, right))
