"""The form of training steps compiled for absent devices: the collectives, the kernels and the largest array of each.

Ten of the steps, in which every pair of strategy, family and chip occurs, are marked `absent`; the others `full`.
"""

import functools
import itertools
import math
import re
from typing import Any, NamedTuple

import pytest
from compiled import ALL, Budget, budget_of
from programs import largest_array

import moezoo
from moezoo.config.build import build_execution
from moezoo.config.settings import TrainConfig
from moezoo.parallel.mesh import mesh_of
from moezoo.tools.absent import absent_devices
from moezoo.training.build import build_step

# A device has 1,024 tokens, so that arrays of rows exceed weights. A TPU pads the rows of an exchange to 256 numbers of
# bfloat16. Kernels for attention take 128 queries or more.
SIZES = ("model.embed=256", "model.expert_mlp=128", "model.experts=16", "model.max_length=128")
SETTINGS = ("mesh=fsdp2_ep4", "batch_size=64", "seq_len=128", "execution.dtype=bfloat16")
FAMILIES = {"mixtral": (), "deepseek": ("model.dense_layers=0",)}
LAYERS = 2  # all with experts

# Collectives over the expert axis: how often each runs per layer of experts.
WEIGHTS = {"all-gather": 6, "reduce-scatter": 3}  # three matrices, forward and recomputed; their gradients
OVER_EXPERTS = {
    "dense": WEIGHTS,
    "gather": WEIGHTS,
    # There and back: forward, recomputed and backward.
    "capacity": {"all-to-all": 6},
    # The same, and the counts of rows, forward and recomputed.
    "ragged": {"ragged-all-to-all": 6, "all-gather": 2},
    # Tokens and their routing, forward and recomputed, and the cotangent of the sums; the sums, and the cotangents of
    # tokens and of routing. Despite its name it sends nothing around a ring.
    "ring": {"all-gather": 5, "reduce-scatter": 3},
}
# XLA for TPU takes an all-reduce instead of a small collective: that of the counts, and that of the cotangent of
# routing with two experts per token, of 64 KiB. With DeepSeek's four it stays.
RAGGED_ON_TPU = {"ragged-all-to-all": 6, "all-reduce": 2}
ON_TPU = {
    ("ragged", "mixtral"): RAGGED_ON_TPU,
    ("ragged", "deepseek"): RAGGED_ON_TPU,
    ("ring", "mixtral"): {"all-gather": 5, "reduce-scatter": 2, "all-reduce": 1},
}

KERNELS = {
    "h200": {
        *("attention", "attention_by_keys", "attention_by_queries"),
        *("grouped_by_rows", "grouped_gated", "grouped_matmul", "grouped_outer"),
    },
    "v5p": {
        "splash_mha_fwd_residuals",
        "splash_mha_dkv_no_residuals",
        "splash_mha_dq_no_residuals",
        "ragged-dot-metadata",
        "ragged-dot-none",
    },
}


class Program(NamedTuple):
    """A compiled step: its configuration, what it moves, and its text."""

    config: TrainConfig
    budget: Budget
    text: str


@functools.cache
def compiled(strategy: str, family: str, kind: str) -> Program:
    """Return a training step of a narrow model, compiled for eight absent devices of a kind."""
    words = (f"model={family}", f"model.layers={LAYERS}", *FAMILIES[family], *SIZES)
    cfg = moezoo.compose(*words, f"dispatch={strategy}", *SETTINGS)
    step = build_step(cfg, build_execution(cfg, mesh_of(cfg.mesh, absent_devices(kind))))
    program = step.compile().program
    return Program(cfg, budget_of(step, program), program.as_text() or "")


def cases() -> list[Any]:
    """Return all cases, each with its mark."""
    found = []
    for strategy, family, kind in itertools.product(OVER_EXPERTS, FAMILIES, KERNELS):
        # DeepSeek on a GPU, which takes longest to compile, is chosen once. No case is both `absent` and `full`.
        chosen = ((family, kind) in (("mixtral", "h200"), ("deepseek", "v5p"))) != (strategy == "ragged")
        marks = [pytest.mark.absent if chosen else pytest.mark.full]
        if (strategy, family, kind) == ("ragged", "mixtral", "v5p"):
            marks.append(pytest.mark.smoke)
        found.append(pytest.param(strategy, family, kind, marks=marks))
    return found


pytestmark = [
    pytest.mark.usefixtures("_uncached"),
    pytest.mark.parametrize(("strategy", "family", "kind"), cases()),
]


def test_collectives_over_experts(strategy, family, kind):
    """Rows or weights of experts travel by the strategy's own instructions, and nothing else does."""
    program = compiled(strategy, family, kind)
    found = {op: moved.count for (op, axes), moved in program.budget.program.items() if axes == ("expert",)}
    wanted = OVER_EXPERTS[strategy]
    if kind == "v5p":
        wanted = ON_TPU.get((strategy, family), wanted)
    assert {op: count for op, count in found.items() if count} == {op: LAYERS * n for op, n in wanted.items()}


def test_budget(strategy, family, kind):
    """What the step moves is what was traced, but for the choices of a compiler."""
    # XLA for GPU only joins equal sums of numbers. XLA for TPU replaces reduce-scatters, and gathers of few numbers.
    equal = ALL - {"all-reduce"} if kind == "h200" else ("all-to-all", "ragged-all-to-all")
    compiled(strategy, family, kind).budget.check(equal)


def test_products_and_attention_are_kernels(strategy, family, kind):
    text = compiled(strategy, family, kind).text
    names = set()
    for name, rest in re.findall(r'%([\w-]+)[\w.-]* = (.* custom_call_target="(?:mosaic_gpu|tpu_custom_call).*)', text):
        scope = re.search(r'op_name="[^"]*/(\w+)/mpmd_map', rest)  # on a GPU all instructions have one name
        names.add(scope[1] if scope else name)
    assert names == KERNELS[kind]
    products = re.findall(r' (?:dot|convolution)\(.*op_name="([^"]*)"|"__cublas.*op_name="([^"]*)"', text)
    scopes = {first or second for first, second in products}
    assert scopes
    assert not [scope for scope in scopes if "/experts/" in scope]


def test_no_row_is_copied_for_every_expert(strategy, family, kind):
    """All arrays are smaller than one with the rows of a device for each of its experts."""
    cfg, _, text = compiled(strategy, family, kind)
    model: Any = cfg.model
    tokens, ways = cfg.batch_size * cfg.seq_len // 8, cfg.mesh.expert
    local = model.experts if strategy in ("dense", "gather") else model.experts // ways
    assigned = tokens * model.experts_per_token
    rows = {
        "dense": model.experts * tokens,
        "gather": assigned,
        "capacity": model.experts * math.ceil(1.25 * assigned / model.experts),
    }
    # A group's tokens may all choose experts of one device.
    assert largest_array(text) < local * rows.get(strategy, ways * assigned) * min(model.embed, model.expert_mlp)
