"""`moezoo sharding`: its JSON, its tables, the difference of two layouts, and mistakes."""

import json
import typing

import pytest

from moezoo.config import overrides
from moezoo.config.options import describe_switches
from moezoo.hub.few_bits import BY_NAME
from moezoo.tools.calls import CALLS
from moezoo.tools.sharding.command import Switches
from moezoo.typed import types_of

SLICE = ("model=mixtral_8x7b", "mesh.expert=8", "batch_size=64", "seq_len=4096")


def test_choices_are_those_of_the_registry():
    assert typing.get_args(types_of(Switches)["call"]) == tuple(CALLS)
    assert dict(describe_switches(Switches)).keys() >= {f"--few-bits={'|'.join(BY_NAME)}"}


def test_json_is_alone_and_counts_as_by_hand(console):
    """One token of 64 rows on eight devices, `ragged`, in bfloat16: the exchange of an accelerator."""
    code, out, err = console("sharding", *SLICE, "dispatch=ragged", "--call=decode", "--json")
    assert (code, err.split()[:2]) == (0, ["decode", "mixtral:"])
    found = json.loads(out)
    assert {name: sorted(rows[0]) for name, rows in found.items()} == {
        "parameters": ["axes", "bytes_per_device", "local_shape", "name", "shape", "spec", "trained"],
        "activations": ["axes", "bytes_per_device", "local_shape", "name", "shape", "spec"],
        "collectives": ["bytes", "count", "mesh_axes", "op", "scope"],
        "memory": ["bytes_per_device", "name"],
    }
    parameters = sum(row["bytes_per_device"] for row in found["parameters"])
    cache = 32 * 2 * (4096 + 16) * 8 * 128 * 2 * 8  # keys and values of eight rows on each device, in bfloat16
    held = {row["name"]: row["bytes_per_device"] for row in found["memory"]}
    assert held == {"parameters": parameters, "cache": cache, "all": parameters + cache}
    assert found["parameters"][0] == {
        "name": ".embedding.weight",
        "axes": ["vocab", "embed"],
        "spec": [[], ["expert"]],
        "shape": [32000, 4096],
        "local_shape": [32000, 512],
        "bytes_per_device": 32000 * 512 * 4,
        "trained": True,
    }
    rows = {(row["scope"], row["op"]): (row["mesh_axes"], row["count"], row["bytes"]) for row in found["collectives"]}
    layers, embed, numbers = 32, 4096, 2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 8
    once = 8 * 2 * embed * 2 * 7 // 8  # eight rows of two experts
    assert rows == {
        ("embedding/weights", "all-gather"): (["expert"], 1, 32000 * embed * 2 * 7 // 8),
        ("layers/weights", "all-gather"): (["expert"], 5 * layers, layers * numbers * 2 * 7 // 8),
        ("layers/feed_forward/dispatch", "all-gather"): (["expert"], layers, layers * 8 * 4 * 7),
        ("layers/feed_forward/dispatch", "ragged-all-to-all"): (["expert"], layers, layers * once),
        ("layers/feed_forward/combine", "ragged-all-to-all"): (["expert"], layers, layers * once),
        ("head/weights", "all-gather"): (["expert"], 1, 32000 * embed * 2 * 7 // 8),
    }


def test_few_bits_by_hand(console):
    """Experts of gpt-oss-120b on eight devices: half a byte for each number and one for each 32 of them."""
    asked = ("model=gpt_oss_120b", "rules=serve", "mesh.expert=8", "--few-bits=mxfp4", "--parameters-only", "--json")
    code, out, _ = console("sharding", *asked)
    rows = {row["name"]: row for row in json.loads(out)["parameters"]}
    assert code == 0
    values, scale = (rows[f".stacks[0].blocks[0].feed_forward.experts.gate.{name}"] for name in ("values", "scale"))
    numbers = 18 * 128 * 2880 * 2880  # of every other layer
    assert (values["bytes_per_device"], scale["bytes_per_device"]) == (numbers // 2 // 8, numbers // 32 // 8)
    assert not values["trained"]


def test_few_bits_with_a_scale_per_output_by_hand(console):
    """Queries of GLM-4.5-Air, whose inputs eight devices cut: a byte for each number, and scales of each part."""
    words = ("model=glm4_5_air", "mesh.expert=8", "--few-bits=fp8_channels", "--parameters-only", "--json")
    code, out, _ = console("sharding", *words)
    rows = {row["name"]: row for row in json.loads(out)["parameters"]}
    assert code == 0
    values, scale = (rows[f".stacks[0].blocks[0].attention.query.{name}"] for name in ("values", "scale"))
    assert (values["shape"], scale["shape"]) == ([1, 4096, 96, 128], [1, 8, 96, 128])
    assert (values["bytes_per_device"], scale["bytes_per_device"]) == (4096 * 96 * 128 // 8, 96 * 128 * 4)


def test_the_title_has_the_axis_that_splits_nothing(console):
    code, out, _ = console("sharding", "rules=tensor", "mesh=single", "--parameters-only")
    assert (code, out.splitlines()[1]) == (0, "1 device: mesh=single rules=tensor dispatch=ring")
    assert out.splitlines()[2].startswith("mesh axis tensor has one device, so heads, ")


def test_the_title_has_what_auto_chose(console):
    """Each layout has its own choice, beside its mesh and rules; much unused room has a line."""
    words = ["model=mixtral", "model.layers=1", "model.experts=16", "mesh=ep8", "dispatch=auto"]
    code, out, _ = console("sharding", *words, "--against", "dispatch=ring")
    assert code == 0
    lines = out.splitlines()
    assert "dispatch=auto" in lines[1]
    assert lines[2].startswith("- auto: ragged to train; received per layer: ring ")
    assert "8 times the rows in use; dispatch=ragged dispatch.buffer_factor=2" in lines[3]
    assert "dispatch=ring dispatch.buffer_factor=2" in next(line for line in lines if line.startswith("+ room"))


def test_difference_of_two_layouts(console):
    """Here only parameters; a batch that no mesh divides does not matter for them."""
    words = (
        "model=mixtral",
        "mesh=fsdp2_ep4",
        "batch_size=3",
        "--parameters-only",
        "--against=rules=shard_exp_on_fsdp",
    )
    code, out, err = console("sharding", *words)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    first = lines.index("- .feed_forward.experts.gate 4x8x128x256 4x2x64x256 524,288")
    assert lines[first + 1 : first + 4] == [
        "layer expert(expert) expert_embed(fsdp) expert_mlp",
        "+ .feed_forward.experts.gate 4x8x128x256 4x1x128x256 524,288",
        "layer expert(expert fsdp) expert_embed expert_mlp",
    ]
    assert lines[-1] == "10 other rows of parameters are the same"
    _, out, _ = console("sharding", *words, "--json")
    found = json.loads(out)
    assert found["activations"] == found["collectives"] == found["memory"] == []
    assert [change["this"]["name"] for change in found["parameters"]] == [
        f".stacks[0].blocks[0].feed_forward.experts.{name}" for name in ("gate", "up", "down")
    ]
    assert found["parameters"][0]["this"]["spec"] == [[], ["expert"], ["fsdp"], []]
    assert found["parameters"][0]["against"]["spec"] == [[], ["expert", "fsdp"], [], []]


@pytest.mark.parametrize(
    ("words", "changes", "result"),
    [
        ("mesh=ep8 rules=fsdp_ep steps=2", "rules=ep_as_dp steps=3", "mesh=ep8 steps=2 rules=ep_as_dp steps=3"),
        ("mesh.fsdp=8 mesh.data=2", "mesh.data=4", "mesh.fsdp=8 mesh.data=2 mesh.data=4"),
        (
            "mesh.fsdp=8 model=olmoe +rules.store.router=[fsdp]",
            "mesh=ep8 rules=ep_as_dp",
            "model=olmoe mesh=ep8 rules=ep_as_dp",
        ),
    ],
)
def test_what_the_other_layout_is_composed_of(words, changes, result):
    """A group that is named anew loses its keys, because they were meant for the other entry."""
    assert overrides.replace(words.split(), changes.split()) == result.split()
