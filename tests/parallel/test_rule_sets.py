"""The shipped rule sets on released models: where every parameter is stored, and what a traced step moves.

Traces are held to `traffic_oracle` here too, for any preset, rule set and mesh.
"""

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from presets import PRESETS
from traffic_oracle import step_traffic

from moezoo import UserError
from moezoo.config.build import build_execution
from moezoo.config.compose import compose, groups
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import Gather, Ragged
from moezoo.parallel.axes import Role, parameter_table
from moezoo.parallel.collectives import split_by_tokens
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import STAGE, MeshShape, abstract_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.rules import live
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.weight_mover import WeightMover
from moezoo.training.build import build_step

# By hand, major to minor, by letters: data, fsdp, expert (X), context, tensor. Experts compute split over what follows
# "keep", and heads, widths and the vocabulary are stored and computed split over "inner". What is stored over F or C is
# stored over pipeline stages too, and so are layers. Meshes here have one stage: tests/parity has more.
LAYOUTS = {
    #                     batch  sequence  embed  expert  expert_embed  keep  inner
    "fsdp_ep": ("D F X", "C", "F C X", "X", "F C", "X", ""),
    "pure_fsdp": ("F", "", "F", "", "F", "", ""),
    "shard_exp_on_fsdp": ("D F X", "C", "F C X", "X F", "C", "X", ""),
    "ep_as_cp": ("D F", "X", "F X", "X", "F", "X", ""),
    "cp_as_ep": ("D F X", "C", "F C X", "C X", "F", "C X", ""),
    "ep_as_dp": ("D F X", "", "F", "X", "F", "X", ""),
    "tensor": ("D F X", "C", "F C X", "X", "F C", "X", "T"),
    "serve": ("D F X", "", "", "X", "", "X", "T"),
}
LETTERS = {"D": "data", "F": "fsdp", "X": "expert", "C": "context", "T": "tensor"}
INNER = ("heads", "kv_heads", "mlp", "expert_mlp", "vocab")
DEVICES = (8, 64, 256)
# gpt-oss is 2,880 wide and Nemotron 3 Nano 2,688, which 256 devices cannot share: they need an axis `data`.
NARROW = ("gpt_oss_20b", "gpt_oss_120b", "nemotron_3_nano_30b_a3b")
SIZES = [case for case in itertools.product(PRESETS, DEVICES) if case[1] < 256 or case[0] not in NARROW]


@functools.cache
def shipped(name):
    """Return a shipped rule set."""
    return compose(f"rules={name}").rules


@functools.cache
def parameters(preset):
    """Return axes and shape of every parameter of a preset, with the biases that a family may have; each pair once."""
    settings: Any = compose(f"model={preset}").model
    settings = replace(settings, **({"attention_bias": "all"} if "attention_bias" in vars(settings) else {}))
    return tuple({(axes, shape): None for _, axes, shape in parameter_table(Blueprint(settings).shapes)})


@functools.cache
def meshes(name, devices):
    """Return all meshes of so many devices with two or more along each axis that the rules store anything over.

    With fewer devices than that takes, an axis may have one. Rules that store nothing over `fsdp` get an axis `data`.
    """
    axes = {axis for dimension in shipped(name).store.values() for axis in dimension}
    axes = sorted((axes if "fsdp" in axes else axes | {"data"}) - {STAGE})
    sizes = [2**power for power in range(2 ** len(axes) <= devices, devices.bit_length())]
    found = [choice for choice in itertools.product(sizes, repeat=len(axes)) if math.prod(choice) == devices]
    # The most even ones first.
    return [dict(zip(axes, choice, strict=True)) for choice in sorted(found, key=lambda c: (max(c), c))]


@functools.cache
def placement(name, axes, mesh, shared):
    """Return the placement of parameters with these axes, which many sizes share; `mesh` has pairs."""
    return shipped(name).placement(axes, dict(mesh), shared=shared)


def placement_of(layout, axes, shape, mesh):
    """Return the placement of a parameter."""
    return placement(layout.name, axes, tuple(mesh.items()), layout.shared(axes, shape, mesh))


def inner(layout, axes, shape, mesh):
    """Return the mesh axes that an inner dimension of a parameter is split over: none where key heads are too few."""
    of_recurrent = ("key_heads", "value_heads", "state_groups", "state_heads", "channels")
    heads = dict.fromkeys(of_recurrent, "heads")
    names = {heads.get(name, name) for name in axes.names} & set(INNER)
    few = "kv_heads" in names and shape[axes.names.index("kv_heads")] < mesh.get("tensor", 1)
    return {axis for name in names if not few for axis in live(layout.store.get(name, ()), mesh)}


def fits(preset, name, mesh):
    """Return whether a mesh divides every size of a preset."""
    layout = shipped(name)
    try:
        for axes, shape in parameters(preset):
            layout.check_parameter("", placement_of(layout, axes, shape, mesh), shape, mesh)
    except UserError:
        return False
    return True


@functools.cache
def fitting(preset, name, devices):
    """Return the meshes that divide every size of a preset."""
    return [mesh for mesh in meshes(name, devices) if fits(preset, name, mesh)]


def test_every_rule_set_has_a_row():
    assert set(LAYOUTS) == set(groups()["rules"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_is_the_one_of_the_table(name):
    *_, embed, expert, expert_embed, kept, inner = rows = [
        tuple(LETTERS[x] for x in row.split()) for row in LAYOUTS[name]
    ]
    layout = shipped(name)
    assert layout.name == name
    assert [layout.batch, layout.sequence] == rows[:2]
    store: dict[str, Any] = {
        "embed": embed,
        "q_lora": embed,
        "kv_lora": embed,
        "expert_embed": expert_embed,
    }
    if name != "serve":
        store = {"layer": (STAGE,)} | {logical: (*axes, STAGE) for logical, axes in store.items() if axes}
    store["expert"] = expert
    split = dict.fromkeys(INNER, inner) if inner else {}
    assert layout.store == {logical: axes for logical, axes in store.items() if axes} | split
    assert layout.compute == ({"expert": kept} if kept else {}) | split


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_parameter_is_split_over_all_axes_of_its_kind(name):
    """Arrays over all axes that the rules name for their dimensions. Hardly any is whole, less than 0.1% of a model.

    They are norms, which may be as short as a head; biases of queries and keys, where heads are not split; a router's
    bias and choice bias, one number per expert. And what makes the decays and gates of recurrent layers of a rank: with
    256 devices more would share it than it has numbers.
    """
    layout = shipped(name)
    for preset, devices in SIZES:
        assert fitting(preset, name, devices), (preset, devices)
        for mesh in fitting(preset, name, devices):
            total = whole = 0
            for axes, shape in parameters(preset):
                placement = placement_of(layout, axes, shape, mesh)
                dims = ("expert", "expert_embed") if "expert" in axes.names else ("embed",)
                if axes.role is Role.BIAS or {"decay_lora", "gate_lora"} & set(axes.names):
                    dims = [dim for dim in dims if dim in axes.names]
                wanted = {axis for dim in dims for axis in live(layout.store.get(dim, ()), mesh)}
                if axes.role in (Role.SCALE, Role.BUFFER) or not dims:
                    wanted, whole = set(), whole + math.prod(shape)
                wanted |= inner(layout, axes, shape, mesh)
                assert set(placement.mesh_axes) == wanted, (preset, mesh, axes)
                assert placement.ways == math.prod(mesh[axis] for axis in wanted)
                total += math.prod(shape)
            assert whole < total / 1000


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dimension_is_gathered_by_one_collective(name):
    """For tokens that move, and where experts' weights move too: all its axes split tokens, or none does."""
    for (preset, devices), strategy in itertools.product(SIZES, (Ragged(), Gather())):
        mesh = MeshShape(**fitting(preset, name, devices)[0])
        execution = on_mesh(Execution(mesh=abstract_mesh(mesh), rules=shipped(name), dispatch=strategy))
        for axes, shape in parameters(preset):
            placement = execution.placement(axes, shape)
            gathered = [dim for dim in placement.gathered if dim]
            runs = [split_by_tokens(dim, WeightMover(execution).summed_axes(placement)) for dim in gathered]
            assert [len(run) for run in runs] == [1] * len(gathered), (preset, mesh, axes)
            kept = set(placement.mesh_axes) - {axis for dim in gathered for axis in dim}
            stays = strategy.moves == "tokens" and "expert" in axes.names
            wanted = inner(shipped(name), axes, shape, execution.sizes)
            assert kept == (set(execution.expert_axes) if stays else set()) | wanted, (preset, mesh, axes)


def check_trace(preset, name, devices, dispatch):
    """Check the axes of every collective of a step of few layers and sequences, by the scope that asks for it."""
    mesh, layout = fitting(preset, name, devices)[0], shipped(name)
    dense_layers = vars(compose(f"model={preset}").model).get("dense_layers", 0)
    rows = math.prod(mesh.get(axis, 1) for axis in layout.batch)
    words = [f"model={preset}", f"rules={name}", f"dispatch={dispatch}", f"model.layers={1 + dense_layers}"]
    words += ["optimizer=sgd", "seq_len=512", f"batch_size={rows}"]
    cfg = compose(*words, *(f"mesh.{axis}={size}" for axis, size in mesh.items()))
    execution = on_mesh(build_execution(cfg, abstract_mesh(cfg.mesh)))
    step = build_step(cfg, execution)
    table = collective_traffic(step.traced.jaxpr)
    moves_weights = execution.moves_weights
    store = {dim: live(axes, mesh) for dim, axes in layout.store.items()}
    kept = () if moves_weights else live(layout.compute.get("expert", ()), mesh)
    dense = store.get("embed", ())
    experts = store.get("expert", ())[len(kept) :], store.get("expert_embed", ())
    split = execution.inner_group("heads").axes
    allowed = {
        # Rows of the embedding; the largest logit and the sums of a token.
        "embedding": {split},
        "head": {split},
        # Weights: each dimension in one collective, over all its axes that it does not compute split over.
        "embedding/weights": {dense},
        "head/weights": {dense},
        "layers/weights": {dense, *experts},
        # Keys and values, positions: the axes of the sequence alone. What enters and leaves heads: those of heads.
        "layers/attention": {execution.sequence_axes, split},
        "layers/feed_forward": {split},
        "positions": {execution.sequence_axes},
        # Tokens reach experts, and results return. Nothing else around the experts moves.
        "layers/feed_forward/dispatch": {execution.expert_axes},
        "layers/feed_forward/combine": {execution.expert_axes},
    }
    sums = ("routing", "loss", "gradient_sums", "gradient_norm")
    seen = set()
    for scope, _, collective, axes in table:
        if scope in sums:
            assert collective == "psum", (scope, collective, axes)
            continue
        assert axes in allowed.get(scope, ()), (scope, collective, axes)
        seen.add((scope, axes))
    needed = {(scope, axes) for scope, some in allowed.items() for axes in some if axes}
    stay = ("layers/feed_forward/dispatch", "layers/feed_forward/combine") if moves_weights else ()
    assert seen == {(scope, axes) for scope, axes in needed if scope not in stay}
    if dispatch == "ragged":  # its only gather is that of the rows per expert, one integer each
        gathers = {r: t for r, t in table.items() if "feed_forward" in r.scope and r.collective == "all_gather"}
        ways = execution.ways(execution.expert_axes)
        assert all(t.bytes == t.count * 4 * cfg.model.experts * (ways - 1) for t in gathers.values())
    assert table.outline(2) == step_traffic(cfg, step.arguments[0].model)


# Every rule set that trains, every strategy but `dense`, every number of devices. All presets with `-m full`.
TRACED = [
    ("deepseek_v3", "ep_as_cp", 64, "ragged"),
    ("kimi_k2", "fsdp_ep", 256, "ragged"),
    ("deepseek_v2", "cp_as_ep", 64, "ring"),
    ("mixtral_8x7b", "shard_exp_on_fsdp", 8, "gather"),
    ("olmoe_1b_7b", "ep_as_dp", 256, "ragged"),
    ("qwen3_30b_a3b", "pure_fsdp", 256, "ring"),
    ("olmoe_1b_7b", "tensor", 64, "capacity"),
]


@pytest.mark.parametrize(("preset", "name", "devices", "dispatch"), TRACED)
def test_what_a_step_moves(preset, name, devices, dispatch):
    check_trace(preset, name, devices, dispatch)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_step_moves_on_every_preset(name):
    for preset, devices in SIZES:
        check_trace(preset, name, devices, "ragged")
