"""A blueprint describes the model that it makes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from refusals import refused

import moezoo
from moezoo.config.build import blueprint_of
from moezoo.models import MixtralConfig
from moezoo.models.blueprint import Blueprint
from moezoo.nn.containers import store

TINY = MixtralConfig(vocab=8, embed=8, layers=1, heads=1, kv_heads=1, head_dim=4, expert_mlp=4, experts=4)
EXPERTS = ".stacks[0].blocks[0].feed_forward.experts."


def described(model):
    """Return the shape and dtype of each array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}


def stored(model):
    return store(model, lambda path: path.startswith(EXPERTS))


def test_shapes_are_those_of_the_model():
    """Also of one whose experts are stored in containers; they are made once."""
    plain = Blueprint(TINY, "bfloat16")
    for plan in (plain, dataclasses.replace(plain, change=stored)):
        model = jax.jit(plan.make)(jax.random.key(0))
        assert described(plan.shapes) == described(model)
        assert jax.tree.structure(plan.shapes) == jax.tree.structure(model)
        assert model.embedding.weight.dtype == jnp.bfloat16
        assert plan.shapes is plan.shapes
        assert (EXPERTS + "gate" in described(model)) == (plan is plain)


def test_the_mask_is_of_the_shapes():
    plan = Blueprint(TINY, change=stored)
    everything = described(jax.tree.map(lambda x, leaf: leaf if x else None, plan.mask, plan.shapes))
    assert everything.keys() == {path for path in described(plan.shapes) if not path.startswith(EXPERTS)}
    one = dataclasses.replace(plan, trained=lambda path: path == ".embedding.weight")
    assert sum(jax.tree.leaves(one.mask)) == 1
    assert one.mask.embedding.weight
    with refused("trained chooses no parameter"):
        _ = dataclasses.replace(plan, trained=lambda path: False).mask


def test_that_of_a_configuration():
    """It has the dtype of the parameters, and makes what `build_model` makes."""
    cfg = moezoo.compose("model=mixtral", "execution.param_dtype=bfloat16")
    plan = blueprint_of(dataclasses.replace(cfg, model=TINY))
    assert plan == Blueprint(TINY, "bfloat16")
    found, wanted = plan.make(jax.random.key(3)), moezoo.build_model(TINY, key=jax.random.key(3), dtype="bfloat16")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
