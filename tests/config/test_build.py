"""What a mesh cannot split: the refusal names meshes and rule sets with which the same configuration runs."""

import re

import pytest
from jax.sharding import AbstractMesh, AxisType
from refusals import refused

import moezoo
from moezoo.analysis.cost import communication
from moezoo.config.build import build_execution
from moezoo.convert import show
from moezoo.parallel.mesh import abstract_mesh
from moezoo.parallel.traffic import TrafficTable


def build(*overrides):
    cfg = moezoo.compose(*overrides)
    return build_execution(cfg, abstract_mesh(cfg.mesh))


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        ("mesh=ep8 batch_size=6", ["mesh.expert=2 mesh.context=4", "mesh.expert=2", "rules=ep_as_cp"]),
        ("mesh=fsdp2_ep4 batch_size=4", ["mesh.fsdp=1 mesh.context=2", "mesh.fsdp=1", "rules=ep_as_cp"]),
        ("mesh=fsdp2_ep4 rules=ep_as_cp batch_size=3", ["mesh.fsdp=1 mesh.expert=8", "mesh=single"]),
        ("mesh=ep8 batch_size=7", ["mesh.expert=1 mesh.context=8", "mesh=single", "rules=ep_as_cp"]),
        ("mesh=ep8 batch_size=6 seq_len=126", ["mesh.expert=2"]),
        ("mesh=fsdp8 rules=pure_fsdp batch_size=12", ["mesh.fsdp=4"]),
        (
            "mesh=ep8 execution.microbatches=2",
            ["execution.microbatches=1", "mesh.expert=4 mesh.context=2", "mesh.expert=4", "rules=ep_as_cp"],
        ),
        ("mesh=ep8 execution.microbatches=3", ["execution.microbatches=1"]),
        ("mesh.data=4 mesh.fsdp=2 batch_size=4", ["mesh.data=2 mesh.context=2", "mesh.data=2"]),
        (
            "mesh=ep8 rules.batch=[expert,data] rules.sequence=[tensor] batch_size=4",
            ["mesh.expert=4 mesh.tensor=2", "mesh.expert=4"],
        ),
        # Heads cannot be stored over 8 devices along context.
        ("mesh=ep8 batch_size=7 rules.store.heads=[context] rules.store.embed=[fsdp,expert]", ["mesh=single"]),
        ("mesh=fsdp2_ep4 rules.batch=[fsdp] batch_size=3", ["mesh.fsdp=1 mesh.context=2", "mesh.fsdp=1"]),
    ],
)
def test_every_advice_runs(overrides, advice):
    with pytest.raises(moezoo.UserError) as caught:
        build(*overrides.split())
    message = str(caught.value)
    assert "\n" not in message
    size = re.search(r"is not divisible by (\d+)", message)
    assert size is not None
    assert f"make it a multiple of {size[1]}" in message
    assert f"rules.batch={show(moezoo.compose(*overrides.split()).rules.batch)}" in message
    found = re.findall(
        r"((?:mesh|execution|rules)[.=a-z0-9_ ]+?)(?= \(\d|;| or )", message.partition("fewer ways with ")[2]
    )
    assert found == advice
    for changed in found:
        mesh = changed == "mesh=single"
        base = [word for word in overrides.split() if not (mesh and word.startswith("mesh="))]
        build(*base, *changed.split())


@pytest.mark.parametrize(
    ("overrides", "parts", "mesh", "rules"),
    [
        (
            "mesh.fsdp=4 mesh.expert=4 rules=shard_exp_on_fsdp batch_size=16",
            ["mesh.expert=4 x mesh.fsdp=4", "16 ways", "model.experts=8", "rules.store.expert=[expert, fsdp]"],
            "mesh.expert=4 mesh.fsdp=2",
            "cp_as_ep, ep_as_cp, ep_as_dp, fsdp_ep, tensor",
        ),
        (
            "mesh.context=2 mesh.expert=4 rules=cp_as_ep model.experts=6",
            ["mesh.context=2 x mesh.expert=4", "8 ways", "model.experts=6", "context x expert divides 6"],
            "mesh.context=2 mesh.expert=1",
            "",
        ),
        # 8 divides neither 6 experts nor, by 6 or 3, an embedding of 128.
        ("mesh=ep8 model.experts=6", ["mesh.expert=8", "8 ways", "model.experts=6"], "mesh.expert=2", ""),
        (
            "mesh.context=2 rules=ep_as_cp",
            ["mesh.context=2", "rules ep_as_cp", "'context'", "set mesh.context=1"],
            "",
            "cp_as_ep, fsdp_ep, shard_exp_on_fsdp, tensor",
        ),
        ("mesh=fsdp2_ep4 model.embed=36", ["mesh.fsdp=2 mesh.expert=4", "8 ways", "model.embed=36"], "", "ep_as_dp"),
        ("mesh.tensor=2", ["mesh.tensor=2", "rules fsdp_ep", "'tensor'"], "", "tensor"),
        (
            "rules=tensor mesh.tensor=4 model.heads=12 model.kv_heads=6",
            ["mesh.tensor=4", "'kv_heads' 4 ways", "model.kv_heads=6"],
            "mesh.tensor=2",
            "",
        ),
        (
            "rules=tensor mesh.tensor=4 model.expert_mlp=50",
            ["mesh.tensor=4", "'expert_mlp' 4 ways", "model.expert_mlp=50"],
            "mesh.tensor=2",
            "",
        ),
        # Changed keys of a shipped rule set would change another one too.
        ("mesh.tensor=2 rules.batch=[fsdp]", ["mesh.tensor=2", "rules fsdp_ep", "'tensor'"], "", ""),
        (
            "mesh=fsdp2_ep4 rules.compute={}",
            ["mesh.expert=4", "rules fsdp_ep", "rules.compute.expert=[]", "Ring moves tokens", "dispatch=gather"],
            "",
            "",
        ),
    ],
)
def test_rules_that_do_not_fit_a_mesh(overrides, parts, mesh, rules):
    """The advice, if there is any, runs."""
    with pytest.raises(moezoo.UserError) as caught:
        build(*overrides.split())
    message = str(caught.value)
    assert message.startswith(parts[0])
    assert "\n" not in message
    assert not [part for part in parts if part not in message], message
    assert re.findall(r", such as (.*?)(?:;|$)", message) == ([mesh] if mesh else [])
    assert re.findall(r"; rules with which it runs on this mesh: (.*)", message) == ([rules] if rules else [])
    for advice in [mesh] if mesh else []:
        build(*overrides.split(), *advice.split())
    for name in rules.split(", ") if rules else []:
        build(*(word for word in overrides.split() if not word.startswith("rules=")), f"rules={name}")


def test_a_mesh_with_other_axes_is_refused_without_advice():
    mesh = AbstractMesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    with refused("mesh.rows=2", "rules fsdp_ep", "name it in the rules"):
        build_execution(moezoo.compose("rules=fsdp_ep"), mesh)


def test_a_sequence_that_does_not_divide():
    with refused("seq_len=126", "by 4 (mesh.expert=4)", "multiple of 4", "rules.sequence=[expert]"):
        build("mesh=fsdp2_ep4", "rules=ep_as_cp", "seq_len=126")


def test_fewer_sequences_than_devices():
    execution = build("mesh=fsdp2_ep4", "rules=ep_as_cp", "batch_size=2")
    assert (execution.batch_axes, execution.sequence_axes) == (("fsdp",), ("expert",))


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_any_axis_may_split_the_sequence(axis):
    """Names of axes mean nothing: a sequence over another axis moves what a sequence over `context` moves."""
    words = "model=deepseek dispatch=ring mesh.fsdp=2 mesh.expert=2"
    usual = communication(moezoo.compose(*f"{words} mesh.context=2 rules.store.embed=[fsdp,expert]".split()))
    changed = f"mesh.{axis}=2 rules.store.embed=[fsdp,expert] rules.batch=[fsdp,expert] rules.sequence=[{axis}]"
    stored = " ".join(f"rules.store.{name}=[fsdp,{axis},expert]" for name in ("q_lora", "kv_lora"))
    other = communication(moezoo.compose(*f"{words} {changed} {stored} rules.store.expert_embed=[fsdp,{axis}]".split()))
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
