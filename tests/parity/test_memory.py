"""Memory of a step: gathered weights exist only while their layer runs, and activations follow the memory model.

No remat policy saves a gathered weight for the backward pass. On a split sequence the temporaries per device are near
those of docs/planning.md.
"""

import functools
import math
import re
from dataclasses import replace
from typing import Any

import jax
import pytest
from cover import Case, config
from running import RATE, STEPS, batch_shapes

import moezoo
from moezoo.config.build import build_execution
from moezoo.models.blueprint import Blueprint
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.traces import equations
from moezoo.profiling.hlo import read_computations
from moezoo.training.build import build_step
from moezoo.training.step import Step
from moezoo.training.step_memory import step_footprint

# Weights are large and there are few tokens, so every large array is a weight. A device has two rows of eight tokens.
LAYERS, EMBED, MLP, EXPERTS = 8, 64, 256, 8
FLOAT = 4  # bytes per float32
ONE_LAYER = 3 * EXPERTS * EMBED * MLP * FLOAT  # bytes of the gathered expert weights of a layer


@functools.cache
def step_with_large_weights(case: Case) -> Step:
    """Return the step of a case, not compiled, for a model with large weights."""
    blueprint = Blueprint(config(layers=LAYERS, embed=EMBED, expert_mlp=MLP))
    optimizer = Optimizer(SGD(RATE), Constant(), STEPS, case.execution.placements(blueprint.shapes))
    return Step(blueprint, optimizer, case.execution, batch_shapes(1))


# Every policy where weights are gathered over `fsdp`, and those that keep more also where over `expert` and over both.
CASES = [Case("ring", "fsdp8", "fsdp_ep", remat, 1, "batch") for remat in ("full", "dots", "none")]
CASES += [
    Case("gather", "ep8", "fsdp_ep", "none", 1, "batch"),
    Case("gather", "fsdp2_ep4", "fsdp_ep", "dots", 1, "batch"),
]


def arrays_kept_per_layer(step: Step, layers: int = LAYERS) -> list[Any]:
    """Return the types of the arrays that scans over layers stack: gradients, and what the backward pass reads."""
    kept = []
    for equation, *_ in equations(step.traced.jaxpr):
        if equation.primitive.name == "scan" and equation.params["length"] == layers:
            body = equation.params["jaxpr"]
            results: Any = zip(equation.outvars, getattr(body, "jaxpr", body).outvars, strict=True)
            # A carry leaves the scan in the shape it has in the body. A stacked array gains a dimension.
            kept += [inner.aval for outer, inner in results if outer.aval.shape != inner.aval.shape]
    return kept


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_scan_returns_gathered_weights(case):
    """The scan over layers returns what it saves for the backward pass; no weight may be among these arrays."""
    kept = [math.prod(array.shape) for array in arrays_kept_per_layer(step_with_large_weights(case))]
    # A layer returns its gradients, of which each device has an eighth, as of the parameters, and activations. The
    # largest activation has MLP numbers for each of the device's tokens and each of its K = 2 experts.
    tokens = 16
    assert max(kept) <= max(EXPERTS * EMBED * MLP // 8, 2 * tokens * MLP)
    assert max(kept) < EXPERTS * EMBED * MLP // 4  # far less than one gathered weight


def test_offload_moves_layer_inputs_to_the_host_only():
    """`offload` saves the same arrays as `full`; only the layer's input is in host memory."""
    full, offload = (
        [(array.shape, array.memory_space) for array in arrays_kept_per_layer(step)]
        for step in (step_with_large_weights(replace(CASES[0], remat=remat)) for remat in ("full", "offload"))
    )
    rows = (2, 8, EMBED)
    assert [where for shape, where in full if shape == rows] == [jax.memory.Space.Device]
    assert [where for shape, where in offload if shape == rows] == [jax.memory.Space.Host]
    assert sorted(shape for shape, _ in full) == sorted(shape for shape, _ in offload)
    assert [where for _, where in offload].count(jax.memory.Space.Host) == 1


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_compiled_step_holds_few_gathered_layers(case):
    """XLA's temporary memory, without arguments and results, is that of few layers."""
    analysis: Any = step_with_large_weights(case).compile().program.memory_analysis()
    temporary = analysis.temp_size_in_bytes
    # A layer needs its three gathered weights, their gradients before they are scattered, and transposed copies for the
    # products: less than 4 * ONE_LAYER. The device's eighth of all gradients, `gradient`, may exist twice.
    # Activations are small. If the backward pass read saved weights, there would be at least LAYERS * ONE_LAYER.
    gradient = LAYERS * ONE_LAYER // 8
    assert ONE_LAYER < temporary < 4 * ONE_LAYER + 2 * gradient < LAYERS * ONE_LAYER


# Sequences that are split over four devices; sizes that are not small beside each other.
SPLIT = ("mesh.context=4", "batch_size=1", "optimizer=sgd", "dispatch=gather", "model.vocab=64", "model.embed=64")
GROUPED = ("model=mixtral", "model.layers=5", "model.kv_heads=2", "model.head_dim=16", "model.expert_mlp=64")
RECURRENT = ("model=qwen3_5", "model.layers=8", "model.attention_every=2", "model.kv_heads=2", "model.head_dim=16")
RECURRENT += ("model.expert_mlp=64", "model.shared_mlp=64", "model.delta.key_dim=16", "model.delta.value_dim=16")
LATENT = ("model=deepseek", "model.layers=5", "model.dense_layers=0", "model.q_lora=32", "model.expert_mlp=64")


def split_step(length: int, *words: str) -> tuple[Any, Step]:
    """Return the configuration and the step of a laptop-sized model on sequences of `length` tokens."""
    cfg = moezoo.compose(f"seq_len={length}", f"model.max_length={length}", *SPLIT, *words)
    return cfg, build_step(cfg, build_execution(cfg))


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (8192, (*GROUPED, "execution.context_parallel=ring")),
        (2048, (*LATENT, "execution.context_parallel=gather")),
        pytest.param(2048, (*RECURRENT, "execution.context_parallel=ring"), marks=pytest.mark.weekly),
        pytest.param(2048, (*GROUPED, "execution.context_parallel=ring"), marks=pytest.mark.full),
        pytest.param(8192, (*LATENT, "execution.context_parallel=gather"), marks=pytest.mark.full),
    ],
    ids=["grouped-ring", "latent-gather", "recurrent-ring", "grouped-ring-short", "latent-gather-long"],
)
def test_temporaries_of_a_split_sequence(length, words):
    """XLA's temporary memory is near that of the memory model."""
    _, step = split_step(length, *words)
    analysis: Any = step.compile().program.memory_analysis()
    model = step_footprint(step)
    predicted = model.peak - model.arguments
    assert predicted / 1.2 < analysis.temp_size_in_bytes < 1.2 * predicted


def test_temporaries_of_a_head_with_a_cap():
    """XLA's temporary memory is near that of the memory model where logits are most of it: the cap keeps its tanh."""
    words = ["model=gemma4", "model.layers=1", "model.vocab=32768", "model.embed=32", "model.mlp=16", "model.experts=4"]
    words += ["model.expert_mlp=16", "model.experts_per_token=2", "model.heads=2", "model.kv_heads=1"]
    words += ["model.head_dim=8", "model.full_head_dim=8", "batch_size=1", "seq_len=512", "optimizer=sgd"]
    cfg = moezoo.compose(*words, "mesh=single", "dispatch=gather")
    step = build_step(cfg, build_execution(cfg))
    analysis: Any = step.compile().program.memory_analysis()
    model, logits = step_footprint(step), 512 * cfg.model.vocab
    assert model.moment == "head"
    # The tanh, exponentials and their gradient. Without a cap 4 bytes less: exponentials take the place of logits.
    assert 12 * logits < analysis.temp_size_in_bytes < model.peak - model.arguments < 13 * logits


@pytest.mark.parametrize(
    ("words", "context_parallel"),
    [((*GROUPED, "model.heads=16"), "gather"), (LATENT, "ring")],
    ids=["grouped-gather", "latent-ring"],
)
def test_arrays_of_a_split_sequence(words, context_parallel):
    """No array grows faster than the sequence or has keys for every query head; a layer saves its input alone."""
    largest, saved = {}, {}
    for length in (2048, 4096):
        cfg, step = split_step(length, *words, f"execution.context_parallel={context_parallel}")
        outvars: Any = [out for equation, *_ in equations(step.traced.jaxpr) for out in equation.outvars]
        largest[length] = max(math.prod(out.aval.shape) for out in outvars)
        saved[length] = [array.shape for array in arrays_kept_per_layer(step, cfg.model.layers)]
    assert largest[4096] <= 2 * largest[2048]
    if words[0] == "model=mixtral":
        assert largest[4096] < 4096 * cfg.model.heads * cfg.model.head_dim / 2
    assert [shape for shape in saved[4096] if shape not in saved[2048]] == [(1, 4096 // 4, cfg.model.embed)]


def test_the_scan_does_not_slice_experts():
    """Where experts are not gathered, no pass makes the slice of a layer: each matrix is read out of the stack."""
    cfg = moezoo.compose("model=mixtral", "model.layers=3", "model.expert_mlp=96", "execution.remat=none")
    _, found = read_computations(str(build_step(cfg, build_execution(cfg)).compile().program.as_text()))
    sliced = [x.type.split("{")[0] for body in found.values() for x in body.values() if x.op == "dynamic-slice"]
    experts, embed = cfg.model.experts, cfg.model.embed
    assert f"f32[1,1,{embed},96]" in sliced
    assert not {f"f32[1,{experts},{embed},96]", f"f32[{experts},{embed},96]"} & set(sliced)


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=adamw", "mesh=single"),
        pytest.param(
            ("optimizer=adamw", "mesh=fsdp2_ep4", "optimizer.moment_dtype=bfloat16"), marks=pytest.mark.weekly
        ),
        pytest.param(("optimizer=muon", "mesh=single"), marks=pytest.mark.weekly),
        pytest.param(("optimizer=muon", "mesh=single", "optimizer.moment_dtype=bfloat16"), marks=pytest.mark.weekly),
        pytest.param(("optimizer=sgd", "mesh=single"), marks=pytest.mark.weekly),
    ],
    ids=" ".join,
)
def test_state_is_updated_in_place(words):
    """No array of the state is copied whole before an update: nothing reads an old array after the new one is written.

    A copy of an argument is an instruction of its own in the program's entry.
    """
    cfg = moezoo.compose("model=mixtral", "model.layers=2", "model.embed=64", "model.vocab=128", "batch_size=8", *words)
    step = build_step(cfg, build_execution(cfg))
    entry, found = read_computations(str(step.compile().program.as_text()))
    # With the suite's flags of XLA, parameters that are gathered in the entry are copied first.
    whose = 'op_name="state' if cfg.mesh.devices == 1 else 'op_name="state.optimizer'
    state = {name: x.text for name, x in found[entry].items() if x.op == "parameter" and whose in x.text}
    assert any("router" in text for text in state.values())
    copied = [x.operands[0] for x in found[entry].values() if x.op == "copy" and not re.match(r"\w+\[\]", x.type)]
    assert [state[name] for name in copied if name in state] == []
