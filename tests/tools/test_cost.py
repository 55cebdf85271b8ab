"""Traced steps of released models against the oracle of traffic and figures by hand; tables, and refusals."""

import functools
import math
from typing import Any, NamedTuple

import pytest
from traffic_oracle import step_traffic

import moezoo
from moezoo import MeshShape, UserError
from moezoo.config.build import build_execution
from moezoo.config.settings import TrainConfig
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.mesh import abstract_mesh
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import Row, Traffic, TrafficTable, received_bytes
from moezoo.tools.cost import communication
from moezoo.training.build import build_step

BY_HAND = "model=mixtral_8x7b mesh.expert=8 dispatch=ragged"
# Released sizes on up to 512 devices. The parity suite compares steps of small models for every strategy, mesh, rules,
# remat and family; these cases add bounds, dtypes, axes of more than eight devices, and routers and norms stored in
# parts.
SLICES = [
    BY_HAND,
    "model=mixtral_8x22b mesh.fsdp=16 mesh.expert=8 mesh.context=2 dispatch=ring dispatch.buffer_factor=1.5 "
    "execution.reduce_dtype=bfloat16",
    "model=olmoe_1b_7b mesh.data=2 mesh.fsdp=4 mesh.expert=8 dispatch=gather execution.remat=dots "
    "model.tied_embeddings=true",
    "model=mixtral_8x7b mesh.data=2 mesh.expert=8 dispatch=dense execution.dtype=float32 execution.remat=none",
    "model=minimax_m2 mesh.fsdp=8 mesh.expert=8 dispatch=ragged dispatch.buffer_factor=2 rules.batch=[data,fsdp]",
    "model=kimi_k2 mesh.data=2 mesh.fsdp=16 mesh.expert=16 dispatch=ragged dispatch.buffer_factor=0.9 "
    "execution.microbatches=2 rules.store.router=[data] rules.store.norm=[expert]",
    "model=qwen3_235b_a22b mesh.fsdp=16 mesh.expert=16 dispatch=ring dispatch.chunks=3 model.attention_bias=all "
    "execution.remat=none",
    "model=olmoe mesh.fsdp=4 mesh.context=4 dispatch=gather execution.context_parallel=ring execution.remat=dots",
    "model=deepseek mesh.fsdp=2 mesh.expert=8 rules=ep_as_cp dispatch=capacity execution.context_parallel=ring",
    "model=mixtral mesh.fsdp=2 mesh.context=8 model.window=600 execution.context_parallel=ring",
    "model=gpt_oss mesh.fsdp=2 mesh.context=8 execution.context_parallel=ring execution.sequence_order=contiguous",
]


def compose_slice(words: str) -> TrainConfig:
    """Return the configuration of a few overrides, with two rows per device; presets compute in bfloat16.

    SGD is traced fastest. As AdamW's, its update moves nothing; the goldens have the collectives of AdamW.
    """
    given = words.split()
    devices = math.prod(int(word.split("=")[1]) for word in given if word.startswith("mesh."))
    return moezoo.compose(*given, "optimizer=sgd", f"batch_size={2 * devices}", "seq_len=2048")


class Traced(NamedTuple):
    """A step of a slice: its configuration, the shapes of its model, and the traffic of its program."""

    cfg: TrainConfig
    model: Any
    traffic: TrafficTable


@functools.cache
def trace(words: str) -> Traced:
    """Trace the step of a slice; no device is needed."""
    cfg = compose_slice(words)
    step = build_step(cfg, build_execution(cfg, abstract_mesh(cfg.mesh)))
    return Traced(cfg, step.arguments[0].model, collective_traffic(step.traced.jaxpr))


def oracle(cfg: TrainConfig) -> Any:
    """Return the traffic of a step by the oracle."""
    return step_traffic(cfg, Blueprint(cfg.model, cfg.execution.param_dtype).shapes)


def is_larger(words: str) -> bool:
    """Return whether a slice has a released size, but for the first."""
    return "_" in words.split()[0].replace("gpt_oss", "") and words != BY_HAND


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=pytest.mark.weekly if is_larger(words) else ()) for words in SLICES],
    ids=lambda words: words.split()[0].removeprefix("model="),
)
def test_traced_step_equals_the_oracle(words):
    """All counts and bytes are equal."""
    cfg, model, traffic = trace(words)
    assert traffic
    assert traffic.outline(2) == step_traffic(cfg, model)


def test_by_hand():
    """Mixtral 8x7B on eight devices of one axis, 2 x 2048 tokens per device, `ragged`, in bfloat16."""
    tokens, embed, layers, vocab = 2 * 2048, 4096, 32, 32000
    table = trace(BY_HAND).traffic.by("collective", "axes")
    # Two experts per token; 7/8 of the rows come from other devices; six exchanges: forward, again and backward, each
    # with dispatch and combine.
    assert table["ragged_all_to_all", ("expert",)] == (6 * layers, 6 * layers * 2 * tokens * embed * 2 * 7 // 8)
    # All weights except experts and norms, in bfloat16, twice (embedding and head once); gradients in float32; counts.
    attention = 2 * embed * 4096 + 2 * embed * 1024
    weights = 2 * layers * (attention + embed * 8) + 2 * vocab * embed
    counts = 2 * layers * 7 * 8 * 4
    assert table["all_gather", ("expert",)] == (2 * layers * 5 + 2 + 2 * layers, weights * 2 * 7 // 8 + counts)
    gradients = layers * (attention + embed * 8) + 2 * vocab * embed
    assert table["reduce_scatter", ("expert",)] == (layers * 5 + 2, gradients * 4 * 7 // 8)
    # Gradients of three norms; load, probabilities, tokens, z and drops; the loss, the number of tokens, the norm.
    sums = [2 * layers * embed + embed, layers * (2 * 8 + 3), 1, 1, 1]
    assert table["psum", ("expert",)].count == 3 + 5 + 3
    assert table["psum", ("expert",)].bytes == pytest.approx(sum(sums) * 4 * 2 * 7 / 8, abs=12)
    assert set(table) == {(kind, ("expert",)) for kind in ("ragged_all_to_all", "all_gather", "reduce_scatter", "psum")}


def test_bytes_received_by_each_collective():
    assert received_bytes("all_gather", 10, 4) == 30
    assert received_bytes("reduce_scatter", 40, 4) == received_bytes("all_to_all", 40, 4) == 30
    assert received_bytes("ragged_all_to_all", 40, 4) == 30
    assert received_bytes("psum", 40, 4) == 60
    assert received_bytes("psum", 4, 8) == 8  # rounded up to whole bytes
    assert received_bytes("ppermute", 40, 4) == 40


def test_arguments_replace_parts_of_the_configuration():
    def compose(*words: str) -> TrainConfig:
        return moezoo.compose("model=mixtral", "model.layers=1", "batch_size=16", "seq_len=32", *words)

    bounded = compose("mesh.expert=8", "dispatch=capacity", "dispatch.capacity_factor=3")
    rules = moezoo.compose("rules=ep_as_dp").rules
    other = communication(bounded, mesh=MeshShape(expert=4, fsdp=2), rules=rules, dispatch="gather")
    words = ("mesh.expert=4", "mesh.fsdp=2", "rules=ep_as_dp", "dispatch=gather")
    assert other.outline(2) == oracle(compose(*words))
    by_name = communication(bounded, mesh="fsdp8", rules="pure_fsdp", dispatch="ring")
    assert by_name.outline(2) == oracle(compose("mesh=fsdp8", "rules=pure_fsdp"))
    # The name of the configuration's own strategy keeps its options.
    assert communication(bounded, dispatch="capacity").outline(2) == oracle(bounded)


def test_table():
    table = TrafficTable()
    weights = Row("layers/weights", "forward", "all_gather", ("fsdp", "expert"))
    table.add(weights, Traffic(2, 1000))
    table.add(Row("layers/feed_forward/combine", "backward", "psum", ("fsdp", "expert")), Traffic(1, 7000))
    table.add(Row("layers/feed_forward/dispatch", "backward", "psum", ("expert", "fsdp")), Traffic(1, 1))
    assert (table.count, table.bytes) == (4, 8001)
    short = table.outline(2)
    joined = Row("layers/feed_forward", "backward", "psum", ("expert", "fsdp"))
    assert short == {weights: (2, 1000), joined: (2, 7001)}
    assert table.outline(1).by("scope") == {("layers",): (4, 8001)}
    assert list(table.by("collective", "axes")) == [("psum", ("expert", "fsdp")), ("all_gather", ("fsdp", "expert"))]
    assert [line.split() for line in str(short).splitlines()] == [
        ["scope", "phase", "collective", "over", "times", "bytes"],
        ["layers/feed_forward", "backward", "psum", "expert", "fsdp", "2", "7,001"],
        ["layers/weights", "forward", "all_gather", "fsdp", "expert", "2", "1,000"],
        ["all", "4", "8,001"],
    ]


def test_refuses():
    with pytest.raises(UserError, match=r"^dispatch=rong: no such dispatch; did you mean 'ring'"):
        communication(moezoo.compose("model=mixtral", "mesh=ep8"), dispatch="rong")
