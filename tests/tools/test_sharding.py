"""What is said about a layout, against the traced programs, JAX's own shards, the oracle of traffic, and by hand."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import pytest
from jax.sharding import PartitionSpec
from traffic_oracle import step_traffic

import moezoo
from moezoo.config.build import blueprint_of
from moezoo.models.blueprint import Blueprint
from moezoo.nn.containers import store
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import collective_traffic, equations
from moezoo.parallel.traffic import Row, Traffic, TrafficTable
from moezoo.tools.calls import CALLS, Call, CallName
from moezoo.tools.sharding.activations import activations
from moezoo.tools.sharding.describe import (
    Change,
    CollectiveRow,
    MemoryRow,
    ParameterRow,
    Sharding,
    collectives,
    describe,
    find_differences,
)

# Sizes differ, so that a shape is found only where it belongs. One kind of layer is traced in half the time of two.
PROGRAMS: dict[CallName, str] = {
    "train": "model=mixtral_8x22b rules=tensor mesh.fsdp=16 mesh.expert=8 mesh.context=2 mesh.tensor=4 batch_size=384 "
    "seq_len=2048 dispatch=ring",
    "evaluate": "model=deepseek_v3 rules=cp_as_ep mesh.data=8 mesh.fsdp=8 mesh.context=4 mesh.expert=16 "
    "batch_size=2048 seq_len=4096 dispatch=capacity dispatch.capacity_factor=1.5 dispatch.chunks=2",
    "prefill": "model=qwen3_30b_a3b rules=tensor mesh.fsdp=8 mesh.expert=8 mesh.tensor=8 batch_size=24 seq_len=1000 "
    "dispatch=ring",
    "decode": "model=deepseek_v2_lite model.dense_layers=0 rules=tensor mesh.fsdp=8 mesh.expert=8 mesh.context=2 "
    "mesh.tensor=2 batch_size=384 seq_len=3000",
}


class Traced(NamedTuple):
    cfg: Any
    model: Any
    call: Call
    jaxpr: Any


@functools.cache
def trace(name: CallName) -> Traced:
    cfg = moezoo.compose(*PROGRAMS[name].split())
    model = blueprint_of(cfg).shapes
    call = CALLS[name](cfg, blueprint_of(cfg))
    return Traced(cfg, model, call, call.trace().jaxpr)


@pytest.mark.parametrize("name", CALLS)
def test_activations_are_arrays_of_the_traced_program(name):
    """A device makes an array of each local shape and number of bytes."""
    cfg, model, call, jaxpr = trace(name)
    inside = [each.equation for each in equations(jaxpr, "tpu") if each.mesh]
    arrays: list[Any] = [value.aval for each in inside for value in (*each.invars, *each.outvars)]
    found = {(x.shape, x.size * x.dtype.itemsize) for x in arrays if hasattr(x, "shape")}
    rows = activations(cfg, model, call, collective_traffic(jaxpr))
    assert [row.name for row in rows if (row.local_shape, row.bytes_per_device) not in found] == []
    for row in rows:
        assert len(row.axes) == len(row.spec) == len(row.shape) == len(row.local_shape)
        ways = [call.execution.ways(over) for over in row.spec]
        assert row.shape == tuple(size * n for size, n in zip(row.local_shape, ways, strict=True))


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_activations_of_stages(name):
    """Those of a micro-batch of two rows are in the traced program, and so is what a stage keeps of all of them."""
    words = "model=mixtral mesh.stage=2 mesh.fsdp=4 batch_size=64 seq_len=32 execution.pipeline.microbatches=8"
    cfg = moezoo.compose(*words.split())
    call = CALLS[name](cfg, blueprint_of(cfg))
    jaxpr = call.trace().jaxpr
    inside = [each.equation for each in equations(jaxpr, "tpu") if each.mesh]
    arrays: list[Any] = [value.aval for each in inside for value in (*each.invars, *each.outvars)]
    found = {(x.shape, x.size * x.dtype.itemsize) for x in arrays if hasattr(x, "shape")}
    rows = {row.name: row for row in activations(cfg, blueprint_of(cfg).shapes, call, collective_traffic(jaxpr))}
    # The program has token ids of all own micro-batches in one array.
    missing = [row for row in rows.values() if (row.local_shape, row.bytes_per_device) not in found]
    assert [row.name for row in missing if row.name != "token ids"] == []
    kept = {"micro-batches that wait": 4, "micro-batches that are done": 4}
    kept |= {"inputs of ticks": 9} if name == "train" else {}
    assert {n: row.local_shape for n, row in rows.items() if "stage" in str(row.spec[:1])} == {
        **{n: (count, 2, 32, 128) for n, count in kept.items()},
        "logits held at once": (256, 256),
    }
    assert rows["residual stream"].shape == (8, 32, 128)


def test_activations_by_hand():
    """DeepSeek-V3 on 4,096 devices: rows split 1,024 ways, sequences 4 ways; two micro-steps, tokens in 3 chunks."""
    words = "model=deepseek_v3 rules=cp_as_ep mesh.data=8 mesh.fsdp=8 mesh.context=4 mesh.expert=16 batch_size=4096"
    cfg = moezoo.compose(
        *words.split(), "seq_len=4096", "execution.microbatches=2", "dispatch=ragged", "dispatch.chunks=3"
    )
    model = Blueprint(cfg.model).shapes
    gathers = TrafficTable({Row("layers/attention", "forward", "all_gather", ("context",)): Traffic(1, 1)})
    rows = {row.name: row for row in activations(cfg, model, CALLS["train"](cfg, blueprint_of(cfg)), gathers)}
    batch, sequence = 4096 // 2 // (8 * 8 * 16), 4096 // 4
    # 64 devices share the experts, 4 each; a token needs at most 4 rows on one of them.
    room = 64 * -(-batch * sequence // 3) * 4
    assert {name: row.local_shape for name, row in rows.items()} == {
        "token ids": (batch, sequence),
        "residual stream": (batch, sequence, 7168),
        "queries": (batch, sequence, 128, 128 + 64),
        "latent kept by attention": (batch, sequence, 512),
        "latent gathered over the sequence": (batch, 4096, 512),
        "shared kept by attention": (batch, sequence, 64),
        "shared gathered over the sequence": (batch, 4096, 64),
        "router probabilities": (batch, sequence, 256),
        "rows of the experts": (room, 7168),
        "inner rows of the experts": (room, 2048),
        "logits held at once": (512, 129280),
    }
    assert rows["rows of the experts"] == (
        "rows of the experts",
        ("rows", "expert_embed"),
        (("data", "fsdp", "expert", "context"), ()),
        (4096 * room, 7168),
        (room, 7168),
        2 * room * 7168,
    )
    assert rows["residual stream"].shape == (2048, 4096, 7168)
    assert rows["residual stream"].spec == (("data", "fsdp", "expert"), ("context",), ())
    assert rows["latent gathered over the sequence"].spec == (("data", "fsdp", "expert"), (), ())


def test_what_recurrent_layers_exchange_by_hand():
    """Laptop sizes on 2 x 4 devices: two chunks of each sequence per device, heads whole; and on a ring."""
    words = "model=qwen3_5 mesh.fsdp=2 mesh.context=4 batch_size=8 seq_len=64 dispatch=gather execution.dtype=bfloat16"
    cfg = moezoo.compose(*words.split(), "execution.context_parallel=ring")
    found = describe(cfg)
    rows = {row.name: row for row in found.activations if "gathered over the sequence" in row.name}
    assert {name: row.local_shape for name, row in rows.items()} == {
        "map of states gathered over the sequence": (4, 8, 4, 32, 64),
        "last inputs of the query gathered over the sequence": (4, 8, 3, 2, 32),
        "last inputs of the key gathered over the sequence": (4, 8, 3, 2, 32),
        "last inputs of the value gathered over the sequence": (4, 8, 3, 4, 32),
    }
    of_states, _, last, _ = rows.values()
    assert of_states.bytes_per_device == 4 * 4 * 8 * 4 * 32 * 64
    assert last.bytes_per_device == 2 * 4 * 8 * 3 * 2 * 32
    assert of_states.spec == (("fsdp",), (), (), (), ())
    # An all-gather brings what the seven other devices have, of the three recurrent layers.
    scopes = {row.scope: row for row in found.collectives if row.op == "all-gather" and "delta_rule" in row.scope}
    assert scopes["layers/attention/delta_rule"].bytes == 2 * 3 * of_states.bytes_per_device * 3 // 4


def test_states_of_recurrent_layers_by_hand():
    """Four sequences on two devices that share heads: float32 states lie with their value heads."""
    words = "model=qwen3_5 rules=serve mesh.expert=4 mesh.tensor=2 batch_size=8 seq_len=64 execution.dtype=bfloat16"
    found = describe(moezoo.compose(*words.split()), "decode")
    rows = {row.name.partition(" in the cache")[0]: row for row in found.activations if "cache" in row.name}
    assert {name: row.local_shape for name, row in rows.items()} == {
        **{f"inputs.{name}": (3, 2, 3, 1, 32) for name in ("query", "key")},
        "inputs.value": (3, 2, 3, 2, 32),
        "matrix": (3, 2, 2, 32, 32),
        **dict.fromkeys(("key", "value"), (1, 2, 1, 80, 32)),
    }
    assert rows["matrix"].bytes_per_device == 4 * 3 * 2 * 2 * 32 * 32
    assert rows["inputs.key"].bytes_per_device == 2 * 3 * 2 * 3 * 32
    assert rows["matrix"].spec == ((), ("expert",), ("tensor",), (), ())
    memory = {row.name: row.bytes_per_device for row in found.memory}
    assert memory["cache"] == sum(row.bytes_per_device for row in rows.values())


def test_cache_by_hand():
    cfg, model, call, _ = trace("decode")
    rows = {row.name: row for row in activations(cfg, model, call, TrafficTable()) if "cache" in row.name}
    # 384 rows on all 128 devices; 3,000 tokens and 16 more, rounded up.
    slots = 3072 + 16
    assert {name: row.local_shape for name, row in rows.items()} == {
        "latents in the cache of .stacks[0].blocks[0]": (27, 3, slots, 512 + 64),
    }
    assert {row.axes[:3] for row in rows.values()} == {("layer", "batch", "slots")}


def test_memory_of_a_step_by_hand():
    """What is not trained has no gradient and no moment; AdamW has two moments and counts its steps."""
    cfg = moezoo.compose("mesh=fsdp2_ep4", "trained=['*.query']")
    rows = describe(cfg, parts="parameters").parameters
    (query,) = (row.bytes_per_device for row in rows if row.trained)
    assert CALLS["train"](cfg, blueprint_of(cfg)).memory == {
        "parameters": sum(row.bytes_per_device for row in rows),
        "gradients": query,
        "optimizer state": 2 * query + 4,
    }


def test_collectives_of_a_step_are_those_of_the_oracle():
    cfg, model, _, jaxpr = trace("train")
    rows, wanted = collectives(collective_traffic(jaxpr)), step_traffic(cfg, model).values()
    assert [(sum(row.count for row in rows), sum(row.bytes for row in rows))] == [
        tuple(map(sum, zip(*wanted, strict=True)))
    ]
    assert {row.op for row in rows} == {"all-gather", "reduce-scatter", "all-reduce"}


def test_rows_of_collectives():
    """Phases are summed, and so are reductions; the others stay apart. The most bytes come first."""
    traffic = TrafficTable()
    given: Any = (
        ("a", "forward", "all_gather", ("x", "y"), (3, 100)),
        ("a", "recomputed", "all_gather", ("x", "y"), (3, 100)),
        ("a", "backward", "all_gather", ("y", "x"), (1, 10)),
        ("b", "outside", "psum", ("x",), (2, 5)),
        ("b", "outside", "pmax", ("x",), (1, 4)),
        ("b", "outside", "pmin", ("x",), (1, 2)),
        ("b", "forward", "ppermute", ("x",), (7, 9)),
        ("b", "forward", "all_to_all", ("x",), (7, 8)),
        ("b", "forward", "ragged_all_to_all", ("x",), (7, 7)),
        ("b", "backward", "reduce_scatter", ("x",), (7, 6)),
    )
    for scope, phase, kind, axes, numbers in given:
        traffic.add(Row(scope, phase, kind, axes), Traffic(*numbers))
    assert collectives(traffic) == (
        CollectiveRow("all-gather", ("x", "y"), 6, 200, "a"),
        CollectiveRow("all-reduce", ("x",), 4, 11, "b"),
        CollectiveRow("all-gather", ("y", "x"), 1, 10, "a"),
        CollectiveRow("collective-permute", ("x",), 7, 9, "b"),
        CollectiveRow("all-to-all", ("x",), 7, 8, "b"),
        CollectiveRow("ragged-all-to-all", ("x",), 7, 7, "b"),
        CollectiveRow("reduce-scatter", ("x",), 7, 6, "b"),
    )


def test_parameters_are_stored_as_jax_does():
    """Also the arrays of a container, which are not trained."""
    words = "model=deepseek mesh.fsdp=2 mesh.expert=2 mesh.context=2 rules=shard_exp_on_fsdp"
    cfg = moezoo.compose(*words.split(), "execution.param_dtype=bfloat16")
    experts = ".stacks[1].blocks[0].feed_forward.experts"
    change = lambda m: store(m, lambda path: path == f"{experts}.gate")  # noqa: E731
    blueprint = dataclasses.replace(blueprint_of(cfg), change=change)
    model, rows = blueprint.shapes, describe(cfg, parts="parameters", blueprint=blueprint).parameters
    shardings = jax.tree.leaves(on_mesh(moezoo.execution(cfg)).shardings(model))
    leaves = jax.tree_util.tree_leaves_with_path(model)
    assert [row.name for row in rows] == [jax.tree_util.keystr(path) for path, _ in leaves]
    for row, (_, leaf), sharding in zip(rows, leaves, shardings, strict=True):
        assert row.shape == leaf.shape
        assert row.local_shape == sharding.shard_shape(leaf.shape)
        assert row.bytes_per_device == math.prod(row.local_shape) * leaf.dtype.itemsize
        assert PartitionSpec(*(over or None for over in row.spec)) == sharding.spec
    found = {row.name: row for row in rows}
    assert found[f"{experts}.up"].axes == ("layer", "expert", "expert_embed", "expert_mlp")
    assert found[f"{experts}.up"].spec == ((), ("expert", "fsdp"), ("context",), ())
    assert found[f"{experts}.gate.values"].spec == found[f"{experts}.up"].spec
    assert found[f"{experts}.gate.values"].bytes_per_device * 2 == found[f"{experts}.up"].bytes_per_device
    assert {row.name for row in rows if not row.trained} == {
        f"{experts}.gate.values",
        f"{experts}.gate.scale",
        ".stacks[1].blocks[0].feed_forward.router.choice_bias",
    }


def test_only_chosen_parameters_are_trained():
    rows = describe(moezoo.compose("trained=['*.query']"), parts="parameters").parameters
    assert [row.name for row in rows if row.trained] == [".stacks[0].blocks[0].attention.query"]


def test_differences():
    def parameter(name: str, size: int) -> ParameterRow:
        return ParameterRow(name, ("embed",), ((),), (8,), (size,), size, True)

    gather = CollectiveRow("all-gather", ("x",), 1, 10, "layers")
    this = Sharding(
        (parameter("a", 8), parameter("b", 4)), (), (gather, gather._replace(scope="head")), (MemoryRow("all", 9),)
    )
    changed = (gather._replace(bytes=9), gather._replace(op="x"))
    other = Sharding((parameter("a", 4), parameter("b", 4)), (), changed, (MemoryRow("all", 8),))
    found = find_differences(this, other)
    assert found.parameters == (Change(parameter("a", 8), parameter("a", 4)),)
    assert found.collectives == (
        Change(gather._replace(scope="head"), None),
        Change(gather, gather._replace(bytes=9)),
        Change(None, gather._replace(op="x")),
    )
    assert found.memory == (Change(MemoryRow("all", 9), MemoryRow("all", 8)),)
    assert found.same == (1, 0, 0, 0)
    assert find_differences(this, this) == ((), (), (), (), (2, 0, 2, 1))


def test_any_number_of_sequences_generates():
    """Rows that the devices do not divide are the same on several of them."""
    cfg = moezoo.compose("mesh.expert=4", "mesh.fsdp=2", "batch_size=6", "seq_len=16")
    call = CALLS["prefill"](cfg, blueprint_of(cfg))
    assert call.local_tokens == (3, 16)
