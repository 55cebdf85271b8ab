"""What may not change a number at all, and what a step does with the arrays it is given."""

import functools

import jax
import numpy as np
import pytest
from cover import MESHES, Case, fits, model, rules
from jax.sharding import NamedSharding, PartitionSpec
from running import STEPS, Running

import moezoo
from moezoo.optim import AdamW, Cosine, Optimizer
from moezoo.training.build import build_model_on_mesh
from moezoo.training.step import check_shardings

CASE = Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch")


@pytest.fixture(scope="module")
def running() -> Running:
    """One compiled step for all tests that need any."""
    return Running(CASE, Optimizer(AdamW(), Cosine(), STEPS, CASE.execution.placements(model())))


def bits(tree) -> list[bytes]:
    """The arrays of a tree, to compare exactly."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_the_same_step_twice_is_bit_equal(running):
    """The compiled step takes its own result: it returns the state as it is laid out on entry."""

    def once():
        running.state = running.begin()
        return bits((running(0), running(1), running.state))

    assert once() == once()
    check_shardings(running.state, running.step.state_shardings)


@functools.cache
def initial(mesh: str, layout: str, dispatch: str) -> list[bytes]:
    """A fresh model's arrays, born on a mesh."""
    execution = Case(dispatch, mesh, layout, "full", 1, "batch").execution
    small = ("model.vocab=40", "model.embed=16", "model.layers=2", "model.expert_mlp=12")
    return bits(build_model_on_mesh(moezoo.compose(*small, f"dispatch={dispatch}"), execution))


# Compiling takes seconds for each layout, so that most are left to the run of the whole product.
_ALWAYS = (("ep8", "fsdp_ep"), ("fsdp2_ep4", "shard_exp_on_fsdp"), ("fsdp2_ep2_context2", "cp_as_ep"))


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        pytest.param(mesh, layout, marks=() if (mesh, layout) in _ALWAYS else pytest.mark.full)
        for mesh in MESHES
        for layout in rules()
        if fits(mesh, layout)
    ],
)
@pytest.mark.xdist_group("initial")  # one process makes what the others are compared with
def test_initial_parameters_depend_on_the_seed_only(mesh, layout):
    dispatch = {"fsdp_ep": "ring", "pure_fsdp": "gather"}.get(layout, "dense")
    assert initial(mesh, layout, dispatch) == initial("single", "fsdp_ep", "ring")


def test_a_step_deletes_the_state_it_was_given(running):
    before = running.state = running.begin()
    running(0)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert not any(x.is_deleted() for x in jax.tree.leaves(running.state))


def test_an_array_that_lies_otherwise_is_refused(running):
    state = running.begin()
    check_shardings(state, running.step.state_shardings)
    mesh = CASE.execution.mesh
    assert mesh is not None
    moved = jax.device_put(np.asarray(state.model.embedding.weight), NamedSharding(mesh, PartitionSpec("fsdp")))
    layout = state.model.embedding.weight.sharding
    assert layout.spec == PartitionSpec(None, ("fsdp", "expert"))
    replaced = jax.tree.map(lambda x: moved if x is state.model.embedding.weight else x, state)
    with pytest.raises(ValueError, match=r"embedding\.weight lies as .*'fsdp'.*, expected .*'fsdp', 'expert'"):
        check_shardings(replaced, running.step.state_shardings)
    # The compiled step itself moves nothing either.
    running.state = replaced
    with pytest.raises(ValueError, match="sharding"):
        running(0)
