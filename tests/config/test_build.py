"""A batch that a mesh cannot split: the refusal names meshes on which the same configuration runs."""

import re

import pytest

import moezoo
from moezoo.config.build import build_execution
from moezoo.convert import show
from moezoo.parallel.mesh import abstract_mesh


def build(*overrides):
    cfg = moezoo.compose(*overrides)
    return build_execution(cfg, abstract_mesh(cfg.mesh))


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        ("mesh=ep8 batch_size=6", ["mesh.expert=2 mesh.context=4", "mesh.expert=2"]),
        ("mesh=fsdp2_ep4 batch_size=4", ["mesh.fsdp=1 mesh.context=2", "mesh.fsdp=1"]),
        ("mesh=ep8 batch_size=7", ["mesh.expert=1 mesh.context=8", "mesh=single"]),
        ("mesh=ep8 batch_size=6 seq_len=126", ["mesh.expert=2"]),
        ("mesh=fsdp8 rules=pure_fsdp batch_size=12", ["mesh.fsdp=4"]),
        (
            "mesh=ep8 execution.microbatches=2",
            ["execution.microbatches=1", "mesh.expert=4 mesh.context=2", "mesh.expert=4"],
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
    found = re.findall(r"((?:mesh|execution)[.=a-z0-9_ ]+?)(?= \(\d|;| or )", message.partition("fewer ways with ")[2])
    assert found == advice
    for changed in found:
        mesh = changed == "mesh=single"
        base = [word for word in overrides.split() if not (mesh and word.startswith("mesh="))]
        build(*base, *changed.split())


def test_settings_reach_the_execution():
    settings = {"dtype": "bfloat16", "reduce_dtype": "bfloat16", "remat": "dots", "routing": "balanced"}
    execution = build("mesh=ep8", *(f"execution.{name}={value}" for name, value in settings.items()))
    assert {name: str(getattr(execution, name)) for name in settings} == settings


def test_a_window_may_be_as_long_as_the_longest_text():
    build("mesh=ep8", "model.max_length=64", "seq_len=64")
    with pytest.raises(moezoo.UserError, match=r"^seq_len=65 exceeds model.max_length=64; "):
        build("mesh=ep8", "model.max_length=64", "seq_len=65")
