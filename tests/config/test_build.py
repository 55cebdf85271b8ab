"""What a mesh cannot split: the refusal names another mesh of as many devices, or the sizes that none divides."""

import math
import re

import pytest
from jax.sharding import AbstractMesh, AxisType
from refusals import by_table, refused

import moezoo
from moezoo.config.build import build_execution
from moezoo.parallel.mesh import abstract_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traffic import TrafficTable
from moezoo.tools.cost import communication
from moezoo.typed import show


def build(*overrides):
    cfg = moezoo.compose(*overrides)
    return on_mesh(build_execution(cfg, abstract_mesh(cfg.mesh)))


def advice_of(overrides):
    """Return the line that refuses a layout, the mesh that it names, and other settings that it names.

    All that it names runs, and the mesh has as many devices as the refused one.
    """
    words = overrides.split()
    with pytest.raises(moezoo.UserError) as caught:
        build(*words)
    message = str(caught.value)
    assert "\n" not in message
    meshes = re.findall(r"; (mesh\.[^;]*) has as many devices and divides all sizes$", message)
    devices = math.prod(moezoo.compose(*words).mesh.sizes.values())
    for mesh in meshes:
        assert math.prod(build(*words, *mesh.split()).sizes.values()) == devices
    for near in message.partition("; nearest: ")[2].split(", or "):
        build(*words, *near.split()) if near else None
    others = re.findall(r", or set (\S+);", message)
    for other in others:
        build(*(word for word in words if not word.startswith(f"{other.partition('=')[0]}=")), other)
    return message, "".join(meshes), "".join(others)


@by_table(
    """
    overrides => mesh => other
    mesh=ep8 batch_size=6 => mesh.expert=2 mesh.context=4 =>
    mesh=fsdp2_ep4 batch_size=4 => mesh.fsdp=1 mesh.expert=4 mesh.context=2 =>
    mesh=fsdp2_ep4 rules=ep_as_cp batch_size=3 => mesh.fsdp=1 mesh.expert=8 =>
    mesh=ep8 batch_size=7 => mesh.expert=1 mesh.context=8 =>
    mesh=ep8 batch_size=6 seq_len=126 => =>
    mesh=fsdp8 rules=pure_fsdp batch_size=12 => =>
    mesh=ep8 execution.microbatches=2 => mesh.expert=4 mesh.context=2 => execution.microbatches=1
    mesh=ep8 execution.microbatches=3 => => execution.microbatches=1
    mesh.data=4 mesh.fsdp=2 batch_size=4 => mesh.data=2 mesh.fsdp=2 mesh.context=2 =>
    mesh=ep8 rules.batch=[expert,data] rules.sequence=[tensor] batch_size=4 => mesh.expert=4 mesh.context=2 =>
    # Heads cannot be stored over 8 devices along context.
    mesh=ep8 batch_size=7 rules.store.heads=[context] rules.store.embed=[fsdp,expert] => =>
    mesh=fsdp2_ep4 rules.batch=[fsdp] batch_size=3 => mesh.fsdp=1 mesh.expert=8 =>
    # The number of stages stays as it is.
    mesh.stage=2 mesh.expert=4 batch_size=6 model.layers=4 => mesh.stage=2 mesh.expert=1 mesh.context=4 =>
    """
)
def test_a_batch_that_a_mesh_does_not_split(overrides, mesh, other):
    message, *found = advice_of(overrides)
    size = re.search(r"is not divisible by (\d+)", message)
    assert size is not None
    assert f"make it a multiple of {size[1]}" in message
    assert f"rules.batch={show(moezoo.compose(*overrides.split()).rules.batch)}" in message
    assert found == [mesh, other]


@by_table(
    """
    overrides => parts => mesh
    mesh.fsdp=4 mesh.expert=4 rules=shard_exp_on_fsdp batch_size=16
        => mesh.expert=4 x mesh.fsdp=4 ... 16 ways ... model.experts=8 ... rules.store.expert=[expert, fsdp]
        => mesh.data=2 mesh.fsdp=2 mesh.expert=4
    mesh.context=2 mesh.expert=4 rules=cp_as_ep model.experts=6
        => mesh.context=2 x mesh.expert=4 ... 8 ways ... model.experts=6 ... context x expert divides 6
        => mesh.fsdp=4 mesh.expert=1 mesh.context=2
    # 8 divides neither 6 experts nor, by 6 or 3, an embedding of 128.
    mesh=ep8 model.experts=6 => mesh.expert=8 ... 8 ways ... model.experts=6 => mesh.fsdp=4 mesh.expert=2
    mesh.context=2 rules=ep_as_cp => mesh.context=2 ... rules ep_as_cp ... 'context' ... set mesh.context=1
        => mesh.fsdp=2 mesh.context=1
    mesh=fsdp2_ep4 model.embed=36 => mesh.fsdp=2 mesh.expert=4 ... 8 ways ... model.embed=36
        => mesh.data=2 mesh.fsdp=1 mesh.expert=4
    mesh.tensor=2 => mesh.tensor=2 ... rules fsdp_ep ... 'tensor' => mesh.expert=2 mesh.tensor=1
    # A value head meets its key head: four devices do not share two of these.
    model=qwen3_5 rules=tensor mesh.tensor=4 => mesh.tensor=4 ... 'key_heads' 4 ways ... model.delta.key_heads=2
        => mesh.expert=2 mesh.tensor=2
    # Four devices may share two key-value heads, but not six.
    rules=tensor mesh.tensor=4 model.heads=12 model.kv_heads=6
        => mesh.tensor=4 ... 'kv_heads' 4 ways ... model.kv_heads=6 ... or is a multiple
        => mesh.expert=2 mesh.tensor=2
    rules=tensor mesh.tensor=4 mesh.expert=4 model.experts=6
        => mesh.expert=4 splits experts 4 ways => mesh.fsdp=2 mesh.expert=2 mesh.tensor=4
    rules=tensor mesh.tensor=4 model.expert_mlp=50 => mesh.tensor=4 ... 'expert_mlp' 4 ways ... model.expert_mlp=50
        => mesh.expert=2 mesh.tensor=2
    # The sizes are not the reason.
    mesh=fsdp2_ep4 rules.compute={}
        => mesh.expert=4 ... rules fsdp_ep ... rules.compute.expert=[] ... Ring moves tokens ... dispatch=gather =>
    dispatch.chunks=2000 => dispatch.chunks=2000 =>
    """
)
def test_rules_that_do_not_fit_a_mesh(overrides, parts, mesh):
    message, found, _ = advice_of(overrides)
    assert message.startswith(parts.split(" ... ")[0])
    assert not [part for part in parts.split(" ... ") if part not in message], message
    assert found == mesh


DEEPSEEK = "model=deepseek_v3 batch_size=4096 seq_len=4096"


@by_table(
    """
    overrides => mesh => nearest
    # 7,168 is 7 x 1,024, but 512 is the width of the latents of keys, so four devices along data have the same.
    mesh.fsdp=64 mesh.expert=32 => mesh.data=4 mesh.fsdp=16 mesh.expert=32 =>
    # Along fsdp alone 512 devices are the most, whatever the batch.
    mesh.fsdp=2048 rules=pure_fsdp => => 2048 ... mesh.fsdp=512
    mesh.fsdp=64 mesh.expert=32 batch_size=8 seq_len=128 =>
        => 2048 ... mesh.fsdp=1 mesh.expert=8 mesh.context=64
        ... mesh.data=4 mesh.fsdp=16 mesh.expert=32 batch_size=2048
    mesh.fsdp=64 mesh.expert=32 adapter=lora => mesh.data=4 mesh.fsdp=16 mesh.expert=32 =>
    mesh.fsdp=3 => => 3 ... mesh.fsdp=2 ... mesh.fsdp=4 ... mesh.data=3 mesh.fsdp=1 batch_size=4095
    """
)
def test_one_refusal_names_a_mesh_that_divides_every_dimension(overrides, mesh, nearest):
    message, found, _ = advice_of(f"{DEEPSEEK} {overrides}")
    assert found == mesh
    devices, *words = nearest.split(" ... ")
    end = f"; no mesh of {devices} devices divides all sizes; nearest: {', or '.join(words)}"
    assert not nearest or message.endswith(end), message


def test_the_nearest_meshes_and_batch_in_a_short_line():
    message, _, _ = advice_of("mesh.fsdp=3 batch_size=8")
    assert message.endswith("; nearest: mesh.fsdp=2, or mesh.fsdp=4, or mesh.data=3 mesh.fsdp=1 batch_size=9")
    assert len(message) < 240


def test_what_all_stages_store_is_no_layer():
    cfg = moezoo.compose("mesh.stage=3", "batch_size=9")
    with refused("mesh.stage=3 splits 'embed' 3 ways", "(.embedding.weight, which all stages store together)"):
        build_execution(cfg, abstract_mesh(cfg.mesh), batches="any")


def test_parameters_alone_need_no_batch():
    cfg = moezoo.compose("mesh.fsdp=3", "batch_size=7")
    with refused("mesh.fsdp=3 splits 'embed' 3 ways", "; mesh.data=3 mesh.fsdp=1 has as many devices"):
        build_execution(cfg, abstract_mesh(cfg.mesh), batches="any")


@pytest.mark.parametrize(
    ("axes", "line"),
    [
        ({"rows": 2}, "mesh.rows=2 but rules fsdp_ep name no axis 'rows', .*; set mesh.rows=1 or name it in the rules"),
        ({"rows": 1, "expert": 8}, "batch_size=6 is not .*names the mesh axes that split it"),
        ({"expert": 8}, "batch_size=6 is not .*; mesh.expert=2 mesh.context=4 has as many devices and .*"),
    ],
)
def test_a_mesh_with_other_axes_is_refused_without_advice(axes, line):
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    with pytest.raises(moezoo.UserError, match=f"^{line}$"):
        build_execution(moezoo.compose("rules=fsdp_ep", "batch_size=6"), mesh)


def test_a_sequence_that_does_not_divide():
    with refused("seq_len=126", "by 4 (mesh.expert=4)", "multiple of 4", "rules.sequence=[expert]"):
        build("mesh=fsdp2_ep4", "rules=ep_as_cp", "seq_len=126")


def test_fewer_sequences_than_devices():
    execution = build("mesh=fsdp2_ep4", "rules=ep_as_cp", "batch_size=2")
    assert (execution.batch_axes, execution.sequence_axes) == (("fsdp",), ("expert",))


def test_any_axis_may_split_the_sequence():
    """Names of axes mean nothing: a sequence over another axis moves what a sequence over `context` moves."""
    words = "model=deepseek dispatch=ring mesh.fsdp=2 mesh.expert=2"
    usual = communication(moezoo.compose(*f"{words} mesh.context=2 rules.store.embed=[fsdp,expert]".split()))
    for axis in ("data", "tensor"):
        changed = f"mesh.{axis}=2 rules.store.embed=[fsdp,expert] rules.batch=[fsdp,expert] rules.sequence=[{axis}]"
        changed += f" rules.store.expert_embed=[fsdp,{axis}]"
        stored = (f"rules.store.{name}=[fsdp,{axis},expert]" for name in ("q_lora", "kv_lora"))
        other = communication(moezoo.compose(*f"{words} {changed}".split(), *stored))
        renamed = TrafficTable()
        for row, traffic in usual.items():
            renamed.add(row._replace(axes=tuple(axis if name == "context" else name for name in row.axes)), traffic)
        assert other == renamed


def test_settings_reach_the_execution():
    settings = {"dtype": "bfloat16", "reduce_dtype": "bfloat16", "remat": "dots", "routing": "balanced"}
    execution = build("mesh=ep8", *(f"execution.{name}={value}" for name, value in settings.items()))
    assert {name: str(getattr(execution, name)) for name in settings} == settings


def test_a_window_may_be_as_long_as_the_longest_text():
    build("mesh=ep8", "model.max_length=64", "seq_len=64")
    with pytest.raises(moezoo.UserError, match=r"^seq_len=65 exceeds model.max_length=64; "):
        build("mesh=ep8", "model.max_length=64", "seq_len=65")


def test_a_window_may_be_as_long_as_the_index_of_sparse_attention_selects():
    build("mesh=ep8", "model=deepseek", "model.index_topk=64", "seq_len=64")
    with refused("seq_len=65 exceeds model.index_topk=64 (beyond it", "not built); shorten it"):
        build("mesh=ep8", "model=deepseek", "model.index_topk=64", "seq_len=65")
