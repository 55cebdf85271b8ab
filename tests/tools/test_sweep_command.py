"""`moezoo sweep`: which runs are trained, continued and left out, its table, failures and signals."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moezoo.errors import UserError
from moezoo.host.files import locking
from moezoo.interrupts import Ended
from moezoo.tools.sweep.expand import expand
from moezoo.tools.sweep.runs import (
    SOME_FAILED,
    average_over_seeds,
    check_same,
    find_outcome,
    run_all,
    start_process,
)

STEPS, PYTHON = 10, sys.executable
GRID = expand(["optimizer.learning_rate=1e-3,3e-3", "seed=0,1", f"steps={STEPS}"])


def leave(folder: Path, step: int, val_loss=None, *, loss: float = 3.0, saved: bool = True) -> None:
    """Write what a run leaves at a step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"batch_size: 2\nseq_len: 8\nsteps: {STEPS}\ndata:\n  name: python_stdlib\n")
    row = {"step": step, "loss": loss, "tokens_per_second": 100.0, "skipped": 1, "val_loss": val_loss}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    if saved:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)


class Trainer:
    """Stands for the process of a run: notes the overrides, and leaves a finished run or what `ends` says of it."""

    def __init__(self, **ends):
        self.calls, self._ends = [], ends

    def __call__(self, words):
        (folder,) = (Path(word.partition("=")[2].strip('"')) for word in words if word.startswith("run_dir="))
        self.calls.append(words)
        end = next((end for name, end in self._ends.items() if folder.name.endswith(name)), None)
        if isinstance(end, Ended):
            return end
        leave(folder, STEPS, *(end or (2.0,)))
        return Ended(0, "")


def sweep(trainer, grid=GRID):
    Path("all").mkdir(exist_ok=True)
    return run_all(grid, Path("all"), trainer)


def words_of(element):
    """The overrides with which a run starts and continues."""
    return [*element.words, f'run_dir="all/{element.name}"', "resume=auto"]


def table():
    return json.loads(Path("all/sweep.json").read_text())


def test_finished_runs_are_left_out_begun_ones_continue_and_others_start(capsys):
    names = [each.name for each in GRID.elements]
    leave(Path("all", names[0]), STEPS, 2.5)
    leave(Path("all", names[1]), 4)
    leave(Path("all", names[2]), 4, saved=False)
    trainer = Trainer()
    assert sweep(trainer) == 0
    assert trainer.calls == [words_of(each) for each in GRID.elements[1:]]
    done = re.findall(r"run \d/4 .*: (.*)", capsys.readouterr().out)
    assert done == ["finished before", "continues from step 4", "starts", "starts"]
    assert sweep(again := Trainer()) == 0
    assert again.calls == []


def test_the_best_has_the_lowest_validation_loss():
    ends = {"0.001_seed_0": (2.2,), "0.001_seed_1": (2.1,), "0.003_seed_0": (2.3,), "0.003_seed_1": (2.4,)}
    names = [each.name for each in GRID.elements]
    for name, (val_loss,) in zip(names, ends.values(), strict=True):
        leave(Path("all", name), STEPS, val_loss, loss=4 - val_loss)  # the best has the highest training loss
    assert sweep(Trainer()) == 0
    runs = table()["runs"]
    assert [run["number"] for run in runs] == [1, 0, 2, 3]
    assert (runs[0]["val_loss"], runs[0]["tokens_per_second"], runs[0]["skipped"]) == (2.1, 100.0, 1)
    assert runs[0]["loss"] == pytest.approx(1.9)
    text = Path("all/sweep.md").read_text().splitlines()
    assert [line.split()[1] for line in text if "(best)" in line] == ["1"]
    assert Path("all/loss.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_are_averaged_for_each_choice_of_the_other_keys():
    losses = [2.0, 2.2, 1.0, 1.4]
    for each, loss in zip(GRID.elements, losses, strict=True):
        leave(Path("all", each.name), STEPS, loss)
    found = average_over_seeds([find_outcome(Path("all", e.name), e) for e in GRID.elements])
    assert [(each.values, each.count) for each in found] == [
        ({"optimizer.learning_rate": 0.003}, 2),
        ({"optimizer.learning_rate": 0.001}, 2),
    ]
    assert [each.mean for each in found] == pytest.approx([1.2, 2.1])
    assert [each.spread for each in found] == pytest.approx([0.4 / 2**0.5, 0.2 / 2**0.5])  # of a sample of two


def test_a_failed_run_is_listed_with_its_line_and_the_sweep_goes_on(capsys):
    trainer = Trainer(**{"0.001_seed-1": Ended(2, "the data are | gone"), "0.003_seed-0": (None,)})
    assert sweep(trainer) == SOME_FAILED
    assert len(trainer.calls) == 4
    out, err = capsys.readouterr()
    lost = "it has no finite validation loss; moezoo evaluate run_dir=all/learning_rate-0.003_seed-0 computes it"
    assert f"- run 1: the data are | gone\n- run 2: {lost}\n" in out
    assert "2 of 4 runs failed" in err
    states = {run["number"]: (run["state"], run["line"]) for run in table()["runs"]}
    assert states[0][0] == states[3][0] == "finished"
    assert states[1] == ("failed", "the data are | gone")
    assert states[2] == ("failed", lost)
    # What failed before its end is tried again, and what has no steps left is not.
    assert sweep(again := Trainer()) == SOME_FAILED
    assert again.calls == [words_of(GRID.elements[1])]
    assert "the data" not in Path("all/sweep.md").read_text()


def test_a_signal_ends_the_sweep_and_the_next_continues(capsys):
    def stopped(words):
        leave(Path(re.findall(r'"(.*)"', words[-2])[0]), 4)
        return Ended(130, "")

    assert sweep(stopped) == 130
    assert "the same command and sweep_dir=all" in capsys.readouterr().out
    assert [run["state"] for run in table()["runs"]] == ["begun", "waiting", "waiting", "waiting"]
    assert sweep(trainer := Trainer()) == 0
    assert trainer.calls == [*map(words_of, GRID.elements)]
    assert "continues from step 4" in capsys.readouterr().out


def test_a_run_that_another_process_trains_is_left_out(capsys):
    folder = Path("all", GRID.elements[1].name)
    leave(folder, 4, saved=False)
    with locking(folder.resolve(), ""):
        assert sweep(trainer := Trainer()) == 0
    assert len(trainer.calls) == 3
    assert (folder / "metrics.jsonl").exists()
    out = capsys.readouterr().out
    assert f"{folder.name}: another process trains here" in out
    assert "at step 4 of 10" in out


def test_one_run_of_a_sweep_alone():
    grid = expand(["optimizer.learning_rate=1e-3,3e-3", "seed=0,1", f"steps={STEPS}"], only=2)
    assert sweep(trainer := Trainer(), grid) == 0
    assert trainer.calls == [words_of(GRID.elements[2])]
    assert {run["number"]: run["state"] for run in table()["runs"]}[0] == "waiting"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["optimizer.learning_rate=1e-3,3e-3,1e-2", "seed=0,1", f"steps={STEPS}"], []),
        (["seed=0,1", f"steps={STEPS}", "optimizer.learning_rate=3e-3,1e-3"], []),
        (["optimizer.learning_rate=1e-3,3e-3", "seed=0,1", "steps=11"], ["steps=10", "steps=11"]),
        (["optimizer.learning_rate=1e-3,3e-3", "seed=0,1"], ["steps=10", "no steps"]),
        (["optimizer.learning_rate=1e-3,1e-2", "seed=0,1", f"steps={STEPS}"], ["learning_rate-0.003_seed-0"]),
        (["seed=0,1", f"steps={STEPS}"], ["[optimizer.learning_rate, seed]", "[seed]"]),
    ],
)
def test_a_sweep_may_only_grow(words, parts):
    sweep(Trainer())
    if not parts:
        check_same(Path("all"), expand(words))
        return
    with pytest.raises(UserError) as caught:
        check_same(Path("all"), expand(words))
    assert [part for part in ("sweep_dir=all", "another folder", *parts) if part not in str(caught.value)] == []


def test_other_folders_are_refused():
    Path("other").mkdir()
    check_same(Path("other"), GRID)
    Path("other/notes").touch()
    with pytest.raises(UserError, match=r"sweep_dir=other .*sweep\.json is missing"):
        check_same(Path("other"), GRID)
    Path("other/sweep.json").write_text('{"keys": 3}')
    with pytest.raises(UserError, match=r"sweep_dir=other.*damaged"):
        check_same(Path("other"), GRID)
    with pytest.raises(UserError, match=r"sweep_dir=other/notes: .*Not a directory.*name another folder"):
        check_same(Path("other/notes"), GRID)


def test_cfg_prints_the_configuration_of_one_run(console):
    assert "\nseed: 5\n" in console("sweep", "seed=4,5", "only=1", "--cfg", "job")[1]


@pytest.fixture
def process(monkeypatch):
    """Run Python code in place of a training run; returns how its process ended."""

    def run(body: str) -> Ended:
        script = Path("python").resolve()
        script.write_text(f"#!{PYTHON}\nimport os, signal, sys\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return start_process(["seed=1"])

    return run


def test_how_a_process_ended(process, capfd):
    line = "print('warning: x\\nerror: ' + ' '.join(sys.argv[1:]) + '\\n', file=sys.stderr); sys.exit(2)"
    assert process(line) == Ended(2, "-P -m moezoo train seed=1")
    assert "error: -P" in capfd.readouterr().err
    killed = "ended by SIGKILL, perhaps because memory ran out"
    assert process("os.kill(os.getpid(), signal.SIGKILL)") == Ended(137, killed)


WAITS = """#!{python}
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("saved").touch(), sys.exit(0)))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
pathlib.Path("ready").touch()
time.sleep(60)
"""
WATCHES = """
import sys
import moezoo.interrupts as interrupts
with interrupts.ending():
    from moezoo.tools.sweep.runs import start_process
    sys.executable = "./waits"
    print(start_process([]).code)
"""


def test_a_signal_reaches_the_run_and_ends_the_sweep_even_if_the_run_just_ended():
    Path("waits").write_text(WAITS.format(python=sys.executable))
    Path("waits").chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", WATCHES], stdout=subprocess.PIPE, text=True) as watching:
        while not Path("ready").exists():
            assert watching.poll() is None
            time.sleep(0.05)
        watching.send_signal(signal.SIGTERM)
        out, _ = watching.communicate(timeout=30)
    assert (out, Path("saved").exists()) == ("143\n", True)


@pytest.mark.newer
def test_a_sweep_of_two_processes(console, small_run, pytestconfig):
    """One trains and is left out the second time; the other finds a mistake that only its data show."""
    cache = pytestconfig.cache.mkdir("sweep")
    words = [*(word for word in small_run if not word.startswith("mesh.")), f"cache_dir={cache}"]
    for before in ("starts", "finished before"):
        code, out, err = console("sweep", *words, "data.document_length=3,1000", "sweep_dir=sweeps/a b")
        assert code == SOME_FAILED
        assert re.findall(r"run \d/2 +document_length-(\d+): (.*)", out) == [("3", "starts"), ("1000", before)]
        assert "error: data=synthetic" in err
        assert "1 of 2 runs failed" in err
        finished, failed = json.loads(Path("sweeps/a b/sweep.json").read_text())["runs"]
        assert (failed["state"], finished["state"], finished["step"]) == ("failed", "finished", 1)
        assert failed["line"].startswith("data=synthetic")
        assert finished["val_loss"] > 0
