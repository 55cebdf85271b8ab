"""SIGINT and SIGTERM end a command at any moment: one line or nothing, 130 or 143, and nothing left behind."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import moezoo.interrupts as interrupts
from moezoo.training.signals import Signals

ROOT = Path(__file__).parents[2]
SOON = 5  # seconds in which a process has to end after a signal

# Each part runs in a process without JAX. `send(number, seconds)` sends it a signal later; nothing takes a minute.
BEGIN = """
import atexit, ctypes, os, signal, threading, time
import moezoo.interrupts as interrupts
INT, TERM, C = signal.SIGINT, signal.SIGTERM, ctypes.CDLL(None)
def send(number, seconds=0.1):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
class Slow:
    def __del__(self):
        time.sleep(60)
"""
IN_PYTHON = """
with interrupts.ending():
    send(INT)
    time.sleep(60)
"""
# An exception raised there is printed and ignored.
IN_A_FINALIZER = """
with interrupts.ending():
    send(TERM)
    Slow()
"""
# The main thread receives no signal, as while it compiles.
IN_C = """
with interrupts.ending():
    signal.pthread_sigmask(signal.SIG_BLOCK, (INT, TERM))
    send(TERM)
    C.sleep(60)
"""
# A file is written, while the main thread is in C, when the second signal comes.
UNDONE = """
with interrupts.ending(), interrupts.undoing(lambda: os.rmdir("outer")):
    os.mkdir("outer")
    with interrupts.undoing(lambda: (time.sleep(0.5), os.rmdir("outer/inner"))):
        os.mkdir("outer/inner")
        send(INT)
        send(TERM, 0.3)
        time.sleep(60)
"""
RECEIVED = """
with interrupts.ending():
    numbers = []
    with interrupts.receiving(numbers.append):
        os.kill(os.getpid(), INT)
        while not numbers:
            time.sleep(0.01)
        print(numbers)
    os.kill(os.getpid(), TERM)
    time.sleep(60)
"""
IGNORED = """
signal.signal(INT, signal.SIG_IGN)  # as a shell does for jobs in the background
with interrupts.ending():
    os.kill(os.getpid(), INT)
    time.sleep(0.5)
    print("done")
"""
# The interpreter finishes.
AT_EXIT = """
atexit.register(lambda: (os.kill(os.getpid(), TERM), time.sleep(60)))
with interrupts.ending():
    pass
"""
WITHOUT_READER = """
here, there = os.pipe()
os.close(here)
os.dup2(there, 2)
os.mkdir("new")
with interrupts.ending(), interrupts.undoing(lambda: os.rmdir("new")):
    send(INT)
    time.sleep(60)
"""
# The pipe is full; a line would wait forever.
FULL = """
here, there = os.pipe()
os.set_blocking(there, False)
try:
    while os.write(there, bytes(4096)):
        pass
except BlockingIOError:
    os.set_blocking(there, True)
os.dup2(there, 2)
with interrupts.ending():
    send(TERM)
    time.sleep(60)
"""
INHERITED = """
import subprocess, sys
begin = "import time, moezoo.interrupts as i\\nwith i.ending(): time.sleep(60)"
with interrupts.ending(), interrupts.blocked():
    child = subprocess.Popen([sys.executable, "-c", begin])
child.send_signal(INT)  # before the child's first line
os._exit(child.wait())
"""
# The child has the handlers and the pipe of its parent.
FORKED = """
with interrupts.ending(), interrupts.undoing(lambda: os.rmdir("new")):
    os.mkdir("new")
    if not (child := os.fork()):
        time.sleep(60)
    time.sleep(0.1)
    os.kill(child, TERM)
    print(os.waitpid(child, 0)[1])
    time.sleep(0.5)
    print(os.listdir())
    os.rmdir("new")
    os.mkdir("new")
    send(INT)
    time.sleep(60)
"""
LINES = {signal.SIGINT: "stopped by SIGINT\n", signal.SIGTERM: "stopped by SIGTERM\n"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (IN_PYTHON, (130, "", LINES[signal.SIGINT])),
        (IN_A_FINALIZER, (143, "", LINES[signal.SIGTERM])),
        (IN_C, (143, "", LINES[signal.SIGTERM])),
        (UNDONE, (130, "", LINES[signal.SIGINT])),
        (RECEIVED, (143, "[2]\n", LINES[signal.SIGTERM])),
        (IGNORED, (0, "done\n", "")),
        (AT_EXIT, (-signal.SIGTERM, "", "")),
        (WITHOUT_READER, (130, "", "")),
        (FULL, (143, "", "")),
        (INHERITED, (130, "", LINES[signal.SIGINT])),
        (FORKED, (130, "15\n['new']\n", LINES[signal.SIGINT])),
    ],
    ids=["python", "finalizer", "c", "undone", "received", "ignored", "exit", "reader", "full", "inherited", "forked"],
)
def test_a_process_ends_wherever_it_is(tmp_path, code, expected):
    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == expected
    assert list(tmp_path.iterdir()) == []


def test_what_a_block_began_is_undone_when_it_raises():
    undone = []
    with interrupts.undoing(lambda: undone.append("kept")):
        pass
    with (
        pytest.raises(ZeroDivisionError),
        interrupts.undoing(lambda: undone.append("outer")),
        interrupts.undoing(lambda: undone.append("inner")),
    ):
        _ = 1 // 0
    assert undone == ["inner", "outer"]


def test_a_command_stores_signals_only_while_there_are_steps(monkeypatch):
    """The first one waits for the step; so does another within a second. A later one ends the process."""
    ended = []
    monkeypatch.setattr(interrupts, "is_ending", lambda: True)
    monkeypatch.setattr(interrupts, "end", ended.append)
    before = signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        assert signal.getsignal(signal.SIGINT) is before
        assert interrupts._receivers == []
        with signals.awaiting():
            (receive,) = interrupts._receivers
            receive(signal.SIGTERM)
            receive(signal.SIGINT)
            assert (signals.number, ended) == (signal.SIGTERM, [])
            now = time.monotonic()
            monkeypatch.setattr(time, "monotonic", lambda: now + 1.5)
            receive(signal.SIGINT)
            assert ended == [signal.SIGINT]
        assert ended[1:] == [signal.SIGTERM]  # no step acted on the first one, so it is not lost


def ends(process, number):
    """Send a signal to a process, and return its exit code and errors; it has to end soon."""
    process.send_signal(number)
    late = threading.Timer(SOON, process.kill)
    late.start()
    errors = process.communicate()[1]
    late.cancel()
    return process.returncode, errors


def test_commands_end_while_importing_and_compiling(small_run, tmp_path):
    """The folder of the run, and the one around it, are removed with what was in them."""
    start = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    training = ("train", *small_run, "steps=1000", "run_dir=new/run")
    train = subprocess.Popen([sys.executable, "-m", "moezoo", *training], **start)
    # Python writes a line for each module that has been imported: the signal comes among JAX's many. A file, unlike a
    # pipe, is never full, which would take the last line away.
    script = [sys.executable, "-X", "importtime", "-m", "moezoo", "generate", "run_dir=nowhere", "prompt=a"]
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        generate = subprocess.Popen(script, **(start | {"stderr": file}))
    while " jax." not in errors.read_text() and generate.poll() is None:
        time.sleep(0.01)
    code, _ = ends(generate, signal.SIGTERM)
    others = [line for line in errors.read_text().splitlines(keepends=True) if not line.startswith("import time:")]
    assert (code, others) == (143, [LINES[signal.SIGTERM]])
    errors.unlink()
    assert train.stdout is not None
    assert any(line.startswith("compile") for line in train.stdout)
    assert (tmp_path / "new" / "run" / "config.yaml").exists()
    assert ends(train, signal.SIGINT) == (130, LINES[signal.SIGINT])
    assert list(tmp_path.iterdir()) == []
