"""What a configuration takes on a slice of devices that this machine does not have: one row per layout.

Memory is that of `moezoo.tools.memory_model`, time the bound of `moezoo.tools.plan.work`: no run is faster, because
products, memory and links work at their peak rates and at the same time. So throughput and utilisation are bounds from
above.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from moezoo.config.build import blueprint_on, build_execution
from moezoo.config.compose import compose_described
from moezoo.config.own import path_of
from moezoo.config.settings import TrainConfig
from moezoo.config.sizes import divisors
from moezoo.errors import UserError
from moezoo.parallel.dispatch import Dispatch
from moezoo.parallel.kernels import Target, mesh_for
from moezoo.parallel.mesh import abstract_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traffic import CallName
from moezoo.tools.absent import GPUS
from moezoo.tools.calls import CALLS
from moezoo.tools.memory_model import Footprint, footprint, least_footprint
from moezoo.tools.plan.hardware import Slice
from moezoo.tools.plan.units import show_bytes
from moezoo.tools.plan.work import bound, work_of
from moezoo.tools.sharding.describe import CollectiveRow, collectives


class PlanRow(NamedTuple):
    """One layout. Bytes, FLOPs and collectives are those of one device and one call; what is not known is None.

    Attributes:
        words: The overrides that compose its configuration.
        mesh: Mesh axis -> number of devices, of those above 1.
        rules: The name of the rules.
        dispatch: The strategy; for `auto` also the one that it chooses.
        fits: Whether the compiler's peak is at most `usable_bytes`; where it is not known, whether the predicted peak
            is at most `moezoo.tools.plan.hardware.LEAST_RATIO` of it.
        reason: Why it does not fit or cannot be laid out, and what would help; empty if it fits.
        caution: Why a run there is refused as things are, and what to do; empty if it is not.
        bytes_per_device: The peak of the memory model.
        hbm_bytes: What a device has.
        usable_bytes: What JAX may take of it.
        memory: What is held at the peak -> bytes.
        moment: When the peak is.
        compiled_bytes: The compiler's own peak.
        flops_per_device: FLOPs that are executed, of products.
        recomputed_flops: Those of rematerialisation among them.
        model_flops: A device's share of the FLOPs of the model.
        collectives: The collectives of the traced program.
        seconds: "compute", "HBM" and each link -> the least seconds that it works.
        step_seconds: The largest of these: a bound from below.
        unoverlapped_seconds: The bound if nothing overlaps.
        bound_by: Which one is the largest.
        tokens_per_second_per_device: A bound from above.
        utilisation: The share of the peak rate that the FLOPs of the model are; a bound from above.
        bubble: With pipeline stages, the share of ticks in which a stage has no work. They count in the least time and
            in FLOPs that are executed, not in those of the model.
    """

    words: tuple[str, ...]
    mesh: Mapping[str, int]
    rules: str
    dispatch: str
    fits: bool
    reason: str
    hbm_bytes: int
    usable_bytes: int
    bytes_per_device: int | None = None
    memory: Mapping[str, int] | None = None
    moment: str | None = None
    compiled_bytes: int | None = None
    flops_per_device: float | None = None
    recomputed_flops: float | None = None
    model_flops: float | None = None
    collectives: tuple[CollectiveRow, ...] | None = None
    seconds: Mapping[str, float] | None = None
    step_seconds: float | None = None
    unoverlapped_seconds: float | None = None
    bound_by: str | None = None
    tokens_per_second_per_device: float | None = None
    utilisation: float | None = None
    bubble: float | None = None
    caution: str = ""


def target_of(where: Slice) -> Target:
    """Return the target of programs for a slice."""
    return Target("cuda", f"{GPUS[where.chip.name][1]}.0") if where.chip.is_gpu else Target("tpu")


def estimate(words: Sequence[str], where: Slice, call: CallName = "train", *, least: bool = False) -> PlanRow:
    """Return the row of a configuration on a slice, by the memory model and the traced program. No device is used.

    Args:
        words: The overrides of the configuration, mesh included.
        where: The slice.
        call: What runs, as in `moezoo.tools.sharding.describe.describe`.
        least: Leave out what needs the traced program where the memory does not fit. Where not even the arguments and
            gradients of a step do, their bytes are `bytes_per_device`, and nothing is traced.
    """
    words = tuple(words)
    try:
        cfg = compose_described(*words)
        if least and call == "train" and (row := _too_large(words, cfg, where)):
            return row
        cfg, row = _laid_out(words, cfg, where, call)
        return row if least and not row.fits else _timed(row, cfg, where, call)
    except UserError as error:
        return refused(words, where, str(error))


def with_memory(row: PlanRow, where: Slice, call: CallName) -> PlanRow:
    """Return a row with what is held, where `estimate(least=True)` gave only its arguments and gradients."""
    known = row.memory is not None or row.bytes_per_device is None
    return row if known else _laid_out(row.words, compose_described(*row.words), where, call)[1]


def refused(words: Sequence[str], where: Slice, reason: str) -> PlanRow:
    """Return the row of a configuration that cannot be laid out, with the reason."""
    found = {key: word.partition("=")[2] for word in words if (key := word.partition("=")[0])}
    mesh = {key.partition(".")[2]: int(n) for key, n in found.items() if key.startswith("mesh.") and n.isdigit()}
    chosen, chip = (found.get("rules", ""), found.get("dispatch", "")), where.chip
    return PlanRow(tuple(words), mesh, *chosen, False, reason, chip.hbm_bytes, chip.usable_bytes)


def program_of(words: Sequence[str], where: Slice) -> Hashable:
    """Return what decides the program of a configuration beside its sizes: equal values are equal programs.

    Raises:
        UserError: The parts of the configuration do not fit together.
    """
    cfg = compose_described(*words)
    execution = on_mesh(build_execution(cfg, abstract_mesh(cfg.mesh), batches="any"))
    stored = tuple(str(placement) for placement in jax.tree.leaves(execution.placements(blueprint_on(cfg).shapes)))
    group = execution.expert_group(cfg.model.experts)
    split = (execution.batch_axes, execution.sequence_axes, group.axes, tuple(cfg.mesh.sizes.items()), str(where))
    split += (str(execution.pipeline),)
    inner = tuple(execution.inner_group(axis).axes for axis in ("heads", "mlp", "vocab"))
    return stored, split, inner, str(cfg.dispatch) if group.size > 1 else ""


def _too_large(words: tuple[str, ...], cfg: TrainConfig, where: Slice) -> PlanRow | None:
    """Return the row of a step of which not even arguments and gradients fit; None if they do."""
    held, room = least_footprint(cfg, target_of(where)), where.chip.predicted_bytes
    if held <= room:
        return None
    reason = f"{show_bytes(held)} of arguments and gradients, where at most {show_bytes(room)} fits"
    return refused(words, where, reason)._replace(bytes_per_device=held)


def _laid_out(words: tuple[str, ...], cfg: TrainConfig, where: Slice, call: CallName) -> tuple[TrainConfig, PlanRow]:
    """Return the configuration with the strategy that it chooses on the slice, and its row."""
    name, mesh = path_of(type(cfg.dispatch)), mesh_for(cfg.mesh, target_of(where))
    if not isinstance(cfg.dispatch, Dispatch):
        cfg = dataclasses.replace(cfg, dispatch=CALLS[call](cfg, blueprint_on(cfg), mesh).execution.strategy)
        name += f": {path_of(type(cfg.dispatch))}"
    group = on_mesh(build_execution(cfg, mesh, batches="any")).expert_group(cfg.model.experts)
    found, chip = footprint(cfg, call, target=target_of(where)), where.chip
    mesh = {axis: size for axis, size in cfg.mesh.sizes.items() if size > 1}
    held: dict[str, int] = {}
    for term in found.terms:
        held[term.name] = held.get(term.name, 0) + term.bytes
    fits = found.peak <= chip.predicted_bytes
    row = PlanRow(words, mesh, cfg.rules.name, name, fits, "", chip.hbm_bytes, chip.usable_bytes)
    row = row._replace(bytes_per_device=found.peak, memory=held, moment=found.moment)
    row = row._replace(caution=cfg.dispatch.refusal(group) or "")
    if (stages := cfg.mesh.stage) > 1 and call in ("train", "evaluate"):
        row = row._replace(bubble=cfg.execution.pipeline.bubble(stages))
    return cfg, row if row.fits else row._replace(reason=_shortage(found, chip.predicted_bytes))


def _shortage(found: Footprint, room: int) -> str:
    most = max(found.terms, key=lambda term: term.bytes)
    needed = f"{show_bytes(found.peak)} in the {found.moment}, where at most {show_bytes(room)} fits"
    return f"{needed}; most is {most.name}, {show_bytes(most.bytes)}"


def _timed(row: PlanRow, cfg: TrainConfig, where: Slice, call: CallName) -> PlanRow:
    work = work_of(cfg, call)
    least = bound(work, where, cfg.mesh.sizes)
    tokens = cfg.batch_size * (1 if call == "decode" else cfg.seq_len)
    step = least.step_seconds
    return row._replace(
        flops_per_device=sum(work.flops.values()),
        recomputed_flops=work.flops.get("recomputed", 0.0),
        model_flops=work.model_flops,
        collectives=collectives(work.traffic),
        seconds={"compute": least.compute, "HBM": least.hbm, **least.links},
        step_seconds=step,
        unoverlapped_seconds=least.summed,
        bound_by=least.bound_by,
        tokens_per_second_per_device=tokens / step / where.devices,
        utilisation=work.model_flops / (step * where.chip.flops),
    )


def remedies(words: Sequence[str], where: Slice, call: CallName = "train") -> Iterator[str]:
    """Yield changes with which a configuration fits into the memory of a slice, each tried by the memory model.

    Each is one setting; if none is enough, all are tried together. More devices are named too.
    """
    yield from settings_that_help(words, where, call)
    words, cfg = tuple(words), compose_described(*words)
    axis = "fsdp" if "fsdp" in cfg.rules.mesh_axes else "expert"
    for factor in (2, 4, 8, 16):
        more = f"mesh.{axis}={cfg.mesh.sizes[axis] * factor}"
        if _fits((*words, more), where, call):
            yield f"{where.devices * factor:,} devices ({more})"
            break


def settings_that_help(words: Sequence[str], where: Slice, call: CallName = "train") -> Iterator[str]:
    """Yield those of `remedies` that need no more devices: overrides, several of them joined by a space."""
    words, cfg = tuple(words), compose_described(*words)
    settings = _savings(cfg, call)
    alone = [next((each for each in values if _fits((*words, each), where, call)), None) for values in settings]
    yield from filter(None, alone)
    if settings and not any(alone):
        *others, last = settings
        together = ([*(values[-1] for values in others), each] for each in last)
        found = next((each for each in together if _fits((*words, *each), where, call)), None)
        yield from [" ".join(found)] if found else []


def _savings(cfg: TrainConfig, call: CallName) -> list[list[str]]:
    """Return settings that save memory, each with its values from the least saving to the most."""
    options = {field.name for field in dataclasses.fields(cfg.dispatch)}
    found = []
    if call == "train" and cfg.execution.remat != "full":
        found.append(["execution.remat=full"])
    if call == "train" and cfg.execution.reduce_dtype == "float32" and cfg.execution.dtype == "bfloat16":
        found.append(["execution.reduce_dtype=bfloat16"])
    if "chunks" in options:
        found.append([f"dispatch.chunks={n}" for n in (2, 4, 8)])
    if "buffer_factor" in options:
        found.append(["dispatch.buffer_factor=1.5"])
    if call == "train":
        now, rest = cfg.execution.microbatches, cfg.batch_size // cfg.micro_batches
        if cfg.mesh.stage > 1:  # smaller ones pass through the stages, which then wait less
            count = cfg.execution.pipeline.count(cfg.mesh.stage)
            found += [["execution.pipeline.gather=tick"]] * (cfg.execution.pipeline.gather == "once")
            found.append([f"execution.pipeline.microbatches={count * n}" for n in divisors(rest)[1:]])
        else:
            found.append([f"execution.microbatches={now * n}" for n in divisors(rest)[1:]])
    return [values for values in found if values]


def _fits(words: Sequence[str], where: Slice, call: CallName) -> bool:
    try:
        return footprint(compose_described(*words), call, target=target_of(where)).peak <= where.chip.predicted_bytes
    except UserError:
        return False


def sort(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the rows that fit, those without caution first, and of these the fastest, then the others.

    Of equal bounds, the first has less time without overlap, in two digits, then less memory.
    """

    def order(row: PlanRow) -> tuple[Any, ...]:
        rest = float(f"{row.unoverlapped_seconds or math.inf:.2g}")
        return not row.fits, bool(row.caution), row.step_seconds or math.inf, rest, row.bytes_per_device or math.inf

    return sorted(rows, key=order)


def distinct(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the rows without those that equal an earlier one in memory and all times: the same program."""
    found: dict[Any, PlanRow] = {}
    for row in rows:
        times = tuple((row.seconds or {}).items()) or row.words  # what is not timed may be another program
        found.setdefault((row.bytes_per_device, times, row.unoverlapped_seconds), row)
    return list(found.values())


def as_mapping(row: PlanRow) -> dict[str, Any]:
    """Return a row as JSON has it."""
    found = row._asdict()
    return found | {"collectives": [each._asdict() for each in row.collectives or ()]}
