"""What a run prints: the summary before step 1, and its results."""

import collections
import dataclasses
import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from moezoo.config.own import name_in, path_of
from moezoo.config.settings import TrainConfig
from moezoo.data import Source
from moezoo.data.epochs import Epochs
from moezoo.host.machine import in_units
from moezoo.host.remote import RunPath
from moezoo.hub.adapters import describe_peers
from moezoo.kernels.attention import api as attention
from moezoo.kernels.delta_rule import api as delta_rule
from moezoo.kernels.grouped_matmul import api as grouped_matmul
from moezoo.models import name_of
from moezoo.models.blueprint import Blueprint
from moezoo.models.choice import Compared, compare_strategies
from moezoo.nn.ring_attention import RotateKept
from moezoo.optim import Schedule, UpdateRule, Work
from moezoo.optim.base import short_names
from moezoo.parallel import distributed
from moezoo.parallel.axes import Role, Stack, count_parameters, is_stored, parameter_table, pattern_of
from moezoo.parallel.context_parallel import Stretches, most_seen
from moezoo.parallel.dispatch import Dispatch, DispatchChoice, ExpertGroup
from moezoo.parallel.low_rank import drops, is_low_rank
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.rules import Rules
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import CallName, TrafficTable
from moezoo.training.evaluate import Evaluation
from moezoo.training.metrics import Validations
from moezoo.training.sample import Sample
from moezoo.training.stage_lines import stage_lines
from moezoo.training.step import Step
from moezoo.typed import counted, show

HELD_OUT_FILE = "held_out.txt"
_TITLE_WIDTH, _MOST_PARTS = 12, 3
_MUCH_ROOM = 5  # rows of room per row in use from which the summary mentions it


def _axes(axes: Sequence[str]) -> str:
    return f"mesh ax{'is' if len(axes) == 1 else 'es'} {', '.join(axes)}"


def _split(axes: Sequence[str]) -> str:
    return f"split over {_axes(axes)}" if axes else "not split"


def _token_lines(cfg: TrainConfig, execution: MeshExecution) -> list[str]:
    """Describe how tokens are split, and how queries meet keys of other devices."""
    batch = f"{execution.rules.name}: batch {_split(execution.batch_axes)}; each sequence"
    if not execution.sequence_axes:
        return [f"{batch} not split"]
    how = f"{execution.sequence_order} order, keys by {name_in(cfg.execution.context_parallel)}"
    return [f"{batch} split", f"sequences {_split(execution.sequence_axes)}, in {how}"]


def unsplit_lines(rules: Rules, sizes: Mapping[str, int]) -> list[str]:
    """Name the mesh axes of one device over which the rules would keep inner dimensions of layers split."""
    lines = []
    for axis in rules.inner_axes(dict.fromkeys(sizes, 2)):
        if sizes[axis] == 1:
            whole = ", ".join(logical for logical, axes in rules.compute.items() if axis in axes)
            lines.append(f"mesh axis {axis} has one device, so {whole} stay whole; mesh.{axis}=2 or more splits them")
    return lines


def layout_lines(placements: PyTree) -> list[str]:
    """Describe how each logical dimension of the weights is split, and what a layer gathers before it runs."""
    dimensions: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    shared: dict[tuple[str, ...], dict[str, None]] = {}
    for placement in jax.tree.leaves(placements):
        for logical, over, moved in zip(placement.axes.names, placement.stored, placement.gathered, strict=True):
            if over and logical not in (names := dimensions.setdefault((over, moved), [])):
                names.append(logical)
        for logical, taken in zip(placement.axes.names, placement.taken, strict=False):
            if taken:
                shared.setdefault(taken, {})[logical] = None
    lines = []
    for (over, moved), names in dimensions.items():
        use = "gathered per layer" if moved else "never gathered"
        use += f" over {', '.join(moved)} only" * (0 < len(moved) < len(over))
        lines.append(f"split over {_axes(over)}, {use}: dimension{'s' * (len(names) > 1)} {', '.join(names)}")
    for over, names in shared.items():
        lines.append(f"stored whole along {_axes(over)}, each device takes its part: dimension {', '.join(names)}")
    return lines or ["every device stores all of them"]


def dispatch_lines(cfg: TrainConfig, execution: MeshExecution, blueprint: Blueprint) -> list[str]:
    """Describe the strategy of training, the bytes that `dispatch` chose it by, if it did, and much unused room."""
    rows, stacks = cfg.batch_size // cfg.micro_batches, blueprint.shapes.stacks
    training = compare_strategies(stacks, rows, cfg.seq_len, execution, "train", blueprint.mask)
    rows = cfg.batch_size // execution.micro_batches
    validation = compare_strategies(stacks, rows, cfg.seq_len, execution.exact, "evaluate")
    lines = [dispatch_line(training.chosen, training.group)]
    lines += choice_lines(cfg.dispatch, {"train": training, "evaluate": validation})
    return lines + room_lines(training)


def choice_lines(dispatch: DispatchChoice, calls: dict[CallName, Compared]) -> list[str]:
    """Describe what a choice between strategies chose for each call, and the bytes that it compared."""
    lines = []
    for call, found in calls.items():
        if found.bytes:
            bytes_of = ", ".join(f"{path_of(type(each))} {in_units(number)}" for each, number in found.bytes.items())
            chosen = path_of(type(found.chosen))
            lines.append(f"{path_of(type(dispatch))}: {chosen} to {call}; received per layer: {bytes_of}")
    return lines


def room_lines(found: Compared) -> list[str]:
    """Name the bound of a strategy of which most of the room stays unused."""
    if not found.chosen.bound or found.room < _MUCH_ROOM:
        return []
    keys = f"dispatch={path_of(type(found.chosen))} dispatch.{found.chosen.bound}=2"
    return [f"room for {found.room:.3g} times the rows in use; {keys} bounds it"]


def dispatch_line(dispatch: Dispatch, group: ExpertGroup) -> str:
    """Describe what the strategy moves on this mesh, its bound, and its options that differ from their defaults."""
    name = path_of(type(dispatch))
    line = f"{name}: every device runs all {group.num_experts} experts, so no tokens move"
    if group.axes:
        moved = "expert weights" if dispatch.moves == "weights" else "tokens"
        line = f"{name}: {moved} move over {_axes(group.axes)}; "
        line += f"{group.num_local} of {group.num_experts} experts per device"
    for field in dataclasses.fields(dispatch):
        value = getattr(dispatch, field.name)
        if value != field.default or (field.name == dispatch.bound and value is not None):
            line += f"; {field.name}={show(value)}"
    return line


def kernel_lines(execution: MeshExecution, length: int, stacks: Sequence[Stack]) -> list[str]:
    """Name the backend of each kernel that a step on sequences of `length` tokens runs, and why it is that one.

    Why: what the step is compiled for, or the setting that names the backend; backends that are passed over; and what
    attention skips: windows, and what is in other documents, which lie in order in each row. Kernels of mixers are
    named where a layer has such a mixer.
    """
    target, names, dtype = execution.target, execution.kernels, execution.dtype
    assert target is not None
    queries = length // execution.sequence_group.size
    on_ring = execution.sequence_group.size > 1 and isinstance(execution.context_parallel, RotateKept)
    keys = queries if on_ring else length  # of one call
    skips = ", ".join([*_windows(stacks), "documents in order"])
    experts = [getattr(block.feed_forward, "experts", None) for stack in stacks for block in stack.blocks]
    product = grouped_matmul.chosen_backend(target, names.grouped_matmul, dtype, experts)

    def line(kernel: str, backend: str, reasons: Sequence[str], *others: str) -> str:
        who = f"set by execution.{kernel} on " * bool(getattr(names, kernel))
        why = who + " ".join(filter(None, target)) + f": {', '.join(reasons)}" * bool(reasons)
        return f"{kernel}: {backend} ({'; '.join([why, *others])})"

    lines = [line("grouped_matmul", product, grouped_matmul.reasons(product, target, names.grouped_matmul, dtype))]
    mixers = [block.attention for stack in stacks for block in stack.blocks]
    own = dict[str, int]()  # each backend of attention, and the narrowest heads that take it
    for width in sorted({max(mixer.head_sizes) for mixer in mixers} - {0}):
        given: Any = {"dtype": dtype, "in_parts": on_ring, "width": width}
        own.setdefault(attention.chosen_backend(target, queries, keys, names.attention, **given), width)
    for name, width in own.items():
        reasons = attention.reasons(name, target, names.attention, dtype, on_ring, width)
        lines.append(line("attention", name, reasons, skips, *[f"heads of {width}"] * (len(own) > 1)))
    if any(mixer.kernel == "delta_rule" for mixer in mixers):
        backend = delta_rule.chosen_backend(target, queries, names.delta_rule)
        lines.append(line("delta_rule", backend, delta_rule.reasons(backend, target, queries, names.delta_rule)))
    return lines


def _windows(stacks: Sequence[Stack]) -> list[str]:
    """Describe the windows of layers, such as "window 128 in 12 of 24 layers", and stretches in the same way."""
    layers = [
        getattr(b.attention, "window", None) for stack in stacks for b in stack.blocks for _ in range(stack.count)
    ]
    counts = collections.Counter(window for window in layers if window is not None)
    some = {window: f" in {count} of {len(layers)} layers" * (count < len(layers)) for window, count in counts.items()}
    kinds = {window: "stretches of" if isinstance(window, Stretches) else "window" for window in some}
    return [f"{kinds[window]} {most_seen(window)}{part}" for window, part in some.items()]


def traffic_lines(traffic: TrafficTable) -> list[str]:
    """Report the bytes per device and step that collectives bring, and the parts of the step that receive most."""
    if not traffic:
        return []
    parts = list(traffic.outline(2).by("scope").items())[:_MOST_PARTS]
    return [
        f"{in_units(traffic.bytes)} received per device and step, by {counted(traffic.count, 'collective')}",
        "largest: " + ", ".join(f"{scope} {in_units(part.bytes)}" for (scope,), part in parts),
    ]


def rate_line(rule: UpdateRule, schedule: Schedule, steps: int) -> str:
    """Describe the learning rate from the first step of a run to the last."""
    peak, warmup = rule.learning_rate, schedule.count_warmup(steps)
    first, last = (float(schedule.rate(peak, jnp.int32(step), steps)) for step in (0, max(0, steps - 1)))
    course = f"{peak:.3g}" if warmup < 2 else f"{first:.3g} to {peak:.3g} over {counted(warmup, 'step')}"
    if steps > warmup:
        stays = abs(last - peak) < 1e-6 * peak
        course += f", then {path_of(type(schedule))}" + f" to {last:.3g}" * (not stays)
    return f"learning rate {course}"


def optimizer_lines(update: Sequence[Work], traffic: TrafficTable) -> list[str]:
    """Describe what updates which parameters, how, and what it takes, where several rules do."""
    if len(update) == 1:
        return []
    received = in_units(traffic.within("optimizer").bytes)
    lines = []
    for each in update:
        takes = f"; {each.flops / 1e9:.3g} GFLOP of work, {received} received per device and step" * bool(each.flops)
        how = f" ({each.group.rule.how}{takes})" * bool(each.group.rule.how)
        lines.append(f"{each.group.name} updates {short_names(each.paths)}{how}")
    return lines


def trained_rows(blueprint: Blueprint) -> list[tuple[str, str]]:
    """Return titled lines that count the parameters that are trained and those that are not; none where all are.

    A container counts as the array that it stands for, and its bytes are those of its arrays. A low-rank pair counts
    besides its base.
    """
    if not any(jax.tree.leaves(blueprint.constant)):
        return []
    model, table = blueprint.shapes, parameter_table(blueprint.shapes)
    learns = jax.tree.map(lambda _, mask: any(jax.tree.leaves(mask)), model, blueprint.mask, is_leaf=is_stored)
    entries = zip(table, jax.tree.leaves(learns), jax.tree.leaves(model, is_leaf=is_stored), strict=True)
    found: dict[str, list[tuple[str, int, int]]] = {"adapted": [], "trained": [], "frozen": []}
    for (path, axes, shape), learns, stored in entries:
        if is_low_rank(stored):
            pair = (stored.a, stored.b)
            found["adapted"].append((path, sum(x.size for x in pair), _size(pair)))
            stored, learns = stored.base, False
        if axes.role is not Role.BUFFER:
            found["trained" if learns else "frozen"].append((path, math.prod(shape), _size(stored)))
    if pairs := found.pop("adapted"):
        rows = list(_adapter_rows(blueprint, pairs))
        if found["trained"]:
            alone = "the run's folder adapter/ lacks what is trained besides; moezoo convert merges all into a folder"
            rows.append(("adapter", alone))
        return rows + _count_rows({name: some for name, some in found.items() if some})
    return _count_rows(found)


def _size(stored: PyTree) -> int:
    """Return the bytes of an array or of a container's arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))


def _adapter_rows(blueprint: Blueprint, pairs: Sequence[tuple[str, int, int]]) -> Iterator[tuple[str, str]]:
    """Yield what pairs are beside which weights."""
    ranks: dict[tuple[int, float], list[tuple[str, int, int]]] = {}
    models = jax.tree.leaves(blueprint.shapes, is_leaf=is_low_rank)
    for pair, entry in zip(filter(is_low_rank, models), pairs, strict=True):
        ranks.setdefault((pair.rank, pair.scale), []).append(entry)
    for (rank, scale), entries in ranks.items():
        paths, counts, sizes = zip(*entries, strict=True)
        how = f"rank {rank}, scale {scale:.4g}"
        yield "adapter", f"{how}: {sum(counts):,} parameters, {in_units(sum(sizes))}: {short_names(paths)}"
    if rate := blueprint.adapter.dropout:
        table = {path: drops(axes) for path, axes, _ in parameter_table(blueprint.shapes)}
        named = [[path for path, *_ in pairs if table[path] is which] for which in (True, False)]
        others = f"; those of {short_names(named[1])} drop nothing" * bool(named[1])
        yield "adapter", f"dropout {rate:g} of what the pairs of {short_names(named[0])} read{others}"
    if unread := describe_peers(blueprint.shapes):
        yield "adapter", unread


def _count_rows(found: Mapping[str, Sequence[tuple[str, int, int]]]) -> list[tuple[str, str]]:
    """Return a row for what is trained and for what is not, given the path, count and bytes of each parameter."""
    names, others = ({pattern_of(path) for path, *_ in found.get(title, ())} for title in ("trained", "frozen"))
    rows = []
    for title, part in found.items():
        paths, counts, sizes = zip(*part, strict=True)
        # Where only some layers train a parameter, its name alone would be in both lines.
        shown = short_names(path[1:] if pattern_of(path) in names & others else path for path in paths)
        rows.append((title, f"{sum(counts):,} parameters, {in_units(sum(sizes))}: {shown}"))
    return rows


def summarize(
    cfg: TrainConfig, execution: MeshExecution, step: Step, source: Source, epochs: Epochs, baseline: float | None
) -> list[tuple[str, str]]:
    """Return the title and text of every line of the summary, which is printed before step 1."""
    assert isinstance(execution.mesh, Mesh)
    model, traffic = step.arguments[0].model, collective_traffic(step.traced.jaxpr)
    memory = {what: in_units(number) for what, number in step.memory.items()}
    parameters, active = count_parameters(model, cfg.model.experts_per_token)
    used = [f"{axis}={size}" for axis, size in execution.sizes.items() if size > 1]
    devices = execution.mesh.devices
    rows = [
        (
            "model",
            f"{name_of(cfg.model)}: {parameters:,} parameters, {active:,} active per token "
            f"({counted(cfg.model.layers, 'layer')}, {cfg.model.experts_per_token} of {cfg.model.experts} experts)",
        ),
        *trained_rows(step.blueprint),
        (
            "mesh",
            counted(devices.size, f"{devices.flat[0].platform} device")
            + f" of {distributed.count()} processes" * distributed.several()
            + (f": {_axes(used)}" if used else ""),
        ),
        *(("rules", line) for line in _token_lines(cfg, execution)),
        *(("rules", line) for line in unsplit_lines(execution.rules, execution.sizes)),
        *(("stages", line) for line in stage_lines(execution, model, traffic, cfg.execution.pipeline)),
        *(("weights", line) for line in layout_lines(step.placements.model)),
        *(("dispatch", line) for line in dispatch_lines(cfg, execution, step.blueprint)),
    ]
    if execution.routing != "learned":
        rows.append(("routing", f"{execution.routing}: for speed measurements only, the router chooses no expert"))
    rows += [
        ("optimizer", rate_line(cfg.optimizer, cfg.schedule, cfg.last_step)),
        *(("optimizer", line) for line in optimizer_lines(step.update_work, traffic)),
        *(("kernels", line) for line in kernel_lines(execution, cfg.seq_len, model.stacks)),
        (
            "memory",
            f"per device: parameters {memory['parameters']}, optimizer {memory['optimizer state']}, gradients "
            f"{memory['gradients']}, plus activations",
        ),
        *(("traffic", line) for line in traffic_lines(traffic)),
        (
            "precision",
            f"compute {cfg.execution.dtype}, parameters {cfg.execution.param_dtype}, "
            f"gradient sums {cfg.execution.reduce_dtype}; remat {execution.remat}",
        ),
        *data_rows(source),
        *(("packing", line) for line in epochs.describe()),
    ]
    if baseline is not None:
        rows.append(("baseline", f"{baseline:.3f} nats per {source.unit}, the validation loss of a trigram model"))
    total = cfg.last_step * cfg.batch_size * cfg.seq_len
    sizes = f"{cfg.last_step:,} steps x {cfg.batch_size} sequences x {cfg.seq_len} tokens = {total:,} tokens"
    if cfg.epochs is not None:
        sizes += f", {counted(cfg.epochs, 'epoch')} of {epochs.count(1):,} rows"
    return [*rows, ("steps", sizes), ("checkpoint", _describe_saves(cfg))]


def data_rows(source: Source) -> list[tuple[str, str]]:
    """Return the lines about data: of a mixture, those of each source."""
    facts = dict(source.summary)
    if source.weighted:
        return [
            ("data", f"mixture of {facts['rows']} of the rows, sha256 of all token ids {facts['sha256']}"),
            *(
                (title, f"{name}: {line}")
                for name, part in source.weighted.items()
                for title, line in data_rows(part.source)
            ),
        ]
    train, validation, split = (facts.pop(key) for key in ("train", "validation", "held out"))
    duplicates = facts.pop("duplicates", None)
    if "sha256" in facts:
        facts["sha256 of all token ids"] = facts.pop("sha256")
    named = f"; names in {HELD_OUT_FILE}" if source.held_out else ""
    return [
        ("data", ", ".join([source.name, *(f"{key} {value}" for key, value in facts.items())])),
        ("training", train),
        ("validation", f"{validation}: {split}{named}"),
        *([("duplicates", duplicates)] if duplicates else []),
        *(("note", line) for line in source.notes),
    ]


def _describe_saves(cfg: TrainConfig) -> str:
    units = ((cfg.checkpoint_minutes, "minute"), (cfg.checkpoint_every, "step"))
    due = [f"every {unit}" if number == 1 else f"every {number:,.10g} {unit}s" for number, unit in units if number]
    newest = f"the newest {cfg.checkpoint_keep}" if cfg.checkpoint_keep > 1 else "the newest"
    due.append("at best validations")
    return f"{', '.join(due)} and at the end; {newest} and the best are kept"


def _fitting(text: str) -> list[str]:
    """Return the lines of a text beside the titles: on a terminal of its width, elsewhere the text as it is."""
    room = shutil.get_terminal_size().columns - _TITLE_WIDTH
    if not sys.stdout.isatty() or len(text) <= room or room < _TITLE_WIDTH:
        return [text]
    kept: Any = dict.fromkeys(("break_long_words", "break_on_hyphens", "replace_whitespace", "expand_tabs"), False)
    return textwrap.wrap(text, room, **kept) or [text]


def print_lines(rows: Sequence[tuple[str, str]]) -> None:
    """Print titled lines on the first process; a title is printed once for its consecutive lines.

    What the encoding of stdout lacks is printed as escapes: a sample may hold any character. On a terminal, lines are
    broken between words.
    """
    if not distributed.is_first():
        return
    before, encoding = "", getattr(sys.stdout, "encoding", None) or "utf-8"
    for title, text in rows:
        for part in _fitting(text):
            line = f"{'' if title == before else title:<{_TITLE_WIDTH}}{part}"
            print(line.encode(encoding, "backslashreplace").decode(encoding))
            before = title
    sys.stdout.flush()


def print_results(
    cfg: TrainConfig,
    evaluation: Evaluation,
    validations: Validations,
    baseline: float | None,
    sample: Sample,
    folder: RunPath,
    unit: str,
    seen: Mapping[str, int],
) -> None:
    """Print the validation loss, a sample, the files of the run, and its best step.

    `seen` are the tokens that were read by source.
    """
    compared = f" (trigram {baseline:.3f})" if baseline is not None else ""
    rows = [("validation", f"{evaluation.loss:.4f} nats per {unit} over {evaluation.tokens:,} {unit}s{compared}")]
    rows += [
        ("", f"{name}: {own.loss:.4f} nats per {unit} over {own.tokens:,} {unit}s; trained on {seen[name]:,} {unit}s")
        for name, own in evaluation.by_source.items()
    ]
    rows.append(("sample", "the model continues a held-out text; its continuation is between ⟦ and ⟧"))
    rows += [("", line) for line in f"{sample.prompt}⟦{sample.continuation}⟧".splitlines()]
    for name, what in (
        ("metrics.jsonl", "one row per logged step"),
        ("loss.png", "loss by step"),
        ("routing.png", "how evenly experts are used, by step"),
        ("expert_load.png", "how evenly experts are used, by layer and expert"),
        ("profile.md", "where the time of the recorded steps went"),
        ("profile", "the recorded steps, for xprof --logdir"),
        ("tensorboard", "the rows for tensorboard --logdir"),
        ("wandb", "the rows for wandb sync, or what was uploaded"),
        ("mlflow", "the rows for mlflow ui"),
        ("adapter", "the low-rank pairs, as PEFT reads them"),
        ("checkpoints", "all that resume=FOLDER needs"),
        ("config.yaml", "the complete configuration"),
        (HELD_OUT_FILE, "names of the validation documents"),
    ):
        if (folder / name).exists():
            rows.append(("files", f"{folder / name}  {what}"))
    if validations.exhaust(cfg.eval_patience):
        rows.append(("ended", f"by eval_patience={cfg.eval_patience}: so many evaluations had no lower loss"))
    if (best := validations.step) is None:
        rows.append(("best", "no validation loss was finite"))
    else:
        kept = (folder / "checkpoints" / str(best)).exists()
        where = "checkpoint=best names it" if kept else f"its checkpoint is not in {folder}"
        rows.append(("best", f"step {best}, validation {validations.loss:.4f} nats per {unit}; {where}"))
    print_lines(rows)
