import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from moezoo import cli
from moezoo.cli.command import ConfiguredCommand, KeysCommand, execute
from moezoo.config.compose import as_mapping, compose, compose_onto, defaults, groups, read_yaml
from moezoo.config.options import read
from moezoo.convert import Checks, Range
from moezoo.errors import UserError


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


def test_overrides_reach_the_task(call):
    assert call("steps=3", "mesh=ep8") == (0, "steps=3 mesh=ep8\n", "")
    assert call() == (0, "\n", "")


def test_exit_code_is_the_tasks(call):
    assert call(task=lambda _: 3)[0] == 3


def test_a_mistake_is_one_line_and_exit_code_2(call):
    def task(_):
        raise UserError("steps=0 must be at least 1")

    assert call(task=task) == (2, "", "error: steps=0 must be at least 1\n")


def test_interrupted(call):
    def task(_):
        raise KeyboardInterrupt

    assert call(task=task) == (130, "", "interrupted\n")


def test_other_errors_are_ours_and_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        execute(ConfiguredCommand("count", "", lambda _: 1 // 0, description=""), [], "moezoo count")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_everything(call, saved, option):
    code, out, err = call("steps=3", option, examples=("steps=7",))
    assert (code, err) == (0, "")
    assert "Counts sheep." in out
    assert "moezoo count steps=7" in out
    lines = out.splitlines()
    for group, names in groups().items():
        assert any(line.startswith(f"  {group}") for line in lines)
        for name in names:
            marked = name + "*" * (name == defaults()[group])
            (line,) = (line for line in lines if line.split()[:1] == [marked])
            assert len(line.split()) > 2, f"conf/{group}/{name}.yaml should begin with a comment that explains it"
    for key in {*saved, "dtype"} - set(groups()) - {"execution"}:
        (line,) = (line for line in lines if line.split()[:1] == [f"{key}:"])
        assert " # " in line


def test_help_names_the_keys_of_what_is_chosen(call, saved):
    _, out, _ = call("--help")
    assert {f"model.{key}" for key in saved["model"]} - {"model.family"} <= set(out.split())
    assert "model.router.score" not in out
    _, out, _ = call("model=deepseek", "--help", "mesh=nowhere")
    assert {"model.yarn.factor", "model.router.score", "model.q_lora"} <= set(out.split())
    assert "model.kv_heads" not in out


@pytest.mark.parametrize(
    "arguments",
    [["--cfg", "job", "steps=3"], ["--cfg=job", "steps=3"], ["--cfg", "steps=3"], ["steps=3", "--cfg"]],
)
def test_cfg_prints_the_configuration(call, saved, tmp_path, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    (tmp_path / "config.yaml").write_text(out)
    assert read_yaml(tmp_path / "config.yaml") == {**saved, "steps": 3}


def test_cfg_of_a_script_that_composes_its_own_way(call, saved):
    _, out, _ = call("--cfg", "job", configure=lambda *overrides: compose_onto(saved, "seed=9", *overrides))
    assert "seed: 9\n" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-m", "mesh=ep8,single"], ["error: -m: ", "--help, --cfg job", "loop", "moezoo count mesh=$m"]),
        (["--multirun"], ["error: --multirun: ", "--help, --cfg job", "loop"]),
        (["steps=3", "--steps=3"], ["error: --steps=3: ", "--help, --cfg job"]),
        (["-"], ["error: -: "]),
        (["--cfg", "hydra"], ["error: --cfg hydra: expected --cfg job"]),
        (["--cfg=all"], ["error: --cfg all: expected --cfg job"]),
        (["--cfg", "job", "steps=abc"], ["error: steps=abc: expected a whole number"]),
    ],
)
def test_refuses_in_one_line(call, arguments, said):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert [part for part in said if part not in err] == []


SCRIPT = """
import sys

from moezoo.cli.command import ConfiguredCommand, execute
from moezoo.parallel.mesh import has_started

try:
    execute(ConfiguredCommand("count", "count sheep", print, description="Counts sheep."), sys.argv[1:], "count")
finally:
    assert not has_started()
"""


def test_help_starts_no_device_and_its_reader_may_leave():
    command = [sys.executable, "-W", "error", "-c", SCRIPT, "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stderr is not None
        script.stdout.close()
        assert script.stderr.read() == ""
    assert script.returncode == 141


@dataclasses.dataclass(frozen=True)
class Sheep:
    flock: str = ""
    legs: int = 4
    wool: float = 0.5


def test_a_script_with_keys_of_its_own(call):
    def task(overrides):
        print(read(Sheep, overrides, Checks(ranges={"legs": Range(at_least=1)})))

    own = {"kind": KeysCommand, "task": task, "keys": ("legs=4  of each",), "examples": ("legs=3",)}
    assert call("flock=12", "legs=3", "wool=1e-4", **own) == (0, "Sheep(flock='12', legs=3, wool=0.0001)\n", "")
    code, out, _ = call("--help", **own)
    assert code == 0
    for part in ("Counts sheep.", "legs=4  of each", "moezoo count legs=3"):
        assert part in out
    for argument, said in [
        ("lgs=3", "lgs: there is no key 'lgs'; did you mean 'legs'?"),
        ("legs=0", "legs=0 must be at least 1"),
        ("legs=many", "legs=many: expected a whole number such as 4, found text"),
        ("wool=nan", "wool=nan: expected a number such as 0.5, found no finite number"),
        ("12", "12: expected KEY=VALUE, such as flock=12"),
        ("--cfg", "--cfg: no such option; valid: --help, and KEY=VALUE"),
    ]:
        assert call(argument, **own) == (2, "", f"error: {said}\n")


def test_the_console_command(monkeypatch, capsys):
    """It lists its commands, hands arguments on, and answers a name that does not exist in one line."""

    def moezoo(*arguments):
        monkeypatch.setattr(sys, "argv", ["/bin/moezoo", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    for arguments in ([], ["--help"], ["-h"]):
        code, out, err = moezoo(*arguments)
        assert (code, err) == (0, "")
        listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
        assert listed == ["train", "evaluate", "generate", "parity", "prepare-data", "bench", "endurance"]
    assert moezoo("trian", "steps=3") == (2, "", "error: moezoo trian: no such command; did you mean 'train'?\n")
    code, out, err = moezoo("--version")
    assert (code, out) == (2, "")
    assert err.startswith("error: --version: no such option; valid: --help, or a command: train, ")
    code, out, _ = moezoo("train", "--cfg", "job", "steps=3")
    assert code == 0
    assert "steps: 3\n" in out
    for name in listed:
        code, out, err = moezoo(name, "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"usage: moezoo {name} ")


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_a_script(name):
    """A few lines around the same function, which say how they were called."""
    script = Path(__file__).parents[2] / "scripts" / f"{name.replace('-', '_')}.py"
    assert len(script.read_text().splitlines()) < 10
    assert script.stem not in sys.stdlib_module_names  # it is first on the path of `python scripts/NAME.py`
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python {script} ")
