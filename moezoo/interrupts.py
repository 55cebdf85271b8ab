"""SIGINT and SIGTERM while a command runs: one line, the exit code 128 + the signal's number, and nothing left behind.

Only commands enter `ending`, before anything else is imported. Without it, as in a notebook, signals keep the effect
that they had.

- Python runs signal handlers only between two instructions of the main thread. While that thread compiles or waits for
  a device, a second thread acts instead; it reads the signal from a pipe that C code fills.
- Nothing is raised: an exception in a callback of C++, in `__del__` or in an import can be lost, and the interpreter
  cannot end cleanly while XLA compiles. The process ends by `os._exit`.
"""

import _thread
import contextlib
import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
# How long the main thread has to act, before the other thread does. It stops at its next instruction, so it does not
# write files while what it wrote is removed.
_PAUSE = 0.2
_STDERR = 2

_receivers: list[Callable[[int], None]] = []
_undos: list[Callable[[], object]] = []
_state: dict[str, Any] = {}  # "active": whether `ending` is entered; "owner": the thread that ends the process


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Let SIGINT and SIGTERM end this process. Enter it in the main thread, before other imports, and exit afterwards.

    A signal that this process was started to ignore, as a shell does for SIGINT of jobs in the background, stays
    ignored. Lines that are printed appear immediately, because nothing is flushed at such an end.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _thread.start_new_thread(_watch, (read,))
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)  # see `blocked`
    os.register_at_fork(after_in_child=_forget)
    _state["active"] = True
    try:
        yield
    finally:
        # Nothing is left to do. The interpreter, which now finishes, stops the thread and would lose a signal; the
        # kernel does not.
        _release()


def is_ending() -> bool:
    """Return whether SIGINT or SIGTERM ends this process, as in a command; not in a notebook."""
    return _state.get("active", False)


@contextlib.contextmanager
def receiving(receiver: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, pass the number of a signal to `receiver`, in another thread, instead of ending."""
    _receivers.append(receiver)
    try:
        yield
    finally:
        _receivers.remove(receiver)


@contextlib.contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises, or if a signal ends the process while the block runs.

    After a signal it runs in either thread, at any point of the block, so it must not import or wait for locks.
    """
    _undos.append(undo)
    try:
        yield
    except BaseException:
        undo()
        raise
    finally:
        _undos.remove(undo)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Keep signals from a process that the block starts, until that process enters `ending`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)


class Ended(NamedTuple):
    """How a process ended: its exit code, the last line of its stderr, and the first signal passed on to it, or 0."""

    code: int
    line: str
    signal: int = 0


def run_child(command: Sequence[str], on_line: Callable[[str], object], **options: Any) -> Ended:
    """Run a process, which gets the signals of this one; `on_line` receives each line of its stderr as it comes.

    `options` are those of `subprocess.Popen`, and the code of a process that a signal ended is negative, as there.
    """
    import subprocess

    with blocked():
        child = subprocess.Popen(command, stderr=subprocess.PIPE, **options)
    received, last = [], ""

    def receive(number: int) -> None:
        received.append(number)
        child.send_signal(number)

    with receiving(receive), child:
        for raw in child.stderr or ():
            on_line(line := raw.decode(errors="replace"))
            last = line.strip() or last
    return Ended(child.returncode, last, *received[:1])


def end(number: int) -> None:
    """End this process because of the signal `number`; return only if the same thread is doing so already.

    Print a line, unless that would wait for a reader, and call what `undoing` registered, the latest first.
    """
    mine = [_thread.get_ident()]
    owner = _state.setdefault("owner", mine)
    if owner is not mine:
        while owner != mine:
            time.sleep(1)  # the other thread ends the process meanwhile
        return
    try:
        with contextlib.suppress(OSError, ValueError):
            if _STDERR in select.select([], [_STDERR], [], 0)[1]:
                os.write(_STDERR, f"stopped by {signal.Signals(number).name}\n".encode())
        for undo in reversed(_undos):
            with contextlib.suppress(OSError):
                undo()
    finally:
        os._exit(128 + number)


def _forget() -> None:
    """Forget, in a forked process, the pipe and the clean-ups of its parent."""
    signal.set_wakeup_fd(-1)
    _receivers.clear()
    _undos.clear()
    _release()


def _release() -> None:
    """Give signals their usual effect."""
    _state["active"] = False
    for number in _NUMBERS:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def _handle(number: int, frame: Any) -> None:
    """Run in the main thread, between two instructions."""
    del frame
    if not _receivers:
        end(number)


def _watch(pipe: int) -> None:
    """Run in the other thread: pass on or act on every signal whose number comes through the pipe."""
    while True:
        number = os.read(pipe, 1)[0]
        if number in _NUMBERS:
            if not _receivers:
                time.sleep(_PAUSE)
            receive = [end, *_receivers][-1]
            receive(number)
            if receive not in [end, *_receivers]:  # it stopped receiving meanwhile, so nobody acts on the number
                end(number)
