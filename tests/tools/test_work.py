"""The work of one device, by hand and against other programs, and the bounds that follow from it."""

import dataclasses
import functools
import math
from typing import Any

import pytest

import moezoo
from moezoo.config.build import blueprint_of
from moezoo.models import DeepSeekConfig, MixtralConfig
from moezoo.parallel.traces import equations
from moezoo.tools.calls import CALLS
from moezoo.tools.cost import communication
from moezoo.tools.plan.hardware import parse_slice
from moezoo.tools.plan.work import Bound, Work, bound, model_flops, work_of
from moezoo.tools.sharding.describe import describe

TOKENS = 512  # of a device: 16 rows of 256 tokens on 8 devices
STEP = "mesh=ep8 batch_size=16 seq_len=256 dispatch=ragged"
PAIRS = TOKENS * (1 + 256) / 2  # queries and the keys that they see


@functools.cache
def work(words: str, call: Any = "train") -> Work:
    return work_of(moezoo.compose(*words.split()), call)


def bound_of(words: str, topology: str, call: Any = "train") -> Bound:
    return bound(work(words, call), parse_slice(topology), moezoo.compose(*words.split()).mesh.sizes)


def expert_products(m: Any) -> int:
    """Return the multiplications of a token with the weights of a layer with experts, except those of attention."""
    chosen = m.experts_per_token + getattr(m, "shared_experts", 0)
    return m.experts * m.embed + chosen * 3 * m.embed * m.expert_mlp


def dims_of_a_pair(m: Any) -> int:
    """Return the multiplications per head for each query and key that see each other: for the score and the value."""
    return m.nope_dim + m.rope_dim + m.value_dim if isinstance(m, DeepSeekConfig) else 2 * m.head_dim


def products(m: Any) -> tuple[int, int]:
    """Return the multiplications of a token with the weights of all layers, and with those of the head."""
    experts = expert_products(m)
    if isinstance(m, MixtralConfig):
        attention = m.embed * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
        return m.layers * (attention + experts), m.embed * m.vocab
    queries = m.embed * m.q_lora + m.q_lora * m.heads * (m.nope_dim + m.rope_dim)
    keys = m.embed * (m.kv_lora + m.rope_dim) + m.kv_lora * m.heads * (m.nope_dim + m.value_dim)
    attention = queries + keys + m.heads * m.value_dim * m.embed
    layers = m.layers * attention + m.dense_layers * 3 * m.embed * m.mlp
    return layers + (m.layers - m.dense_layers) * experts, m.embed * m.vocab


@pytest.mark.parametrize("remat", ["none", "full", "full execution.microbatches=2"])
@pytest.mark.parametrize("model", ["mixtral", "deepseek"])
def test_flops_by_hand(model, remat):
    words = f"model={model} {STEP} execution.remat={remat}"
    m: Any = moezoo.compose(*words.split()).model
    layers, head = products(m)
    attention = 2 * PAIRS * m.heads * dims_of_a_pair(m) * m.layers
    flops = work(words).flops
    assert flops["forward"] == 2 * TOKENS * (layers + head) + attention
    assert flops["backward"] == 2 * flops["forward"]
    assert flops["outside"] == 0
    # The last product of a dense layer is not needed for gradients; neither is the head computed again.
    last = getattr(m, "dense_layers", 0) * m.embed * getattr(m, "mlp", 0)
    again = 2 * TOKENS * (layers - last) + attention
    assert flops["recomputed"] == (0 if remat == "none" else again)


def test_products_that_are_kept_are_not_computed_again():
    """With `dots` the results of products and of attention are kept."""
    found = work(f"model=mixtral {STEP} execution.remat=dots").flops
    assert found == {**work(f"model=mixtral {STEP} execution.remat=none").flops, "recomputed": 0}


@pytest.mark.parametrize(("remat", "window"), [("none", 256), ("full", 100)])
def test_flops_are_those_of_the_naive_program(remat, window):
    """It runs all experts on all tokens, and scores all keys."""
    words = f"model=mixtral mesh=ep8 batch_size=16 seq_len=256 dispatch=dense execution.remat={remat}"
    words += f" model.window={window}"
    cfg = moezoo.compose(*words.split(), "execution.attention=[reference]", "execution.grouped_matmul=[ragged_dot]")
    found = dict.fromkeys(work(words).flops, 0)
    for one in equations(CALLS["train"](cfg, blueprint_of(cfg)).trace().jaxpr, "cpu"):
        arrays: list[Any] = [x.aval for x in (*one.equation.invars[:2], *one.equation.outvars[:1])]
        shapes = [x.shape for x in arrays]
        if one.equation.primitive.name == "ragged_dot_general":
            numbers = math.prod(shapes[0]) * shapes[2][-1]
        elif one.equation.primitive.name == "dot_general":
            # Every index of an operand: the contracted ones are in both operands only.
            (inner, _), (batch, _) = one.equation.params["dimension_numbers"]
            numbers = math.prod(shapes[0]) * math.prod(shapes[1])
            numbers //= math.prod(shapes[0][dim] for dim in (*inner, *batch))
        else:
            continue
        assert one.times is not None
        found[one.phase] += 2 * one.times * numbers
    m: Any = cfg.model
    seen = sum(min(query + 1, window) for query in range(256))
    unseen = 2 * TOKENS // 256 * (256**2 - seen) * m.heads * dims_of_a_pair(m) * m.layers
    times = {"forward": 1, "recomputed": remat == "full", "backward": 2, "outside": 0}
    assert work(words).flops == {phase: flops - times[phase] * unseen for phase, flops in found.items()}


def test_share_of_the_models_flops():
    """Of 8 passes of full rematerialisation 6 are the model's, and the head is not computed again."""
    cfg = moezoo.compose("model=mixtral", *STEP.split())
    full = work(f"model=mixtral {STEP} execution.remat=full")
    assert full.model_flops == model_flops(cfg) / 8
    assert 0.75 < full.model_flops / sum(full.flops.values()) < 0.76
    none = work(f"model=mixtral {STEP} execution.remat=none")
    assert none.model_flops / sum(none.flops.values()) == pytest.approx(1, rel=2e-3)  # norms are no products


def test_rows_that_are_computed():
    """The room of `ragged` is not; buffers of `capacity` are full; `dense` runs every expert on every token."""
    m: Any = moezoo.compose("model=mixtral").model
    rest = {}
    for name, rows in {"ragged": 2.0, "ring": 2.0, "capacity": 3.0, "dense": 8.0, "gather": 2.0}.items():
        words = f"model=mixtral mesh=ep8 batch_size=16 seq_len=256 dispatch={name}"
        flops = work(f"{words} dispatch.capacity_factor=1.5" if name == "capacity" else words).flops["forward"]
        rest[name] = flops - rows * 2 * TOKENS * 3 * m.embed * m.expert_mlp * m.layers
    assert len(set(rest.values())) == 1


def test_devices_that_share_work():
    """Heads, widths and vocabulary over 2 devices: each does half, of tokens that both have, but the whole router."""
    words = "model=mixtral batch_size=8 seq_len=256 dispatch=ragged rules=tensor mesh.fsdp=4"
    m: Any = moezoo.compose("model=mixtral").model
    whole, half = work(words).flops["forward"], work(f"{words} mesh.tensor=2").flops["forward"]
    router = 2 * TOKENS * m.embed * m.experts * m.layers
    assert half - router == (whole - router) / 2


def test_backward_pass_ends_where_nothing_is_trained():
    cfg = f"model=deepseek {STEP} execution.remat=full trained=['.stacks[1].*']"
    m: Any = moezoo.compose("model=deepseek").model
    part, whole = work(cfg), work(f"model=deepseek {STEP} execution.remat=full")
    assert sum(part.flops[phase] for phase in ("forward", "outside")) == whole.flops["forward"]
    # One dense layer less, with two of its three products.
    attention = products(m)[0] - products(dataclasses.replace(m, layers=m.layers - 1))[0] - expert_products(m)
    less = 2 * TOKENS * (attention + 2 * m.embed * m.mlp) + 2 * PAIRS * m.heads * dims_of_a_pair(m)
    assert part.flops["recomputed"] == whole.flops["recomputed"] - less
    assert part.hbm["saved activations"] == whole.hbm["saved activations"] * (m.layers - 1) / m.layers
    assert part.hbm["update"] < whole.hbm["update"]


def test_bytes_of_a_step_by_hand():
    """Mixtral in float32 on one axis of 8 devices, each with one expert; all other weights are used whole."""
    words = f"model=mixtral {STEP} execution.remat=none"
    m: Any = moezoo.compose("model=mixtral").model
    found, memory = (
        work(words).hbm,
        {row.name: row.bytes_per_device for row in describe(moezoo.compose(*words.split())).memory},
    )
    attention = m.embed * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    weights = m.layers * (attention + m.experts * m.embed + 3 * m.embed * m.expert_mlp) + m.embed * m.vocab
    # Read forward and backward, and their gradients written; the head's once for each of these, in one chunk.
    assert found["weights"] == 4 * 3 * weights
    assert found["saved activations"] == 2 * m.layers * TOKENS * m.embed * 4
    assert found["embeddings"] == TOKENS * m.embed * 4
    assert found["update"] == 2 * (memory["parameters"] + memory["gradients"] + memory["optimizer state"])
    other: Any = moezoo.compose("model=gpt_oss").model
    two_kinds = work(f"model=gpt_oss {STEP}").hbm["saved activations"]
    assert two_kinds == 2 * other.layers * TOKENS * other.embed * 4
    assert found["collectives"] == communication(moezoo.compose(*words.split())).bytes == work(words).traffic.bytes


@pytest.mark.parametrize("batch_size", [8, 64])
def test_bytes_of_decoding_by_hand(batch_size):
    """On 8 devices with one expert each; a device with 2 or 16 rows reads its expert."""
    words = f"model=mixtral mesh=ep8 batch_size={batch_size} seq_len=250 dispatch=ragged execution.dtype=bfloat16"
    cfg = moezoo.compose(*words.split())
    m: Any = cfg.model
    found = work(words, "decode")
    attention = m.embed * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    weights = m.layers * (attention + m.experts * m.embed + 3 * m.embed * m.expert_mlp) + m.embed * m.vocab
    assert found.hbm["weights"] == 2 * weights
    assert found.hbm["cache"] == {row.name: row.bytes_per_device for row in describe(cfg, "decode").memory}["cache"]
    assert found.flops["outside"] == found.model_flops
    # All slots are read: prompts of 256 tokens after rounding, and 16 new ones.
    slots = found.hbm["cache"] / (2 * 2 * m.layers * m.kv_heads * m.head_dim) / (batch_size // 8)
    layers, head = products(m)
    pairs = slots * m.heads * dims_of_a_pair(m) * m.layers
    assert found.flops["outside"] == 2 * batch_size / 8 * (layers + head + pairs)


def test_one_row_reads_few_experts():
    """With `gather` a device has all 8 experts and, of one token, 2 rows."""
    m: Any = moezoo.compose("model=mixtral").model
    few, more = (
        work(f"model=mixtral mesh=fsdp8 rules=pure_fsdp batch_size={rows} seq_len=64 dispatch=gather", "decode").hbm
        for rows in (8, 64)
    )
    assert more["weights"] - few["weights"] == 4 * 6 * 3 * m.embed * m.expert_mlp * m.layers


def test_calls_without_gradients():
    words = f"model=deepseek {STEP} execution.remat=none"
    evaluated, read = work(words, "evaluate"), work(words.replace("seq_len=256", "seq_len=250"), "prefill")
    forward = work(words).flops["forward"]
    assert evaluated.flops == {"forward": 0, "recomputed": 0, "backward": 0, "outside": forward}
    assert set(evaluated.hbm) == {"weights", "embeddings", "collectives"}
    # Prompts are padded to 256 tokens, but queries see keys of 250; and only the last token has logits.
    m: Any = moezoo.compose("model=deepseek").model
    unseen = PAIRS - 2 * 250 * (1 + 250) / 2
    less = 2 * unseen * m.heads * dims_of_a_pair(m) * m.layers + 2 * (TOKENS - 2) * m.embed * m.vocab
    assert read.flops["outside"] == pytest.approx(forward - less)
    assert read.hbm["cache"] > 0


def test_bound():
    words = f"model=mixtral {STEP} execution.dtype=bfloat16"
    found, device = bound_of(words, "h200"), work(words)
    assert found.compute == sum(device.flops.values()) / 989.5e12
    assert found.hbm == sum(device.hbm.values()) / 4.8e12
    assert found.step_seconds == max(found.compute, found.hbm, found.links["NVLink"])
    assert found.bound_by == "NVLink"
    # Over one switch, collectives take as long together as one after the other.
    assert found.links["NVLink"] == pytest.approx(found.alone)
    assert found.summed == pytest.approx(found.compute + found.hbm + found.alone)
    sums = sum(each.bytes for row, each in device.traffic.items() if row.collective in ("psum", "pmax"))
    assert found.links["NVLink"] * 450e9 == pytest.approx(device.traffic.bytes - sums * (1 - 8 / 7 / 2))
    assert Bound(3.0, 2.0, {"ICI": 1.0}, 1.0).bound_by == "compute"
    assert Bound(1.0, 2.0, {}, 0.0).bound_by == "HBM"
    torus = bound_of(words, "v5p")
    assert max(torus.links.values()) <= torus.alone * (1 + 1e-9)


def test_ring_takes_longer_than_ragged_over_many_devices():
    """64 devices have an expert each: a token travels to all of them, or to two."""
    words = "model=mixtral model.experts=64 model.layers=1 mesh.expert=64 batch_size=64 seq_len=256 dispatch="
    ring, ragged = (bound_of(words + name, "v5p:4x4x4").alone for name in ("ring", "ragged"))
    assert ring > 2 * ragged


def test_fewer_tokens_leave_more_time_for_weights_to_travel():
    """Gathered weights are as large for one row per device as for 16."""
    words = "model=mixtral mesh=fsdp8 rules=pure_fsdp seq_len=256 dispatch=gather batch_size="
    few, many = bound_of(words + "8", "v6e"), bound_of(words + "128", "v6e")
    assert many.alone == pytest.approx(few.alone, rel=0.01)
    assert many.compute == pytest.approx(16 * few.compute)
    assert few.alone / few.summed > 1.2 * many.alone / many.summed


STAGES = "model=mixtral model.layers=8 mesh.stage=2 mesh.fsdp=4 batch_size=16 seq_len=256 dispatch=ragged"


@pytest.mark.parametrize(("remat", "passes"), [pytest.param("full", 2, marks=pytest.mark.newer), ("none", 1)])
def test_ticks_without_work_take_time(remat, passes):
    """Of 5 ticks one is without work: their FLOPs count, and not as the model's. A tick runs again, then its layers."""
    words = f"{STAGES} execution.pipeline.microbatches=4 execution.remat={remat}"
    m: Any = moezoo.compose(*words.split()).model
    layers, head = products(m)
    staged = (2 * TOKENS * layers + 2 * PAIRS * m.heads * dims_of_a_pair(m) * m.layers) * 5 / 4
    found = work(words)
    assert found.flops["forward"] == staged + 2 * TOKENS * head
    assert found.flops["backward"] == 2 * found.flops["forward"]
    assert found.flops["recomputed"] == passes * staged
    assert found.model_flops == model_flops(moezoo.compose(*words.split())) / 8
    device = TOKENS // 2 * m.embed * 4  # the input of a tick
    assert found.hbm["saved activations"] == 2 * 5 * (1 + m.layers // 2) * device
    bounds = bound_of(words, "h200")
    assert bounds.compute == sum(found.flops.values()) / 989.5e12
    evaluated = work(words, "evaluate")
    assert evaluated.flops["outside"] == found.flops["forward"]
    assert evaluated.model_flops == pytest.approx(found.model_flops / 3)


@pytest.mark.newer
def test_layers_outside_of_stages_run_once_per_micro_batch():
    """A dense layer before the stages and one layer after them, with windows in neither."""
    words = STAGES.replace("mixtral", "deepseek") + " execution.pipeline.microbatches=4"
    m: Any = moezoo.compose(*words.split()).model
    assert (m.layers, m.dense_layers) == (8, 1)
    layers, head = products(m)
    part = products(dataclasses.replace(m, layers=2))[0]
    attention = 2 * PAIRS * m.heads * dims_of_a_pair(m)
    in_ticks = 2 * TOKENS * (layers - part) + 6 * attention
    assert work(words).flops["forward"] == in_ticks * 5 / 4 + 2 * TOKENS * (part + head) + 2 * attention


def of_delta_rule(m: Any) -> tuple[float, float]:
    """Return the FLOPs per token of a layer's rule, forward and backward (docs/planning.md, "Recurrent layers")."""
    d, size = m.delta, 64
    pairs = 4 * size**2 * d.key_dim * d.key_heads
    inverse = (3 * 4 * 2 + 2 * 2) * 2 * 16**3 + 2 * 2 * 32**3
    answers = 2 * size * d.key_dim * d.value_dim + 2 * size**2 * d.value_dim
    written = 2 * size**2 * (d.value_dim + d.key_dim) + 4 * size * d.key_dim * d.value_dim
    forward = pairs + d.value_heads * (inverse + written + answers)
    # Once more, but for the answers; then two products for each, but for the inverse, whose gradient has its own two.
    backward = forward - d.value_heads * answers
    backward += 2 * (forward - d.value_heads * inverse) + d.value_heads * 2 * 2 * size**3
    return forward / size, backward / size


def hybrid_products(m: Any) -> tuple[int, int]:
    """Return the multiplications of a token with weights, those of filters included, and those of the recurrences."""
    d, layers = m.delta, m.layers * 3 // 4
    keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
    recurrent = m.embed * (2 * keys + 3 * values + 2 * d.value_heads) + d.taps * (2 * keys + values)
    attention = m.embed * m.head_dim * (3 * m.heads + 2 * m.kv_heads)
    experts = expert_products(m) + m.embed * (3 * m.shared_mlp + 1)
    of_weights = layers * recurrent + (m.layers - layers) * attention + m.layers * experts
    return of_weights, layers * 3 * d.value_heads * d.key_dim * d.value_dim


@pytest.mark.parametrize("remat", ["none", "full"])
def test_flops_of_recurrent_layers(remat):
    """Projections, filters and the rule in chunks; three layers of four have no pairs of queries and keys."""
    words = f"model=qwen3_5 {STEP} execution.remat={remat}"
    cfg = moezoo.compose(*words.split())
    m: Any = cfg.model
    assert m.layers == 4
    (products, recurrence), (rule, back) = hybrid_products(m), of_delta_rule(m)
    head, pairs = m.embed * m.vocab, 2 * PAIRS * m.heads * dims_of_a_pair(m)
    found = work(words)
    assert found.flops["forward"] == 2 * TOKENS * (products + head) + pairs + 3 * TOKENS * rule
    assert found.flops["backward"] == 4 * TOKENS * (products + head) + 2 * pairs + 3 * TOKENS * back
    again = 2 * TOKENS * products + pairs + 3 * TOKENS * rule
    assert found.flops["recomputed"] == (again if remat == "full" else 0)
    assert model_flops(cfg) / 8 == found.model_flops == 3 * (2 * TOKENS * (products + head + recurrence) + pairs)


def test_flops_of_recurrent_layers_whose_heads_are_split():
    """Two devices share all products but those of the router and of the shared expert's gate."""
    words = "model=qwen3_5 mesh.tensor=2 rules={} batch_size=2 seq_len=250 dispatch=gather"
    m: Any = moezoo.compose(*words.format("tensor").split()).model
    (products, recurrence), (rule, _) = hybrid_products(m), of_delta_rule(m)
    head, whole = m.embed * m.vocab, m.layers * m.embed * (m.experts + 1)
    tokens, chunks, slots, dims = 2 * 250, 2 * 256, 256 + 16, m.heads * dims_of_a_pair(m)
    forward = tokens * (products + whole + head) + tokens * 251 / 2 * dims + 3 * chunks * rule / 2
    assert work(words.format("tensor")).flops["forward"] == forward
    token = products + recurrence + whole + head + slots * dims
    assert work(words.format("serve"), "decode").flops["outside"] == 2 * token


def test_decoding_reads_and_writes_states():
    """Keys and values are read; states, and the last inputs of filters, are of one size and written too."""
    words = "model=qwen3_5 mesh=ep8 batch_size=8 seq_len=250 dispatch=ragged execution.dtype=bfloat16"
    m: Any = moezoo.compose(*words.split()).model
    d, slots = m.delta, 256 + 16
    state = 4 * d.value_heads * d.key_dim * d.value_dim
    inputs = 2 * (d.taps - 1) * (2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim)
    slotted = 2 * 2 * slots * m.kv_heads * m.head_dim
    assert work(words, "decode").hbm["cache"] == slotted + 2 * 3 * (state + inputs)
    assert work(words, "prefill").hbm["cache"] == slotted + 3 * (state + inputs)
    products, recurrence = hybrid_products(m)
    pairs = slots * m.heads * dims_of_a_pair(m)
    assert work(words, "decode").flops["outside"] == 2 * (products + recurrence + pairs + m.embed * m.vocab)
