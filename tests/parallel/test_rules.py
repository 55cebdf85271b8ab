"""Rules as data: every line they refuse with, and the layouts that the shipped ones give."""

import itertools
import math
import re

import jax
import pytest
from jax.sharding import PartitionSpec

from moezoo.config.compose import compose
from moezoo.errors import UserError
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
    """All axes of a mesh, as `Execution` knows them."""
    return {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1} | MESHES[mesh]


def rules(**changes):
    """Rules named `mine` that say nothing but `changes`."""
    empty = {"name": "mine", "store": {}, "compute": {}, "batch": (), "sequence": ()}
    return Rules(**(empty | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"store": {"embde": ()}}, "rules.store.embde: no such logical axis; did you mean 'embed'?"),
        ({"compute": {"exprt": ()}}, "rules.compute.exprt: no such logical axis; did you mean 'expert'?"),
        (
            {"store": {"embed": ("fsdb",)}},
            "rules.store.embed names mesh axis 'fsdb', which does not exist; did you mean 'fsdp'?",
        ),
        (
            {"compute": {"expert": ("experts",)}},
            "rules.compute.expert names mesh axis 'experts', which does not exist; did you mean 'expert'?",
        ),
        (
            {"batch": ("zzz",)},
            "rules.batch names mesh axis 'zzz', which does not exist; valid: context, data, expert, fsdp, tensor",
        ),
        (
            {"sequence": ("contxt",)},
            "rules.sequence names mesh axis 'contxt', which does not exist; did you mean 'context'?",
        ),
        (
            {"store": {"embed": ("fsdp", "expert", "fsdp")}},
            "rules.store.embed=[fsdp, expert, fsdp] names mesh axis 'fsdp' twice; name it once",
        ),
        (
            {"store": {"layer": ("fsdp",)}},
            "rules.store.layer=[fsdp]: layers run one after the other on every device and are stored whole; store "
            "another dimension over these axes, such as embed",
        ),
        ({"batch": ("data", "data")}, "rules.batch=[data, data] names mesh axis 'data' twice; name it once"),
        (
            {"batch": ("data", "context"), "sequence": ("context",)},
            "rules.batch and rules.sequence both name mesh axis 'context'; leave it in one of them",
        ),
        (
            {"store": {"mlp": ("tensor",)}, "compute": {"mlp": ("tensor",)}},
            "rules.compute.mlp: only expert can stay split while computing; leave it out",
        ),
        (
            {"store": {"expert": ("fsdp", "expert")}, "compute": {"expert": ("expert",)}},
            "rules.compute.expert=[expert] must come first in rules.store.expert=[fsdp, expert]; "
            "reorder rules.store so that what stays split is on the left",
        ),
        (
            {"compute": {"expert": ("expert",)}},
            "rules.compute.expert=[expert] must come first in rules.store.expert=[]; "
            "reorder rules.store so that what stays split is on the left",
        ),
    ],
)
def test_refuses(changes, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        rules(**changes)


def test_what_stays_split_is_a_prefix_of_what_is_stored():
    """Any other pair would gather blocks that do not lie side by side: experts silently permuted."""
    axes = ("expert", "fsdp", "context")
    orders = [order for n in range(4) for order in itertools.permutations(axes, n)]
    for stored, kept in itertools.product(orders, orders):
        changes = {"store": {"expert": stored}, "compute": {"expert": kept}}
        if stored[: len(kept)] != kept:
            with pytest.raises(UserError, match="must come first"):
                rules(**changes)
            continue
        accepted, everywhere = rules(**changes), {"expert": 2, "fsdp": 2, "context": 2}
        placement = accepted.placement(EXPERT, everywhere)
        assert placement.stored[1] == kept + placement.gathered[1]
        # An axis of one device is in neither.
        fewer = everywhere | {"expert": 1}
        placement = accepted.placement(EXPERT, fewer)
        assert "expert" not in placement.stored[1]
        assert placement.stored[1] == live(kept, fewer) + placement.gathered[1]
        # Where experts are wanted whole, nothing of them stays split.
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
    """By hand: where `embed`, `expert` and `expert_embed` are stored; experts stay, all else is gathered."""
    layout, size = compose(f"rules={name}").rules, sizes(mesh)
    assert layout.placement(DENSE, size).spec == PartitionSpec(None, dense or None, None, None)
    assert layout.placement(DENSE, size).gathered == ((), dense, (), ())
    assert layout.placement(OUT, size).spec == PartitionSpec(None, None, None, dense or None)
    assert layout.placement(OUT, size).gathered == ((), (), (), dense)
    assert layout.placement(EXPERT, size).spec == PartitionSpec(None, experts or None, width or None, None)
    assert layout.placement(EXPERT, size).gathered == ((), (), gathered_width, ())
    assert layout.placement(NORM, size).spec == PartitionSpec(None)


@pytest.mark.parametrize("mesh", ["ep8", "fsdp2_ep4", "fsdp4_ep2", "fsdp8", "fsdp2_ep2_cp2"])
def test_nearly_every_parameter_is_split_over_all_devices(mesh):
    """At least 99.9% under the default rules: norms alone are whole everywhere."""
    config = MixtralConfig(vocab=2048, embed=512, layers=4, heads=8, head_dim=64, expert_mlp=1024)
    model = jax.eval_shape(lambda: Mixtral(config, key=jax.random.key(0)))
    layout, size = compose("rules=fsdp_ep").rules, sizes(mesh)
    split = total = 0
    for _, axes, shape in parameter_table(model):
        placement = layout.placement(axes, size)
        assert placement.local_size(shape) * placement.ways == math.prod(shape)
        assert placement.ways == math.prod(size[axis] for axis in placement.mesh_axes)
        total += math.prod(shape)
        split += math.prod(shape) * (placement.ways == 8)
    assert split / total >= 0.999


def check(layout, name, axes, shape, size):
    """As an execution does it."""
    layout.check_parameter(name, layout.placement(axes, size), shape, size)


def test_two_dimensions_on_one_mesh_axis_are_refused():
    layout = rules(store={"embed": ("fsdp",), "heads": ("fsdp",)})
    said = (
        "rules mine: parameter .attention.query has logical axes 'embed' and 'heads' both stored over mesh axis "
        "'fsdp'; take it from rules.store.embed or rules.store.heads"
    )
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        check(layout, ".attention.query", DENSE, (2, 8, 4, 4), sizes("fsdp8"))
    check(layout, ".attention.query", DENSE, (2, 8, 4, 4), sizes("ep8"))  # one device along fsdp: no conflict


def test_a_size_that_does_not_divide_is_refused():
    layout = compose("rules=fsdp_ep").rules
    said = "mesh.expert=8 splits 'expert' 8 ways but model.experts=6 (.up); choose a mesh whose expert divides 6"
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        check(layout, ".up", EXPERT, (2, 6, 16, 16), sizes("ep8"))
    said = (
        "mesh.fsdp=2 mesh.expert=4 splits 'embed' 8 ways but model.embed=12 (.key); "
        "choose a mesh whose fsdp x expert divides 12"
    )
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        check(layout, ".key", DENSE, (2, 12, 4, 4), sizes("fsdp2_ep4"))
    check(layout, ".key", DENSE, (2, 16, 4, 4), sizes("fsdp2_ep4"))


def test_equal_rules_hash_alike():
    """A layout is part of the key under which a compiled step is found again."""
    one = rules(store={"embed": ("fsdp",), "expert": ("expert",)})
    other = rules(store={"expert": ("expert",), "embed": ("fsdp",)})
    assert one == other
    assert hash(one) == hash(other)
    assert rules(store={"embed": ("fsdp",)}) != one


def test_named_axes():
    assert rules(store={"embed": ("fsdp",)}, batch=("data",), sequence=("context",)).mesh_axes == {
        "fsdp",
        "data",
        "context",
    }
