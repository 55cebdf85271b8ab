"""`moezoo plan`: its JSON, its answer, its rows in any width, its picture, its search, and mistakes."""

import itertools
import json
import os
import re
import subprocess

import pytest
from refusals import check_line

from moezoo.errors import UserError
from moezoo.tools import apart
from moezoo.tools.plan import candidates, text
from moezoo.tools.plan import command as plan
from moezoo.tools.plan.estimate import PlanRow, estimate
from moezoo.tools.plan.hardware import parse_slice
from moezoo.tools.plan.text import report, stopped
from moezoo.training import pictures

TINY = ("model=mixtral", "topology=v5p:2x2x2", "batch_size=16", "seq_len=32", "--estimate")
SMALL = ("model=mixtral", "mesh.fsdp=4", "mesh.expert=2", "batch_size=16", "seq_len=32", "dispatch=gather")
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION=.95"
KEYS = {
    "mesh",
    "rules",
    "dispatch",
    "fits",
    "reason",
    "bytes_per_device",
    "hbm_bytes",
    "usable_bytes",
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


@pytest.mark.parametrize(
    ("topology", "setting"), [pytest.param("v5p:2x2x2", "", marks=pytest.mark.weekly), ("h200:8", f"{FRACTION} ")]
)
def test_the_answer_comes_first(console, monkeypatch, topology, setting):
    """The best row, what it needs, and the command that runs it, which lets JAX take as much as the answer says."""
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = console("plan", TINY[0], f"topology={topology}", *TINY[2:], "mesh=fsdp4_ep2", "dispatch=all")
    lines, chip = out.splitlines(), parse_slice(topology).chip
    assert code == 0
    assert lines[0].startswith(f"fits {topology}: yes, best with fsdp4_ep2 fsdp_ep ")
    assert lines[0].endswith(" (5 of these 5 layouts fit)")
    assert re.fullmatch(r"memory per device, predicted: [\d.]+ MiB of .+, 0.93 of what JAX may take", lines[1])
    assert f" of {int(chip.hbm_bytes * (0.95 if setting else 1) * 0.93) / 2**30:.1f} GiB, " in lines[1]
    assert re.fullmatch(r"step: at least [\d.]+ us, bound by .+", lines[2])
    assert lines[3:5][0] == "train with:"
    words = "model=mixtral batch_size=16 seq_len=32 mesh.fsdp=4 mesh.expert=2"
    assert lines[4].startswith(f"  {setting}moezoo train {words} dispatch=")
    assert {line.split()[2] for line in lines[10:15]} == {"dense", "capacity", "gather", "ring", "ragged"}


def wide_rows() -> list[PlanRow]:
    """Return rows of every kind, with values that are wider than they usually are."""
    row = estimate(SMALL, parse_slice("h200:8"))
    row = row._replace(words=(*row.words, f"data.path={'a b' * 70}", "tokenizer=it's"))
    assert row.memory is not None
    settings = (*row.words, "execution.reduce_dtype=bfloat16", f"dispatch.option={'x' * 150}", "mesh.data=1")
    held = {"y" * 130: row.memory["parameters"], **row.memory}
    largest = {"bytes_per_device": 12345 * 2**30, "compiled_bytes": 23456 * 2**30, "step_seconds": 123456.7}
    wide = row._replace(words=settings, memory=held, bubble=0.25, caution=f"caution {'z ' * 90}{'z' * 90}", **largest)
    refused = row._replace(fits=False, reason="no such " * 30, memory=None, step_seconds=None, bytes_per_device=None)
    return [row, wide, wide._replace(fits=False, reason="w" * 300), refused]


@pytest.mark.parametrize("columns", [80, 119, 120, None])
@pytest.mark.parametrize("call", ["train", "decode"])
def test_no_line_is_wider_than_the_terminal(monkeypatch, capsys, columns, call):
    """Rows are records below 120 columns, and where a table would be wider. Without a terminal there are 80."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def no_terminal(_):
        raise OSError

    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    where, rows = parse_slice("h200:8"), wide_rows()
    for first in range(len(rows)):
        found = [*rows[first:], *rows[:first]]
        for printed in (report(found, (), where, call, ["The search " * 20]), stopped(found)):
            assert max(map(len, printed.splitlines())) <= (columns or 80)
            assert printed.count("  utilisation <=: ") == 4
            letters = "".join(printed.split())
            assert letters.count("w" * 300) >= 1  # nothing is cut off
            assert letters.count("z" * 180) >= 1
        usual = stopped([rows[0], rows[-1], rows[0]._replace(bubble=0.25)])
        assert max(map(len, usual.splitlines())) <= (columns or 80)
        assert usual.count("  utilisation <=: ") == (0 if columns == 120 else 3)
        assert ("tokens/s utilisation" in usual) == (columns == 120)
        plan._progress(f"  {rows[2].reason} {rows[1].caution}")
        assert max(map(len, capsys.readouterr().err.splitlines())) <= (columns or 80)


def test_a_shell_reads_the_command(monkeypatch):
    """Lines are joined, and so are the parts of a word that is wider than a line."""
    monkeypatch.setenv("COLUMNS", "80")
    rows = wide_rows()
    text = report(rows[:1], (), parse_slice("h200:8"), "train", ())
    command = text.partition("train with:\n")[2].partition("\n\n")[0]
    printed = subprocess.run(["bash", "-c", f"moezoo() {{ printf '%s\\n' \"$@\"; }}\n{command}"], capture_output=True)
    assert printed.stdout.decode().splitlines() == ["train", *rows[0].words]


def test_picture(console, tmp_path, monkeypatch):
    """Bars of a small model have the unit that suits them; where the limit is far away, it is only named."""
    drawn, draw = [], pictures.draw_bars
    monkeypatch.setattr(text, "draw_bars", lambda *given: drawn.append(given[-1]) or draw(*given))
    picture = tmp_path / "plan.png"
    assert console("plan", *TINY, "mesh=fsdp4_ep2", "dispatch=gather,ring", f"--picture={picture}")[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (memory, times), row = drawn.pop(), estimate(SMALL, parse_slice("v5p:2x2x2"))
    assert (memory.name, memory.limit) == ("MiB per device at the peak; at most 88.3 GiB fits", None)
    assert times.name == "us at least, one after the other"
    assert row.bytes_per_device is not None
    assert any(sum(bar.values()) * 2**20 == pytest.approx(row.bytes_per_device, rel=0.05) for bar in memory.parts)
    held = {"parameters": 60 * 2**30, "gradients": 2**20}
    text.draw([row._replace(memory=held)], picture, "large", 95 * 2**30)
    ((memory, _),) = drawn
    assert memory.parts == [{"parameters": 60.0}]
    assert memory.limit == 95


def test_nothing_fits(console):
    """The rows are printed all the same, as JSON too, with what would help."""
    words = ("model=mixtral_8x7b", "topology=v5e:2x4", "mesh=ep8", "batch_size=8", "seq_len=64", "--estimate")
    code, out, err = console("plan", *words, "dispatch=ring", "--json")
    (row,) = json.loads(out)
    assert (code, row["fits"]) == (2, False)
    assert "most is " in row["reason"]
    assert err.splitlines()[-1] == "error: nothing fits topology=v5e:2x4"


@pytest.mark.parametrize(
    ("mesh", "wanted"), [("fsdp4", "fsdp8"), ("fsdp2_ep2", "fsdp4_ep2"), ("ep3", "fsdp8"), ("fsdp64_ep2", "fsdp4_ep2")]
)
def test_a_mesh_of_another_size(console, mesh, wanted):
    """No progress comes before the mistake."""
    code, out, err = console("plan", *TINY, f"mesh={mesh}")
    assert (code, out) == (2, "")
    line = err.removesuffix("\n")
    check_line(line, f"error: mesh={mesh} has ", f" and topology=v5p:2x2x2 has 8; write mesh={wanted}")


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


def test_a_search_looks_at_a_number_of_layouts(console, monkeypatch):
    """It finds the same however long it takes, and says how many layouts it left out."""
    words = (*TINY, "mesh=all", "layouts=3")
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = console("plan", *words)
    hours = itertools.count(step=10_000)
    monkeypatch.setattr(plan.time, "monotonic", lambda: next(hours))
    assert console("plan", *words)[:2] == (code, out) == (0, out)
    assert re.search(r"^searching 3 of \d{3} layouts$", err, re.MULTILINE)
    assert re.search(r"^The search looked at 3 of \d{3} layouts.$", out, re.MULTILINE)
    assert 3 <= out.count("layout: ") <= 6  # and those three, recomputing less
    monkeypatch.setattr(candidates, "searched", lambda *_: [("model=mixtral", "mesh=ep8")])
    assert "The search looked at 1 of 1 layouts." in console("plan", *words)[1]


@pytest.mark.parametrize("call", ["evaluate", "prefill", "decode"])
def test_other_calls(console, call):
    code, out, _ = console("plan", *TINY, "mesh=ep8", f"--call={call}", "--json")
    (row,) = json.loads(out)
    assert (code, row["fits"]) == (0, True)
    assert row["recomputed_flops"] == 0
