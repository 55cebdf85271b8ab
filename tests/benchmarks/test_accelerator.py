"""`accelerator` at toy size on a CPU: its rows, going on, failures, and the choice of sizes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accelerator, agreement, tuning
from benchmarks.parts import PARTS
from moezoo.cli.command import execute
from moezoo.host import locking
from moezoo.kernels import blocks
from moezoo.kernels.grouped_matmul import api
from moezoo.parallel.kernels import Target

QUICK = ("seconds=0.001", "samples=1", "out=a")
EVERY = ("parity", "products", "layers", "attention", "step", "generate")


def bench(capsys, *arguments):
    """Return the exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as caught:
        execute(PARTS["accelerator"], (*QUICK, *arguments), "python scripts/bench.py accelerator")
    return caught.value.code, *capsys.readouterr()


def test_all_parts_and_going_on(capsys):
    """Rows are lines of JSON; a second call measures only what the first has not finished."""
    code, out, err = bench(capsys)
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("{")]
    file = Path("a/rows.jsonl")
    assert file.read_text().splitlines() == lines
    rows = [json.loads(line) for line in lines]
    assert tuple(dict.fromkeys(row["part"] for row in rows)) == EVERY
    assert all(row["device"] == "cpu" and row["jax"] and row["date"] for row in rows)
    assert all(row["agrees"] for row in rows if row["part"] == "parity")
    for part in ("products", "layers"):
        assert {row["pass"] for row in rows if row["part"] == part} == {"forward", "backward", "both"}
        assert {"matmul", "moezoo blocked"} <= {row["implementation"] for row in rows if row["part"] == part}
    decoded = [row for row in rows if row.get("pass") == "decode"]
    assert {row["implementation"] for row in decoded} == {"moezoo one_query", "moezoo reference"}
    assert all(row["gigabytes_per_second"] > 0 for row in decoded)
    step, *scopes = [row for row in rows if row["part"] == "step"]
    assert step["tflops"] > 0
    assert step["tokens_per_second"] == pytest.approx(16e3 / step["ms"], rel=1e-2)
    assert sum(row["share"] for row in scopes) == pytest.approx(1, abs=1e-3)
    assert "profile of the step" in out
    assert Path("a/speed.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("a/rows.json").read_text()) == rows
    # A call that was killed in the last unit has left the others.
    file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["part"] != "generate"))
    code, out, err = bench(capsys, "json=true")
    assert code == 0
    again = [json.loads(line) for line in out.splitlines()]
    assert {row["part"] for row in again} == {"generate"}
    assert err.count("measured before") == len({(row["part"], row["unit"]) for row in rows}) - 1
    assert len(json.loads(Path("a/rows.json").read_text())) == len(rows)


def test_failures_and_limits(capsys, monkeypatch):
    """A unit that fails leaves its error, and is measured again; a part starts nothing after its minutes."""
    products = accelerator.kernels.product

    def broken(*arguments):
        yield from list(products(*arguments))[:1]

        def fail():
            raise RuntimeError("no such kernel [/x]\non this device")

        yield "torch grouped_mm", fail

    monkeypatch.setattr(accelerator.kernels, "product", broken)
    code, out, err = bench(capsys, "only=products", "json=true")
    assert code == 2
    assert "accelerator: 1 measurements failed and 0 results disagree; see a/rows.jsonl" in err
    *measured, failed = [json.loads(line) for line in out.splitlines()]
    assert {row["implementation"] for row in measured} == {"matmul"}
    assert (failed["implementation"], failed["error"]) == ("torch grouped_mm", "RuntimeError: no such kernel [/x]")
    monkeypatch.setattr(accelerator.kernels, "product", products)
    monkeypatch.setitem(accelerator.SIZES, "tiny", accelerator.SIZES["tiny"]._replace(shapes=("tiny", "S1")))
    # A call that does not come to what failed keeps what is known of it.
    kept = Path("a/rows.jsonl").read_text()
    code, out, _ = bench(capsys, "only=attention")
    assert code == 2
    assert "no such kernel [/x]" in out  # brackets stay in the table
    assert Path("a/rows.jsonl").read_text().startswith(kept)
    code, out, err = bench(capsys, "only=products", "json=true", "minutes=0.0001")  # 6 ms
    assert code == 0
    assert {json.loads(line)["name"] for line in out.splitlines()} == {"tiny"}
    assert "products S1: left, the part has run for 0 minutes; out=a goes on" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"part": "step", "un',
            r"a/rows\.jsonl is not as accelerator leaves it \(line 1 is no row of it\); name another folder",
        ),
        ("[1]", r"\(line 1 is no row of it\); name another folder"),
        ('{"part": "step", "unit": "all"}', r"\(line 1 is no row of it\); name another folder"),
        (
            '{"part": "step", "unit": "all", "device": "NVIDIA H200", "size": "full"}',
            r"a/rows\.jsonl has rows of device NVIDIA H200, and this is cpu; name another folder",
        ),
        (
            '{"part": "step", "unit": "all", "device": "cpu", "size": "full"}',
            r"a/rows\.jsonl has rows of size full, and this is tiny; name another folder",
        ),
    ],
    ids=["cut", "no object", "other keys", "another device", "another size"],
)
def test_other_rows_are_refused(capsys, text, message):
    """A folder whose rows cannot go on is named, and stays as it is."""
    file = Path("a/rows.jsonl")
    file.parent.mkdir()
    file.write_text(text)
    code, out, err = bench(capsys, "only=products")
    assert (code, out, file.read_text()) == (2, "", text)
    assert re.search(message, err)
    assert err.count("\n") == 1


def test_one_call_at_a_time_measures_into_a_folder(capsys):
    """A second one would replace the rows of the first."""
    Path("a").mkdir()
    Path("a/rows.jsonl").touch()
    with locking(Path("a").resolve(), ""):
        code, _, err = bench(capsys, "only=products")
    assert code == 2
    assert err == "error: another call measures into a; wait for it, or name another folder\n"


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("cpu", None),
    ],
)
def test_peaks_by_the_names_of_devices(kind, peak):
    """A v5p calls itself v5."""
    assert accelerator.peak_of(kind) == peak


def test_disagreement_is_seen(monkeypatch):
    """A wrong kernel, and a wrong gradient, are rows that do not agree."""
    one = agreement.PRODUCTS["blocked"]

    def multiply(rows, *rest):
        return (one.multiply(rows, *rest).astype(jnp.float32) * (1 + 1e-4)).astype(rows.dtype)

    monkeypatch.setattr(agreement, "PRODUCTS", {"blocked": one})
    monkeypatch.setattr(agreement, "ATTENTION", {})
    monkeypatch.setitem(api.BACKENDS, "blocked", one._replace(multiply=multiply))
    found = {(row["dtype"], row["result"]): row["agrees"] for row in agreement.rows(presets=())}
    assert [found["float32", name] for name in ("value", "by rows", "by weights")] == [False, False, True]
    assert found["bfloat16", "value"]  # less than a rounding


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1 + 1e-4), ("bfloat16", 1.05)])
def test_other_gradients_of_a_model_are_seen(dtype, factor):
    """On a CPU a model is compared with itself, so the comparison gets other numbers here."""
    gradients = {"a": np.ones(5, np.float32), "b": np.full(3, 2, np.float32)}
    other = {name: x * np.float32(factor) for name, x in gradients.items()}
    for loss, found, wanted in ((2.0, gradients, [True, True]), (2.0 * factor, other, [False, False])):
        rows = agreement._differences("model", dtype, (np.float32(2), gradients), (np.float32(loss), found))
        assert [row["agrees"] for row in rows] == wanted


def test_tuning(capsys, monkeypatch, tmp_path):
    """Each field is varied around the best of those before it, and the table is what backends read."""
    times = {(256, 64): 3.0, (512, 128): 2.0, (1024, 256): 1.0, (2048, 512): 4.0, (2048, 512, 128): 5.0}
    asked = []

    def measured(backend, table, names, keys):
        sizes = table["8.0"][backend]
        if backend == "chunked":
            return dict.fromkeys(names, 1.0 + abs(sizes["queries"] - 1024) + abs(sizes["keys"] - 256))
        asked.append(sizes)
        if sizes["experts"] == (2048, 512):
            raise RuntimeError("too large")
        return {name: times[sizes["products"]] + times[sizes["experts"]] for name in names}

    monkeypatch.setattr(tuning, "_times", measured)
    monkeypatch.setattr(blocks, "TABLE", tmp_path / "blocks.json")
    blocks.TABLE.write_text(json.dumps({"9.0": {}}))
    rows = list(tuning.tune(Target("cuda", "8.0"), ("tiny",), SimpleNamespace()))
    assert {sizes["products"] for sizes in asked[4:]} == {(1024, 256)}
    tuning.write(tuning.table_of(json.loads(json.dumps(rows))), tmp_path)
    best = {"products": [1024, 256], "experts": [1024, 256]}
    assert blocks.read() == {"9.0": {}, "8.0": {"blocked": best, "chunked": {"queries": 1024, "keys": 256}}}
    assert blocks.measured(tuning.ON_GPUS, "blocked", Target("cuda", "8.0")).experts == (1024, 256)
    # What failed has no time, and is not written.
    failed = {"part": "tune", "implementation": "", "error": "no memory"}
    assert tuning.table_of([*rows, failed]) == tuning.table_of(rows)
    tuning.write(tuning.table_of([failed]), tmp_path / "none")
    assert blocks.read().keys() == {"9.0", "8.0"}
    code, _, err = bench(capsys, "tune=true")
    assert code == 2
    assert "tune=true measures sizes for GPUs, and this is cpu; leave it out" in err
    assert np.isfinite(rows[0]["ms"])


def test_tune_beside_other_parts(capsys, monkeypatch):
    """`tune=true` adds its part to those that are named, which run with its sizes; without it the part is refused."""
    gpu = Target("cuda", "8.0")
    monkeypatch.setattr(accelerator, "device_target", lambda device: gpu)
    tables = []
    monkeypatch.setattr(accelerator.kernels, "rows_of", lambda *arguments: tables.append(blocks.read()) or [])
    monkeypatch.setattr(blocks, "TABLE", Path("blocks.json").resolve())
    row = {"part": "tune", "implementation": "blocked", "capability": "8.0", "sizes": {"products": [8]}, "ms": 1.0}
    monkeypatch.setattr(tuning, "tune", lambda target, *rest: [row])
    code, _, err = bench(capsys, "only=products", "tune=true", "size=tiny")
    assert code == 0, err
    assert [*tables, blocks.read()] == 2 * [{"8.0": {"blocked": {"products": [8]}}}]
    code, _, err = bench(capsys, "only=tune", "only=products")
    assert (code, err) == (2, "error: only=tune: add tune=true, which replaces the table that backends read\n")


def test_times_of_sizes(monkeypatch):
    """A layer and attention are compiled with the sizes of the table for this GPU, which a CPU stands for here."""
    seen = []
    monkeypatch.setattr(tuning, "measure", lambda calls, **_: {name: SimpleNamespace(ms=1.0) for name in calls})
    monkeypatch.setattr("moezoo.parallel.kernels._own", lambda: Target("cuda", "8.0"))
    read = blocks.measured
    monkeypatch.setattr(blocks, "measured", lambda *arguments: seen.append(read(*arguments)) or seen[-1])
    table = {"8.0": {"blocked": {"products": [16], "experts": [8]}, "chunked": {"keys": 64}}}
    for backend, wanted in (("blocked", ((16,), (8,))), ("chunked", (512, 64))):
        seen.clear()
        assert tuning._times(backend, table, ("tiny",), SimpleNamespace(seconds=1, samples=1)) == {"tiny": 1.0}
        assert set(seen) == {wanted}
