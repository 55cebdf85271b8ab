"""`moezoo doctor`: what it reports, what it hides, and that a broken part is one line and stops no other."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from _pytest.capture import SysCapture
from jax.experimental.compilation_cache import compilation_cache

from moezoo.errors import UserError
from moezoo.host.machine import add_xla_flags
from moezoo.tools.doctor import command as doctor
from moezoo.tools.doctor import devices as doctor_devices
from moezoo.tools.doctor.command import DEVICES, MARK, STEPS, Entry, guarded, mask


def texts(entries, kind="fact"):
    return [entry.text for entry in entries if entry.kind == kind]


@pytest.fixture(scope="module")
def on_devices():
    """The entries of the parts on devices, run in this process; and JAX as it was before."""
    capture, before = SysCapture(1), jax.config.jax_enable_compilation_cache  # pyright: ignore
    capture.start()
    try:
        doctor_devices.child(DEVICES)
        doctor_devices.child(STEPS)
    finally:
        out = capture.snap()
        capture.done()
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
    said = [json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK)]
    assert said.count(None) == 2
    return [Entry(*each) for each in said if each is not None]


def test_two_steps_run_on_all_devices_and_agree_with_those_on_one(on_devices):
    assert {entry.kind for entry in on_devices} == {"fact"}
    losses, agreement = (entry.text for entry in on_devices if entry.title == STEPS)
    assert float(agreement.partition(" by ")[2].split()[0]) < 1e-5  # float32, and sums of at most 64 terms
    assert "fsdp=2 expert=4, and naively " in losses
    first, second = (float(loss) for loss in losses.removeprefix("losses ").partition(" on ")[0].split(", "))
    assert 3 < second < first < 4.5  # ln(32 tokens) is 3.47
    assert any("8 x virtual CPU devices" in entry.text for entry in on_devices)


def test_the_error_of_one_row_counts_and_that_of_a_few_tokens_does_not():
    theirs = np.random.default_rng(0).normal(size=(4, 7, 5))
    ours = theirs.copy()
    ours[0, :3] += 9
    assert doctor_devices.measure_error(ours, theirs) == 0
    ours[2] *= 1.5
    assert doctor_devices.measure_error(ours, theirs) == pytest.approx(0.5)
    ours[3] = np.nan
    assert np.isnan(doctor_devices.measure_error(ours, theirs))


@pytest.mark.parametrize(
    ("logit", "loss", "kind"),
    [
        (1, 3.0, "fact"),
        (1, 3.1, "problem"),
        (1, float("nan"), "problem"),
        (1.01, 3.0, "problem"),
        (float("nan"), 3.0, "problem"),
    ],
)
def test_wrong_numbers_are_a_problem(monkeypatch, logit, loss, kind):
    """Also the second loss alone, which the gradients of the first step change."""

    def train(devices, count, width, dtype, *words):
        values = (1.0, 3.0) if words else (logit, loss)
        return doctor_devices.Trial("", np.full((2, 3, 4), float(values[0])), [4.0, values[1]])

    monkeypatch.setattr(doctor_devices, "train", train)
    monkeypatch.setattr(doctor_devices, "use_none", lambda: None)
    *_, found = doctor_devices.find_steps()
    assert (found.kind, "something else" in found.text) == (kind, kind == "problem")
    assert found.text.startswith("logits differ by ")


def test_a_part_that_raises_is_one_line():
    def broken():
        yield Entry("fact", "x", "first")
        raise OSError("no such\nthing")

    assert list(guarded("x", broken))[1:] == [Entry("problem", "x", "failed: OSError: no such")]
    refusing = lambda: (_ for _ in ()).throw(UserError("a=b; write c"))  # noqa: E731
    assert texts(guarded("x", refusing), "problem") == ["failed: a=b; write c"]


def test_drivers_of_accelerators_that_jax_does_not_use(monkeypatch):
    def compared(files):
        return list(doctor_devices._explain_unused(files))

    gpu = {"/dev/nvidia0": "NVIDIA"}
    (kept,) = compared(gpu)  # by JAX_PLATFORMS=cpu
    assert (kept.kind, "JAX_PLATFORMS=cpu" in kept.text) == ("note", True)
    monkeypatch.setattr(doctor_devices, "SETTINGS", SimpleNamespace(jax_platforms=None))
    monkeypatch.setattr(doctor_devices, "installed", {"jax-cuda13-plugin": "0.12", "libtpu": "0.1"}.get)
    (fails,) = texts(compared(gpu), "problem")
    assert "jax-cuda13-plugin found no device" in fails
    monkeypatch.setattr(doctor_devices, "installed", {"libtpu": "0.1"}.get)
    (lacks,) = texts(compared(gpu), "problem")
    assert "/dev/nvidia0" in lacks
    assert "'moezoo[cuda]'" in lacks
    assert texts(compared({"/dev/vfio/1": "TPU"}), "problem") == []
    monkeypatch.setattr(doctor_devices, "driver_files", lambda: gpu)
    assert len(texts(doctor_devices.find_devices(), "problem")) == 1
    monkeypatch.setattr(doctor_devices, "start", lambda count: [SimpleNamespace(platform="gpu")])
    assert texts(doctor_devices.find_devices(), "problem") == []


def test_text_is_shown_without_secrets_and_names(monkeypatch):
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("HOME", "/home/ada")
    assert mask("see /home/ada/x and /srv/ada/y of ada, /home/adam") == "see ~/x and /srv/USER/y of ada, /home/adam"
    assert mask("LD=/home/ada:/a/home/ada https://bob:secret@host/x") == "LD=~:/a/home/USER https://***host/x"
    assert mask("hf_abcDEF123 eyJhbGciOi.eyJzdWIi.c2ln sk-1 --xla_x=a/b") == "*** *** *** --xla_x=a/b"


def test_only_known_variables_are_shown(monkeypatch):
    for name in list(os.environ):
        if doctor._SHOWN.fullmatch(name):
            monkeypatch.delenv(name)
    assert [entry.title for entry in doctor.find_machine()] == ["machine"]
    for name in ("SLURM_JOB_USER", "AWS_REGION", "JAX_API_KEY", "WANDB_API_KEY", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("XLA_FLAGS", "--xla_x=3")
    assert texts(doctor.find_machine())[1:] == ["NCCL_DEBUG=INFO", "XLA_FLAGS=--xla_x=3"]
    # What moezoo adds is none of the user's settings.
    add_xla_flags("--xla_y=4")
    assert "--xla_y=4" in os.environ["XLA_FLAGS"]
    assert texts(doctor.find_machine())[1:] == ["NCCL_DEBUG=INFO", "XLA_FLAGS=--xla_x=3"]
    monkeypatch.setenv("XLA_FLAGS", "")
    add_xla_flags()
    assert texts(doctor.find_machine())[1:] == ["NCCL_DEBUG=INFO"]


def test_libraries_that_do_not_fit_are_problems(monkeypatch):
    assert texts(doctor.find_libraries(), "problem") == []
    really = doctor.installed
    wrong = {"jax": "0.9.1", "jaxlib": "0.9.1", "optax": None, "jax-cuda13-plugin": "0.8.0"}
    plugin = SimpleNamespace(name="jax-cuda13-plugin")
    monkeypatch.setattr(doctor, "installed", lambda name: wrong[name] if name in wrong else really(name))
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: [plugin])
    found = list(doctor.find_libraries())
    assert sorted(each.split(",")[0] for each in texts(found, "problem")) == ["jax 0.9.1", "optax is missing"]
    (versions,) = texts(found)
    assert versions.startswith("jaxlib 0.9.1, jax 0.9.1, ")
    assert versions.endswith(", jax-cuda13-plugin 0.8.0")


def test_where_moezoo_is(monkeypatch, tmp_path):
    version, python = texts(doctor.find_versions())
    assert f"in {doctor._PACKAGE.parent}" in version
    assert sys.executable in python
    monkeypatch.setattr(doctor, "_PACKAGE", tmp_path / "moezoo")
    assert sum("symbolic links" in each for each in texts(doctor.find_versions(), "problem")) == 3
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    assert any("not installed" in each for each in texts(doctor.find_versions(), "problem"))


def say(message):
    """Return the statement that prints a message of a part's process."""
    return f"print({f'{MARK}{json.dumps(message)}'!r}, flush=True)"


FINE = f"print('noise')\n{say(None)}\n{say(('fact', 'x', 'fine'))}"


@pytest.fixture
def examined(monkeypatch):
    """Run programs in place of the parts' processes, and return the entries of these parts."""

    def run(devices, steps=FINE, seconds=60.0):
        def command(title):
            return [
                sys.executable,
                "-S",
                "-c",
                f"import os, signal, sys, time\n{devices if title == DEVICES else steps}",
            ]

        monkeypatch.setattr(doctor, "command_of", command)
        titles = ("moezoo", "python", "libraries", "machine", "environment")
        return [entry for entry in doctor.examine(seconds) if entry.title not in titles]

    return run


def test_a_part_that_crashes_is_one_line(examined):
    crash = f"{FINE}\nprint('F0 Check failed: x', file=sys.stderr, flush=True)\nos.abort()"
    found = examined(FINE, crash)
    assert texts(found, "problem") == ["failed: its process ended by SIGABRT: F0 Check failed: x"]
    assert texts(found) == ["fine", "fine"]
    assert [entry.kind for entry in examined(crash)] == ["fact", "problem", "fact"]


@pytest.mark.parametrize("way", ["crash", "hang", "refuse"])
def test_where_devices_do_not_start_the_rest_is_tried_on_the_cpu(examined, monkeypatch, way):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    end = {
        "crash": "os.kill(os.getpid(), signal.SIGSEGV)",
        "hang": "time.sleep(100)",
        "refuse": say(("problem", "devices", "failed: no")),
    }[way]
    steps = f"assert os.environ['JAX_PLATFORMS'] == 'cpu'\n{FINE}"
    found = examined(f"{say(None)}\n{end}", steps, seconds=3.0 if way == "hang" else 60.0)
    (wrong,) = texts(found, "problem")
    assert {"crash": "SIGSEGV", "hang": "no answer for 3 s", "refuse": "failed: no"}[way] in wrong
    assert texts(found) == ["what follows is of the CPU", "fine"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    if way != "hang":
        assert [entry.kind for entry in examined(f"{say(None)}\n{end}", steps)] == ["problem"]


def test_where_jax_cannot_be_imported_nothing_else_is_tried(examined):
    found = examined("raise ImportError('jaxlib is too old')")
    assert [(entry.kind, entry.title) for entry in found] == [("problem", "jax")]
    assert "ended with code 1: ImportError: jaxlib is too old" in found[0].text


@pytest.fixture
def planted_report(monkeypatch):
    def plant(*entries):
        monkeypatch.setattr(doctor, "examine", lambda seconds: iter(entries))

    return plant


LONG = " ".join(["word"] * 60) + " " + "/folder" * 30


def test_the_report_is_narrow_text_and_markdown_and_json(console, planted_report):
    plain = Entry("fact", "machine", LONG), Entry("note", "machine", "a hint"), Entry("fact", "machine", "more")
    planted_report(*plain)
    code, out, err = console("doctor")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out
    assert [line.split()[0] for line in out.splitlines() if line[:1].strip()] == ["machine", "note", "result"]
    code, marked, _ = console("doctor", "--markdown")
    assert marked == f"```text\n{out}```\n"
    code, listed, _ = console("doctor", "--json", "--markdown")
    assert json.loads(listed) == {
        "facts": {"machine": [LONG, "more"]},
        "notes": [{"part": "machine", "text": "a hint"}],
        "problems": [],
    }
    planted_report(*plain, Entry("problem", "machine", f"{os.path.expanduser('~')}/x is full"))
    code, out, _ = console("doctor")
    assert code == 1
    assert "problem      machine: ~/x is full" in out
    assert out.endswith("result       1 problem\n")
    assert console("doctor", "--json")[0] == 1


@pytest.mark.newer
def test_the_command_works_here_and_without_jax(monkeypatch, tmp_path):
    """As a user runs it: the whole report, then one of an environment in which importing JAX raises."""
    command = [sys.executable, "-m", "moezoo", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"], done.stderr) == (0, [], "")
    assert set(found["facts"]) >= {"moezoo", "python", "libraries", "machine", DEVICES, STEPS}
    (tmp_path / "jax.py").write_text("raise RuntimeError('jaxlib 0.1 is incompatible')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert [each["part"] for each in found["problems"]] == ["jax"]
    assert "jaxlib 0.1 is incompatible" in found["problems"][0]["text"]
    assert "machine" in found["facts"]
