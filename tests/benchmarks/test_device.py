"""`device`: a rehearsal with planted faults, going on, rows of other machines, and the choice of sizes of blocks."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import agreement, device, device_parts, tuning
from benchmarks.parts import PARTS
from moezoo.cli.command import execute
from moezoo.host.files import locking
from moezoo.kernels import blocks
from moezoo.kernels.attention import BACKENDS as ATTENTION
from moezoo.kernels.delta_rule import BACKENDS as DELTA_RULE
from moezoo.kernels.delta_rule import Backend
from moezoo.kernels.grouped_matmul import BACKENDS as PRODUCTS
from moezoo.parallel.kernels import Target

QUICK = ("each=0.001", "samples=1")
# Backends of products that are wrong, that end their process, and that wait for ever, each in one kernel.
PLANTED = """
import functools, os, signal, time
from moezoo.kernels.grouped_matmul import BACKENDS, Backend, gated, register

def wrong(*operands):
    return 1.1 * BACKENDS["blocked"].outer(*operands)

def crashing(*operands):
    os.kill(os.getpid(), signal.SIGSEGV)

def hanging(*operands):
    time.sleep(1000)

def both(rows, gate, up, sizes, *biases, keep, activation):
    return gated(rows, gate, up, sizes, activation=activation, implementation="blocked")

for one in (wrong, crashing, hanging):
    register(one.__name__, Backend(BACKENDS["blocked"].multiply, one, both, runs_on=BACKENDS["hopper"].runs_on))
"""
PLANTED_NAMES = ("wrong", "crashing", "hanging")
FORMS = ("hopper", "hopper_persistent", "blocked")


def bench(capsys, *arguments):
    """Return the exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as caught:
        execute(PARTS["device"], (*QUICK, *arguments), "python scripts/bench.py device")
    return caught.value.code, *capsys.readouterr()


def rows_of(file):
    """Return the rows of a file, and the units that began, in order."""
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    begun = [(row["part"], row["unit"]) for row in rows if row.get("event") == "begin"]
    return [row for row in rows if "event" not in row], begun


def test_a_kernel_of_two_backends_is_missed_by_both():
    assert "grouped_matmul hopper outer" in device_parts._product_kernels("hopper_persistent")
    assert "outer" not in agreement.roles_of("hopper_persistent")


def test_a_wrong_kernel_is_left_out(capsys, monkeypatch):
    """Found by one process, it is named by the next one, which measures the other kernels.

    The library's kernels for TPUs are checked, and of the planted ones that which is wrong. Few products are timed.
    """
    wrong = PLANTED.replace(str(PLANTED_NAMES).replace("'", ""), "(wrong,)").replace("hopper", "megablox")
    Path("planted.py").write_text(wrong)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    timed = {"blocked multiply wide", "wrong multiply wide", "wrong outer wide"}
    names = "blocked", "ragged_dot", "megablox", "wrong"
    products = {" ".join(each) for each in itertools.product(names, agreement.ROLES, ("wide", "narrow"))}
    left_out = {
        "right": [f"grouped_matmul wrong {role} toy bfloat16" for role in agreement.ROLES if role != "outer"],
        "products": sorted(products - timed),
    }
    told = device._job

    def job(session, part, tried):
        found = told(session, part, tried)
        return found | {"done": [*found["done"], *left_out.get(part.name, ())]}

    monkeypatch.setattr(device, "_job", job)
    code, _, err = bench(capsys, "rehearse=tpu", "kernels=planted", "only=right", "only=products", "out=a")
    assert code == 2
    assert "device: 0 measurements failed and 1 results disagree; see a/rows.jsonl" in err
    rows, _ = rows_of("a/rows.jsonl")
    assert [row["kernel"] for row in rows if row.get("agrees") is False] == ["grouped_matmul wrong outer"]
    products = {row["unit"]: row for row in rows if row["part"] == "products S2"}
    assert products["wrong multiply wide"]["tflops"] > 0
    left = {name: row["left_out"] for name, row in products.items() if "left_out" in row}
    assert left == {"wrong outer wide": "grouped_matmul wrong outer is broken: its results are wrong"}


@pytest.mark.weekly
@pytest.mark.interpreted
def test_a_rehearsal_with_planted_faults(capsys, monkeypatch):
    """Each fault costs its kernel, which later parts leave out by name; everything else is measured, and goes on."""
    Path("planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    # Less for a unit of `right`, because one waits for ever.
    monkeypatch.setattr(device, "PARTS", tuple(p._replace(unit=45) if p.name == "right" else p for p in device.PARTS))
    code, out, err = bench(capsys, "rehearse=gpu", "kernels=planted", "out=a")
    assert code == 2
    rows, begun = rows_of("a/rows.jsonl")
    assert [json.loads(line) for line in out.splitlines() if line.startswith("{")] == rows
    assert json.loads(Path("a/rows.json").read_text()) == rows
    assert Path("a/speed.png").read_bytes().startswith(b"\x89PNG")
    assert len(begun) == len(set(begun))
    parts = ["env", "right", "ceilings", "products S2", "attention 8192", "torch S2", "layers S2", "step", "olmoe 16"]
    assert list(dict.fromkeys(part for part, _ in begun)) == [*parts, "decode 32768", "delta_rule", "models"]
    assert all(row["date"] and row["size"] == "toy (gpu)" for row in rows)
    assert all(row["device"] == "cpu" and row["jax"] == jax.__version__ for row in rows if row["part"] != "env")

    # Every kernel of the library is right, and each of those that are not is named with its reason.
    checked = {row["kernel"]: row for row in rows if row["part"] == "right"}
    roles = {"hopper": 5, "hopper_persistent": 2, "blocked": 3}  # of those, kernels that are not composed or another's
    assert {name: len(agreement.roles_of(name)) for name in FORMS} == roles
    wanted = {f"grouped_matmul {name} {role}" for name in FORMS for role in agreement.roles_of(name)}
    wanted |= {f"attention {name} {role}" for name in ("hopper", "chunked", "one_query") for role in agreement.PASSES}
    chunks = itertools.product(("chunked", "reference"), agreement.PASSES, agreement.DECAYS)
    wanted |= {" ".join(("delta_rule", *words)) for words in chunks}
    planted = {f"grouped_matmul {name} {role}" for name in PLANTED_NAMES for role in agreement.ROLES}
    assert checked.keys() == wanted | planted
    broken = {name.split(" ", 1)[1]: row for name, row in checked.items() if not row.get("agrees")}
    assert broken.keys() == {"wrong outer", "crashing outer", "hanging outer"}
    assert broken["wrong outer"]["roundings"] == pytest.approx(0.1 * 2**8, rel=0.1)
    assert broken["crashing outer"]["error"].startswith("its process ended by SIGSEGV")
    assert broken["hanging outer"]["error"] == "it did not end in 45 s"
    assert sum("error" in row for row in rows) == 2
    assert "device: 2 measurements failed and 1 results disagree; see a/rows.jsonl" in err

    # Later parts measure what is right of these backends, and name the rest.
    products = {row["unit"]: row for row in rows if row["part"] == "products S2"}
    assert products["wrong multiply wide"]["tflops"] > 0
    left = products["wrong outer wide"]["left_out"]
    assert left == "grouped_matmul wrong outer is broken: its results are wrong"
    assert "crashing outer is broken: its process ended" in products["crashing outer wide"]["left_out"]
    layers = {row["unit"]: row for row in rows if row["part"] == "layers S2"}
    assert [name for name, row in layers.items() if "ms" in row] == [f"{name} both" for name in ("hopper", "blocked")]
    assert all("is broken" in layers[f"{name} both"]["left_out"] for name in PLANTED_NAMES)
    for part in ("step", "olmoe 16"):
        step, *scopes = [row for row in rows if row["part"] == part]
        assert step["tokens_per_second"] == pytest.approx(16e3 / step["ms"], rel=1e-2)
        assert step["apart"]["compiled"] == pytest.approx(step["in_use_bytes"] / step["predicted_bytes"] - 1, abs=1e-4)
        assert step["in_goal"] == (abs(step["apart"]["compiled"]) <= step["apart_goal"] == 0.05)
        assert sum(row["share"] for row in scopes) == pytest.approx(1, abs=1e-3)
    assert "optimizer.moment_dtype=bfloat16 execution.remat=dots" in step["settings"]
    left = [row["left_out"] for row in rows if (row["part"], row["unit"]) == ("attention 8192", "cudnn both")]
    assert left == ["cuDNN needs an NVIDIA GPU"]

    # What has been mended is measured, and what was cut off; everything else stays.
    mended = PLANTED.replace(".multiply, one,", ".multiply, lambda *x: BACKENDS['blocked'].outer(*x),")
    Path("planted.py").write_text(mended)
    lines = Path("a/rows.jsonl").read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"begin"' in line and '"models"' in line)
    Path("a/rows.jsonl").write_text("".join([*lines[: last + 1], lines[last + 1][:9]]))
    chosen = [f"only={name}" for name in ("right", "ceilings", "step", "models")]
    code, out, err = bench(capsys, "resume=a", "out=b", "rehearse=gpu", "kernels=planted", *chosen)
    assert code == 0, err
    resumed, all_begun = rows_of("b/rows.jsonl")
    again = all_begun[len(begun) :]
    assert [unit for part, unit in again if part == "env"] == ["device", "numbers", "versions"]
    assert {unit.split()[1] for part, unit in again if part == "right"} == set(PLANTED_NAMES)
    assert [part for part, _ in again[3:]] == [*["right"] * 3, "models"]
    for name in ("ceilings", "step"):
        assert [row for row in resumed if row["part"] == name] == [row for row in rows if row["part"] == name]


# Processes of parts that print these messages, and then do something. Each runs the units that are left.
FAKES = {
    "env": ["device"],
    "ceilings": ["one", "raises", "crash", "two", "ends between", "three"],
    "products": ["four", "hang", "five"],
    "attention": [],
    "torch": ["last"],
}
SCRIPT = """
import json, os, sys, time
def say(**message): print("moezoo-bench " + json.dumps(message), flush=True)
job, fakes = json.loads(sys.stdin.readline() or "null"), json.loads(sys.argv[1])
if job is None: sys.exit()
part, units = job["part"], [unit for unit in fakes[job["part"]] if unit not in job["done"]]
if part == "attention": sys.exit("it does not start")
for unit in units:
    say(event="begin", unit=unit, kernel=None)
    if unit == "crash": os.abort()
    if unit in ("hang", "last"): time.sleep(1000)
    if unit == "raises": say(unit=unit, implementation="", error="no such kernel [/x]")
    elif part == "env": say(unit=unit, device="chip", driver="")
    else: say(unit=unit, implementation="x", tflops=1.0)
    say(event="end", unit=unit)
    if unit == "ends between": sys.exit(9)
"""


def test_processes_that_end_too_early(capsys, monkeypatch):
    """A crash, a hang, an end between two units and one before the first each leave one row; the time ends the last."""

    monkeypatch.setattr(device, "_command", lambda: [sys.executable, "-c", SCRIPT, json.dumps(FAKES)])
    limits = {name: 1000 if name == "torch" else 2 for name in FAKES}
    monkeypatch.setattr(device, "PARTS", tuple(device.Part(name, "", 1000, limits[name]) for name in FAKES))
    code, out, err = bench(capsys, "seconds=8", "out=a")
    assert code == 2
    rows, begun = rows_of("a/rows.jsonl")
    assert begun == [(name, unit) for name, units in FAKES.items() for unit in units]
    assert {row["unit"] for row in rows if "tflops" in row} == {"one", "two", "ends between", "three", "four", "five"}
    assert {(row["part"], row["unit"]): row["error"].split(":")[0] for row in rows if "error" in row} == {
        ("ceilings", "raises"): "no such kernel [/x]",
        ("ceilings", "crash"): "its process ended by SIGABRT",
        ("products", "hang"): "it did not end in 2 s",
        ("attention", ""): "its process ended with code 1",
    }
    assert [(row["part"], row["left_out"]) for row in rows if "left_out" in row] == [
        ("torch", "the call is out of time")
    ]
    assert "no such kernel [/x]" in out  # brackets stay in the table
    assert "attention : its process ended with code 1: it does not start" in err
    # The next call goes on in the same folder, whose last row is cut: with what failed, and with what the time ended.
    with Path("a/rows.jsonl").open("a") as file:
        file.write('{"part": "st')
    code, _, _ = bench(capsys, "seconds=4", "resume=a", "only=ceilings", "only=torch")
    assert rows_of("a/rows.jsonl")[1][len(begun) :] == [
        *(("env", unit) for unit in FAKES["env"]),
        *(("ceilings", unit) for unit in ("raises", "crash")),
        ("torch", "last"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"part": "step"}\n', "a/rows.jsonl, line 1, is no row that device leaves; name another folder in resume="),
        ("[1]\n{}", "a/rows.jsonl, line 1, is no row"),
        (
            '{"part": "step", "unit": "step", "device": "NVIDIA H200", "size": "full"}\n',
            "resume=a has rows of device NVIDIA H200, and this is chip; omit it",
        ),
        (
            '{"part": "step", "unit": "step", "device": "chip", "size": "toy (gpu)"}\n',
            "resume=a has rows of size toy (gpu), and this is full; omit it",
        ),
    ],
    ids=["other keys", "no object", "another device", "another size"],
)
def test_other_rows_are_refused(capsys, monkeypatch, text, message):
    """A folder that cannot go on is named in a line, and what it has stays."""
    monkeypatch.setattr(device, "_command", lambda: [sys.executable, "-c", SCRIPT, json.dumps(FAKES)])
    Path("a").mkdir()
    Path("a/rows.jsonl").write_text(text)
    code, _, err = bench(capsys, "resume=a", "out=b", "only=env")
    assert code == 2
    assert message in err
    assert Path("a/rows.jsonl").read_text() == text


def test_one_call_at_a_time_measures_into_a_folder(capsys):
    """A second one would replace the rows of the first."""
    Path("a").mkdir()
    Path("a/rows.jsonl").touch()
    with locking(Path("a").resolve(), ""):
        code, _, err = bench(capsys, "resume=a", "only=env")
    assert code == 2
    assert err == "error: another call measures into a; wait for it, or name another folder\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("only=env", "this machine has no accelerator; rehearse=gpu goes through all parts on a CPU, as a toy"),
        ("only=products2", "only=products2: no such part; did you mean 'products'?"),
        ("resume=b", "resume=b: rows.jsonl is not there; name the folder of an earlier call"),
        ("only=tune", "only=tune: add tune=true, which replaces the table that backends read"),
        ("only=env kernels=missing_module rehearse=tpu", "No module named 'missing_module'"),
    ],
)
def test_mistakes(capsys, monkeypatch, words, message):
    """No process imports beside the one that ends, since no part follows it."""
    monkeypatch.setattr(device._Processes, "take", device._Processes._start)
    code, _, err = bench(capsys, *words.split(), "out=a")
    assert code == 2
    assert err.splitlines()[-1] == f"error: {message}"


@pytest.mark.weekly
def test_a_clone_needs_no_installed_package(tmp_path):
    """Neither moezoo nor its metadata is found anywhere, as on a machine with libraries and a clone alone."""
    root = Path(__file__).parents[2]
    (tmp_path / "site").mkdir()
    for entry in (entry for site in sys.path if "site-packages" in site for entry in Path(site).glob("*")):
        if "moezoo" not in entry.name and not (tmp_path / "site" / entry.name).exists():
            (tmp_path / "site" / entry.name).symlink_to(entry)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}/site"}
    python = [sys._base_executable, "-c", "import importlib.metadata as m; m.version('moezoo')"]  # pyright: ignore
    assert subprocess.run(python, env=environment, capture_output=True, cwd="/").returncode
    command = [python[0], str(root / "scripts/bench.py"), "device", "rehearse=tpu", "only=step", "out=a", *QUICK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"moezoo", "profile"} == {r["implementation"] for r in rows_of("a/rows.jsonl")[0] if r["part"] == "step"}


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
    assert device_parts.peak_of(kind) == peak


def check_of(name):
    """Return the check of a kernel at toy size."""
    return next(each for each in agreement.checks(Target("cpu"), *agreement.TOYS) if each.kernel.name == name)


def compared(check, change=lambda found, turn: found):
    """Return the row of a check whose results are changed, turn by turn."""
    run, turns = jax.jit(check.kernel.run), iter(range(9))
    operands = check.kernel.make()
    return agreement.compare(check, lambda *given: change(run(*given), next(turns)), operands, 3)


def test_kernels_that_are_not_right_are_seen():
    """By a wrong number, NaN, a number behind the last group, and bits that change from run to run."""
    check = check_of("grouped_matmul blocked multiply")
    assert compared(check)["agrees"]
    assert not compared(check, lambda x, turn: x.at[3, 5].add(0.05 * jnp.abs(x).max()))["agrees"]
    assert not compared(check, lambda x, turn: x.at[3, 5].set(jnp.nan))["agrees"]
    row = compared(check, lambda x, turn: x.at[-1, 0].set(1e-6))
    assert (row["tail_is_zero"], row["agrees"]) == (False, False)
    row = compared(check, lambda x, turn: x.at[3, 5].multiply(1 + (turn == 2) * 2.0**-7))
    assert (row["differing"], row["agrees"]) == (1, False)
    assert row["roundings"] <= row["bound"]
    check = check_of("attention chunked gradients")
    assert compared(check)["agrees"]
    assert not compared(check, lambda found, turn: (found[0], found[1] * 1.1, found[2]))["agrees"]


@pytest.mark.parametrize(("passed", "decays"), [("forward", "per head"), ("gradients", "per channel")])
def test_another_delta_rule_is_seen(monkeypatch, passed, decays):
    """Each backend is compared with tokens read one by one on the host; one that mixes documents is not right."""
    one = lambda o, start: DELTA_RULE["chunked"].rule(dataclasses.replace(o, segment=0 * o.segment), start)  # noqa: E731
    monkeypatch.setitem(DELTA_RULE, "wrong", Backend(one, runs_on=lambda target: True))
    assert compared(check_of(f"delta_rule chunked {passed} {decays}"))["agrees"]
    assert not compared(check_of(f"delta_rule wrong {passed} {decays}"))["agrees"]


@pytest.mark.weekly
def test_the_delta_rule_by_length(capsys):
    """In chunks beside attention, with its time, its tokens per second and its memory."""
    code, _, err = bench(capsys, "rehearse=tpu", "only=delta_rule", "out=a")
    assert code == 0, err
    rows = [row for row in rows_of("a/rows.jsonl")[0] if row["part"] == "delta_rule"]
    who = [f"moezoo delta_rule chunked {decays}" for decays in agreement.DECAYS]
    assert [row["implementation"] for row in rows] == [*who, "moezoo attention reference"]
    assert all(row["tokens_per_second"] == pytest.approx(80e3 / row["ms"], rel=1e-2) for row in rows)


def test_a_registered_backend_joins():
    """The lists of kernels are the library's: those made for a target, and the portable one beside them."""
    for kernel, every, portable in (("grouped_matmul", PRODUCTS, "blocked"), ("attention", ATTENTION, "chunked")):
        for target in (Target("cuda", "9.0"), Target("cuda", "10.0"), Target("cuda", "8.0"), Target("cpu")):
            own = {name for name, one in every.items() if one.runs_on(target) and not one.runs_on(Target("rocm"))}
            assert set(agreement.backends_of(kernel, target)) == {portable, *own}
    on_tpu = agreement.backends_of("grouped_matmul", Target("tpu"))
    assert on_tpu == ["blocked", "ragged_dot", "megablox"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("grouped_matmul hopper outer", " execution.grouped_matmul=[blocked]"),
        ("attention hopper gradients", " execution.attention=[chunked]"),
        ("grouped_matmul other outer", ""),
    ],
)
def test_a_step_without_a_broken_kernel(tmp_path, broken, words):
    """A default kernel that is not right is replaced in the settings, which are in the step's row."""
    keys = SimpleNamespace(broken={broken: "its results are wrong"})
    here = device_parts.Here(Target("cuda", "9.0"), device_parts.SIZES["full"], keys, tmp_path)
    assert device_parts._instead(here) == words


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1 + 1e-4), ("bfloat16", 1.05)])
def test_other_gradients_of_a_model_are_seen(dtype, factor):
    """On a CPU a model is compared with itself, so the comparison gets other numbers here."""
    gradients = {"a": np.ones(5, np.float32), "b": np.full(3, 2, np.float32)}
    other = {name: x * np.float32(factor) for name, x in gradients.items()}
    for loss, found, wanted in ((2.0, gradients, [True, True]), (2.0 * factor, other, [False, False])):
        rows = agreement._differences("model", dtype, (np.float32(2), gradients), (np.float32(loss), found))
        assert [row["agrees"] for row in rows] == wanted


def test_tuning(monkeypatch, tmp_path):
    """Each field is varied around the best of those before it, and the table is what backends read."""
    times = {(256, 64): 3.0, (512, 128): 2.0, (1024, 256): 1.0, (2048, 512): 4.0, (2048, 512, 128): 5.0}
    asked = []

    def measured(backend, capability, tried, names, keys):
        for sizes in tried:
            if backend == "chunked":
                yield sizes, dict.fromkeys(names, 1.0 + abs(sizes.queries - 1024) + abs(sizes.keys - 256))
            elif sizes.experts != (2048, 512):  # too large
                asked.append(sizes)
                yield sizes, {name: times[sizes.products] + times[sizes.experts] for name in names}

    monkeypatch.setattr(tuning, "_times", measured)
    monkeypatch.setattr(blocks, "TABLE", tmp_path / "blocks.json")
    blocks.TABLE.write_text(json.dumps({"9.0": {}}))
    gpu = Target("cuda", "8.0")
    for backend in ("blocked", "chunked"):
        rows = list(tuning.tune(backend, gpu, ("tiny",), SimpleNamespace()))
        tuning.write(tuning.table_of(json.loads(json.dumps(rows))), tmp_path)
    assert {sizes.products for sizes in asked[4:]} == {(1024, 256)}
    best = {"products": [1024, 256], "experts": [1024, 256]}
    assert blocks.read() == {"9.0": {}, "8.0": {"blocked": best, "chunked": {"queries": 1024, "keys": 256}}}
    assert blocks.measured(tuning.ON_GPUS, "blocked", gpu).experts == (1024, 256)
    tuning.write(tuning.table_of([]), tmp_path / "none")
    assert blocks.read().keys() == {"9.0", "8.0"}


def test_times_of_sizes(monkeypatch):
    """A layer and attention are compiled with the sizes of the table for this GPU, which a CPU stands for here."""
    seen = []
    monkeypatch.setattr(tuning, "measure", lambda calls, **_: {name: SimpleNamespace(ms=1.0) for name in calls})
    monkeypatch.setattr("moezoo.parallel.kernels._own", lambda: Target("cuda", "8.0"))
    read = blocks.measured
    monkeypatch.setattr(blocks, "measured", lambda *arguments: seen.append(read(*arguments)) or seen[-1])
    keys = SimpleNamespace(seconds=1, samples=1)
    for backend, sizes in (
        ("blocked", tuning.ON_GPUS._replace(products=(16,), experts=(8,))),
        ("chunked", tuning.chunked.ON_GPUS._replace(keys=64)),
    ):
        seen.clear()
        assert list(tuning._times(backend, "8.0", [sizes], ("tiny",), keys)) == [(sizes, {"tiny": 1.0})]
        assert set(seen) == {sizes}


def test_a_part_of_tuning_writes_the_table(monkeypatch, tmp_path):
    """After each of its rows, so that nothing is lost when the time is over."""
    monkeypatch.setattr(blocks, "TABLE", tmp_path / "blocks.json")
    rows = [{"implementation": "blocked", "capability": "8.0", "sizes": {"products": [n]}, "ms": 9 - n} for n in (8, 9)]
    monkeypatch.setattr(tuning, "tune", lambda backend, *rest: iter(rows if backend == "blocked" else ()))
    here = device_parts.Here(
        Target("cuda", "8.0"), device_parts.SIZES["full"], SimpleNamespace(rehearse=None), tmp_path
    )
    units = {unit.name: unit for unit in device_parts.UNITS["tune"](here, "S2")}
    assert units.keys() == {"blocked", "chunked"}
    for row, size in zip(units["blocked"].measure(), (8, 9), strict=True):
        assert row["sizes"] == {"products": [size]}
        assert (
            blocks.read()
            == json.loads((tmp_path / "blocks.json").read_text())
            == {"8.0": {"blocked": {"products": [size]}}}
        )
