"""Programs compiled for absent TPUs and GPUs move no more than the traced step: see `compiled.Budget.check`.

`tests/parity` checks the programs that it compiles for the CPU.
"""

import functools
import itertools
from typing import Any

import cover
import pytest
from compiled import Budget, budget_of

import moezoo
from moezoo.config.build import build_execution
from moezoo.config.compose import groups
from moezoo.models import FAMILIES
from moezoo.moe.dispatch import STRATEGIES
from moezoo.parallel.mesh import mesh_of
from moezoo.tools.absent import absent_devices
from moezoo.training.build import build_step

# Rows have 128 numbers, because a TPU pads the rows of an exchange to that.
SIZES = ("model.embed=128", "model.expert_mlp=128", "model.max_length=128", "batch_size=16", "seq_len=128")
LAYERS = {"deepseek": 3}  # one has no experts; 2 layers in other families
MESHES = {
    "fsdp8": ("mesh.fsdp=8",),
    "fsdp2_ep4": ("mesh.fsdp=2", "mesh.expert=4"),
    "fsdp2_ep2_context2": ("mesh.fsdp=2", "mesh.expert=2", "mesh.context=2"),
    "ep2_context2_tensor2": ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2"),
}


def budget(kind: str, family: str, strategy: str, rules: str, mesh: str) -> Budget:
    """Return the budget of a laptop-sized step compiled for eight absent devices of a kind."""
    chosen = (f"model={family}", f"dispatch={strategy}", f"rules={rules}", *MESHES[mesh], *SIZES)
    cfg = moezoo.compose(*chosen, f"model.layers={LAYERS.get(family, 2)}")
    step = build_step(cfg, build_execution(cfg, mesh_of(cfg.mesh, absent_devices(kind))))
    return budget_of(step, step.compile().program)


@functools.cache
def meshes_of(rules: str) -> list[str]:
    """Return the meshes whose axes the rules name."""
    named = cover.rules()[rules].mesh_axes
    return [mesh for mesh, words in MESHES.items() if {w[5:].partition("=")[0] for w in words} <= named]


def product() -> list[tuple[Any, ...]]:
    """Return every family, strategy and rule set, on each mesh whose axes the rules name."""
    cases = itertools.product(FAMILIES, STRATEGIES, groups()["rules"])
    return [(*case, mesh) for case in cases for mesh in meshes_of(case[2])]


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(
    ("family", "strategy", "rules", "mesh"),
    [
        ("mixtral", "ragged", "fsdp_ep", "fsdp2_ep2_context2"),
        ("mixtral", "gather", "pure_fsdp", "fsdp8"),
        ("deepseek", "ring", "shard_exp_on_fsdp", "fsdp2_ep4"),
        ("deepseek", "ragged", "ep_as_cp", "fsdp2_ep4"),
        ("deepseek", "capacity", "cp_as_ep", "fsdp2_ep2_context2"),
        ("deepseek", "ragged", "tensor", "ep2_context2_tensor2"),
    ],
)
def test_v5p(family, strategy, rules, mesh):
    budget("v5p", family, strategy, rules, mesh).check()


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(
    ("family", "strategy", "rules", "mesh"),
    [("mixtral", "dense", "ep_as_dp", "fsdp2_ep4"), ("deepseek", "ragged", "fsdp_ep", "fsdp2_ep4")],
)
def test_h200(family, strategy, rules, mesh):
    budget("h200", family, strategy, rules, mesh).check()


# Not marked `absent`, which CI runs; it needs the same compilers.
@pytest.mark.full
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("kind", ["v5p", "h200"])
@pytest.mark.parametrize(("family", "strategy", "rules", "mesh"), product())
def test_every_program(kind, family, strategy, rules, mesh):
    budget(kind, family, strategy, rules, mesh).check()
