"""A blueprint describes the model that it makes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import moezoo
from moezoo.config.build import blueprint_of
from moezoo.models import MixtralConfig
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import Auto
from moezoo.nn.containers import store
from moezoo.nn.linear import draws_numbers, normal
from moezoo.tools.cost import communication
from moezoo.tools.sharding.describe import describe
from moezoo.training.build import build_state, build_step

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


def test_shapes_are_found_without_drawing(monkeypatch):
    """And a function that was traced for shapes draws numbers afterwards."""
    draw = jax.jit(lambda key: normal(key, (3,), 1.0, jnp.dtype("float32")))
    with monkeypatch.context() as patch:
        patch.setattr(jax.random, "truncated_normal", None)
        assert described(Blueprint(dataclasses.replace(TINY, layers=3)).shapes)
        with draws_numbers(False):
            jax.eval_shape(draw, jax.random.key(0))
    assert np.asarray(draw(jax.random.key(0))).all()
    assert np.asarray(Blueprint(TINY).make(jax.random.key(0)).embedding.weight).all()


def test_the_mask_is_of_the_shapes():
    plan = Blueprint(TINY, change=stored)
    everything = described(jax.tree.map(lambda x, leaf: leaf if x else None, plan.mask, plan.shapes))
    assert everything.keys() == {path for path in described(plan.shapes) if not path.startswith(EXPERTS)}
    one = dataclasses.replace(plan, trained=(".embedding.weight",))
    assert sum(jax.tree.leaves(one.mask)) == 1
    assert one.mask.embedding.weight


def test_that_of_a_configuration():
    """It has the dtype of the parameters, and makes what `build_model` makes."""
    cfg = moezoo.compose("model=mixtral", "execution.param_dtype=bfloat16")
    plan = blueprint_of(dataclasses.replace(cfg, model=TINY))
    assert plan == Blueprint(TINY, "bfloat16")
    found, wanted = plan.make(jax.random.key(3)), moezoo.build_model(TINY, key=jax.random.key(3), dtype="bfloat16")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": dataclasses.replace(TINY, vocab=16)}, "blueprint: model.vocab=16 in the blueprint, "),
        ({"dtype": "bfloat16"}, "blueprint: dtype is bfloat16, but execution.param_dtype=float32"),
        ({"frozen": ("*.out",)}, "blueprint: frozen is [*.out], but frozen=[]; write dataclasses.replace(blueprint_of"),
    ],
)
def test_one_that_does_not_fit_is_refused(given, message):
    cfg = dataclasses.replace(moezoo.compose(), model=TINY)
    with refused(message):
        communication(cfg, blueprint=dataclasses.replace(blueprint_of(cfg), **given))


def test_a_step_has_that_of_its_state():
    """A fresh state is of the changed model."""
    cfg = moezoo.compose("batch_size=1", "seq_len=4", "trained=['*.attention.*']")
    cfg = dataclasses.replace(cfg, model=TINY)
    blueprint = dataclasses.replace(blueprint_of(cfg), change=stored)
    execution = moezoo.execution(cfg)
    step = build_step(cfg, execution, blueprint)
    state = build_state(cfg, execution, step)
    assert described(state.model) == described(blueprint.shapes) == described(step.arguments[0].model)
    assert len(jax.tree.leaves(state.optimizer)) == 1 + 2 * sum(jax.tree.leaves(blueprint.mask))


def test_programs_are_traced_for_any_mesh_where_the_user_has_set_one():
    words = ("mesh.fsdp=2", "mesh.axis_types=explicit", "batch_size=4", "seq_len=4")
    cfg = dataclasses.replace(moezoo.compose(*words), model=TINY)
    found = [communication(cfg), describe(cfg, "decode")]
    with jax.set_mesh(moezoo.make_mesh(cfg.mesh)):
        assert [communication(cfg), describe(cfg, "decode")] == found
        other = dataclasses.replace(cfg, mesh=moezoo.MeshShape(expert=4), dispatch=Auto())
        assert communication(other).bytes > 0
