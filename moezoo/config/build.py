"""Build the mesh, the execution and the blueprint of the model that a configuration describes."""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from moezoo.config.own import name_in
from moezoo.config.settings import KERNELS, TrainConfig, check_config
from moezoo.config.sizes import Batches, advise, check_batch, check_sizes, divisors, sequence_order
from moezoo.errors import UserError, check_type
from moezoo.hub.kept import Form, in_forms
from moezoo.models import family_of
from moezoo.models.base import check_tokens
from moezoo.models.blueprint import Blueprint
from moezoo.models.config import differing_settings
from moezoo.nn.context_parallel import CONTEXT_PARALLEL
from moezoo.nn.few_bits import cut_pieces, has_few_bits
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh import STAGE, abstract_mesh, has_started, make_mesh
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.parallel.rules import live
from moezoo.typed import convert, show


def blueprint_of(cfg: TrainConfig, given: Blueprint | None = None) -> Blueprint:
    """Return `given`, or what `cfg` says of the model. Equal configurations share one, so its shapes are made once.

    Raises:
        UserError: `given` is of another configuration or dtype than `cfg`, or trains other parameters.
    """
    family = family_of(cfg.model)  # which a notebook may have made anew
    dtype = "float32" if cfg.execution.param_dtype == "stored" else cfg.execution.param_dtype
    plain = Blueprint(cfg.model, dtype, trained=cfg.trained, frozen=cfg.frozen, adapter=cfg.adapter)
    own = _shared(plain, tuple(cfg.init_forms.items()), family.kinds, family.make_block)
    if given is None:
        return own
    remedy = "write dataclasses.replace(blueprint_of(cfg), change=...)"
    check_type("blueprint", given, Blueprint, remedy)
    if differing := differing_settings(given.config, "the blueprint", own.config):
        raise UserError(f"blueprint: {differing}; {remedy}")
    keys = {"dtype": "execution.param_dtype", "trained": "trained", "frozen": "frozen", "adapter": "adapter"}
    for name, key in keys.items():
        if (has := getattr(given, name)) != (value := getattr(own, name)):
            raise UserError(f"blueprint: {name} is {show(has)}, but {key}={show(value)}; {remedy}")
    return given


@functools.lru_cache(maxsize=64)
def _shared(plain: Blueprint, forms: tuple[tuple[str, Form], ...], *_: Any) -> Blueprint:
    if not forms:
        return plain
    constant = plain.constant_paths
    return dataclasses.replace(plain, change=lambda model: in_forms(model, dict(forms), constant))


def blueprint_on(cfg: TrainConfig, execution: Execution | None = None, given: Blueprint | None = None) -> Blueprint:
    """Return `given`, or `blueprint_of(cfg)` with the scales of few bits cut into pieces that a mesh can lay out.

    The mesh is that of `execution`, by default that of `cfg`. Raises `UserError` as `blueprint_of` does.
    """
    blueprint = blueprint_of(cfg, given)
    if given is not None or not has_few_bits(blueprint.shapes):
        return blueprint
    change, on = blueprint.change, execution or build_execution(cfg, abstract_mesh(cfg.mesh), batches="any")
    assert change is not None
    return dataclasses.replace(blueprint, change=lambda model: cut_pieces(change(model), on))


def build_execution(
    cfg: TrainConfig, mesh: Mesh | AbstractMesh | None = None, *, batches: Batches = "configured"
) -> Execution:
    """Return how `cfg` runs a model: mesh, rules, dispatch, dtypes and memory in one value.

    Args:
        cfg: A configuration, from `moezoo.compose` or `moezoo.saved_config`.
        mesh: The mesh in place of that of `cfg`; it may have no devices, which is enough to trace a step.
        batches: "configured" checks that the mesh splits batches of the configured sizes evenly; "any" does not, for
            generation and comparisons.

    Raises:
        UserError: Mesh, rules and sizes do not fit together, or not into the memory of the mesh's devices; or the
            strategy must not run on devices that are here.
    """
    check_config(cfg)
    convert(Batches, batches, "batches")
    # Those of a mesh for which programs are only compiled are not here.
    runs = mesh is None or (isinstance(mesh, Mesh) and has_started() and mesh.devices.flat[0] in jax.devices())
    mesh = make_mesh(cfg.mesh) if mesh is None else mesh
    if (stages := mesh.shape.get(STAGE, 1)) != cfg.mesh.stage:
        raise UserError(
            f"the mesh has stage={stages} and cfg has mesh.stage={cfg.mesh.stage}; give cfg that number too"
        )
    check_sizes(cfg.model, mesh)
    try:
        execution = _lay_out(cfg, mesh)
        here = on_mesh(execution)
        if batches == "configured":
            _check_batches(cfg, here)
    except UserError as error:
        # Pieces of blocks set no limit: they are cut.
        shapes = Blueprint(cfg.model).shapes if cfg.init_forms else blueprint_of(cfg).shapes
        raise UserError(f"{error}{advise(cfg, shapes, mesh, batches)}") from None
    if runs and (why := cfg.dispatch.refusal(here.expert_group(cfg.model.experts))):
        raise UserError(f"dispatch={name_in(cfg.dispatch)}: {why}")
    if batches == "configured":
        check_batch(cfg, here)
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
        sequence_order=sequence_order(cfg),
        kernels=Kernels(**{name: getattr(cfg.execution, name) or () for name in KERNELS}),
        routing=cfg.execution.routing,
        pipeline=cfg.execution.pipeline if mesh.shape.get(STAGE, 1) > 1 else None,
    )
    laid_out = on_mesh(execution)
    if how != "gather" and not laid_out.sequence_axes:
        here = "split no sequence; choose rules=fsdp_ep mesh.context=2"
        if names := cfg.rules.sequence:
            here = f"split sequences over {show(names)}, one device here; set mesh.{names[0]}=2"
        raise UserError(
            f"execution.context_parallel={name_in(how)} has nothing to pass around: rules "
            f"{cfg.rules.name} {here} or more, or execution.context_parallel=gather"
        )
    axes, num_experts = live(cfg.rules.store.get("expert", ()), laid_out.sizes), cfg.model.experts
    if num_experts % (ways := laid_out.ways(axes)):
        split = " x ".join(f"mesh.{axis}={laid_out.sizes[axis]}" for axis in axes)
        raise UserError(
            f"{split} splits experts {ways} ways but model.experts={num_experts} (rules.store.expert={show(axes)}); "
            f"choose a mesh whose {' x '.join(axes)} divides {num_experts}"
        )
    laid_out.specs(blueprint_on(cfg, execution).shapes)
    return execution


def _check_batches(cfg: TrainConfig, execution: MeshExecution) -> None:
    if cfg.seq_len > (limit := cfg.model.longest).tokens:
        others = "" if limit.why else " or raise the maximum"
        raise UserError(f"seq_len={cfg.seq_len} exceeds {limit}; shorten it{others}")
    try:
        check_tokens(cfg.batch_size, cfg.seq_len, execution, batch_key="batch_size", parts=cfg.parts)
    except UserError as error:
        raise UserError(f"{error}{_other_cuts(cfg, execution)}") from None
    execution.token_order(cfg.seq_len)
    _check_chunks(cfg, execution)
    if (tokens := cfg.batch_size * cfg.seq_len) >= 2**31:
        raise UserError(
            f"batch_size={cfg.batch_size} x seq_len={cfg.seq_len} makes {tokens} tokens per step, and they are counted "
            f"in int32; choose at most {2**31 - 1} together"
        )
    tokens //= cfg.micro_batches * execution.ways(execution.batch_axes + execution.sequence_axes)
    if cfg.dispatch.chunks > tokens:
        part = "micro-step" if execution.stages == 1 else "micro-batch"
        raise UserError(
            f"dispatch.chunks={cfg.dispatch.chunks} exceeds the {tokens} tokens per device and {part}; choose at "
            f"most {tokens}, and few: each chunk is compiled separately"
        )


def _check_chunks(cfg: TrainConfig, execution: MeshExecution) -> None:
    """Refuse chunks of split sequences that are shorter than what a layer reads of the chunk before."""
    if (ways := execution.ways(execution.sequence_axes)) == 1:
        return
    chunks = ways * (2 if execution.sequence_order == "balanced" else 1)
    blocks = (block for stack in blueprint_of(cfg).shapes.stacks for block in stack.blocks)
    if cfg.seq_len // chunks < (least := max(block.attention.least_chunk() for block in blocks)):
        axes = " x ".join(f"mesh.{axis}={execution.sizes[axis]}" for axis in execution.sequence_axes)
        raise UserError(
            f"seq_len={cfg.seq_len} in {chunks} chunks ({axes}, execution.sequence_order={execution.sequence_order}) "
            f"has {cfg.seq_len // chunks} tokens per chunk, and a layer reads {least} tokens of the chunk before; make "
            f"seq_len at least {least * chunks}, or split sequences over fewer devices"
        )


def _other_cuts(cfg: TrainConfig, execution: MeshExecution) -> str:
    """Where the mesh does not split a batch evenly, name fewer parts that do, and what splits it."""
    rows, odd = divmod(cfg.batch_size, execution.ways(execution.batch_axes))
    if not odd and rows % cfg.micro_batches == 0:
        return f"; rules.sequence={show(cfg.rules.sequence)} names the mesh axes that split it"
    smaller = []
    for key, number in {} if odd else cfg.parts.items():
        least = execution.stages if "pipeline" in key else 1
        others = cfg.micro_batches // number
        fewer = [n for n in divisors(rows) if n < number and n % least == 0 and rows % (n * others) == 0]
        smaller += [f"{key}={max(fewer)}"] if fewer else []
    advice = f", or set {' or '.join(smaller)}" * bool(smaller)
    return f"{advice}; rules.batch={show(cfg.rules.batch)} names the mesh axes that split it"
