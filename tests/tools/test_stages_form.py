"""The form of steps with pipeline stages, compiled for absent devices: hops between stages, and memory.

A step for v5p is marked `absent`; the others `full`.
"""

import collections
import functools
from typing import Any

import pytest
from compiled import budget_of
from programs import hops_over_loops

import moezoo
from moezoo.config.build import build_execution
from moezoo.parallel.mesh import mesh_of
from moezoo.profiling.hlo import KERNEL, Instruction, read_computations
from moezoo.profiling.profile import operations
from moezoo.tools.absent import absent_devices, memory_of
from moezoo.training.build import build_step

pytestmark = pytest.mark.usefixtures("_uncached")

SIZES = "model=mixtral model.layers=4 model.embed=256 model.expert_mlp=128 model.experts=16 model.max_length=128"
SETTINGS = "mesh.stage=2 mesh.fsdp=2 mesh.expert=2 seq_len=128 execution.dtype=bfloat16 dispatch=ring"
KINDS = [pytest.param("v5p", marks=pytest.mark.absent), pytest.param("h200", marks=pytest.mark.full)]
TICKS = 5  # of four micro-batches


@functools.cache
def compiled(kind: str, words: str = "execution.pipeline.microbatches=4 batch_size=64") -> tuple[Any, Any]:
    """Return the step of a configuration, and its program for eight absent devices."""
    cfg = moezoo.compose(*SIZES.split(), *SETTINGS.split(), *words.split())
    step = build_step(cfg, build_execution(cfg, mesh_of(cfg.mesh, absent_devices(kind))))
    return step, step.compile().program


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_of_a_step_in_stages(kind):
    """Three hops per tick each way, as traced; all devices run what brings tokens to experts in every tick."""
    step, program = compiled(kind)
    budget = budget_of(step, program)
    hops = budget.program["collective-permute", ("stage",)]
    assert hops == budget.trace["collective-permute", ("stage",)]
    assert hops.count == 2 * 3 * TICKS
    budget.check({"collective-permute"})
    _, found = read_computations(program.as_text() or "")

    def collects(name: str) -> bool:
        each = found[name].values()
        return any("all-" in one.op or "reduce-scatter" in one.op or any(map(collects, one.called)) for one in each)

    branches = [
        name for body in found.values() for one in body.values() if one.op == "conditional" for name in one.called
    ]
    assert not list(filter(collects, branches))


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_kernels_belong_to_parts(kind):
    """A profile of the compiled step knows what its products and kernels are for, though not XLA's copies."""
    text = compiled(kind)[1].as_text() or ""
    named, (_, found) = operations(text), read_computations(text)

    def multiplies(one: Instruction) -> bool:
        inside = (each for name in one.called for each in found[name].values())
        return one.op in ("dot", "convolution") or (one.op == "fusion" and any(map(multiplies, inside)))

    inner = {name for body in found.values() for one in body.values() if one.op == "fusion" for name in one.called}
    parts = collections.Counter(
        named[name].part
        for computation, body in found.items()
        for name, one in body.items()
        if computation not in inner and name in named and (multiplies(one) or KERNEL.search(one.text))
    )
    assert parts.keys() <= {"attention", "router", "dispatch", "experts", "combine", "loss", "embedding"}, parts
    assert {"attention", "experts", "loss"} <= parts.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_hops_beside_the_products_of_a_tick(kind):
    """On v5p micro-batches that wait travel beside the layers of a tick, and so do their gradients.

    What a stage made cannot: the next tick begins with it. XLA for GPUs starts no hop before the layers of a tick.
    """
    ticks = list(hops_over_loops(compiled(kind)[1].as_text() or "").values())
    assert len(ticks) == 2  # forward and backward
    beside = [sorted(loops for _, loops in hops) for hops in ticks]
    assert beside == ([[0, 0, 1]] * 2 if kind == "v5p" else [[0, 0]] * 2)


@pytest.mark.full
@pytest.mark.parametrize("gather", ["once", "tick"])
def test_memory_by_micro_batches(gather):
    """A micro-batch more adds the input of a tick, and on two stages between half of one and one and a half."""
    found = {}
    for count in (8, 16):
        words = f"execution.pipeline.microbatches={count} execution.pipeline.gather={gather} batch_size={64 * count}"
        memory = memory_of(compiled("v5p", words)[1])
        assert memory is not None
        found[count] = memory.in_use - memory.arguments
    input = 64 // 4 * 128 * 256 * 2
    assert 1 <= (found[16] - found[8]) / (8 * input) <= 2.5
