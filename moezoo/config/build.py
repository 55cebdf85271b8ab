"""Build the mesh, the execution and the blueprint of the model that a configuration describes."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh

from moezoo.config.compose import compose
from moezoo.config.memory import check_batch, check_sizes
from moezoo.config.overrides import groups
from moezoo.config.own import name_in
from moezoo.config.settings import TrainConfig, check_config
from moezoo.convert import convert, show
from moezoo.errors import UserError
from moezoo.models import ModelConfig, family_of
from moezoo.models.base import check_tokens
from moezoo.models.blueprint import Blueprint
from moezoo.nn.context_parallel import CONTEXT_PARALLEL
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh import AXES, abstract_mesh, make_mesh
from moezoo.parallel.rules import Rules, live


def blueprint_of(cfg: TrainConfig) -> Blueprint:
    """Return what `cfg` says of the model. Equal configurations share one, so its shapes are made once."""
    family = family_of(cfg.model)  # which a notebook may have made anew
    return _blueprint(cfg.model, cfg.execution.param_dtype, family.kinds, family.make_block)


@functools.lru_cache(maxsize=64)
def _blueprint(config: ModelConfig, dtype: str, *_: Any) -> Blueprint:
    return Blueprint(config, dtype)


def build_execution(
    cfg: TrainConfig, mesh: Mesh | AbstractMesh | None = None, *, batches: Literal["configured", "any"] = "configured"
) -> Execution:
    """Return how `cfg` runs a model: mesh, rules, dispatch, dtypes and memory in one value.

    Args:
        cfg: A configuration, from `moezoo.compose` or `moezoo.saved_config`.
        mesh: Replaces the mesh of `cfg`; it may have no devices, which is enough to trace a step.
        batches: "configured" checks that the mesh splits batches of the configured sizes evenly; "any" does not, for
            generation and comparisons.

    Raises:
        UserError: mesh, rules and sizes do not fit together, or not into the memory of the mesh's devices.
    """
    check_config(cfg)
    convert(Literal["configured", "any"], batches, "batches")
    mesh = make_mesh(cfg.mesh) if mesh is None else mesh
    try:
        execution = _lay_out(cfg, mesh)
    except UserError as error:
        raise UserError(f"{error}{_other_layouts(cfg, mesh)}") from None
    if batches == "configured":
        try:
            _check_batches(cfg, execution)
        except UserError as error:
            raise UserError(f"{error}{_smaller_split(cfg, execution)}") from None
        check_batch(cfg, execution)
    return execution


def _lay_out(cfg: TrainConfig, mesh: Mesh | AbstractMesh) -> Execution:
    """Return the execution; raise `UserError` if the rules cannot lay out the model on the mesh."""
    how = cfg.execution.context_parallel
    execution = Execution(
        mesh=mesh,
        rules=cfg.rules,
        dispatch=cfg.dispatch,
        dtype=cfg.execution.dtype,
        reduce_dtype=cfg.execution.reduce_dtype,
        remat=cfg.execution.remat,
        context_parallel=CONTEXT_PARALLEL[how]() if isinstance(how, str) else how,
        sequence_order=cfg.execution.sequence_order or ("balanced" if cfg.model.sees_all else "contiguous"),
        kernels=Kernels(cfg.execution.grouped_matmul or (), cfg.execution.attention or ()),
        routing=cfg.execution.routing,
    )
    if how != "gather" and not execution.sequence_axes:
        here = "split no sequence; choose rules=fsdp_ep mesh.context=2"
        if names := cfg.rules.sequence:
            here = f"split sequences over {show(names)}, one device here; set mesh.{names[0]}=2"
        raise UserError(
            f"execution.context_parallel={name_in(how)} has nothing to pass around: rules "
            f"{cfg.rules.name} {here} or more, or execution.context_parallel=gather"
        )
    axes, num_experts = live(cfg.rules.store.get("expert", ()), execution.sizes), cfg.model.experts
    if num_experts % (ways := execution.ways(axes)):
        split = " x ".join(f"mesh.{axis}={execution.sizes[axis]}" for axis in axes)
        raise UserError(
            f"{split} splits experts {ways} ways but model.experts={num_experts} (rules.store.expert={show(axes)}); "
            f"choose a mesh whose {' x '.join(axes)} divides {num_experts}"
        )
    check_sizes(cfg.model, execution)
    execution.specs(blueprint_of(cfg).shapes)
    return execution


def _other_layouts(cfg: TrainConfig, mesh: Mesh | AbstractMesh) -> str:
    """Where the rules do not fit the mesh, name a mesh that splits in ways that fit, and the rule sets that fit."""
    sizes, num_experts = dict(mesh.shape), cfg.model.experts
    if not set(sizes) <= set(AXES):  # a mesh with axes of other names, made in Python
        return ""
    axes, meshes = live(cfg.rules.store.get("expert", ()), sizes), []
    if num_experts % math.prod(sizes[axis] for axis in axes):
        divisors = ([n for n in range(1, sizes[axis] + 1) if num_experts % n == 0] for axis in axes)
        fewer = sorted(itertools.product(*divisors), key=lambda choice: (-math.prod(choice), *(-n for n in choice)))
        fewer = [choice for choice in fewer if num_experts % math.prod(choice) == 0]
        meshes = [dict(zip(axes, choice, strict=True)) for choice in fewer[:8]]  # others do not fit for other reasons
    elif inner := cfg.rules.inner_axes(sizes):
        near = sorted(range(2, 2 * sizes[inner[0]]), key=lambda ways: (abs(ways - sizes[inner[0]]), ways))[1:17]
        meshes = [{inner[0]: ways} for ways in near]
    fitting = next((some for some in meshes if _fits(cfg, sizes | some)), {})
    advice = f", such as {_set_mesh(fitting)}" * bool(fitting)
    others = _other_rules(cfg, sizes)
    return advice + f"; rules with which it runs on this mesh: {', '.join(others)}" * bool(others)


@functools.cache
def _shipped_rules() -> dict[str, Rules]:
    return {name: compose(f"rules={name}").rules for name in groups()["rules"]}


def _other_rules(cfg: TrainConfig, sizes: Mapping[str, int]) -> dict[str, Rules]:
    """Return the other shipped rule sets with which `cfg` runs; none if it changes single keys of a shipped one.

    Those that gather nothing are for generation and left out.
    """
    shipped = _shipped_rules()
    if cfg.rules != shipped.get(cfg.rules.name, cfg.rules):
        return {}
    others = {name: rules for name, rules in shipped.items() if cfg.rules != rules and rules.store != rules.compute}
    return {name: rules for name, rules in others.items() if _fits(dataclasses.replace(cfg, rules=rules), sizes)}


def _set_mesh(sizes: Mapping[str, int]) -> str:
    return " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())


def _check_batches(cfg: TrainConfig, execution: Execution) -> None:
    if cfg.seq_len > (limit := cfg.model.longest).tokens:
        others = "" if limit.why else " or raise the maximum"
        raise UserError(f"seq_len={cfg.seq_len} exceeds {limit}; shorten it{others}")
    micro_steps = cfg.execution.microbatches
    check_tokens(cfg.batch_size, cfg.seq_len, execution, batch_key="batch_size", micro_steps=micro_steps)
    execution.token_order(cfg.seq_len)
    if (tokens := cfg.batch_size * cfg.seq_len) >= 2**31:
        raise UserError(
            f"batch_size={cfg.batch_size} x seq_len={cfg.seq_len} makes {tokens} tokens per step, and they are counted "
            f"in int32; choose at most {2**31 - 1} together"
        )
    tokens //= micro_steps * execution.ways(execution.token_axes)
    if cfg.dispatch.chunks > tokens:
        raise UserError(
            f"dispatch.chunks={cfg.dispatch.chunks} exceeds the {tokens} tokens per device and micro-step; choose at "
            f"most {tokens}, and few: each chunk is compiled separately"
        )


def _smaller_split(cfg: TrainConfig, execution: Execution) -> str:
    """Where the mesh does not split a batch evenly, name meshes and rule sets that do, and what splits it."""
    size, micro_steps = cfg.batch_size, cfg.execution.microbatches
    ways = execution.ways(execution.batch_axes)
    if ways == 1 or size % (micro_steps * ways) == 0:
        uneven = cfg.seq_len % execution.ways(execution.sequence_axes)
        return f"; rules.sequence={show(cfg.rules.sequence)} names the mesh axes that split it" * bool(uneven)
    advice = []
    if fewer := [n for n in range(1, micro_steps) if size % (n * ways) == 0]:
        advice.append(f"execution.microbatches={fewer[-1]}")
    devices = math.prod(execution.sizes.values())
    for count in (n for n in range(devices, 1, -1) if devices % n == 0):
        # On fewer devices only a mesh without a split sequence is simpler than one on all of them.
        if sizes := _find_mesh(cfg, execution, count, whole_sequences=count < devices):
            keys = _set_mesh({axis: n for axis, n in sizes.items() if n != execution.sizes[axis]})
            where = f", on {count} devices" * (count < devices)
            advice.append(f"{keys} ({_count_ways(cfg.rules, sizes)}{where})")
            if math.prod(sizes[axis] for axis in cfg.rules.sequence) == 1:
                break
    else:
        advice += ["mesh=single"] * (size % micro_steps == 0)
    others = _other_rules(cfg, execution.sizes).items()
    advice += [f"rules={name} ({_count_ways(rules, execution.sizes)})" for name, rules in others]
    fewer_ways = f", or split it fewer ways with {' or '.join(advice)}" if advice else ""
    return f"{fewer_ways}; rules.batch={show(cfg.rules.batch)} names the mesh axes that split it"


def _count_ways(rules: Rules, sizes: Mapping[str, int]) -> str:
    ways, parts = (math.prod(sizes[axis] for axis in axes) for axes in (rules.batch, rules.sequence))
    return f"{ways} way{'s' * (ways > 1)}" + f"; sequences {parts} ways" * (parts > 1)


def _find_mesh(cfg: TrainConfig, execution: Execution, devices: int, *, whole_sequences: bool) -> dict[str, int]:
    """Return the mesh of so many devices that splits the batch most, and changes the fewest axes; {} if none can."""
    axes: list[str] = list(AXES)
    batch, sequence = cfg.rules.batch, cfg.rules.sequence
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    choices = {axis: [size] for axis, size in execution.sizes.items()} | dict.fromkeys(batch, divisors)
    choices |= dict.fromkeys(sequence, [1] if whole_sequences else divisors)
    meshes = (dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*(choices[axis] for axis in axes)))
    fitting = [
        sizes
        for sizes in meshes
        if math.prod(sizes.values()) == devices
        and cfg.batch_size % (cfg.execution.microbatches * math.prod(sizes[axis] for axis in batch)) == 0
    ]

    def order(sizes: dict[str, int]) -> tuple[int, int]:
        changed = sum(n != execution.sizes[axis] for axis, n in sizes.items())
        return -math.prod(sizes[axis] for axis in batch), changed

    return next((sizes for sizes in sorted(fitting, key=order) if _fits(cfg, sizes)), {})


def _fits(cfg: TrainConfig, sizes: Mapping[str, int]) -> bool:
    """Whether `cfg` runs on a mesh of these sizes."""
    try:
        execution = _lay_out(cfg, abstract_mesh(dataclasses.replace(cfg.mesh, **sizes)))
        _check_batches(cfg, execution)
        check_batch(cfg, execution)
    except UserError:
        return False
    return True
