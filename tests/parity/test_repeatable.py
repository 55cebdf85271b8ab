"""Repeated steps and initial parameters are equal to the bit, and a step checks and deletes the state it is given."""

import functools

import jax
import numpy as np
import pytest
from cover import MESHES, Case, fits, model, rules
from jax.sharding import NamedSharding, PartitionSpec
from running import STEPS, CompiledStep

import moezoo
from moezoo.models.blueprint import Blueprint
from moezoo.optim import AdamW, Cosine, Optimizer
from moezoo.training.build import build_model_on_mesh
from moezoo.training.step import check_shardings

CASE = Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch")


@pytest.fixture(scope="module")
def compiled() -> CompiledStep:
    """One compiled step for all tests of this file."""
    return CompiledStep(CASE, Optimizer(AdamW(), Cosine(), STEPS, CASE.execution.placements(model())))


def bits(tree) -> list[bytes]:
    """Return the bytes of each array of a tree, for exact comparison."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_the_same_step_twice_is_bit_equal(compiled):
    """The second pass also shows that a step returns its state in the layout in which it takes it."""

    def run_two_steps():
        compiled.state = compiled.begin()
        return bits((compiled(0), compiled(1), compiled.state))

    assert run_two_steps() == run_two_steps()
    check_shardings(compiled.state, compiled.step.state_shardings)


@functools.cache
def initial(mesh: str, layout: str, dispatch: str) -> list[bytes]:
    """Return the arrays of a new model that is initialised on a mesh."""
    execution = Case(dispatch, mesh, layout, "full", 1, "batch").execution
    small = ("model.vocab=40", "model.embed=16", "model.layers=2", "model.expert_mlp=12")
    return bits(build_model_on_mesh(Blueprint(moezoo.compose(*small).model), execution, 0))


# Each layout takes seconds to compile. These run in CI, the others with `-m full`.
_ALWAYS = {
    ("ep8", "fsdp_ep"): pytest.mark.weekly,
    ("fsdp2_ep4", "shard_exp_on_fsdp"): (),
    ("fsdp2_ep2_context2", "cp_as_ep"): (),
}


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        pytest.param(mesh, layout, marks=_ALWAYS.get((mesh, layout), pytest.mark.full))
        for mesh in MESHES
        for layout in rules()
        if fits(mesh, layout)
    ],
)
def test_initial_parameters_depend_on_the_seed_only(mesh, layout):
    dispatch = {"fsdp_ep": "ring", "pure_fsdp": "gather"}.get(layout, "dense")
    assert initial(mesh, layout, dispatch) == initial("single", "fsdp_ep", "ring")


def test_a_step_deletes_the_state_it_was_given(compiled):
    before = compiled.state = compiled.begin()
    compiled(0)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert not any(x.is_deleted() for x in jax.tree.leaves(compiled.state))


def test_a_step_refuses_an_array_in_another_layout(compiled):
    state = compiled.begin()
    check_shardings(state, compiled.step.state_shardings)
    mesh = CASE.execution.mesh
    assert mesh is not None
    moved = jax.device_put(np.asarray(state.model.embedding.weight), NamedSharding(mesh, PartitionSpec("fsdp")))
    layout = state.model.embedding.weight.sharding
    assert layout.spec == PartitionSpec(None, ("fsdp", "expert"))
    replaced = jax.tree.map(lambda x: moved if x is state.model.embedding.weight else x, state)
    with pytest.raises(ValueError, match=r"embedding\.weight .*'fsdp'.*'fsdp', 'expert'"):
        check_shardings(replaced, compiled.step.state_shardings)
    # The compiled step refuses it too, instead of moving it.
    compiled.state = replaced
    with pytest.raises(ValueError, match="sharding"):
        compiled(0)
