"""The optimizer: one group equals optax, and several groups equal separate optimizers."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from blueprints import as_blueprint

import moezoo
from moezoo.config.build import build_execution
from moezoo.models import build_model
from moezoo.optim import SGD, AdamW, Constant, Cosine, Group, Optimizer
from moezoo.parallel.axes import Role, trainable_mask
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.placement import EVERYWHERE
from moezoo.training.build import build_step
from moezoo.training.checkpoint import Checkpoints, read_about, restore
from moezoo.training.step import Step

STEPS, RULE = 3, AdamW(clip_norm=0.5)
MATRICES = Group("matrices", RULE)
# One layer with experts; its choice bias is not trained.
SIZES = ("model.layers=1", "model.dense_layers=0", "model.q_lora=null", "model.embed=32", "model.vocab=32")
DEEPSEEK = ("model=deepseek", *SIZES, "mesh=fsdp2_ep4", "batch_size=16")


class Started(NamedTuple):
    """A model with leaves that are not trained, its trained parameters, and the placements of both trees."""

    model: Any
    parameters: Any
    all_placements: Any
    placements: Any


@pytest.fixture(scope="module")
def started() -> Started:
    cfg = moezoo.compose(*DEEPSEEK)
    model = build_model(cfg.model, key=jax.random.key(0))
    placements, trained = on_mesh(build_execution(cfg)).placements(model), trainable_mask(model)
    return Started(model, eqx.filter(model, trained), placements, eqx.filter(placements, trained))


class ByRole(AdamW):
    """AdamW for matrices except those of the router, and SGD for other leaves."""

    def assign(self, placements: Any) -> Any:
        """Return the group of each leaf."""
        rest = Group("rest", SGD())
        return jax.tree.map(lambda matrix: MATRICES if matrix else rest, is_matrix(placements))


BY_ROLE = ByRole(clip_norm=0.5)


def is_matrix(placements: Any) -> Any:
    """Return for each leaf whether it is a matrix outside of the router."""
    return jax.tree_util.tree_map_with_path(
        lambda path, p: p.axes.role is Role.WEIGHT and "router" not in jax.tree_util.keystr(path), placements
    )


def gradients(parameters: Any, seed: int) -> Any:
    """Return random gradients, whose norm is far above the clip norm."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(p.dtype), parameters)


def run(optimizer: Optimizer, parameters: Any, select: Any = lambda tree: tree) -> tuple[Any, Any]:
    """Return parameters and state after updates of the leaves that `select` keeps; the norm is that of all leaves."""
    some = select(parameters)

    @jax.jit
    def update(every: Any, state: Any, some: Any, number: Any) -> Any:
        return optimizer.update(
            select(every), state, some, optimizer.rate(number, optimizer.pace), optax.tree.norm(every)
        )[:2]

    state = jax.jit(optimizer.init)(some)
    for number in range(STEPS):
        some, state = update(gradients(parameters, number), state, some, np.int32(number))
    return some, state


def assert_equal(found: Any, wanted: Any) -> None:
    """Assert equality of every bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_one_group_is_the_transformation_of_its_rule(started):
    plain = RULE.transform(started.all_placements)

    optimizer = Optimizer(RULE, Cosine(), STEPS, started.all_placements)

    @jax.jit
    def update(gradients: Any, state: Any, parameters: Any, number: Any) -> Any:
        rate, norm = optimizer.rate(number, optimizer.pace), optax.tree.norm(gradients)
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / jnp.maximum(norm, 1e-12)), gradients)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = plain.update(gradients, state, parameters)
        return jax.tree.map(lambda p, u: p - rate * u, parameters, updates), state

    parameters, state = started.parameters, jax.jit(plain.init)(started.parameters)
    for number in range(STEPS):
        parameters, state = update(gradients(parameters, number), state, parameters, np.int32(number))
    assert_equal(run(optimizer, started.parameters), (parameters, {"all": state}))


def test_two_groups_are_two_optimizers(started):
    """SGD updates the other leaves, and both are clipped by the norm of all leaves."""
    optimizer = Optimizer(BY_ROLE, Constant(), STEPS, started.all_placements)
    found, found_state = run(optimizer, started.parameters)
    matrices = is_matrix(started.placements)

    def select(inverse: bool) -> Any:
        return lambda tree: eqx.filter(tree, matrices, inverse=inverse)

    first = Optimizer(RULE, Constant(), STEPS, select(False)(started.placements))
    second = Optimizer(SGD(RULE.learning_rate, RULE.clip_norm), Constant(), STEPS, select(True)(started.placements))
    one, state = run(first, started.parameters, select(False))
    other, _ = run(second, started.parameters, select(True))
    assert_equal(found, eqx.combine(one, other))
    assert_equal(jax.tree.leaves(found_state["matrices"]), jax.tree.leaves(state))
    assert jax.tree.leaves(found_state["rest"]) == []
    assert len(jax.tree.leaves(found_state)) == 1 + 2 * sum(jax.tree.leaves(matrices))
    assert 0 < sum(jax.tree.leaves(matrices)) < len(jax.tree.leaves(matrices))


def test_the_state_of_two_groups_has_its_parameters_placements_and_is_saved(started, tmp_path):
    """Tracing the step checks every layout; a checkpoint restores the state."""
    cfg = moezoo.compose(*DEEPSEEK)
    execution = on_mesh(build_execution(cfg))
    optimizer = Optimizer(BY_ROLE, Constant(), STEPS, started.all_placements)
    state = jax.jit(optimizer.init)(started.parameters)
    placements = optimizer.placements(started.parameters, started.placements)
    assert jax.tree.structure(placements) == jax.tree.structure(state)
    wanted = jax.tree.leaves(eqx.filter(started.placements, is_matrix(started.placements)))
    assert jax.tree.leaves(placements["matrices"]) == [EVERYWHERE, *wanted, *wanted]
    step = Step(as_blueprint(started.model), optimizer, execution, build_step(cfg, execution).arguments[1])
    assert step.traced is not None

    state = jax.device_put(jax.tree.map(lambda x: np.asarray(x) + 1, state), step.state_shardings.optimizer)
    checkpoints = Checkpoints(tmp_path / "checkpoints", count=1, size=0)
    about = {"config": {}, "loader": {}, "versions": {"moezoo": "0"}}
    checkpoints.save(1, {"training": state}, about)
    checkpoints.wait()
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    restored = restore(checkpoints.folder, 1, read_about(checkpoints.folder, 1), training=target)["training"]
    assert_equal(restored, state)


class OfOneName(AdamW):
    """Two rules whose groups have one name."""

    def assign(self, placements: Any) -> Any:
        """Return the group of each leaf."""
        return jax.tree.map(lambda matrix: Group("a", RULE if matrix else SGD()), is_matrix(placements))


def test_refuses_different_groups_of_one_name(started):
    with pytest.raises(ValueError, match=r"^different groups have the same name: Group\(name='a'"):
        Optimizer(OfOneName(), Constant(), STEPS, started.all_placements)
