"""`Execution`: what it refuses, what its properties say of a mesh, and what each `remat` keeps."""

import re
from typing import get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array

from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.kernels.grouped_matmul import grouped_matmul
from moezoo.moe.dispatch import Ring
from moezoo.nn.linear import project
from moezoo.parallel.axes import Buffer, Weight
from moezoo.parallel.collectives import GATHERED_TOKENS, varying_axes
from moezoo.parallel.execution import Execution, Remat
from moezoo.parallel.mesh import MeshShape, make_mesh
from moezoo.parallel.rules import Rules

FSDP_EP = compose("rules=fsdp_ep").rules


def refuses(said, **options):
    """`Execution` raises exactly this line."""
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        Execution(**options)


def test_the_default_is_one_device():
    execution = Execution()
    assert execution.live_axes == execution.token_axes == ()
    assert execution.tokens_spec == PartitionSpec(None, None)
    group = execution.expert_group(8)
    assert (group.axes, group.size, group.num_local, group.index()) == ((), 1, 8, 0)
    assert execution.dtype == jnp.float32
    assert execution.dispatch is None


def test_equal_executions_share_a_compiled_step():
    assert Execution(dispatch=Ring(), dtype="bfloat16") == Execution(dispatch=Ring(), dtype=jnp.bfloat16)
    assert hash(Execution(dispatch=Ring())) == hash(Execution(dispatch=Ring()))


def test_an_axis_that_no_rule_names():
    refuses(
        "mesh.tensor=2 but rules fsdp_ep name no axis 'tensor', so its 2 devices would all do the same; "
        "set mesh.tensor=1 or name it in the rules",
        mesh=make_mesh(MeshShape(fsdp=2, tensor=2)),
        rules=FSDP_EP,
    )


@pytest.mark.parametrize("other", ["ring", Ring])
def test_dispatch_is_a_value(other):
    execution = Execution()
    object.__setattr__(execution, "dispatch", other)  # under the type checker of these tests its complaint comes first
    said = f"dispatch={other!r} is not a strategy; give a value such as moezoo.moe.dispatch.Ring(), or take the "
    said += "execution from moezoo.execution(cfg), which knows strategies by name"
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        execution.__post_init__()


def test_tokens_split_over_some_of_the_expert_axes():
    store = {"expert": ("expert", "context")}
    rules = Rules("mine", store, store, ("fsdp", "expert"), ())
    refuses(
        "rules mine: rules.compute.expert=[expert, context] and tokens are split over only some of them; "
        "name all of them in rules.batch and rules.sequence, or none",
        mesh=make_mesh(MeshShape(expert=2, context=2)),
        rules=rules,
    )
    Execution(mesh=make_mesh(MeshShape(expert=2)), rules=rules)  # the other axis has one device
    for batch, sequence in (((), ()), (("expert",), ("context",)), (("context", "expert"), ())):
        rules = Rules("mine", store, store, batch, sequence)
        Execution(mesh=make_mesh(MeshShape(expert=2, context=2)), rules=rules)


def test_axes_of_one_device_are_nowhere():
    execution = Execution(mesh=make_mesh(MeshShape(fsdp=2, context=4)), rules=FSDP_EP)
    assert execution.live_axes == ("fsdp", "context")
    assert (execution.batch_axes, execution.sequence_axes) == (("fsdp",), ("context",))
    assert execution.tokens_spec == PartitionSpec(("fsdp",), ("context",))
    assert execution.expert_group(8).axes == ()
    execution = Execution(mesh=make_mesh(MeshShape(fsdp=2, expert=4)), rules=FSDP_EP)
    assert execution.token_axes == ("fsdp", "expert")
    assert execution.ways(execution.token_axes) == 8
    assert (execution.expert_group(8).axes, execution.expert_group(8).num_local) == (("expert",), 2)


class Layer(eqx.Module):
    """Two weights that are gathered, one that is whole, and a buffer."""

    experts: Weight[Array, "expert, expert_embed -> expert_mlp"]
    dense: Weight[Array, "embed -> mlp"]
    whole: Weight[Array, "mlp -> head_dim"]
    buffer: Buffer[Array, "router"]


def layer(dtype=jnp.float32):
    """Sizes that a mesh of 4 along fsdp divides."""
    return Layer(jnp.ones((2, 8, 8), dtype), jnp.ones((8, 6), dtype), jnp.ones((6, 8), dtype), jnp.ones(2))


def on_mesh(function, execution, *specs):
    """`function` of a layer and more, in the layout of `execution`."""
    return jax.shard_map(
        function, mesh=execution.mesh, in_specs=(execution.specs(layer()), *specs), out_specs=PartitionSpec("fsdp")
    )


def test_whole_casts_weights_and_never_buffers():
    execution = Execution(mesh=make_mesh(MeshShape(fsdp=4)), rules=FSDP_EP, dtype="bfloat16")

    def local(stored):
        assert stored.experts.shape == (2, 2, 8)
        whole = execution.whole(stored)
        assert (whole.experts.shape, whole.experts.dtype) == ((2, 8, 8), jnp.bfloat16)
        assert whole.whole.dtype == jnp.bfloat16
        assert whole.buffer.dtype == jnp.float32
        assert {varying_axes(x) for x in jax.tree.leaves(execution.vary_parameters(stored))} == {frozenset({"fsdp"})}
        return whole.experts

    assert jax.eval_shape(on_mesh(local, execution), layer()).shape == (8, 8, 8)


def test_specs_refuse_what_the_rules_cannot_lay_out():
    execution = Execution(mesh=make_mesh(MeshShape(fsdp=4)), rules=FSDP_EP)
    assert execution.specs(layer()).experts == PartitionSpec(None, ("fsdp",), None)
    said = "mesh.fsdp=4 splits 'expert_embed' 4 ways but model.embed=6 (.experts); choose a mesh whose fsdp divides 6"
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        execution.specs(eqx.tree_at(lambda x: x.experts, layer(), jnp.ones((2, 6, 8))))


def operations(remat):
    """How often one layer's forward and backward pass does what it could keep instead."""
    execution = Execution(mesh=make_mesh(MeshShape(fsdp=4)), rules=FSDP_EP, remat=remat)

    @execution.checkpoint
    def body(x, stored):
        whole = execution.whole(stored)
        tokens = checkpoint_name(lax.all_gather(x, "fsdp", tiled=True), GATHERED_TOKENS)
        sizes = jnp.asarray((3, 5), jnp.int32)
        y = grouped_matmul(tokens, whole.experts, sizes, implementation="ragged_dot")
        y = project(jnp.tanh(project(y, whole.dense)), whole.whole)
        return lax.psum_scatter(y, "fsdp", tiled=True)

    def local(stored, x):
        return jax.grad(lambda *arguments: body(*arguments).sum(), argnums=(1, 0))(x, stored)

    layout = PartitionSpec("fsdp")
    step = jax.shard_map(
        local,
        mesh=execution.mesh,
        in_specs=(execution.specs(layer()), layout),
        out_specs=(execution.specs(layer()), layout),
    )
    program = str(jax.make_jaxpr(step)(layer(), jnp.ones((8, 8))))
    counts = {
        "gathered weights": r"f32\[(?:2,8,8|8,6)\]\S* = all_gather\[",
        "gathered tokens": r"f32\[8,8\]\S* = all_gather\[",
        "grouped": r"= ragged_dot_general\[",
        "dot": r"= dot_general\[",
        "tanh": r"= tanh ",
    }
    return {name: len(re.findall(pattern, program)) for name, pattern in counts.items()}


# Two weights: four gathers are one forward and one again each. The transpose of the reduce-scatter at the end gathers
# tokens' gradients. Of four grouped products one is the forward one again, and of seven others the first is.
EXPECTED: dict[Remat, dict[str, int]] = {
    "full": {"gathered weights": 4, "gathered tokens": 3, "grouped": 4, "dot": 7, "tanh": 2},
    "offload": {"gathered weights": 4, "gathered tokens": 3, "grouped": 4, "dot": 7, "tanh": 2},
    "dots": {"gathered weights": 4, "gathered tokens": 3, "grouped": 3, "dot": 6, "tanh": 2},
    "none": {"gathered weights": 4, "gathered tokens": 2, "grouped": 3, "dot": 6, "tanh": 1},
}


@pytest.mark.parametrize("remat", get_args(Remat))
def test_what_remat_keeps(remat):
    """Gathered weights are kept under no policy: whole weights of all layers at once are what FSDP exists to avoid."""
    assert operations(remat) == EXPECTED[remat]
