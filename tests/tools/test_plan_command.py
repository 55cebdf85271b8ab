"""`moezoo plan`: its JSON, its table, its search, and mistakes."""

import json

import pytest

from moezoo.errors import UserError
from moezoo.tools import apart
from moezoo.tools.plan import command as plan

TINY = ("model=mixtral", "topology=v5p:2x2x2", "batch_size=16", "seq_len=32", "--estimate")
KEYS = {
    "mesh",
    "rules",
    "dispatch",
    "fits",
    "reason",
    "bytes_per_device",
    "hbm_bytes",
    "flops_per_device",
    "model_flops",
    "collectives",
    "step_seconds",
    "bound_by",
    "tokens_per_second_per_device",
    "utilisation",
}


def test_json_is_alone_and_sorted(console):
    """A row for each layout; one that cannot be laid out comes last, with the reason."""
    code, out, err = console(
        "plan", *TINY, "mesh=fsdp8,ep8", "dispatch=gather,ragged", "rules=fsdp_ep,pure_fsdp", "--json"
    )
    rows = json.loads(out)
    assert code == 0
    assert all(row.keys() >= KEYS for row in rows)
    assert len(rows) == 8
    assert err.count("at least") == 6
    fitting = [row["step_seconds"] for row in rows if row["fits"]]
    assert fitting == sorted(fitting)
    assert [row["fits"] for row in rows] == [True] * 6 + [False] * 2
    assert all("name no axis 'expert'" in row["reason"] and row["mesh"] == {"expert": 8} for row in rows[6:])


def test_table_and_picture(console, tmp_path):
    """The table fits a wide terminal, and is followed by the best row, with the command that runs it."""
    picture = tmp_path / "plan.png"
    code, out, _ = console("plan", *TINY, "mesh=fsdp4_ep2", "dispatch=all", f"--picture={picture}")
    lines = out.splitlines()
    assert code == 0
    assert lines[1].startswith("Seconds are the least that peak rates allow")
    assert {line.split()[2] for line in lines[4:9]} == {"dense", "capacity", "gather", "ring", "ragged"}
    assert max(map(len, lines[:9])) <= 180
    assert any(line.startswith("recommended: fsdp4_ep2 fsdp_ep ") for line in lines)
    assert lines[-1].startswith("  moezoo train model=mixtral batch_size=16 seq_len=32 mesh.fsdp=4 mesh.expert=2")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_fits(console):
    """The rows are printed all the same, as JSON too, with what would help."""
    words = ("model=deepseek_v3", "topology=v5e:2x4", "mesh=ep8", "batch_size=8", "seq_len=64", "--estimate")
    code, out, err = console("plan", *words, "dispatch=ring", "--json")
    (row,) = json.loads(out)
    assert (code, row["fits"]) == (2, False)
    assert "most is " in row["reason"]
    assert err.splitlines()[-1] == "error: nothing fits topology=v5e:2x4"


def test_a_compiler_that_refuses_leaves_what_was_predicted(console, monkeypatch):
    """Only where it says that memory is exhausted, the row does not fit."""
    monkeypatch.setattr(apart, "check_compiler", lambda topology: None)
    for message, fits in (("the compiler ended with code -6: x", True), ("RESOURCE_EXHAUSTED: 9 of 8 GiB", False)):

        def refuse(*_, message=message):
            raise UserError(message)

        monkeypatch.setattr(apart, "compile_apart", refuse)
        code, out, _ = console("plan", *TINY[:-1], "mesh=ep8", "dispatch=ring", "--json")
        (row,) = json.loads(out)
        assert (row["fits"], row["reason"], row["compiled_bytes"]) == (fits, f"not compiled: {message}", None)
        assert code == (0 if fits else 2)


def test_search_stops_after_its_time(console, monkeypatch):
    """It says how many layouts it left out."""
    monkeypatch.setattr(plan, "_SEARCH_SECONDS", 0.5)
    code, out, err = console("plan", *TINY)
    assert code == 0
    assert "recommended: " in out
    assert "searching " in err
    assert "stopped after 0 s; " in err
    assert "layouts were not looked at" in err


@pytest.mark.parametrize("call", ["evaluate", "prefill", "decode"])
def test_other_calls(console, call):
    code, out, _ = console("plan", *TINY, "mesh=ep8", f"--call={call}", "--json")
    (row,) = json.loads(out)
    assert (code, row["fits"]) == (0, True)
    assert row["recomputed_flops"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("topology=v5q:2x2",), "topology=v5q:2x2: no chip 'v5q'; did you mean 'v5p'?"),
        (("model=mixtral",), "topology is missing; write topology=KIND:SIZES"),
        ((*TINY, "mesh=fsdp4"), "mesh=fsdp4 has 4 devices and topology=v5p:2x2x2 has 8; write mesh=fsdp8"),
        ((*TINY, "mesh=ep8", "dispatch=ragde"), "dispatch=ragde: no such dispatch"),
        ((*TINY, "mesh=ep8", "rules=fsdp"), "rules=fsdp: no such rules"),
        ((*TINY, "mesh=ep_8"), "mesh=ep_8: expected axes and sizes such as fsdp16_ep4"),
        ((*TINY, "mesh=all", "mesh.fsdp=2"), "mesh=all mesh.fsdp=2: a search chooses all sizes"),
        ((*TINY, "mesh=ep8", "--picture=nope/a.png"), "--picture=nope/a.png: there is no such folder"),
        (
            ("model=mixtral", "topology=h200:16"),
            "topology=h200:16: a node has at most 8 h200; write nodes x GPUs, such as h200:2x8",
        ),
        ((*TINY, "run_dir=x"), "run_dir=x: plan writes no run"),
        ((*TINY, "--pictur=x"), "--pictur=x: no such option; did you mean '--picture'?"),
    ],
)
def test_mistakes(console, words, message):
    code, out, err = console("plan", *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: {message}")
