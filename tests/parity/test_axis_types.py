"""Meshes of explicit axes run the programs of meshes of auto axes.

Two programs are the same if they are lowered to the same text, in which `lowered` leaves out what numbers them. Then
they have the same collectives and the same numbers. One step and one evaluation also run.
"""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from cover import LENGTH, MESHES, ROWS, Case, batch, config, model
from jax.sharding import NamedSharding
from refusals import refused
from running import RATE, STEPS, CompiledStep, batch_shapes

import moezoo
from moezoo.data import Batch, load
from moezoo.models.blueprint import Blueprint
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.traces import collective_traffic
from moezoo.training.evaluate import Evaluator
from moezoo.training.feed import Feed
from moezoo.training.step import Step

TYPES = ("auto", "explicit")
# Different rule sets, strategies, families and remat policies. Experts over two mesh axes are those of `cp_as_ep`.
CASES = (
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", "mixtral"),
    Case("ragged", "fsdp2_ep2_context2", "cp_as_ep", "dots", 1, "sequence", "deepseek"),
    Case("capacity", "fsdp2_ep4", "ep_as_cp", "full", 1, "batch", "grouped"),
    Case("gather", "fsdp2_tensor4", "tensor", "none", 1, "batch", "olmoe"),
)


def execution(case: Case, types: str) -> MeshExecution:
    """Return the execution of a case, on a mesh of these axis types."""
    return replace(case.execution, mesh=moezoo.make_mesh(replace(MESHES[case.mesh], axis_types=types)))


def lowered(program: Any) -> str:
    """Return the text of a traced program, without the numbers of its values.

    JAX repeats the layout in which `shard_map` returns an array of explicit axes: for scalars, and from 0.12 on for
    every output. This is left out too.
    """
    text = program.lower().as_text().replace(", sdy.sharding = #sdy.sharding<@mesh, []>", "")
    lines = [line for line in text.splitlines() if "sdy.sharding_constraint" not in line]
    return re.sub(r"%\w+(#\d+)?", "%", "\n".join(lines))


@functools.cache
def compiled(types: str) -> CompiledStep:
    """Return the compiled step of the first case."""
    return CompiledStep(CASES[0], execution=execution(CASES[0], types))


@functools.cache
def traced(case: Case, types: str) -> Any:
    """Return the traced step of a case."""
    how, blueprint = execution(case, types), Blueprint(config(case.family, case.balance))
    optimizer = Optimizer(SGD(RATE), Constant(), STEPS, how.placements(blueprint.shapes))
    return Step(blueprint, optimizer, how, batch_shapes(case.microbatches)).traced


@functools.cache
def evaluator(case: Case, types: str) -> Evaluator:
    """Return the evaluator of a case; only its `sums` are used, on the tests' own batch."""
    cfg = moezoo.compose("data=synthetic", f"batch_size={ROWS}", f"seq_len={LENGTH}")
    source = load(cfg.data, seq_len=LENGTH, seed=0, vocab=cfg.model.vocab)
    return Evaluator(model(case.family), source, cfg, execution(case, types))


@functools.cache
def on_devices(case: Case, types: str) -> tuple[Any, Batch]:
    """Return the model of a case and a batch in their layouts."""
    how = execution(case, types)
    assert how.mesh is not None
    feed = Feed(NamedSharding(how.mesh, how.micro_batches_spec), (1, ROWS, LENGTH), how.token_order(LENGTH))
    return moezoo.place(model(case.family), how), feed(Batch(**{name: x[None] for name, x in batch(0).items()}))


def bits(tree: Any) -> list[bytes]:
    """Return the bytes of each array of a tree."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.weekly if case is CASES[2] else ()) for case in CASES], ids=str
)
def test_steps_are_the_same_programs(case):
    steps = [traced(case, types) for types in TYPES]
    auto, explicit = (collective_traffic(step.jaxpr) for step in steps)
    assert auto == explicit != {}
    auto, explicit = map(lowered, steps)
    assert auto == explicit


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_evaluations_are_the_same_programs(case):
    """With the vocabulary whole and split. The layers are those of steps."""
    auto, explicit = (evaluator(case, types).sums.trace(*on_devices(case, types)) for types in TYPES)
    assert lowered(auto) == lowered(explicit)


def results(types: str) -> dict[str, Any]:
    """Return what two steps, an evaluation, a call and a generation give for the first case, as bytes."""
    case, how = CASES[0], execution(CASES[0], types)
    step = compiled(types)
    types_of_state = {kind for x in jax.tree.leaves(step.state) for kind in x.sharding.mesh.axis_types}
    assert types_of_state == {jax.sharding.AxisType[types.capitalize()]}
    found = {"steps": bits((step(0), step(1), step.state))}
    found["evaluation"] = bits(evaluator(case, types).sums(*on_devices(case, types)))
    placed, tokens = on_devices(case, types)[0], batch(0)["tokens"]
    found["call"] = bits(jax.jit(lambda m, t: m(t, execution=how))(placed, tokens))
    found["generation"] = bits(moezoo.generate(placed, tokens[:2, :3], max_new_tokens=3, execution=how))
    return found


@pytest.mark.weekly
def test_numbers_are_the_same():
    auto, explicit = map(results, TYPES)
    assert auto == explicit
    how, tokens = execution(CASES[0], "explicit"), batch(0)["tokens"]
    start = model(CASES[0].family)  # arrays may arrive in any layout
    compiled_call = jax.jit(lambda m, t: m(t, execution=how))(start, tokens)
    assert bits(compiled_call) == auto["call"]
    # Outside of `jit` XLA fuses nothing, so results differ by the rounding of float32.
    wanted = np.asarray(compiled_call.logits)
    np.testing.assert_allclose(start(tokens, execution=how).logits, wanted, rtol=0, atol=1e-5 * abs(wanted).max())


def test_a_call_without_an_execution_needs_arrays_on_one_device():
    """There JAX would refuse the first operation that does not determine the layout of its result."""
    placed, tokens = on_devices(CASES[0], "explicit")[0], batch(0)["tokens"]
    for call in (lambda m: m(tokens), lambda m: moezoo.generate(m, tokens[:1, :3], max_new_tokens=1)):
        with refused("an array float32[40,16@(fsdp,expert)]", "explicit", "execution=", "moezoo.place"):
            call(placed)
    alone = moezoo.place(placed, moezoo.Execution())
    assert alone(tokens).logits.shape == (ROWS, LENGTH, 40)


@pytest.mark.filterwarnings("ignore:.*transformers has no key for")
def test_a_model_is_saved_and_loaded(tmp_path):
    placed, how = on_devices(CASES[0], "explicit")[0], execution(CASES[0], "explicit")
    moezoo.save_pretrained(placed, tmp_path)
    loaded = moezoo.from_pretrained(tmp_path, how)
    assert bits(loaded) == bits(placed)
    assert [x.sharding for x in jax.tree.leaves(loaded)] == [x.sharding for x in jax.tree.leaves(placed)]
