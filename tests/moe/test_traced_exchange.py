"""The collectives of an MoE layer of released models in a forward pass on eight expert devices, by its trace."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from contexts import context_of
from programs import count_collectives

import moezoo
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import STRATEGIES
from moezoo.moe.mixture import MoE
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import equations
from moezoo.parallel.weight_mover import WeightMover

OVER = ("expert",)
EXCHANGED = {
    "capacity": {("all_to_all", OVER): 2},
    # Counts of rows, rows, and results.
    "ragged": {("all_gather", OVER): 1, ("ragged_all_to_all", OVER): 2},
    # Tokens and routing; sums.
    "ring": {("all_gather", OVER): 2, ("reduce_scatter", OVER): 1},
    "gather": {("all_gather", OVER): 3},
    "dense": {("all_gather", OVER): 3},
}


# A shared expert and grouped routing, and each other preset once.
CASES = [("deepseek_v3", name) for name in STRATEGIES]
CASES += [
    ("mixtral_8x7b", "ring"),
    ("mixtral_8x22b", "capacity"),
    ("qwen3_235b_a22b", "gather"),
    ("olmoe_1b_7b", "ragged"),
]


@pytest.mark.parametrize(("preset", "strategy"), CASES)
def test_a_layer_exchanges_this_and_no_more(preset, strategy):
    assert strategy in EXCHANGED, f"add the collectives of {strategy} to EXCHANGED"
    cfg = moezoo.compose(f"model={preset}", "mesh=ep8")
    execution = on_mesh(moezoo.Execution(moezoo.make_mesh(cfg.mesh), cfg.rules, STRATEGIES[strategy]()))
    # Tokens are split over the expert axis too, and experts stay where they are stored.
    assert "expert" in execution.batch_axes
    assert execution.expert_group(cfg.model.experts).axes == OVER
    stack = Blueprint(cfg.model).shapes.stacks[-1]
    moe = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack.blocks[0].feed_forward)
    x = jax.ShapeDtypeStruct((8, 256, cfg.model.embed), jnp.float32)
    valid = jax.ShapeDtypeStruct((8, 256), jnp.bool)

    def local(moe, x, valid):
        return MoE(moe.router, WeightMover(execution).gather(moe.experts))(x, context_of(valid), execution)[0]

    rules, split = execution.rules, execution.tokens_spec
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), moe)
    kept = jax.sharding.PartitionSpec(rules.compute["expert"])
    experts = jax.tree.map(lambda _: kept, moe.experts)
    specs = type(moe)(specs.router, experts)
    layer = jax.shard_map(local, mesh=execution.mesh, in_specs=(specs, split, split), out_specs=split)
    program = jax.make_jaxpr(layer)(moe, x, valid)
    assert count_collectives(program) == Counter(EXCHANGED[strategy])
    # Unless weights move, no device holds weights of experts that it does not store.
    weights = moe.experts.gate.size
    largest = max(getattr(v.aval, "size", 0) for e in equations(program, "tpu") for v in e.equation.outvars)
    if STRATEGIES[strategy].moves == "tokens":
        assert largest < max(weights, 8 * x.size)
