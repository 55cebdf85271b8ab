"""Steps of a run that are recorded: the page, the trace, and what a recording may not do to the run."""

import os
import re
import signal
import warnings
from pathlib import Path

import jax
import pytest
from training_runs import read_rows, steps_only, train_with_signal

import moezoo
from moezoo.host.machine import NO_CUDA_GRAPHS
from moezoo.parallel import distributed
from moezoo.profiling.profile import Operation, operations, recording
from moezoo.training import profiler
from moezoo.training.profiler import Profiler

SMALL = ("mesh=single", "dispatch=gather", "model.layers=1", "steps=5", "eval_every=3")
RECORDED = ("profile.start=3", "profile.steps=2")


def table(text: str) -> dict[str, list[float]]:
    """Return the numbers of each row of the page's table, as far as it has them."""
    rows = re.findall(r"^\| ([\w\- ,]+?) +\| +([\d.]+) \| +([\d.]+)% \|(.*)\|$", text, re.M)
    return {
        name: [float(ms), float(share), *(float(x.strip() or 0) for x in more.split("|"))]
        for name, ms, share, more in rows
    }


def operations_in(trace: Path) -> list[str]:
    """Return the names of the operations of steps that a trace of CPUs has, each as often as it ran."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as in `read_trace`
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            for event in (event for line in plane.lines for event in line.events):
                if dict(event.stats).get("hlo_module") == "jit__local":
                    found.append(event.name)
    return found


@pytest.mark.weekly
def test_where_the_time_of_steps_went(tiny, tmp_path, capsys, monkeypatch):
    """Parts add up to the step, and the step to the clock; the run's numbers are those without a recording."""
    known: set[str] = set()

    def remember(text: str) -> dict[str, Operation]:
        named = operations(text)
        known.update(named)
        return named

    monkeypatch.setattr(profiler, "operations", remember)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    with steps_only():
        plain = moezoo.train(moezoo.compose(*tiny, *SMALL, f"run_dir={tmp_path}/plain"))
        assert NO_CUDA_GRAPHS not in os.environ["XLA_FLAGS"].split()
        run = moezoo.train(moezoo.compose(*tiny, *SMALL, *RECORDED, f"run_dir={tmp_path}/recorded"))
    assert NO_CUDA_GRAPHS in os.environ["XLA_FLAGS"].split()
    assert read_rows(run.folder) == read_rows(plain.folder)
    assert not (plain.folder / "profile.md").exists()
    assert f"{run.folder}/profile.md  where" in capsys.readouterr().out
    text = (run.folder / "profile.md").read_text()
    assert text.startswith("# Steps 3 to 4\n")
    rows = table(text)
    whole = rows.pop("whole step")
    assert {"attention", "experts", "router", "loss", "optimizer", "no operation"} <= rows.keys()
    for column in range(6):
        assert sum(row[column] for row in rows.values()) == pytest.approx(whole[column], rel=0.05, abs=0.02 * len(rows))
    for part in ("attention", "experts"):
        assert all(rows[part][phase] > 0 for phase in (2, 4))
    (clock,) = re.findall(r"The clock: ([\d.]+) ms", text)
    assert whole[0] == pytest.approx(float(clock), rel=0.05, abs=0.1)
    assert "the median of steps before" in text
    (trace,) = run.folder.glob("profile/plugins/profile/*/*.xplane.pb")
    assert b"jvp(layers))/while" in trace.read_bytes()
    assert "feed_forward/experts" in trace.read_bytes().decode(errors="replace")
    # What the reader does not know counts as no operation: only loops and calls, whose operations it knows.
    ran = operations_in(trace)
    assert len(ran) > 500
    assert {name.partition(".")[0] for name in ran if name not in known} <= {"while", "call", "conditional"}


@pytest.mark.newer
def test_a_signal_ends_the_recording(tiny, tmp_path, monkeypatch, capsys):
    settings = (*tiny, *SMALL, *RECORDED, f"run_dir={tmp_path}/run")
    with steps_only():
        train_with_signal(monkeypatch, 3, signal.SIGTERM, *settings)
    assert "profile: the run ends before step 4, so there is no profile.md" in capsys.readouterr().out
    with recording(tmp_path / "other"):  # none goes on
        pass
    with steps_only():
        moezoo.train(moezoo.compose(*tiny, *SMALL, *RECORDED, "steps=4", f"resume={tmp_path}/run"))
        assert "none: profile.start=3 is not after step 3" in capsys.readouterr().out
        moezoo.train(moezoo.compose(*tiny, *SMALL, "profile.start=5", "profile.steps=1", f"resume={tmp_path}/run"))
    assert (tmp_path / "run/profile.md").read_text().startswith("# Steps 5 to 5\n")


@pytest.mark.newer
def test_a_failure_of_the_profiler_is_one_line(tiny, tmp_path, monkeypatch, capsys):
    with steps_only(), recording(tmp_path / "other"):
        moezoo.train(moezoo.compose(*tiny, *SMALL, *RECORDED, f"run_dir={tmp_path}/busy"))
    assert "profile: nothing is recorded: " in capsys.readouterr().out
    monkeypatch.setattr(profiler, "operations", lambda text: {})
    with steps_only():
        run = moezoo.train(moezoo.compose(*tiny, *SMALL, *RECORDED, f"run_dir={tmp_path}/unknown"))
    assert "profile: no profile.md: " in capsys.readouterr().out
    assert not (run.folder / "profile.md").exists()


def test_only_the_first_process_records(monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "is_first", lambda: False)
    cfg = moezoo.compose(*SMALL, *RECORDED)
    mesh = moezoo.execution(cfg).mesh
    with Profiler(cfg.profile, tmp_path, None, mesh, print) as recorded:  # pyright: ignore[reportArgumentType]
        assert list(recorded.follow(range(1, 6))) == [1, 2, 3, 4, 5]
    assert not list(tmp_path.iterdir())
