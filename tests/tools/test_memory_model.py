"""The memory model: exact where programs are exact, and near what compilers have in use."""

from typing import Any

import pytest

import moezoo
from moezoo.config.build import blueprint_on, build_execution
from moezoo.models.layer_memory import layer_loops, layer_memories, layer_memory, saved_by
from moezoo.parallel.kernels import Target, mesh_for
from moezoo.parallel.mesh import mesh_of
from moezoo.parallel.traces import scan_counts
from moezoo.tools.absent import absent_devices, memory_of
from moezoo.tools.calls import CALLS
from moezoo.tools.memory_model import footprint
from moezoo.tools.sharding.activations import cache_rows
from moezoo.training.build import build_step
from moezoo.training.step import Step
from moezoo.training.step_memory import step_footprint

FAMILIES = ("mixtral", "olmoe", "qwen3_moe", "deepseek", "gpt_oss")
STRATEGIES = ("dense", "capacity", "gather", "ragged", "ring")
TARGETS = {"v5p": Target("tpu"), "v6e": Target("tpu"), "h200": Target("cuda", "9.0")}
SMALL = ("batch_size=16", "seq_len=128", "model.max_length=128")


def step_on(mesh: Any, *words: str) -> Step:
    """Return the step of a configuration on a mesh, or for a target without its devices."""
    cfg = moezoo.compose(*words)
    return build_step(cfg, build_execution(cfg, mesh_for(cfg.mesh, mesh) if isinstance(mesh, Target) else mesh))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("model=deepseek", "mesh=fsdp2_ep4", "optimizer=muon", "execution.microbatches=2"), marks=pytest.mark.weekly
        ),
        ("model=qwen3_moe", "mesh=fsdp8", "adapter=lora"),
        pytest.param(("model=mixtral", "mesh=fsdp8", "dispatch=ring"), marks=pytest.mark.full),
        pytest.param(
            ("model=gpt_oss", "mesh=ep8", "execution.param_dtype=bfloat16", "optimizer=sgd"), marks=pytest.mark.full
        ),
    ],
    ids=lambda words: "-".join(word.partition("=")[2] for word in words),
)
def test_arguments_are_those_of_the_compiled_step(words):
    step = step_on(None, *words, *SMALL)
    memory = memory_of(step.compile().program)
    found = step_footprint(step)
    assert memory is not None
    assert found.arguments == memory.arguments
    assert found.arguments < found.peak < 2 * memory.in_use


@pytest.mark.parametrize(
    ("family", "strategy", "remat"),
    [(f, s, "full") for f, s in zip(FAMILIES, STRATEGIES, strict=True)]
    + [("deepseek", "ragged", "offload"), ("olmoe", "gather", "dots")]
    + [pytest.param("gpt_oss", "ring", "offload", marks=pytest.mark.weekly)]
    + [("qwen3_5", "ring", "full")],
)
def test_one_traced_layer_has_what_the_layers_of_the_step_have(family, strategy, remat):
    words = (f"model={family}", f"dispatch={strategy}", "mesh=fsdp2_ep4", f"execution.remat={remat}", *SMALL)
    step = step_on(Target("tpu"), *words)
    stacks = zip(step.blueprint.shapes.stacks, step.blueprint.mask.stacks, strict=True)
    alone = [layer_memory(stack, learns, step.execution, 16, 128) for stack, learns in stacks]
    within = layer_memories(step.traced.jaxpr, "tpu")
    assert [one.saved for one in alone] == [one.saved for one in within]
    assert all(1 <= a.backward.bytes / b.backward.bytes < 1.01 for a, b in zip(alone, within, strict=True))
    input = (remat == "full") * 2 * 128 * step.blueprint.config.embed * 4
    if remat != "dots":
        assert [one.saved - one.sums for one in alone] == [
            len(stack.blocks) * input for stack in step.blueprint.shapes.stacks
        ]


def test_dots_save_products():
    """By hand, numbers per token: three projections, the result of attention and `out`, and the products of experts."""
    words = ("model=mixtral", "dispatch=gather", "mesh=fsdp8", "execution.remat=dots", *SMALL)
    step = step_on(Target("tpu"), *words)
    c: Any = step.blueprint.config
    tokens = 2 * 128
    heads, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    # The input, queries, keys and values, attention's result twice (the kernel's and the reordered one), its sum of
    # exponentials and the maximum, `out`, the logits of the router.
    outside = c.embed + heads + 2 * keys + heads + c.heads + c.embed + c.experts
    rows = c.experts_per_token * (2 * c.expert_mlp + c.embed)
    sums = 2 * (2 * c.experts + 1) + 2  # of two rows
    (layers,) = layer_memories(step.traced.jaxpr, "tpu")
    assert layers.saved == 4 * ((outside + rows) * tokens + sums)


@pytest.mark.parametrize(
    ("call", "family"),
    [*((call, "deepseek") for call in ("evaluate", "prefill", "decode")), ("decode", "qwen3_5")],
)
def test_terms_of_other_calls(call, family):
    """States of recurrent layers, float32 beside activations of half as many bits, count by themselves."""
    words = ("rules=serve", "mesh.tensor=2", "execution.dtype=bfloat16") if family == "qwen3_5" else ()
    cfg = moezoo.compose(f"model={family}", "mesh=fsdp2_ep4", "dispatch=ring", "seq_len=100", *words)
    program = CALLS[call](cfg, blueprint := blueprint_on(cfg))
    found = footprint(cfg, call)
    held = dict(found.terms)
    assert held["parameters"] == program.memory["parameters"]
    assert found.peak == sum(held.values()) == max(moment.bytes for moment in found.moments)
    if program.cache is not None:
        rows = cache_rows(blueprint.shapes, program.cache, program.execution)
        assert held["cache"] + held.get("recurrent states", 0) == sum(row.bytes_per_device for row in rows)
    if family == "qwen3_5":
        m: Any = cfg.model
        d = m.delta
        state = 4 * d.value_heads * d.key_dim * d.value_dim
        inputs = 2 * (d.taps - 1) * (2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim)
        rows = cfg.batch_size // 8
        assert held["recurrent states"] == 3 * rows * (state + inputs) // 2
        assert held["cache"] == rows * 2 * 2 * (112 + 16) * m.kv_heads * m.head_dim // 2


def test_more_micro_steps_hold_fewer_activations_and_a_sum_of_gradients():
    once, twice = (
        step_footprint(step_on(Target("tpu"), "model=mixtral", "mesh=fsdp8", f"execution.microbatches={n}", *SMALL))
        for n in (1, 2)
    )
    (before, *_), (after, *_) = (
        [dict(m.terms) for m in found.moments if "backward" in m.name] for found in (once, twice)
    )
    # Two of the sums of routing are one number per layer and micro-step.
    layers = step_on(Target("tpu"), "model=mixtral").blueprint.config.layers
    assert after["saved activations"] * 2 == before["saved activations"] + 2 * 4 * layers
    # While layers run backward, the gradient of the embedding is not there.
    assert after["sum of gradients over micro-steps"] > after["gradients"] == before["gradients"]
    assert after["gradient of the unembedding"] > 0
    assert "sum of gradients over micro-steps" not in before


RECURRENT = (
    "model.layers=4 model.experts=8 model.experts_per_token=2 model.vocab=8192 mesh.fsdp=8 dispatch=gather "
    "batch_size=32 seq_len=4096"
)
# Devices, and the overrides of a step of a released model; of docs/planning.md.
PEAKS = {
    "mixtral": ("v5p:4x4x4", "model=mixtral_8x7b mesh.fsdp=64 batch_size=768 seq_len=4096"),
    "mixtral-large-batch": ("v5p:4x4x4", "model=mixtral_8x7b mesh.fsdp=64 batch_size=1536 seq_len=4096"),
    "mixtral-gpu": ("h200", "model=mixtral_8x7b mesh.fsdp=8 batch_size=16 seq_len=4096"),
    "qwen3-ring": (
        "h200",
        "model=qwen3_30b_a3b mesh.expert=8 dispatch=ring dispatch.buffer_factor=2 batch_size=16 seq_len=4096",
    ),
    "deepseek_v2_lite-capacity-dots": (
        "v5p",
        "model=deepseek_v2_lite mesh.expert=8 dispatch=capacity execution.remat=dots batch_size=32 seq_len=4096",
    ),
    "gpt_oss": ("v5p", "model=gpt_oss_20b mesh.fsdp=8 dispatch=gather batch_size=32 seq_len=4096"),
    "olmoe-none": (
        "h200",
        "model=olmoe_1b_7b mesh.fsdp=8 dispatch=gather execution.remat=none batch_size=16 seq_len=4096",
    ),
    "deepseek_v3-ragged": (
        "v5p:8x8x8",
        "model=deepseek_v3 mesh.fsdp=64 mesh.expert=8 dispatch=ragged dispatch.buffer_factor=2 batch_size=1024 "
        "seq_len=4096",
    ),
    "qwen3-long": (
        "v5p:4x4x4",
        "model=qwen3_30b_a3b mesh.fsdp=8 mesh.context=8 dispatch=gather execution.context_parallel=ring batch_size=8 "
        "seq_len=32768",
    ),
    "olmoe-ragged-dots": (
        "v5p",
        "model=olmoe_1b_7b mesh.fsdp=2 mesh.expert=4 dispatch=ragged execution.remat=dots batch_size=16 seq_len=4096",
    ),
    "deepseek_v2_lite-ring": (
        "h200",
        "model=deepseek_v2_lite mesh.fsdp=2 mesh.expert=4 dispatch=ring execution.microbatches=4 batch_size=64 "
        "seq_len=4096",
    ),
    "olmoe-muon": ("v5p", "model=olmoe_1b_7b mesh.fsdp=8 dispatch=gather optimizer=muon batch_size=16 seq_len=4096"),
    "mixtral-tensor": (
        "h200",
        "model=mixtral_8x7b rules=tensor mesh.expert=4 mesh.tensor=2 dispatch=ring execution.param_dtype=bfloat16 "
        "batch_size=4 seq_len=4096",
    ),
    **{
        name: (devices, f"model={model} seq_len=4096")
        for name, devices, model in (
            ("olmoe-v5p-ring", "v5p:2x2x2", "olmoe_1b_7b mesh.fsdp=4 mesh.expert=2 dispatch=ring batch_size=32"),
            (
                "deepseek-v5p-ring",
                "v5p:2x2x2",
                "deepseek_v2_lite mesh.fsdp=4 mesh.expert=2 dispatch=ring batch_size=32",
            ),
            ("olmoe-v5p-gather", "v5p:2x2x2", "olmoe_1b_7b mesh.fsdp=4 mesh.expert=2 dispatch=gather batch_size=32"),
            ("mixtral-512", "v5p:4x4x4", "mixtral_8x7b mesh.fsdp=64 batch_size=512"),
            # Compiled after the rules were read from the programs above.
            ("deepseek-h200-gather", "h200", "deepseek_v2_lite mesh.fsdp=8 dispatch=gather batch_size=32"),
            ("mixtral-640", "v5p:4x4x4", "mixtral_8x7b mesh.fsdp=64 batch_size=640"),
            ("qwen3-v5p-ring", "v5p:2x2x4", "qwen3_30b_a3b mesh.fsdp=4 mesh.expert=4 dispatch=ring batch_size=32"),
        )
    },
    "qwen3_5": ("v5p", f"model=qwen3_5_35b_a3b {RECURRENT}"),
    "olmoe-v6e-ring": (
        "v6e",
        "model=olmoe_1b_7b mesh.fsdp=2 mesh.expert=4 dispatch=ring batch_size=16 seq_len=2048",
    ),
}
# CI compiles the first. The other takes a minute of a processor, and is compiled each week.
MARKS = {"qwen3-ring": [pytest.mark.absent, pytest.mark.smoke], "gpt_oss": [pytest.mark.absent]}


@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, [pytest.mark.full])) for name in PEAKS],
)
def test_peak_is_near_what_compilers_have_in_use(name):
    devices, words = PEAKS[name]
    cfg = moezoo.compose(*words.split())
    predicted = footprint(cfg, target=TARGETS[devices.partition(":")[0]])
    memory = memory_of(step_on(mesh_of(cfg.mesh, absent_devices(devices)), *words.split()).compile().program)
    assert memory is not None
    print(f"{name}: {predicted.peak / 1e9:.1f} GB at {predicted.moment}; in use {memory.in_use / 1e9:.1f} GB")
    assert memory.in_use / 1.2 < predicted.peak < 1.2 * memory.in_use


STAGED = ("mesh.stage=2", "mesh.fsdp=4", "batch_size=32", "seq_len=64", "execution.dtype=bfloat16")


@pytest.mark.parametrize("order", ["microbatches=4", "microbatches=8", "microbatches=4,gather=tick", "chunks=2"])
def test_what_a_stage_holds(order):
    """One input per tick; gathered weights and their gradients once, or none; a copy of layers that move to stages."""
    options = [f"execution.pipeline.{each}" for each in order.split(",")]
    step = step_on(Target("tpu"), "model=mixtral", *STAGED, *options)
    held = dict(next(m for m in step_footprint(step).moments if "in a tick" in m.name).terms)
    c: Any = step.blueprint.config
    pipeline: Any = step.execution.pipeline
    count, chunks = pipeline.count(2), pipeline.chunks
    ticks, input = chunks * count + 1, 2 * (32 // count // 4) * 64 * c.embed
    sums = 4 * (32 // count // 4 * (2 * c.experts + 1) + 2)  # of one layer of routing
    assert held["saved activations"] == ticks * (input + c.layers // 2 // chunks * sums)
    assert held["inputs of the layers of a tick"] == c.layers // 2 // chunks * input
    assert held["gradients of micro-batches of the stage"] == (count + 1) * input
    layer = c.embed * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + c.embed * c.experts + 2 * c.embed
    layer += c.experts * 3 * c.embed * c.expert_mlp
    once = pipeline.gather == "once"
    assert held.get("gathered weights of the stage", 0) == once * c.layers // 2 * layer * 2
    assert held.get("gradients of weights of the stage", 0) == once * c.layers // 2 * layer * 4
    assert ("layers moved to their stage" in held) == (chunks > 1)
    if chunks > 1:  # stored over four devices, but for the norms; and its gradient
        norms = 2 * c.embed
        assert held["layers moved to their stage"] == 2 * c.layers // 2 * ((layer - norms) // 4 + norms) * 4


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.newer)])
def test_saved_activations_of_stages_are_those_of_the_traced_step(remat):
    """Within the coordinates of tokens: before the stages, in ticks and after them."""
    step = step_on(Target("tpu"), "model=deepseek", "model.layers=8", *STAGED, f"execution.remat={remat}")
    loops = [loop for loop in layer_loops(step.traced.jaxpr, "forward") if scan_counts(loop)[1]]
    # Outside of ticks a loop over micro-batches, which carries nothing, is around that over layers.
    traced = saved_by(loops[0]) * loops[0].params["length"]
    held = {m.name.removeprefix("backward pass of "): dict(m.terms) for m in step_footprint(step).moments}
    parts = ("stacks[0]", "stacks[1] in a tick", "stacks[1]")
    before, ticks, after = (held[name]["saved activations"] for name in parts)
    assert before < ticks < after
    assert 1 <= traced / (ticks - before) < 1.02
    input = 2 * (32 // 2 // 4) * 64 * step.blueprint.config.embed
    assert held[parts[1]]["inputs of the layers of a tick"] >= input
    assert all(
        held[name].get("micro-batches of the stage", 0) == (0 if "tick" in name else 2 * input) for name in parts
    )


def test_an_evaluation_in_stages_keeps_no_inputs_of_ticks():
    cfg = moezoo.compose("model=mixtral", *STAGED, "execution.pipeline.microbatches=4")
    names = {term.name for moment in footprint(cfg, "evaluate").moments for term in moment.terms}
    assert {"gathered weights of the stage", "micro-batches of the stage"} < names
    assert not {"gradients of weights of the stage", "saved activations"} & names
