"""`Execution`: refusals, what follows for its mesh, and what each `remat` keeps."""

import dataclasses
from collections import Counter
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array
from refusals import refused

from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.kernels.grouped_matmul import grouped_matmul
from moezoo.moe.dispatch import Gather, Ring
from moezoo.nn.linear import project
from moezoo.parallel.axes import Buffer, Weight
from moezoo.parallel.collectives import GATHERED_TOKENS, varying_axes
from moezoo.parallel.execution import Execution, Remat
from moezoo.parallel.mesh import MeshShape, make_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.rules import Rules
from moezoo.parallel.traces import equations
from moezoo.parallel.weight_mover import WeightMover

FSDP_EP = compose("rules=fsdp_ep").rules


def test_the_default_is_one_device():
    execution = on_mesh(Execution())
    assert execution.live_axes == execution.token_axes == ()
    assert execution.tokens_spec == PartitionSpec(None, None)
    group = execution.expert_group(8)
    assert (group.axes, group.size, group.num_local, group.index()) == ((), 1, 8, 0)
    assert execution.dtype == jnp.float32
    assert execution.dispatch is None


def test_equal_executions_share_a_compiled_step():
    assert Execution(dispatch=Ring(), dtype="bfloat16") == Execution(dispatch=Ring(), dtype=jnp.bfloat16)
    assert hash(Execution(dispatch=Ring())) == hash(Execution(dispatch=Ring()))


def test_what_users_make_needs_no_mesh():
    """Sizes, axes, groups and placements are members of another value, which has the same settings."""
    execution = build_execution(compose("mesh=fsdp2_ep4", "execution.remat=dots", "execution.dtype=bfloat16"))
    assert type(execution) is Execution
    fields = {field.name for field in dataclasses.fields(Execution)}
    others = {name for name in vars(Execution) if not name.startswith("_")} - fields
    assert others == {"in_turn", "exact", "keep", "strategy", "moves_weights", "checkpoint"}
    there = on_mesh(execution)
    assert on_mesh(there) is there
    assert {name: getattr(there, name) for name in fields} == {name: getattr(execution, name) for name in fields}


def test_an_axis_that_no_rule_names():
    with refused("mesh.tensor=2", "rules fsdp_ep", "'tensor'", "set mesh.tensor=1"):
        Execution(mesh=make_mesh(MeshShape(fsdp=2, tensor=2)), rules=FSDP_EP)


def test_tokens_split_over_some_of_the_expert_axes():
    store = {"expert": ("expert", "context")}
    rules = Rules("mine", store, store, ("fsdp", "expert"), ())
    parts = ["[expert, context] (rules.compute.expert)", "over [expert]", "not over [context]", "name all"]
    with refused("rules mine", *parts, "rules.batch", "rules.sequence"):
        Execution(mesh=make_mesh(MeshShape(expert=2, context=2)), rules=rules)
    Execution(mesh=make_mesh(MeshShape(expert=2)), rules=rules)  # the other axis has one device
    for batch, sequence in (((), ()), (("expert",), ("context",)), (("context", "expert"), ())):
        rules = Rules("mine", store, store, batch, sequence)
        Execution(mesh=make_mesh(MeshShape(expert=2, context=2)), rules=rules)


def test_a_strategy_without_an_axis_along_which_tokens_could_move():
    """Rules under which no device keeps other experts, on a mesh whose axis `expert` says that they should."""
    rules = Rules("mine", {"embed": ("fsdp", "expert"), "expert_embed": ("fsdp",)}, {}, ("fsdp", "expert"), ())
    mesh = make_mesh(MeshShape(fsdp=2, expert=4))
    parts = ["rules mine", "rules.compute.expert=[]", "Ring moves tokens", "rules.compute.expert=[expert]"]
    with refused("mesh.expert=4", *parts, "dispatch=gather"):
        Execution(mesh=mesh, rules=rules, dispatch=Ring())
    Execution(mesh=mesh, rules=rules, dispatch=Gather())
    Execution(mesh=mesh, rules=rules)
    Execution(mesh=make_mesh(MeshShape(fsdp=8)), rules=rules, dispatch=Ring())  # no such axis: tokens stay


def test_axes_of_one_device_are_omitted():
    execution = on_mesh(Execution(mesh=make_mesh(MeshShape(fsdp=2, context=4)), rules=FSDP_EP))
    assert execution.live_axes == ("fsdp", "context")
    assert (execution.batch_axes, execution.sequence_axes) == (("fsdp",), ("context",))
    assert execution.tokens_spec == PartitionSpec(("fsdp",), ("context",))
    assert execution.expert_group(8).axes == ()
    execution = on_mesh(Execution(mesh=make_mesh(MeshShape(fsdp=2, expert=4)), rules=FSDP_EP))
    assert execution.token_axes == ("fsdp", "expert")
    assert execution.ways(execution.token_axes) == 8
    assert (execution.expert_group(8).axes, execution.expert_group(8).num_local) == (("expert",), 2)


class Layer(eqx.Module):
    """Two weights that are gathered, one that is stored whole, and a buffer."""

    experts: Weight[Array, "expert, expert_embed -> expert_mlp"]
    dense: Weight[Array, "embed -> mlp"]
    whole: Weight[Array, "mlp -> head_dim"]
    buffer: Buffer[Array, "router"]


def layer(dtype=jnp.float32):
    """Return a layer whose sizes divide by 4 devices along fsdp."""
    return Layer(jnp.ones((2, 8, 8), dtype), jnp.ones((8, 6), dtype), jnp.ones((6, 8), dtype), jnp.ones(2))


def mapped(function, execution, *specs):
    """Map `function` of a layer and more arguments, in the layout of `execution`."""
    return jax.shard_map(
        function, mesh=execution.mesh, in_specs=(execution.specs(layer()), *specs), out_specs=PartitionSpec("fsdp")
    )


def test_gather_weights_casts_weights_and_never_buffers():
    execution = on_mesh(Execution(mesh=make_mesh(MeshShape(fsdp=4)), rules=FSDP_EP, dtype="bfloat16"))

    def local(stored):
        assert stored.experts.shape == (2, 2, 8)
        whole = WeightMover(execution).gather(stored)
        assert (whole.experts.shape, whole.experts.dtype) == ((2, 8, 8), jnp.bfloat16)
        assert whole.whole.dtype == jnp.bfloat16
        assert whole.buffer.dtype == jnp.float32
        assert {varying_axes(x) for x in jax.tree.leaves(WeightMover(execution).vary(stored))} == {frozenset({"fsdp"})}
        return whole.experts.materialise("bfloat16")

    assert jax.eval_shape(mapped(local, execution), layer()).shape == (8, 8, 8)


def test_specs_refuse_what_the_rules_cannot_lay_out():
    execution = on_mesh(Execution(mesh=make_mesh(MeshShape(fsdp=4)), rules=FSDP_EP))
    assert execution.specs(layer()).experts == PartitionSpec(None, ("fsdp",), None)
    with refused("mesh.fsdp=4", "'expert_embed' 4 ways", "model.embed=6 (.experts)", "fsdp divides 6"):
        execution.specs(eqx.tree_at(lambda x: x.experts, layer(), jnp.ones((2, 6, 8))))


def operations(remat):
    """Count what a layer's forward and backward pass computes, and could keep instead."""
    execution = on_mesh(Execution(mesh=make_mesh(MeshShape(fsdp=4)), rules=FSDP_EP, remat=remat))

    @execution.checkpoint
    def body(x, stored):
        whole = WeightMover(execution).gather(stored)
        tokens = checkpoint_name(lax.all_gather(x, "fsdp", tiled=True), GATHERED_TOKENS)
        sizes = jnp.asarray((3, 5), jnp.int32)
        y = grouped_matmul(tokens, whole.experts, sizes, implementation="ragged_dot")
        y = project(jnp.tanh(project(y, whole.dense)), whole.whole)
        return lax.psum_scatter(y, "fsdp", tiled=True)

    def local(stored, x):
        value, gradients = jax.value_and_grad(lambda *arguments: body(*arguments).sum(), argnums=(1, 0))(x, stored)
        return value[None], gradients

    layout = PartitionSpec("fsdp")
    step = jax.shard_map(
        local,
        mesh=execution.mesh,
        in_specs=(execution.specs(layer()), layout),
        out_specs=(layout, (execution.specs(layer()), layout)),
    )
    names = {
        ("all_gather", (8, 2, 8)): "gathered weights",  # the gathered dimension comes first
        ("all_gather", (8, 6)): "gathered weights",
        ("all_gather", (8, 8)): "gathered tokens",
    }
    counted = {"ragged_dot_general": "grouped", "dot_general": "dot", "tanh": "tanh"}
    found: list[Any] = [equation for equation, *_ in equations(jax.make_jaxpr(step)(layer(), jnp.ones((8, 8))))]
    kinds = [(e.primitive.name, e.outvars[0].aval.shape) for e in found]
    return Counter(names.get(kind, counted.get(kind[0], "")) for kind in kinds) - Counter({"": len(kinds)})


# Each of two weights is gathered twice: forward and recomputed. The transpose of the reduce-scatter at the end gathers
# the gradients of tokens. One of the grouped products and one of the others are recomputed.
EXPECTED: dict[Remat, dict[str, int]] = {
    "full": {"gathered weights": 4, "gathered tokens": 3, "grouped": 4, "dot": 7, "tanh": 2},
    "offload": {"gathered weights": 4, "gathered tokens": 3, "grouped": 4, "dot": 7, "tanh": 2},
    "dots": {"gathered weights": 4, "gathered tokens": 3, "grouped": 3, "dot": 6, "tanh": 2},
    "none": {"gathered weights": 4, "gathered tokens": 2, "grouped": 3, "dot": 6, "tanh": 1},
}


@pytest.mark.parametrize("remat", get_args(Remat))
def test_what_remat_keeps(remat):
    """No policy keeps gathered weights: FSDP exists so that a device never holds all layers' whole weights."""
    assert operations(remat) == EXPECTED[remat]
