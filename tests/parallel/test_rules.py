"""Rules: refusals, and the layouts of the shipped ones."""

import functools
import itertools
import json
import math
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec
from refusals import by_table, refused

from moezoo.config.compose import compose
from moezoo.models import Mixtral, MixtralConfig
from moezoo.parallel.axes import Axes, Role, parameter_table
from moezoo.parallel.rules import Rules, live

MESHES = {
    "single": {},
    "fsdp8": {"fsdp": 8},
    "ep8": {"expert": 8},
    "fsdp2_ep4": {"fsdp": 2, "expert": 4},
    "fsdp4_ep2": {"fsdp": 4, "expert": 2},
    "fsdp2_ep2_cp2": {"fsdp": 2, "expert": 2, "context": 2},
}
DENSE = Axes(Role.WEIGHT, ("layer",), ("embed",), ("heads", "head_dim"))
OUT = Axes(Role.WEIGHT, ("layer",), ("heads", "head_dim"), ("embed",))
EXPERT = Axes(Role.WEIGHT, ("layer", "expert"), ("expert_embed",), ("expert_mlp",))
NORM = Axes(Role.SCALE, (), (), ("norm",))


def sizes(mesh):
    """Return all axes of a mesh with their sizes."""
    return {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1} | MESHES[mesh]


def rules(**changes):
    """Return rules named `mine` that are empty except for `changes`, in which lists may stand for tuples."""
    given: dict[str, Any] = {"name": "mine", "store": {}, "compute": {}, "batch": (), "sequence": ()}
    for name, value in changes.items():
        given[name] = {axis: tuple(axes) for axis, axes in value.items()} if isinstance(value, dict) else tuple(value)
    return Rules(**given)


@functools.cache
def shipped(name):
    """Return shipped rules."""
    return compose(f"rules={name}").rules


@by_table(
    """
    changes => line
    {"store": {"embde": []}} => rules.store.embde ... did you mean 'embed'?
    {"compute": {"exprt": []}} => rules.compute.exprt ... did you mean 'expert'?
    {"store": {"embed": ["fsdb"]}} => rules.store.embed ... 'fsdb' ... did you mean 'fsdp'?
    {"compute": {"expert": ["experts"]}} => rules.compute.expert ... 'experts' ... did you mean 'expert'?
    {"batch": ["zzz"]} => rules.batch ... 'zzz' ... valid: context, data, expert, fsdp, stage, tensor
    {"sequence": ["contxt"]} => rules.sequence ... 'contxt' ... did you mean 'context'?
    {"store": {"embed": ["fsdp", "expert", "fsdp"]}}
        => rules.store.embed=[fsdp, expert, fsdp] ... 'fsdp' twice ... name it once
    {"store": {"layer": ["fsdp"]}} => rules.store.layer=[fsdp] ... store another dimension ... embed
    {"batch": ["data", "data"]} => rules.batch=[data, data] ... 'data' twice ... name it once
    {"batch": ["data", "context"], "sequence": ["context"]}
        => rules.batch and rules.sequence ... 'context' ... leave it in one
    {"store": {"embed": ["tensor"]}, "compute": {"embed": ["tensor"]}}
        => rules.compute.embed ... only expert, heads ... leave it out
    {"store": {"mlp": ["tensor"]}, "compute": {"mlp": ["tensor"]}}
        => rules.compute.expert_mlp=[] ... rules.compute.mlp=[tensor] ... name the same mesh axes
    {"store": {"vocab": ["fsdp"]}, "compute": {"vocab": ["fsdp"]}, "batch": ["data", "fsdp"]}
        => rules.compute.vocab=[fsdp] ... rules.batch ... 'fsdp' ... take 'fsdp' out of rules.batch
    {"store": {"vocab": ["expert"], "expert": ["expert"]}, "compute": {"vocab": ["expert"], "expert": ["expert"]}}
        => rules.compute.vocab=[expert] ... rules.compute.expert=[expert] ... an axis that is not in it
    {"store": {"expert": ["fsdp", "expert"]}, "compute": {"expert": ["expert"]}}
        => rules.compute.expert=[expert] ... rules.store.expert=[fsdp, expert] ... reorder rules.store
    {"compute": {"expert": ["expert"]}}
        => rules.compute.expert=[expert] ... rules.store.expert=[] ... reorder rules.store
    """
)
def test_refuses(changes, line):
    with refused(line):
        rules(**json.loads(changes))


def test_what_stays_split_is_a_prefix_of_what_is_stored():
    """Any other pair would gather blocks that are not adjacent, and silently permute experts."""
    axes = ("expert", "fsdp", "context")
    orders = [order for n in range(4) for order in itertools.permutations(axes, n)]
    for stored, kept in itertools.product(orders, orders):
        changes = {"store": {"expert": stored}, "compute": {"expert": kept}}
        if stored[: len(kept)] != kept:
            with refused("rules.compute.expert", "must come first"):
                rules(**changes)
            continue
        accepted, everywhere = rules(**changes), {"expert": 2, "fsdp": 2, "context": 2}
        placement = accepted.placement(EXPERT, everywhere)
        assert placement.stored[1] == kept + placement.gathered[1]
        # An axis of one device is in neither list.
        fewer = everywhere | {"expert": 1}
        placement = accepted.placement(EXPERT, fewer)
        assert "expert" not in placement.stored[1]
        assert placement.stored[1] == live(kept, fewer) + placement.gathered[1]
        # If experts are gathered completely, no dimension stays split.
        placement = accepted.placement(EXPERT, everywhere, whole=("expert",))
        assert placement.stored[1] == placement.gathered[1] == stored


F, X, C = "fsdp", "expert", "context"


@pytest.mark.parametrize(
    ("name", "mesh", "dense", "experts", "width", "gathered_width"),
    [
        ("fsdp_ep", "single", (), (), (), ()),
        ("fsdp_ep", "fsdp8", (F,), (), (F,), (F,)),
        ("fsdp_ep", "ep8", (X,), (X,), (), ()),
        ("fsdp_ep", "fsdp2_ep4", (F, X), (X,), (F,), (F,)),
        ("fsdp_ep", "fsdp4_ep2", (F, X), (X,), (F,), (F,)),
        ("fsdp_ep", "fsdp2_ep2_cp2", (F, C, X), (X,), (F, C), (F, C)),
        ("pure_fsdp", "single", (), (), (), ()),
        ("pure_fsdp", "fsdp8", (F,), (), (F,), (F,)),
        ("pure_fsdp", "fsdp2_ep4", (F,), (), (F,), (F,)),
    ],
)
def test_shipped_layouts(name, mesh, dense, experts, width, gathered_width):
    """Written by hand: the axes of `embed`, `expert` and `expert_embed`. Only experts are not gathered."""
    layout, size = shipped(name), sizes(mesh)
    assert layout.placement(DENSE, size).spec == PartitionSpec(None, dense or None, None, None)
    assert layout.placement(DENSE, size).gathered == ((), dense, (), ())
    assert layout.placement(OUT, size).spec == PartitionSpec(None, None, None, dense or None)
    assert layout.placement(OUT, size).gathered == ((), (), (), dense)
    assert layout.placement(EXPERT, size).spec == PartitionSpec(None, experts or None, width or None, None)
    assert layout.placement(EXPERT, size).gathered == ((), (), gathered_width, ())
    assert layout.placement(NORM, size).spec == PartitionSpec(None)


def test_buffers_are_stored_whole():
    """Other arrays with the same axis are split."""
    layout = rules(store={"router": ("fsdp",)})
    for role, stored in ((Role.BIAS, (F,)), (Role.BUFFER, ())):
        placement = layout.placement(Axes(role, ("layer",), ("router",), ()), sizes("fsdp8"))
        assert placement.stored == placement.gathered == ((), stored)


def test_nearly_every_parameter_is_split_over_all_devices():
    """At least 99.9% of them under the default rules; only norms are stored whole."""
    config = MixtralConfig(vocab=2048, embed=512, layers=4, heads=8, head_dim=64, expert_mlp=1024)
    table = parameter_table(jax.eval_shape(lambda: Mixtral(config, key=jax.random.key(0))))
    total = sum(math.prod(shape) for _, _, shape in table)
    for mesh in MESHES.keys() - {"single"}:
        split, size = 0, sizes(mesh)
        for _, axes, shape in table:
            placement = shipped("fsdp_ep").placement(axes, size)
            assert placement.local_size(shape) * placement.ways == math.prod(shape)
            assert placement.ways == math.prod(size[axis] for axis in placement.mesh_axes)
            split += math.prod(shape) * (placement.ways == 8)
        assert split / total >= 0.999, mesh


def check(layout, name, axes, shape, size):
    """Check a parameter as an execution does."""
    layout.check_parameter(name, layout.placement(axes, size), shape, size)


def test_two_dimensions_on_one_mesh_axis_are_refused():
    layout = rules(store={"embed": ("fsdp",), "heads": ("fsdp",)})
    with refused(
        "rules mine", ".attention.query", "'embed' and 'heads'", "'fsdp'", "rules.store.embed", "rules.store.heads"
    ):
        check(layout, ".attention.query", DENSE, (2, 8, 4, 4), sizes("fsdp8"))
    check(layout, ".attention.query", DENSE, (2, 8, 4, 4), sizes("ep8"))  # one device along fsdp: no conflict


def test_a_size_that_does_not_divide_is_refused():
    layout = shipped("fsdp_ep")
    with refused("mesh.expert=8", "'expert' 8 ways", "model.experts=6 (.up)", "expert divides 6"):
        check(layout, ".up", EXPERT, (2, 6, 16, 16), sizes("ep8"))
    with refused("mesh.fsdp=2 mesh.expert=4", "'embed' 8 ways", "model.embed=12 (.key)", "fsdp x expert divides 12"):
        check(layout, ".key", DENSE, (2, 12, 4, 4), sizes("fsdp2_ep4"))
    check(layout, ".key", DENSE, (2, 16, 4, 4), sizes("fsdp2_ep4"))


def test_equal_rules_hash_alike():
    """jit compares executions, and so rules, to find a compiled step."""
    one = rules(store={"embed": ("fsdp",), "expert": ("expert",)})
    other = rules(store={"expert": ("expert",), "embed": ("fsdp",)})
    assert one == other
    assert hash(one) == hash(other)
    assert rules(store={"embed": ("fsdp",)}) != one


def test_named_axes():
    named = rules(store={"embed": ("fsdp",)}, batch=("data",), sequence=("context",)).mesh_axes
    assert named == {"fsdp", "data", "context"}


@pytest.mark.parametrize(
    ("heads", "stored", "taken"),
    [(8, ("tensor",), ()), (4, ("tensor",), ()), (2, (), ("tensor",)), (1, (), ("tensor",))],
)
def test_key_value_heads_that_are_fewer_than_devices_are_stored_whole(heads, stored, taken):
    axes, shape = Axes(Role.WEIGHT, ("layer",), ("embed",), ("kv_heads", "head_dim")), (2, 16, heads, 6)
    layout, size = shipped("tensor"), sizes("fsdp8") | {"fsdp": 2, "tensor": 4}
    placement = layout.placement(axes, size, shared=layout.shared(axes, shape, size))
    layout.check_parameter("key", placement, shape, size)
    assert placement.stored == ((), ("fsdp",), stored, ())
    assert placement.gathered == ((), ("fsdp",), (), ())
    assert placement.taken == ((), (), taken, ())
    assert placement.ways == (8 if stored else 2)


@pytest.mark.parametrize("heads", [3, 6])
def test_key_value_heads_that_fit_neither_way_are_refused(heads):
    axes, shape = Axes(Role.BIAS, (), ("kv_heads", "head_dim"), ()), (heads, 6)
    layout, size = shipped("tensor"), sizes("fsdp8") | {"tensor": 4}
    with refused("mesh.tensor=4", f"model.kv_heads={heads}", "key_bias", f"divides {heads} or is a multiple of it"):
        placement = layout.placement(axes, size, shared=layout.shared(axes, shape, size))
        layout.check_parameter("key_bias", placement, shape, size)
