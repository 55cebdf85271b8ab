"""`moezoo doctor`: what it reports, what it hides, and that a broken part is one line and stops no other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from _pytest.capture import SysCapture
from jax.experimental.compilation_cache import compilation_cache

from moezoo.errors import UserError
from moezoo.kernels.attention import api as attention
from moezoo.kernels.grouped_matmul import api as grouped_matmul
from moezoo.moe.dispatch.ragged import GPU_FLAG
from moezoo.parallel import distributed
from moezoo.parallel.kernels import Target
from moezoo.tools.doctor import command as doctor
from moezoo.tools.doctor import devices as doctor_devices
from moezoo.tools.doctor import entries as doctor_entries
from moezoo.tools.doctor import installed as doctor_installed
from moezoo.tools.doctor import machine as doctor_machine
from moezoo.tools.doctor import trial
from moezoo.tools.doctor.entries import MARK, ON_DEVICES, Entry, Part, mask, shown_value


def texts(entries, kind="fact"):
    return [entry.text for entry in entries if entry.kind == kind]


@pytest.fixture(scope="module")
def on_devices():
    """The messages of the process of parts, all but the last part, run in this process; and JAX as it was before."""
    capture, before = SysCapture(1), jax.config.jax_enable_compilation_cache  # pyright: ignore
    capture.start()
    try:
        doctor_devices.child([title for title in ON_DEVICES if title not in ("cache", "compilers")])
    finally:
        out = capture.snap()
        capture.done()
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
    return [json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK)]


def test_parts_on_devices_begin_and_end_in_order(on_devices):
    marks = [(name, message[name]) for message in on_devices for name in ("begin", "end") if name in message]
    titles = [title for title in ON_DEVICES if title not in ("cache", "compilers")]
    assert marks == [(mark, title) for title in titles for mark in ("begin", "end")]
    assert {message["entry"][0] for message in on_devices if "entry" in message} == {"fact"}


def test_two_steps_run_on_all_devices_and_agree_with_a_naive_computation(on_devices):
    found = [Entry(*message["entry"]) for message in on_devices if "entry" in message]
    agreement, steps, _ = (entry.text for entry in found if entry.title == "two steps")
    assert float(agreement.partition(" by ")[2].split()[0]) < 1e-5  # float32, and sums of at most 64 terms
    assert "fsdp=2 expert=4" in steps
    first, second = (float(loss) for loss in steps.partition("losses ")[2].split(", "))
    assert 3.5 < second < first < 5  # ln(64 tokens) is 4.16
    assert any("8 virtual CPU devices" in entry.text for entry in found)


def test_the_error_of_one_row_counts_and_that_of_a_few_tokens_does_not():
    theirs = np.random.default_rng(0).normal(size=(4, 7, 5))
    ours = theirs.copy()
    ours[0, :3] += 9
    assert trial.measure_error(ours, theirs) == 0
    ours[2] *= 1.5
    assert trial.measure_error(ours, theirs) == pytest.approx(0.5)
    ours[3] = np.nan
    assert np.isnan(trial.measure_error(ours, theirs))


def test_the_kernels_are_those_that_a_run_takes(on_devices):
    found = [message["entry"][2] for message in on_devices if message.get("entry", [""] * 2)[1] == "kernels"]
    here = Target("cpu")
    assert f"{attention.chosen_backend(here, 8192, 8192)} for rows of " in found[1]
    assert f"grouped_matmul: {grouped_matmul.chosen_backend(here)} " in found[2]


def test_a_kernel_that_is_passed_over_has_its_reason():
    gpu = Target("cuda", "9.0")
    assert "hopper takes bfloat16, not float32" in doctor_devices._describe_attention(gpu, "float32")
    assert "hopper for rows of 128, 1,024, 8,192" in doctor_devices._describe_attention(gpu, "bfloat16")
    assert doctor_devices._describe_product(gpu, "float32").startswith("blocked ")
    assert doctor_devices._describe_product(gpu, "bfloat16").startswith("hopper ")


def test_ragged_on_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(doctor_devices, "device_target", lambda device: Target("cuda", "9.0"))
    *_, found = doctor_devices.find_kernels()
    assert "dispatch=ragged: XLA's ragged_all_to_all corrupts gradients on GPUs" in found.text
    monkeypatch.setenv("XLA_FLAGS", GPU_FLAG)
    *_, found = doctor_devices.find_kernels()
    assert f"dispatch=ragged: allowed by {GPU_FLAG}; dispatch=auto leaves it out" in found.text


@pytest.mark.parametrize(("error", "loss"), [(float("nan"), 4.0), (0.01, 4.0), (0.0, float("nan"))])
def test_wrong_numbers_are_a_problem(monkeypatch, error, loss):
    sizes = SimpleNamespace(sizes=trial.ON_CPUS, parameters=1, description="")
    monkeypatch.setattr(trial, "prepare", lambda devices: sizes)
    monkeypatch.setattr(trial, "compare_naively", lambda tried: trial.Agreement(error, "cpu"))
    monkeypatch.setattr(trial, "run_steps", lambda tried: trial.Steps((4.0, loss), 1.0, (1.0, 1.0)))
    monkeypatch.setattr(doctor_devices, "use_none", lambda: None)
    (wrong,) = texts(Part("two steps", doctor_devices.find_steps).entries(), "problem")
    assert "nan" in wrong or "1.0e-02" in wrong


def test_a_part_that_raises_is_one_line():
    def broken():
        yield Entry("fact", "x", "first")
        raise OSError("no such\nthing")

    assert list(Part("x", broken).entries())[1:] == [Entry("problem", "x", "failed: OSError: no such")]
    assert list(Part("x", broken, needed=False).entries())[1].kind == "note"
    refusing = lambda: (_ for _ in ()).throw(UserError("a=b; write c"))  # noqa: E731
    assert texts(Part("x", refusing).entries(), "problem") == ["failed: a=b; write c"]


def test_drivers_of_accelerators_that_jax_does_not_use(monkeypatch):
    monkeypatch.setattr(doctor_devices, "driver_files", lambda: {"/dev/nvidia0": "NVIDIA"})
    (kept,) = doctor_devices._compare_drivers("cpu")  # by JAX_PLATFORMS=cpu
    assert (kept.kind, "JAX_PLATFORMS=cpu" in kept.text) == ("note", True)
    monkeypatch.setattr(doctor_devices, "SETTINGS", SimpleNamespace(jax_platforms=None))
    monkeypatch.setattr(doctor_devices, "installed", {"jax-cuda13-plugin": "0.12", "libtpu": "0.1"}.get)
    (fails,) = texts(doctor_devices._compare_drivers("cpu"), "problem")
    assert "jax-cuda13-plugin found no device" in fails
    monkeypatch.setattr(doctor_devices, "installed", {"libtpu": "0.1"}.get)
    (lacks,) = doctor_devices._compare_drivers("cpu")
    assert lacks.kind == "problem"
    assert "/dev/nvidia0" in lacks.text
    assert "'moezoo[cuda]'" in lacks.text
    assert list(doctor_devices._compare_drivers("gpu")) == []
    monkeypatch.setattr(doctor_devices, "driver_files", lambda: {"/dev/vfio/1": "TPU"})
    assert texts(doctor_devices._compare_drivers("cpu"), "problem") == []


def test_settings_of_jax_that_matter_are_noted():
    with jax.enable_x64(True):
        assert any("JAX_ENABLE_X64" in each for each in texts(doctor_devices.find_devices(), "note"))
    found = list(doctor_devices.find_devices())
    assert texts(found, "note") == []
    assert any("PJRT_NPROC" in each for each in texts(found)) is jax.__version__.startswith("0.10.")


def test_what_distributed_auto_would_join(monkeypatch):
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    assert distributed.detect() is None
    for name, value in zip((*names, "SLURM_STEP_NUM_TASKS"), ("7", "node1", "4", "2", "0", "4"), strict=True):
        monkeypatch.setenv(name, value)
    (joined,) = texts(doctor_devices.find_processes())
    assert "slurm as process 2 of 4" in joined
    monkeypatch.setenv("SLURM_PROCID", "two")
    (wrong,) = Part("distributed", doctor_devices.find_processes, needed=False).entries()
    assert (wrong.kind, "two" in wrong.text) == ("note", True)


def test_outdated_programs_are_noted(monkeypatch, tmp_path):
    settings = SimpleNamespace(jax_compilation_cache_dir=str(tmp_path))
    monkeypatch.setattr(doctor_devices, "SETTINGS", settings)
    monkeypatch.setattr(doctor_devices, "use_cache", lambda cache_dir, mesh: f"in {tmp_path}")
    for name, seconds in (("old", 1), ("new", 2**40)):
        with open(tmp_path / f"{name}-cache", "wb") as file:
            file.truncate(10**9)
        os.utime(tmp_path / f"{name}-cache", (seconds, seconds))
    found = list(doctor_devices.find_cache())
    assert texts(found) == [f"in {tmp_path}", "2 programs, 2 GB"]
    assert texts(found, "note")[0].startswith("1 programs (1 GB) ")
    os.utime(tmp_path / "old-cache", (2**40, 2**40))
    assert texts(doctor_devices.find_cache(), "note") == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_x=a/b", None),
        ("JAX_COMPILATION_CACHE_DIR", "/home/ada/cache/2026-11-26", "~/cache/2026-11-26"),
        ("LD_LIBRARY_PATH", "/home/adam/x:/data/ada/y:/home/ada", "/home/adam/x:/data/USER/y:~"),
        ("MOEZOO_NAME", "ada", "USER"),
        ("JAX_API_KEY", "a", "(set, not shown)"),
        ("TPU_URL", "https://bob:secret@host/x?key=abc&b=d", "https://***@host/x?key=***&b=***"),
        ("TPU_URL", "http://u:p@ss@h/ u:pw@h password:hunter2 nvapi-1", "http://***@h/ ***@h password=*** ***"),
        ("MOEZOO_PW", "a", "(set, not shown)"),
        ("JAX_COORDINATOR_ADDRESS", "10.1.2.3:1234", "10.1.2.3:1234"),
        ("MOEZOO_X", "hf_abcDEF123", "***"),
        ("MOEZOO_X", "eyJhbGciOi.eyJzdWIi.c2ln", "***"),
        ("MOEZOO_X", "a=0123456789abcdef0123456789ABCDEF", "a=***"),
        ("MOEZOO_X", "aB3" * 9, "***"),
        ("MOEZOO_X", "password=hunter2,b=1", "password=***,b=1"),
    ],
)
def test_values_are_shown_without_secrets_and_names(monkeypatch, name, value, shown):
    monkeypatch.setattr(doctor_entries, "_users", lambda: {"ada"})
    monkeypatch.setenv("HOME", "/home/ada")
    assert shown_value(name, value) == (value if shown is None else shown)
    assert mask("see /home/ada/x and /srv/ada/y of ada") == "see ~/x and /srv/USER/y of ada"


def test_only_known_variables_are_shown(monkeypatch):
    for name in list(os.environ):
        if name.startswith(doctor_machine._PREFIXES) or name in doctor_machine._NAMES:
            monkeypatch.delenv(name)
    assert texts(doctor_machine.find_environment()) == ["no variable that changes results or speed"]
    monkeypatch.setenv("SLURM_JOB_USER", "ada")
    monkeypatch.setenv("AWS_REGION", "x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    found = list(doctor_machine.find_environment())
    assert texts(found) == ["NCCL_DEBUG=INFO", "XLA_FLAGS=--xla_force_host_platform_device_count=3"]
    (fixed,) = texts(found, "note")
    assert "at 3," in fixed


def test_limits_of_the_machine_are_noted(monkeypatch):
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 * 10**6))
    monkeypatch.setattr(doctor_machine, "processor_limits", lambda: iter([0.5]))
    monkeypatch.setattr(doctor_machine, "_GPUS", "/dev/[nz]*")  # null and zero
    monkeypatch.setattr(doctor_machine, "host_memory", lambda: 2**28)
    found = list(doctor_machine.find_machine())
    facts = " ".join(texts(found))
    assert "0.5 processors" in facts
    assert "0.2 GiB" in facts
    assert ["ulimit -n" in each or "shm-size" in each or "cpus" in each for each in texts(found, "note")] == [True] * 3


def test_the_disk_is_tried_and_nothing_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_machine, "_DISK_BYTES", 3 * 10**6)
    where, speed = texts(doctor_machine.find_disk(Path("runs")))
    assert where.startswith(f"{tmp_path}/runs (to be made in {tmp_path}): ")
    assert "3 MB" in speed
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    (wrong,) = doctor_machine.find_disk(tmp_path / "file" / "runs")
    assert (wrong.kind, "is no folder" in wrong.text) == ("problem", True)
    (wrong,) = texts(doctor_machine.find_disk(Path("/proc/runs")), "problem")  # where not even root can make a file
    assert "/proc cannot be written" in wrong
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert [entry.kind for entry in doctor_machine.find_disk(tmp_path)] == ["fact", "note", "fact"]


def test_libraries_that_do_not_fit_are_problems(monkeypatch):
    assert texts(doctor_installed.find_libraries(), "problem") == []
    really = doctor_installed.installed
    wrong = {"jaxlib": "0.9.1", "optax": None}
    monkeypatch.setattr(doctor_installed, "installed", lambda name: wrong[name] if name in wrong else really(name))
    monkeypatch.setattr(doctor_installed, "_distributions", lambda: {"jax-cuda13-plugin": "0.8.0"})
    found = list(doctor_installed.find_libraries())
    assert sorted(each.split(",")[0] for each in texts(found, "problem")) == [
        "jaxlib 0.9.1 is installed",
        "optax is not installed",
    ]
    (differ,) = texts(found, "note")
    assert "jax-cuda13-plugin 0.8.0 and jaxlib 0.9.1" in differ


@pytest.fixture
def broken_library(monkeypatch, tmp_path):
    """A library of an extra that is installed, too old, and raises when it is imported."""
    (tmp_path / "wandb-0.1.dist-info").mkdir()
    (tmp_path / "wandb-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.1\n")
    (tmp_path / "wandb.py").write_text("raise ImportError('libx.so: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def test_extras_are_listed_and_a_broken_library_is_noted(monkeypatch, broken_library):
    del broken_library
    monkeypatch.setattr(doctor_installed, "_extras", _only(doctor_installed._extras, "wandb", "chat", "mlflow"))
    really = doctor_installed.installed
    monkeypatch.setattr(doctor_installed, "installed", lambda name: None if name == "mlflow" else really(name))
    found = list(doctor_installed.find_extras())
    assert "chat: jinja2 " in texts(found)[0]
    assert texts(found)[1:] == ["mlflow: no mlflow; pip install -e '.[mlflow]'"]
    old, raises = texts(found, "note")
    assert old.startswith("wandb 0.1 is installed, and moezoo[wandb] takes wandb>=")
    assert "ImportError: libx.so: cannot open" in raises


def test_a_module_of_another_name_than_its_distribution_is_imported(monkeypatch, tmp_path):
    """As `material` of mkdocs-material."""
    (tmp_path / "other_name-1.0.dist-info").mkdir()
    (tmp_path / "other_name-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\n")
    (tmp_path / "other_name-1.0.dist-info" / "RECORD").write_text("theirs/__init__.py,,\ntheirs/deep/__init__.py,,\n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert list(doctor_installed._import_all([("docs", "other-name")])) == []


def _only(function, *names):
    return lambda: {name: found for name, found in function().items() if name in names}


def test_where_moezoo_is(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_installed, "_other_installations", lambda root: [])
    assert not any("two installations" in each for each in texts(doctor_installed.find_versions(), "note"))
    monkeypatch.undo()
    (tmp_path / "moezoo").mkdir()
    (tmp_path / "moezoo-0.1.dist-info").mkdir()
    (tmp_path / "moezoo-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: moezoo\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    (two,) = [each for each in texts(doctor_installed.find_versions(), "note") if "two installations" in each]
    assert str(tmp_path) in two
    monkeypatch.setattr(doctor_installed, "_PACKAGE", tmp_path / "moezoo")
    assert sum("symbolic links" in each for each in texts(doctor_installed.find_versions(), "problem")) == 3


def say(**message):
    """Return the statement that prints a message of the process of parts."""
    return f"print({f'{MARK}{json.dumps(message)}'!r}, flush=True)"


WHOLE = "".join(
    f"""
if {title!r} in titles:
    {say(begin=title)}
    {say(entry=("fact", title, "fine"))}
    {say(end=title)}
"""
    for title in ON_DEVICES
)


@pytest.fixture
def examined(monkeypatch):
    """Run the parts on devices with a program in place of their process, and return the entries."""

    def run(program, seconds=60.0):
        def command(titles):
            code = f"import os, signal, sys, time\ntitles = {list(titles)}\n{program}"
            return [sys.executable, "-S", "-c", code]

        monkeypatch.setattr(doctor, "command_of", command)
        return list(doctor.examine_devices(seconds))

    return run


def test_a_part_that_crashes_is_one_line_and_the_others_run(examined):
    crash = f"{say(begin='two steps')}\nprint('F0 Check failed: x', file=sys.stderr, flush=True)\nos.abort()"
    program = WHOLE.replace(say(begin="two steps"), crash.replace("\n", "\n    "))
    found = examined(f"print('noise')\n{program}")
    assert texts(found, "problem") == ["failed: its process ended by SIGABRT: F0 Check failed: x"]
    assert [entry.title for entry in found] == list(ON_DEVICES)
    assert [entry.kind for entry in found].count("fact") == len(ON_DEVICES) - 1


@pytest.mark.parametrize("way", ["crash", "hang", "refuse"])
def test_where_devices_do_not_start_the_rest_is_tried_on_the_cpu(examined, monkeypatch, way):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    end = {
        "crash": "os.kill(os.getpid(), signal.SIGSEGV)",
        "hang": "time.sleep(100)",
        "refuse": f"{say(entry=('problem', 'devices', 'failed: no'))}\n    sys.exit()",
    }[way]
    program = WHOLE.replace(say(begin="devices"), f"{say(begin='devices')}\n    {end}")
    program = f"assert titles[0] == 'devices' or os.environ['JAX_PLATFORMS'] == 'cpu'\n{program}"
    found = examined(program, seconds=3.0 if way == "hang" else 60.0)
    (wrong,) = texts(found, "problem")
    assert {"crash": "SIGSEGV", "hang": "no answer for 3 s", "refuse": "failed: no"}[way] in wrong
    assert texts(found) == ["what follows is of the CPU", *["fine"] * (len(ON_DEVICES) - 1)]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    if way != "hang":
        assert [entry.kind for entry in examined(program)] == ["problem"]


def test_where_jax_cannot_be_imported_nothing_else_is_tried(examined):
    found = examined("raise ImportError('jaxlib is too old')")
    assert [(entry.kind, entry.title) for entry in found] == [("problem", "jax")]
    assert "ended with code 1: ImportError: jaxlib is too old" in found[0].text


@pytest.fixture
def planted_report(monkeypatch):
    def plant(*entries):
        monkeypatch.setattr(doctor, "examine", lambda folder, seconds: iter(entries))

    return plant


LONG = " ".join(["word"] * 60) + " " + "/folder" * 30


def test_the_report_is_narrow_text_and_markdown_and_json(console, planted_report):
    plain = Entry("fact", "disk", LONG), Entry("note", "disk", "a hint"), Entry("fact", "disk", "more")
    planted_report(*plain)
    code, out, err = console("doctor")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out
    assert [line.split()[0] for line in out.splitlines() if line[:1].strip()] == ["disk", "note", "result"]
    code, marked, _ = console("doctor", "--markdown")
    assert marked == f"```text\n{out}```\n"
    code, listed, _ = console("doctor", "--json", "--markdown")
    assert json.loads(listed) == {
        "facts": {"disk": [LONG, "more"]},
        "notes": [{"part": "disk", "text": "a hint"}],
        "problems": [],
    }
    planted_report(*plain, Entry("problem", "disk", f"{os.path.expanduser('~')}/x is full"))
    code, out, _ = console("doctor")
    assert code == 1
    assert "problem      disk: ~/x is full" in out
    assert out.endswith("result       1 problem\n")
    assert console("doctor", "--json")[0] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seconds=0"], "seconds=0 must be at least 1"),
        (["foldr=x"], "foldr: there is no key 'foldr'; did you mean 'folder'?"),
        (["--markdwn"], "--markdwn: no such option"),
        (["runs"], "runs: expected KEY=VALUE, such as folder=runs"),
    ],
)
def test_mistakes_are_one_line(console, words, message):
    code, out, err = console("doctor", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.newer
def test_the_command_works_here_with_a_broken_library_and_without_jax(broken_library):
    """As a user runs it: the whole report, then one of an environment in which importing JAX raises."""
    command = [sys.executable, "-m", "moezoo", "doctor", "--json", f"folder={broken_library}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"], done.stderr) == (0, [], "")
    assert set(found["facts"]) >= {"moezoo", "libraries", "extras", "machine", "disk", *ON_DEVICES}
    assert any("libx.so" in each["text"] for each in found["notes"])
    (broken_library / "jax.py").write_text("raise RuntimeError('jaxlib 0.1 is incompatible')\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert [each["part"] for each in found["problems"]] == ["jax"]
    assert "jaxlib 0.1 is incompatible" in found["problems"][0]["text"]
    assert "disk" in found["facts"]
