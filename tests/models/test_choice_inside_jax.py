"""`dispatch=auto` inside the user's own `jit` and `grad`, on axes of both types: only sizes are read, none is kept."""

import contextlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import moezoo
from moezoo.models import choice
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import Ragged
from moezoo.parallel.mesh_execution import on_mesh

SIZES = ("model=mixtral", "model.layers=1", "model.embed=16", "model.expert_mlp=32", "model.vocab=32", "model.heads=2")
SIZES += ("model.kv_heads=2", "model.head_dim=4", "model.experts_per_token=6", "mesh=ep8")


@pytest.mark.parametrize(("types", "ambient"), [("auto", "no mesh"), ("auto", "its mesh"), ("explicit", "its mesh")])
def test_a_call_inside_jit_and_grad_runs_what_it_runs_outside(types, ambient):
    cfg = moezoo.compose(*SIZES, f"mesh.axis_types={types}", "dispatch=auto")
    execution = on_mesh(moezoo.execution(cfg))
    model = moezoo.place(moezoo.build_model(cfg.model, key=jax.random.key(0)), execution)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (8, 24)), jnp.int32)
    choice._traffic.cache_clear()

    def loss(model, execution):
        key = tuple(choice.expert_layer(model.stacks, 8, 24, "evaluate"))
        assert any(isinstance(x, Tracer) for x in jax.tree.leaves(model))
        assert not any(isinstance(x, Tracer) for x in jax.tree.leaves(key))
        return (model(tokens, execution=execution).logits ** 2).mean()

    mesh: Any = execution.mesh
    there = jax.set_mesh(mesh) if ambient == "its mesh" else contextlib.nullcontext()
    with there:
        value, gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, execution)
        misses = choice._traffic.cache_info().misses
        assert misses == 3  # one trace per candidate
        named = choice.choose_dispatch(model.stacks, 8, 24, execution, "evaluate")
        assert choice._traffic.cache_info().misses == misses
        wanted, by_named = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, named)
    assert named.dispatch == Ragged()
    np.testing.assert_array_equal(value, wanted)
    jax.tree.map(np.testing.assert_array_equal, gradients, by_named)


def test_a_change_of_anything_that_traffic_depends_on_is_traced_anew():
    """The tokens, the call, what is trained, the dtypes and what layers keep; comparing twice gives the same bytes."""
    model = Blueprint(moezoo.compose(*SIZES).model).shapes
    frozen = jax.tree.map(lambda _: False, model)
    head = eqx.tree_at(lambda m: m.unembedding.weight, frozen, True)
    embedding = eqx.tree_at(lambda m: m.embedding.weight, frozen, True)
    training = set()
    for words in ((), ("execution.dtype=bfloat16",), ("execution.remat=none",)):
        execution = on_mesh(moezoo.execution(moezoo.compose(*SIZES, "dispatch=auto", *words)))
        calls = {
            "whole": ("train", 8, None),
            "twice the rows": ("train", 16, None),
            "embedding": ("train", 8, embedding),
            "head": ("train", 8, head),
            "evaluate": ("evaluate", 8, None),
        }
        found, again = (
            {
                name: choice.compare_strategies(model.stacks, rows, 24, execution, call, trained)
                for name, (call, rows, trained) in calls.items()
            }
            for _ in range(2)
        )
        assert found == again
        assert found["head"].bytes == found.pop("evaluate").bytes  # no backward pass reaches the layer
        assert len({tuple(each.bytes.values()) for each in found.values()}) == 4
        training.add(tuple(found["whole"].bytes.values()))
    assert len(training) == 3
