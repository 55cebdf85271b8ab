"""The order of work over pipeline stages, and where their layers are stored."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import moezoo
from moezoo.config.build import blueprint_of, build_execution
from moezoo.parallel.mesh import MeshShape, abstract_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.pipeline import Circular
from moezoo.parallel.weight_mover import hold, use


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))
def test_every_micro_batch_passes_all_chunks_in_order_and_without_a_gap(stages, chunks, groups):
    order = Circular(groups * stages, chunks)
    works = order.count(stages) * chunks
    done: dict[Any, int] = {}  # (micro-batch, number of the chunk among those of all stages) -> tick
    for tick in range(order.ticks(stages)):
        for stage in range(stages):
            if 0 <= tick - stage < works:
                chunk, micro = order.work(tick - stage, stages)
                assert (micro, chunk * stages + stage) not in done
                done[micro, chunk * stages + stage] = tick
    assert done.keys() == {(m, c) for m in range(groups * stages) for c in range(stages * chunks)}
    # What a stage makes is used in the next tick, and only then: it needs no other room.
    assert all(done[m, c] == done[m, c - 1] + 1 for m, c in done if c)
    idle = order.ticks(stages) * stages - len(done)
    assert order.bubble(stages) == pytest.approx(idle / (order.ticks(stages) * stages))
    # Micro-batches begin and end in the order of their numbers, by which they are taken and put back.
    for at in (0, stages * chunks - 1):
        ticks = [done[m, at] for m in range(groups * stages)]
        assert ticks == sorted(ticks)


@pytest.mark.parametrize(("stages", "chunks", "groups"), [(2, 1, 3), (3, 2, 1), (4, 3, 2)])
def test_what_a_stage_made_is_put_in_order(stages, chunks, groups):
    order = Circular(groups * stages, chunks)
    works = order.count(stages) * chunks
    made = jnp.array([order.work(number, stages) for number in range(works)])
    found = np.asarray(order.by_micro(made, stages))
    assert [found[m, c].tolist() for m, c in np.ndindex(*found.shape[:2])] == [
        [c, m] for m, c in np.ndindex(*found.shape[:2])
    ]


def test_bubbles():
    # (S - 1) / (v M + S - 1), in percent
    table = {(v, m): round(100 * Circular(m, v).bubble(8), 1) for v in (1, 2, 4) for m in (8, 16, 32, 64)}
    assert [table[1, m] for m in (8, 16, 32, 64)] == [46.7, 30.4, 17.9, 9.9]
    assert [table[2, m] for m in (8, 16, 32, 64)] == [30.4, 17.9, 9.9, 5.2]
    assert [table[4, m] for m in (8, 16, 32, 64)] == [17.9, 9.9, 5.2, 2.7]


def test_gradients_of_held_weights_are_summed_in_the_dtype_asked_for():
    x = jnp.full((512,), 1 + 2**-7, jnp.bfloat16)

    def total(weight, wide):
        held = hold({"w": weight}, jnp.float32) if wide else {"w": weight}
        products = jax.lax.scan(lambda c, each: (c, (use(held)["w"] if wide else weight) * each), None, x)[1]
        return products.astype(jnp.float32).sum()

    wide, narrow = (float(jax.grad(total)(jnp.bfloat16(1), wide)) for wide in (True, False))
    assert wide == 516
    assert narrow == 512  # each addition rounds by up to a whole one
    assert total(jnp.bfloat16(1), True) == 516


def stored(*overrides: str) -> dict[str, tuple]:
    """Return the layout of each parameter by its path."""
    cfg = moezoo.compose("model=deepseek", "model.layers=9", *overrides)
    execution, model = on_mesh(build_execution(cfg, abstract_mesh(cfg.mesh), batches="any")), blueprint_of(cfg).shapes
    leaves = jax.tree_util.tree_leaves_with_path(execution.placements(model))
    return {jax.tree_util.keystr(path): placement.stored for path, placement in leaves}


def test_layers_are_stored_by_their_stage_where_stages_divide_them():
    key = ".stacks[1].blocks[0].attention.out"
    bias = ".stacks[1].blocks[0].feed_forward.router.choice_bias"
    found = stored("mesh.stage=4", "mesh.fsdp=2")  # one layer before, and eight
    assert found[key] == (("stage",), (), (), ("fsdp",))
    assert found[bias] == ((), ())  # which a step moves by numbers of all stages
    assert found[".stacks[0].blocks[0].attention.out"] == ((), (), (), ("fsdp", "stage"))
    assert found[".embedding.weight"] == ((), ("fsdp", "stage"))
    for other in ("execution.pipeline.chunks=2", "model.layers=10", "rules.store.layer=[]"):
        found = stored("mesh.stage=4", "mesh.fsdp=2", other)
        assert found[key] == ((), (), (), ("fsdp", "stage")), other


def test_the_longest_run_of_one_pattern_is_piped():
    cfg = moezoo.compose("model=deepseek", "model.layers=12", "model.dense_layers=2")
    shapes = blueprint_of(cfg).shapes
    assert [(stack.count, len(stack.blocks)) for stack in shapes.stacks] == [(2, 1), (10, 1)]
    piped = Circular(chunks=2).piped(shapes, 2, True)
    assert piped is not None
    assert (piped.stack, piped.path, piped.depth, piped.periods, piped.by_layer) == (1, ".stacks[1]", 2, 8, False)
    assert Circular().piped(shapes.embedding, 2, True) is None


@pytest.mark.parametrize(
    ("words", "layers", "longest"),
    [
        ("model=qwen3_moe model.layers=7 model.mlp_layers=[0,1,2,4,6]", [3, 4], 1),  # three alike, then two by turns
        ("model=deepseek model.layers=4 model.dense_layers=2", [2, 2], 0),  # the first of equal ones
    ],
)
def test_the_longest_stack_is_the_one_with_most_layers(words, layers, longest):
    shapes = blueprint_of(moezoo.compose(*words.split())).shapes
    assert [stack.count * len(stack.blocks) for stack in shapes.stacks] == layers
    piped = Circular().piped(shapes, 2, True)
    assert piped is not None
    assert piped.stack == longest


def test_a_mesh_of_other_stages_than_those_of_the_configuration():
    with refused("the mesh has stage=1 and cfg has mesh.stage=2", "give cfg that number too"):
        build_execution(moezoo.compose("mesh.stage=2"), abstract_mesh(MeshShape()))


def test_settings_of_a_pipeline():
    cfg = moezoo.compose("mesh.stage=2", "execution.pipeline=circular", "execution.pipeline.chunks=2", "batch_size=8")
    assert cfg.execution.pipeline == Circular(chunks=2)
    assert cfg.parts == {"execution.microbatches": 1, "execution.pipeline.microbatches": 2}
    assert dataclasses.replace(cfg, mesh=MeshShape()).micro_batches == 1
    execution = on_mesh(build_execution(cfg, abstract_mesh(cfg.mesh)))
    assert (execution.stages, execution.micro_batches, execution.token_axes) == (2, 2, ("stage",))
    assert execution.within_stage.token_axes == ()
    assert execution.within_stage.live_axes == ()
    assert execution.within_stage.within_stage == execution.within_stage
    assert execution.in_turn.stages == 1
    assert execution.in_turn.token_axes == ()
    assert execution.in_turn.live_axes == ("stage",)
