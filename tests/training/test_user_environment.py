"""Steps with many collectives with the threads and limits of a user, while other processes compute.

With jax 0.10 and as many threads as devices, the first test hung in ten of ten tries: one device waited in two
collectives, and another had no thread left.
"""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Three of twelve steps are run, up to their row.
COMMAND = (
    "model=deepseek model.layers=8 mesh.stage=4 mesh.fsdp=2 execution.pipeline.microbatches=4 batch_size=16 seq_len=32"
    " data=synthetic optimizer=sgd optimizer.learning_rate=0.3 steps=12 seed=3 log_every=3 eval_every=0"
    " checkpoint_every=0"
)
HANGS = 240.0  # seconds, many times what a run takes
# Three axes each: stages, data and experts; stages, experts and a ring; experts, a ring and split widths.
MIXTURES = """
import moezoo
moezoo.cpu_devices(8)
import math
from cover import EXTRA_CASES, STAGED_CASES
from running import CompiledStep
steps = [CompiledStep(case) for case in (STAGED_CASES[0], STAGED_CASES[6], EXTRA_CASES[8])]
print("done in time", flush=True)
print("losses", *(math.isfinite(step(number).loss) for step in steps for number in range(5)), flush=True)
"""


def run_under_load(*words: str, until: str) -> list[str]:
    """Run Python with these words, without variables that change JAX or XLA; return its lines up to one with `until`.

    From when it has compiled on, two other processes keep processors busy. A process that hangs is ended. Flags are
    those of the suite, which only make compiling cheap.
    """
    theirs = ("JAX_", "XLA_", "PJRT_", "NPROC")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    paths = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "parity"))]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment["XLA_FLAGS"] = os.environ["XLA_FLAGS"]
    lines = []
    with contextlib.ExitStack() as held:

        def start(*words: str) -> subprocess.Popen[str]:
            command, pipe = [sys.executable, *words], subprocess.PIPE
            process = held.enter_context(subprocess.Popen(command, env=environment, stdout=pipe, text=True))
            held.callback(process.kill)
            return process

        process = start(*words)
        timer = threading.Timer(HANGS, process.kill)
        held.callback(timer.cancel)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "done in" in line:
                for _ in range(2):
                    start("-c", "while True: pass")
            if until in line:
                break
    return lines


@pytest.mark.weekly
def test_a_pipeline_of_four_stages(tmp_path):
    command = (str(ROOT / "scripts" / "train.py"), *COMMAND.split(), f"run_dir={tmp_path / 'run'}")
    lines = run_under_load(*command, until="step 3/12")
    assert "step 3/12" in lines[-1]
    assert any("done in" in line for line in lines)


@pytest.mark.weekly
def test_the_deepest_mixtures_of_axes():
    lines = run_under_load("-c", MIXTURES, until="losses")
    assert lines[-1].split() == ["losses", *["True"] * 15], lines
