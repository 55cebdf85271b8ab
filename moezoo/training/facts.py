"""What a run records about itself, as the facts of a model card: without folders, users and machines."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moezoo.config.compose import from_saved
from moezoo.config.own import path_of, saved_own
from moezoo.config.settings import TrainConfig
from moezoo.data import Source
from moezoo.hub.card import Data, Facts, Loss, Size, Training, license_of, read_card
from moezoo.hub.public_names import last_name, name_of_model
from moezoo.models.adapters import ADAPTERS, NoAdapter
from moezoo.parallel.mesh import AXES
from moezoo.trackers import MetricsRow
from moezoo.training.metrics import count_validations
from moezoo.typed import counted, show

_SHOWN = ("learning_rate", "rank")  # options that are shown with their defaults too
_VERSIONS = {"moezoo": "moezoo", "jax": "JAX", "python": "Python"}


def record_data(source: Source) -> dict[str, Any]:
    """Return what a checkpoint records of data: kind and sizes of each source of a mixture by name, or of "" alone.

    The size of a stream is not known.
    """
    return {
        name: {
            "kind": part.name,
            "unit": part.unit,
            **{
                side: {"documents": corpus.documents, "tokens": len(corpus)}
                for side, corpus in (("training", part.train), ("validation", part.validation))
                if side == "validation" or part.stream is None
            },
            "held_out": part.summary.get("held out", ""),
        }
        for name, part in source.parts.items()
    }


def run_facts(about: Mapping[str, Any], rows: Sequence[MetricsRow], step: int, init_from: str | None) -> Facts:
    """Return the facts of a run, up to the step that its weights are of. The title is left to the caller.

    Args:
        about: What the checkpoint of that step records; older runs have recorded less.
        rows: Those of metrics.jsonl up to that step.
        step: The step.
        init_from: Where the weights are now that the run began with; None for random numbers.
    """
    cfg, own = from_saved(about["config"]), saved_own(about["config"])
    base = None if init_from is None else name_of_model(init_from)
    data = list(_data(about["config"]["data"], about.get("data", {}), own.get("data")))
    versions = {title: about["versions"][name] for name, title in _VERSIONS.items() if name in about["versions"]}
    training = Training(
        step,
        _describe_trained(cfg),
        data,
        dict(_settings(cfg, own)),
        list(_losses(rows)),
        versions,
    )
    is_bytes = cfg.model.vocab <= 256 and all(part.unit == "byte" for part in data)
    return Facts(
        name="",
        what="A mixture of experts, trained with moezoo.",
        base=base,
        relation=None if base is None else "finetune",
        license=[] if init_from is None else license_of(read_card(Path(init_from))),
        training=training,
        prompt="bytes" if is_bytes else "ids",
    )


def _describe_trained(cfg: TrainConfig) -> str:
    """Return a sentence about the parameters that were trained, and from what."""
    start = "from random numbers" if cfg.init_from is None else "from those of the base"
    if cfg.upcycle.experts:
        start += f", a dense model whose MLPs became {cfg.upcycle.experts} experts each"
    patterns = lambda some: ", ".join(f"`{show(each)}`" for each in some)  # noqa: E731
    if not isinstance(cfg.adapter, NoAdapter):
        besides = f", and parameters of the names {patterns(cfg.trained)}" if cfg.trained else ""
        name = next(name for name, kind in ADAPTERS.items() if kind is type(cfg.adapter))
        return (
            f"Trained were low-rank pairs ({_options(name, cfg.adapter)}){besides}; all other weights are the base's."
        )
    which = "all parameters" if cfg.trained is None else f"parameters of the names {patterns(cfg.trained)}"
    but = f" but {patterns(cfg.frozen)}" if cfg.frozen else ""
    return f"Trained were {which}{but}, {start}."


def _options(name: str, chosen: Any) -> str:
    """Return the name of an entry of a configuration group, and its options that differ from their defaults."""
    some = (
        f"{field.name}={show(getattr(chosen, field.name))}"
        for field in dataclasses.fields(chosen)
        if field.name != "init_from"  # a path
        and (field.name in _SHOWN or getattr(chosen, field.name) != field.default)
    )
    return ", ".join([name, *some])


def _settings(cfg: TrainConfig, own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield titles and values. Of what is of the user's own, which is not read here, the name alone is known."""
    yield "steps", f"{show(cfg.steps)}, each of {counted(cfg.batch_size, 'sequence')} of {cfg.seq_len} tokens"
    if cfg.epochs is not None:
        yield "epochs", str(cfg.epochs)
    if cfg.micro_batches > 1:
        yield "micro-batches", str(cfg.micro_batches)
    for key, chosen in (("optimizer", cfg.optimizer), ("schedule", cfg.schedule)):
        yield key, own[key] if key in own else _options(path_of(type(chosen)), chosen)
    if "schedule" not in own and cfg.steps:
        yield "warm-up", counted(cfg.schedule.count_warmup(cfg.steps), "step")
    how = cfg.execution
    yield "dtypes", f"compute {how.dtype}, parameters {how.param_dtype}, gradient sums {how.reduce_dtype}"
    used = (f"{axis}={size}" for axis in AXES if (size := getattr(cfg.mesh, axis)) != 1)
    yield "mesh", ", ".join(used) or "one device"
    yield "seed", str(cfg.seed)


def _data(section: Mapping[str, Any], recorded: Mapping[str, Any], own: str | None) -> Iterator[Data]:
    """Yield the data, or each source of a mixture; `own` is the name of a class of the user's own."""
    sources = section.get("sources") or {"": section}
    for name, part in sources.items():
        found = recorded.get(name, {})
        titles = [f"{name}: {own or part['name']}" if name else own or part["name"], _file_name(part.get("path"))]
        titles += [f"weight {part['weight']:g}"] if "weight" in part else []
        apart = part.get("validation")
        held_out = "" if own or apart else found.get("held_out", "")
        if file := _file_name(apart):
            held_out = f"{file}, documents of their own"
        is_bytes = part["name"] == "python_stdlib" or part.get("tokenizer", "") is None
        unit = found.get("unit", "byte" if is_bytes else "token")
        training, validation = (Size(**found[side]) if side in found else None for side in ("training", "validation"))
        training = None if part.get("weight") == 0 else training  # it is only validated on
        yield Data(", ".join(filter(None, titles)), unit, training, validation, held_out)


def _file_name(path: Any) -> str:
    """Return the last name of a path as code; empty for none."""
    name = show(last_name(path)).replace("`", "'") if isinstance(path, str) else ""
    return f"`{name}`" if name else ""


def _losses(rows: Sequence[MetricsRow]) -> Iterator[Loss]:
    """Yield the first and the last training loss, and the first, the best and the last validation loss."""
    for title, key in (("training", "loss"), ("validation", "val_loss")):
        found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if not found:
            continue
        before = title == "validation" and found[0][0] == 0
        if title == "training" or before:
            yield Loss(f"{title}, before the first step" if before else f"{title}, first", *found[0])
        if title == "validation":
            best = count_validations(rows)
            assert best.step is not None
            yield Loss("validation, best", best.step, best.loss)
        yield Loss(f"{title}, last", *found[-1])
