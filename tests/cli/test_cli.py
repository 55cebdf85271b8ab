"""What all commands do: help, --cfg job, one line for a mistake, exit codes; the console command and the scripts."""

import dataclasses
import importlib.metadata
import itertools
import os
import platform
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from moezoo.cli import command
from moezoo.cli.command import ConfiguredCommand, KeysCommand, execute
from moezoo.commands import COMMANDS
from moezoo.config.compose import as_mapping, compose, compose_onto
from moezoo.config.options import key, read
from moezoo.config.overrides import defaults, groups, read_yaml
from moezoo.errors import UserError
from moezoo.typed import Size

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def call(capsys):
    """Run a command with arguments; returns its exit code and what it printed."""

    def call(*arguments, kind=ConfiguredCommand, task=lambda overrides: print(*overrides), **options):
        command = kind("count", "count sheep", task, description="Counts sheep.", **options)
        with pytest.raises(SystemExit) as caught:
            execute(command, arguments, "moezoo count")
        return caught.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def saved():
    return as_mapping(compose())


def test_overrides_reach_the_task_and_its_exit_code_is_the_commands(call):
    assert call("steps=3", "mesh=ep8") == (0, "steps=3 mesh=ep8\n", "")
    assert call() == (0, "\n", "")
    assert call(task=lambda _: 3)[0] == 3


def test_a_mistake_that_a_task_finds_is_one_line(call):
    def task(_):
        raise UserError("steps=0 must be at least 1")

    assert call(task=task) == (2, "", "error: steps=0 must be at least 1\n")


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        execute(ConfiguredCommand("count", "", lambda _: 1 // 0, description=""), [], "moezoo count")


def test_help_explains_every_group_entry_and_key(call, saved):
    code, out, err = call("steps=3", "--help", examples=("steps=7",))
    assert (code, err) == (0, "")
    assert "Counts sheep." in out
    assert "moezoo count steps=7" in out
    assert call("-h", examples=("steps=7",)) == (0, out, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 110
    for group, names in groups().items():
        after = lines[lines.index(f"  {group}") + 1 :]
        here = list(itertools.takewhile(lambda line: line.startswith("    "), after))
        for name in names:
            marked = name + "*" * (name == defaults()[group])
            (line,) = (line for line in here if line.split()[:1] == [marked])
            assert len(line.split()) > 2, f"conf/{group}/{name}.yaml should begin with a comment that explains it"
    explained = {line.split()[0]: line.split()[1:] for line in lines if "=" in line}
    settings = saved["execution"]
    names = {*saved, *(f"execution.{name}" for name in settings)}
    names |= {f"execution.pipeline.{name}" for name in settings["pipeline"]}
    sections = {*groups(), "execution", "guard", "profile", "upcycle", "execution.pipeline", "execution.pipeline.name"}
    for name in names - sections:
        (shown,) = (shown for shown in explained if shown.startswith(f"{name}="))
        assert explained[shown] or out.split(shown)[1].lstrip(" \n")[:1].isalpha()


def test_help_shows_the_values_of_what_is_chosen(call, saved):
    words = call("--help")[1].split()
    shown = {".".join(word.partition("=")[0].split(".")[:2]) for word in words}
    assert {f"model.{key}" for key in saved["model"]} - {"model.family"} <= shown
    assert "execution.dtype=float32" in words
    assert not any(word.startswith("model.router.score") for word in words)
    words = call("model=deepseek_v3", "--help", "mesh=nowhere")[1].split()
    assert {"model.yarn.factor=40.0", "model.router.score=sigmoid", "execution.dtype=bfloat16"} <= set(words)
    assert not any(word.startswith("model.kv_heads") for word in words)


@pytest.mark.parametrize(
    "arguments",
    [["--cfg", "job", "steps=3"], ["--cfg=job", "steps=3"], ["--cfg", "steps=3"], ["steps=3", "--cfg"]],
)
def test_cfg_prints_the_configuration(call, saved, tmp_path, arguments):
    code, out, err = call(*arguments, configure=lambda *overrides: compose_onto(saved, "seed=9", *overrides))
    assert (code, err) == (0, "")
    (tmp_path / "config.yaml").write_text(out)
    assert read_yaml(tmp_path / "config.yaml") == {**saved, "steps": 3, "seed": 9}


@dataclasses.dataclass(frozen=True)
class Sheep:
    legs: Size = key("legs of each sheep", default=4)
    flock: str = key("whose sheep", "NAME", default="")
    wool: float = key("wool per sheep", default=0.5)


def test_a_command_with_keys_of_its_own(call):
    own = {"kind": KeysCommand, "task": lambda words: print(read(Sheep, words)), "keys": Sheep, "examples": ("legs=3",)}
    assert call("flock=12", "legs=3", "wool=1e-4", **own) == (0, "Sheep(legs=3, flock='12', wool=0.0001)\n", "")
    code, out, _ = call("--help", **own)
    assert code == 0
    assert ["flock=NAME", "whose", "sheep"] in [line.split() for line in out.splitlines()]
    assert ["legs=4", "legs", "of", "each", "sheep"] in [line.split() for line in out.splitlines()]
    assert "moezoo count legs=3" in out
    for argument, message in [
        ("lgs=3", "lgs: there is no key 'lgs'; did you mean 'legs'?"),
        ("legs=0", "legs=0 must be at least 1"),
        ("legs=many", "legs=many: expected a whole number such as 4, found text"),
        ("wool=nan", "wool=nan: expected a number such as 0.5, found no finite number"),
        ("12", "12: expected KEY=VALUE, such as legs=12"),
        ("--cfg", "--cfg: no such option; valid: --help, and KEY=VALUE"),
    ]:
        assert call(argument, **own) == (2, "", f"error: {message}\n")


def test_a_configured_command_with_keys_of_its_own(call):
    """Its keys come first in the help, and every other argument configures the run."""
    own = {"keys": Sheep, "groups": ("mesh",)}
    assert call("legs=3", "mesh=ep8", **own) == (0, "legs=3 mesh=ep8\n", "")
    _, out, _ = call("--help", **own)
    assert out.index("legs=4") < out.index("ep8, fsdp2_ep4") < out.index("--cfg job")
    assert "optimizer" not in out
    assert call("legs=0", **own) == (2, "", "error: legs=0 must be at least 1\n")
    assert call("lgs=3", **own) == (2, "", "error: lgs: there is no key 'lgs'; did you mean 'legs'?\n")
    assert call("mesh=epp8", **own)[2].startswith("error: mesh=epp8: no such mesh; did you mean 'ep8'?")


def test_the_console_command(console):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, err = console(*arguments)
        assert (code, err) == (0, "")
        assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert console("trian", "steps=3") == (2, "", "error: moezoo trian: no such command; did you mean 'train'?\n")
    code, out, err = console("--verbose")
    assert (code, out) == (2, "")
    assert err.startswith("error: --verbose: no such option; valid: --help, --version, or a command: train, ")
    code, out, _ = console("train", "--cfg", "job", "steps=3")
    assert code == 0
    assert "steps: 3\n" in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(console, name):
    code, out, err = console(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: moezoo {name} ")


def test_the_script_of_train_is_the_command(console, monkeypatch, capsys):
    script = SCRIPTS / "train.py"
    out = console("train", "--help")[1]
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script), run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out == out.replace("moezoo train ", f"python {script} ")


@pytest.mark.parametrize("arguments", [["train", "--help"], []])
def test_help_starts_no_device_and_its_reader_may_leave(arguments):
    code = "import atexit, sys; from moezoo.__main__ import main; from moezoo.parallel.mesh import has_started\n"
    code += "atexit.register(lambda: has_started() and print('started', file=sys.stderr)); main()"
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stderr is not None
        script.stdout.close()
        assert script.stderr.read() == ""
    assert script.returncode == 141


def test_a_command_prints_in_any_encoding_and_needs_no_home():
    """Tables have lines, and texts any character; stdout may take ASCII alone. Pictures want a folder of settings."""
    code = "from moezoo.training import pictures; pictures._figure(1, 1); from moezoo.__main__ import main; main()"
    command = [sys.executable, "-c", code, "sharding", "--parameters-only"]
    settings = {**os.environ, "PYTHONIOENCODING": "ascii:surrogateescape"}  # as in the C locale
    settings |= {"HOME": "/proc/none", "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": "", "MPLCONFIGDIR": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\u2500\u2500" in done.stdout


def test_a_variable_of_jax_that_it_cannot_read():
    """JAX reads them while it is imported."""
    command = [sys.executable, "-m", "moezoo", "generate", "folder=x", "prompt=1"]
    settings = {**os.environ, "JAX_DEBUG_NANS": "maybe", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: JAX_DEBUG_NANS=maybe: JAX cannot be imported (")
    assert done.stderr.count("\n") == 1


def test_a_current_folder_that_was_removed(tmp_path):
    code = f"import os; os.rmdir({str(tmp_path / 'gone')!r}); from moezoo.__main__ import main; main()"
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", code, "generate", "folder=x", "prompt=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path / "gone")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "error: the current folder cannot be read (No such file or directory); change to one that exists\n"
    )


def test_a_cache_that_fails_is_one_line(call, monkeypatch):
    monkeypatch.setattr(command, "_warned", set())

    def task(_):
        for action, name in itertools.product(("writing", "reading"), "abc"):
            text = f"Error {action} persistent compilation cache entry for '{name}': OSError: [Errno 28] full"
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn(text, stacklevel=1)

    code, out, err = call(task=task)
    assert (code, out) == (0, "")
    writing, reading = err.splitlines()
    for line, words in ((writing, "cannot be kept"), (reading, "cannot be read")):
        assert line.startswith("warning: ")
        assert "([Errno 28] full)" in line
        assert words in line


MISTYPED = {
    "evaluat": "moezoo evaluat: no such command; did you mean 'evaluate'?",
    "train modl=mixtral": "modl: there is no key 'modl'; did you mean 'model'?",
    "train model=mixtrall": "model=mixtrall: no such model; did you mean 'mixtral'?",
    "train dispatch=rong": "dispatch=rong: no such dispatch; did you mean 'ring'?",
    "train folder=x": "folder: there is no key 'folder'; did you mean 'init_from', the folder or run to start from?",
    "evaluate init_from=x": "name one model: run_dir=FOLDER of a run, or folder=FOLDER in Hugging Face's format; init_",
    "train execution.dtyp=float32": "execution.dtyp: there is no key 'dtyp' in execution; did you mean 'dtype'?",
    "train mesh.exprt=8": "mesh.exprt: there is no key 'exprt' in mesh; did you mean 'expert'?",
    "train modle.layers=2": "modle.layers: there is no key 'modle'; did you mean 'model'?",
    "evaluate": "name one model: run_dir=FOLDER of a run, or folder=FOLDER",
    "sweep seed=0,1 mesh.exprt=8": "mesh.exprt: there is no key 'exprt' in mesh; did you mean 'expert'?",
    "compare a b ot=x.png": "ot: there is no key 'ot'; did you mean 'out'?",
    "doctor secnds=9": "secnds: there is no key 'secnds'; did you mean 'seconds'?",
    "generate run_dir=x prompt=a temprature=1": "temprature: there is no key 'temprature'; did you mean 'temperature'?",
    "parity foldr=x": "foldr: there is no key 'foldr'; did you mean 'folder'?",
    "sharding --jsn": "--jsn: no such option; did you mean '--json'?",
    "sharding --against rules=fsdp_epp": "rules=fsdp_epp: no such rules; did you mean 'fsdp_ep'?",
    "bench.py atention": f"python {SCRIPTS}/bench.py atention: no such part; did you mean 'attention'?",
    "bench.py layouts update=3": "update: there is no key 'update'; did you mean 'updates'?",
    "bench.py moe_layer passes=forwards": "passes=forwards: expected one of forward, backward, both, found forwards",
}


def test_mistyped_words_and_versions_are_answered_without_importing_jax():
    code = f"""
import runpy, sys
from moezoo.__main__ import main
for line in {[*MISTYPED, "--version", "train.py --version"]}:
    first, *rest = line.split()
    script = first.endswith(".py")
    sys.argv = ["{SCRIPTS}/" + first, *rest] if script else ["moezoo", first, *rest]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__") if script else main()
    except SystemExit as end:
        assert end.code == (0 if "--version" in line else 2), line
print(sorted({{"jax", "equinox", "optax", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("moezoo", "jax")]
    version = ", ".join([*versions, f"Python {platform.python_version()}"])
    assert (done.returncode, done.stdout) == (0, f"{version}\n{version}\n[]\n"), done.stderr
    for line, message in zip(done.stderr.splitlines(), MISTYPED.values(), strict=True):
        assert line.startswith(f"error: {message}")
