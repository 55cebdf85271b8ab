"""What a run says while it waits: rarely, and whether this process computes."""

import itertools
import threading

import jax
import pytest
from meshes import auto_mesh

import moezoo
from moezoo.cli import evaluate, generate
from moezoo.training import waiting
from moezoo.training.waiting import Waiting


class Clocks:
    """Seconds that pass, and those of processors in use."""

    now = used = 0.0

    def look(self, waits: Waiting, seconds: float, busy: float = 1.5) -> None:
        """Let `seconds` pass with `busy` processors in use, then look."""
        self.now, self.used = self.now + seconds, self.used + busy * seconds
        waits.look()


def watched():
    """Return clocks, what waits on two devices by them, and the lines that it writes."""
    clocks, lines = Clocks(), []
    mesh = auto_mesh(a=2)
    waits = Waiting(mesh, lines.append, clock=lambda: clocks.now, processor_time=lambda: clocks.used)
    return clocks, waits, lines


def test_a_line_after_a_minute_and_when_the_wait_has_doubled():
    clocks, waits, lines = watched()
    clocks.look(waits, 1000)  # nothing is waited for
    with waits.on("step 3"):
        written = []
        for _ in range(100):
            clocks.look(waits, 5)
            written.append(len(lines))
    seconds = [5 * written.index(n) + 5 for n in range(1, written[-1] + 1)]
    assert seconds == [60, 120, 240, 480]
    assert "60 s for step 3 on 2 cpu devices" in lines[0]
    clocks.look(waits, 1000)
    assert len(lines) == 4


def test_each_wait_has_a_minute_of_its_own():
    clocks, waits, lines = watched()
    for number in range(4):
        with waits.on(f"step {number}"):
            clocks.look(waits, 59)
    assert not lines
    waits.begin("batch 1")
    clocks.look(waits, 59)
    waits.begin("batch 2")
    clocks.look(waits, 59)
    assert not lines
    clocks.look(waits, 1)
    assert "60 s for batch 2" in lines[0]


def test_a_second_wait_also_has_a_line_after_a_minute():
    clocks, waits, lines = watched()
    for number in range(2):
        waits.begin(f"step {number}")
        clocks.look(waits, 60)
    assert len(lines) == 2


def test_a_hang_is_told_from_a_slow_machine(monkeypatch):
    """By the processor time of the last seconds; not of accelerators and several processes, where it says nothing."""
    for busy, word in ((1.5, "1.5 processors"), (0.2, "0.2 processors"), (0.05, "kill -9"), (0.0, "resume=FOLDER")):
        clocks, waits, lines = watched()
        waits.begin("step 3")
        clocks.look(waits, 55, busy=1.5 - busy)
        clocks.look(waits, 5, busy=busy)
        assert word in lines[0]
        assert ("only slow" in lines[0]) is (busy > 0.1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    clocks, waits, lines = watched()
    waits.begin("step 3")
    clocks.look(waits, 60, busy=0)
    assert lines[0].endswith(waits._wait.time_of_day)  # type: ignore[union-attr]


@pytest.mark.parametrize("steps", [2, 0])
def test_a_run_names_what_it_waits_for(monkeypatch, capsys, tmp_path, tiny, steps):
    """Steps, batches and new tokens, with waits so short that each is long; afterwards no thread is left."""
    monkeypatch.setattr(waiting, "_FIRST", 1e-9)
    monkeypatch.setattr(waiting, "_BETWEEN", 1e-4)
    names = [f"step {number} on 8 cpu devices" for number in range(1, steps + 1)]
    names += ["batch 1 of 2 of an evaluation and its compilation on", "batch 2 of 2 of an evaluation on"]
    sizes = (f"steps={steps}", "batch_size=8", f"run_dir={tmp_path / 'run'}")
    moezoo.train(moezoo.compose("mesh=ep8", *tiny, *sizes))
    shown = capsys.readouterr().out
    if steps:  # the commands that use its model say it too, beside their results
        evaluate.main([sizes[-1]])
        generate.continuations([sizes[-1], "prompt=1 2", "max_new_tokens=2"])
        names += ["batch 2 of 2 on", "new tokens on"]
        shown += capsys.readouterr().err
    lines = [line for line in shown.splitlines() if line.startswith("waiting ")]
    found = [any(name in line for line in lines) for name in names]
    assert all(found), list(itertools.compress(names, [not each for each in found]))

    assert "waiting" not in [thread.name for thread in threading.enumerate()]
