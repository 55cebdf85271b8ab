"""Steps that train low-rank pairs beside frozen weights, against the oracle's steps of the merged matrices.

With W = base + scale A B the oracle's gradient G of W, in float64, gives those of A and B: scale G B^T, scale A^T G.
Every weight of attention and of all MLPs has a pair, each expert its own; A and B are random, so each pair matters.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from blueprints import as_blueprint
from cover import EXTRA_CASES, LAYERS, LENGTH, OPTIMIZERS, ROWS, Case, batch, config, cover, model
from running import CompiledStep, GradientRecorder, batch_shapes, oracle_family, parameters_of, worst_error
from traffic_oracle import step_traffic

import moezoo
from moezoo.models.adapters import Lora
from moezoo.models.blueprint import Blueprint
from moezoo.nn.block_fp8 import BlockFP8
from moezoo.nn.containers import store
from moezoo.nn.few_bits import cut_pieces
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.axes import Role, parameter_table
from moezoo.parallel.low_rank import is_low_rank, pairs_by_path, without_pairs
from moezoo.parallel.traces import collective_traffic, equations
from moezoo.training.step import Step

STEPS, RATE = 2, 0.02
# As in test_step_parity: float32 rounds about forty operations in a row to 1e-6 of an array's largest value.
TOLERANCE = 1e-5
ADAPTER = Lora(rank=2, alpha=3.0, scale="alpha/sqrt(rank)")
SCALE = 3 / math.sqrt(2)
# Tokens or weights move; experts, heads and widths are split, and key-value heads shared; latents on a ring; layers of
# several kinds; biases and an activation of experts; every `remat`.
CASES = [
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", "deepseek", "adamw"),
    Case("ragged", "ep2_context2_tensor2", "tensor", "dots", 1, "batch", "glm4_moe", "adamw", "ring"),
    Case("capacity", "fsdp2_tensor4", "tensor", "none", 1, "sequence", "gpt_oss", "adamw"),
    Case("gather", "fsdp2_ep2_context2", "shard_exp_on_fsdp", "offload", 1, "batch", "mixtral", "adamw"),
    Case("ring", "ep2_context2_tensor2", "tensor", "full", 2, "batch", "qwen3_5", "adamw"),
]


@functools.cache
def adapted(family: str, balance: Any = "batch") -> Any:
    """Return the tiny model of a family with pairs of random numbers."""
    rng = np.random.default_rng(8)

    def with_numbers(x: Any) -> Any:
        if not is_low_rank(x):
            return x
        a, b = (jnp.asarray(0.15 * rng.standard_normal(part.shape), jnp.float32) for part in (x.a, x.b))
        return dataclasses.replace(x, a=a, b=b)

    whole = ADAPTER.adapt(model(family, balance), jax.random.key(0))
    return jax.tree.map(with_numbers, whole, is_leaf=is_low_rank)


def by_name(family: str, tree: Any, part: str) -> oracle.Parameters:
    """Return one matrix of each pair in a tree like a model, by the oracle's names of the weights."""

    def of_pair(x: Any) -> Any:
        return getattr(x, part) if is_low_rank(x) else jnp.zeros((*x.shape[:1], 0))

    one = jax.tree.map(of_pair, tree, is_leaf=is_low_rank)
    return {name: x for name, x in parameters_of(family, one).items() if x.size}


def pairs_of(family: str, tree: Any) -> oracle.Parameters:
    """Return all matrices of pairs, "NAME a" and "NAME b"."""
    return {f"{name} {part}": x for part in "ab" for name, x in by_name(family, tree, part).items()}


def _matrices(name: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a pair with all inputs and all outputs in one dimension; those of layers and experts come before."""
    lead = 2 if name in ("gate", "up", "down") else 1
    return a.reshape(*a.shape[:lead], -1, a.shape[-1]), b.reshape(*b.shape[: lead + 1], -1)


def merged(bases: oracle.Parameters, pairs: oracle.Parameters) -> oracle.Parameters:
    """Return the oracle's parameters with scale A B added to each weight that has a pair."""
    found, scale = dict(bases), SCALE
    for name in {key[:-2] for key in pairs}:
        a, b = _matrices(name, pairs[f"{name} a"], pairs[f"{name} b"])
        found[name] = bases[name] + scale * (a @ b).reshape(bases[name].shape)
    return found


def gradients_of(gradients: oracle.Parameters, pairs: oracle.Parameters) -> oracle.Parameters:
    """Return the gradients of the pairs, given those of the merged weights."""
    found, scale = {}, SCALE
    for name in {key[:-2] for key in pairs}:
        a, b = _matrices(name, pairs[f"{name} a"], pairs[f"{name} b"])
        g = gradients[name].reshape(*a.shape[:-1], b.shape[-1])
        found[f"{name} a"] = scale * (g @ b.swapaxes(-1, -2)).reshape(pairs[f"{name} a"].shape)
        found[f"{name} b"] = scale * (a.swapaxes(-1, -2) @ g).reshape(pairs[f"{name} b"].shape)
    return found


def compare(case: Case) -> None:
    """Run the steps of a case and of the oracle, and compare everything."""
    start = adapted(case.family, case.balance)
    bases = parameters_of(case.family, without_pairs(start))
    pairs = pairs_of(case.family, start)
    zeros = {name: np.zeros_like(x) for name, x in pairs.items()}
    rule: Any = OPTIMIZERS["adamw"][0]
    constants = (rule.beta1, rule.beta2, rule.epsilon, rule.weight_decay, rule.clip_norm)
    optimizer = oracle.AdamW(*constants, dict(zeros), dict(zeros))
    settings, micro_steps = oracle_family(case.family, case.balance), case.microbatches

    learns = lambda path: path.endswith((".a", ".b"))  # noqa: E731
    recorder = GradientRecorder(rule, Constant(), STEPS, case.execution.placements(start))
    run = CompiledStep(case, recorder, start=start, trained=learns)
    assert collective_traffic(run.step.traced.jaxpr).outline(2) == step_traffic(case.settings, start, trained=learns)
    for number in range(STEPS):
        outcome = oracle.differentiate(merged(bases, pairs), batch(number), micro_steps, settings)
        outcome = dataclasses.replace(outcome, gradients=gradients_of(outcome.gradients, pairs))
        metrics = run(number)
        np.testing.assert_array_equal(metrics.load, outcome.load)
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm"):
            assert float(getattr(metrics, name)) == pytest.approx(getattr(outcome, name), rel=TOLERANCE)
        assert worst_error(pairs_of(case.family, run.gradients), outcome.gradients) < TOLERANCE
        pairs = optimizer.update(pairs, outcome, rule.learning_rate)
        settings = settings.after_step(outcome.load)
    after: Any = run.state.model
    assert worst_error(pairs_of(case.family, after), pairs) < TOLERANCE
    for name, x in parameters_of(case.family, without_pairs(after)).items():
        np.testing.assert_array_equal(x, bases[name])
    moments = jax.tree.leaves(run.state.optimizer.optimizer)
    assert sum(x.ndim > 0 for x in moments) == 2 * len(pairs_by_path(after)) * 2


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(c, marks=pytest.mark.weekly) for c in CASES[1:])], ids=str)
def test_steps_are_those_of_merged_matrices(case):
    compare(case)


def products_of(step: Step) -> int:
    """Return the FLOPs of a traced step's products: of attention, projections and `ragged_dot`."""
    total = 0
    for found in equations(step.traced.jaxpr):
        equation, (one, *_) = found.equation, found.equation.outvars
        if equation.primitive.name not in ("dot_general", "ragged_dot_general"):
            continue
        first, result = (v.aval.shape for v in (equation.invars[0], one))  # pyright: ignore[reportAttributeAccessIssue]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            size = math.prod(result) * math.prod(first[dim] for dim in contracted)
        else:  # each row meets one matrix; a gradient of matrices has [rows, inputs] and [rows, outputs]
            size = math.prod(first) * result[-1]
        assert found.times is not None
        total += 2 * size * found.times
    return total


def test_a_step_computes_no_gradient_of_the_base():
    """Fewer FLOPs than a step of all weights by one product per weight, and more by six thin ones per pair.

    Of a pair, x A and (x A) B run forward; backward run the products that give the gradients of A, B, x A and x.
    """
    case = Case("gather", "single", "fsdp_ep", "none", 1, "batch")
    kernels = moezoo.Kernels(grouped_matmul=("ragged_dot",), attention=("reference",))
    execution = dataclasses.replace(case.execution, kernels=kernels)

    def flops(start: Any, learns: Any = None) -> int:
        optimizer = Optimizer(SGD(0.1), Constant(), STEPS, execution.placements(start))
        return products_of(Step(as_blueprint(start, learns), optimizer, execution, batch_shapes(1)))

    start, tokens = adapted("mixtral"), ROWS * LENGTH
    fewer = more = 0
    for path, axes, shape in parameter_table(start):
        rows = tokens * config("mixtral").experts_per_token if "expert" in axes.names else tokens
        first, cut = len(axes.stacked), len(axes.stacked) + len(axes.inputs)
        inputs, outputs, layers = (
            math.prod(shape[first:cut]),
            math.prod(shape[cut:]),
            LAYERS if ".stacks" in path else 1,
        )
        if axes.role is Role.WEIGHT:
            fewer += 2 * layers * rows * inputs * outputs
        if path in dict(pairs_by_path(start)):
            more += 3 * 2 * layers * rows * ADAPTER.rank * (inputs + outputs)
    whole, of_pairs = flops(model()), flops(start, lambda path: path.endswith((".a", ".b")))
    assert of_pairs == whole - fewer + more


@pytest.mark.parametrize("few", [None, BlockFP8.rounded], ids=["bfloat16", "fp8"])
def test_the_base_travels_as_it_is_stored(few):
    """In bfloat16 or in bytes, for layers in float32; only pairs are float32, and only they send gradients."""
    case = CASES[0]
    ends = ("_up", "experts.gate", "experts.up", "experts.down")

    def change(m: Any) -> Any:
        return m if few is None else cut_pieces(store(m, lambda path: path.endswith(ends), few), case.execution)

    blueprint = Blueprint(config("deepseek"), "bfloat16", change, adapter=Lora(rank=2))
    optimizer = Optimizer(SGD(0.1), Constant(), STEPS, case.execution.placements(blueprint.shapes))
    step = Step(blueprint, optimizer, case.execution, batch_shapes(case.microbatches))
    found = collective_traffic(step.traced.jaxpr).outline(2)
    learns = lambda path: path.endswith((".a", ".b"))  # noqa: E731
    assert found == step_traffic(case.settings, blueprint.shapes, trained=learns)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(without_pairs(blueprint.shapes))}
    assert ("uint8" in kinds) == (few is not None)


@pytest.mark.full
@pytest.mark.parametrize("case", [*cover(), *EXTRA_CASES], ids=str)
def test_on_the_cover(case):
    compare(dataclasses.replace(case, optimizer="adamw"))
