"""Watch a process of a distributed run from a second process, which reports in one line why it ended.

If one process of a run dies, JAX's coordination service aborts the others from C++, with a stack trace and without an
exception that Python could catch. So with `distributed=auto` or `manual` a command starts itself a second time and
watches the copy: it forwards signals and output, replaces the output of the aborting service by one line that names the
cause, and prints how to continue.
"""

import os
import re
import signal
import sys
import threading

import moezoo.interrupts as interrupts
from moezoo.config.run_folders import steps
from moezoo.errors import describe_end
from moezoo.host.remote import as_path
from moezoo.parallel.distributed import Distributed

_VARIABLE = "MOEZOO_SUPERVISED"
# The exit code of a process that ended because another one did.
LOST = 3

# The first line of what the service prints before it aborts.
_SERVICE = re.compile(r"^[EF]\d{4} \S+ +\d+ (coordination_service\w*|client|distributed\w*|add_port)\.\w+:\d+\]")
_FATAL = "Terminating process because the JAX distributed service detected fatal errors"
_CRASHES = (-signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)


def is_wanted(settings: Distributed) -> bool:
    """Return whether this process should only watch a copy of itself."""
    return settings.is_several and _VARIABLE not in os.environ


def supervise(settings: Distributed) -> int:
    """Run this command in a second process, report how it ended, and return the exit code for this process."""
    alive, alive_here = os.pipe()
    progress_here, progress = os.pipe()
    held: list[str] = []

    def forward(line: str) -> None:
        # From the first line of the coordination service on, lines are held back.
        if held or _SERVICE.match(line):
            held.append(line)
        else:
            print(line, end="", file=sys.stderr, flush=True)

    environment = {**os.environ, _VARIABLE: f"{alive},{progress}"}
    command = [sys.executable, *sys.orig_argv[1:]]
    code = interrupts.run_child(command, forward, env=environment, pass_fds=(alive, progress)).code
    os.close(alive)
    os.close(progress)
    with open(progress_here) as file:
        met, _, folder = file.read().partition("\n")
    os.close(alive_here)
    if code in _CRASHES and held and not met:
        where = f"at {settings.coordinator} " if settings.coordinator else ""
        print(
            f"error: the processes did not all meet {where}within distributed.start_seconds={settings.start_seconds}; "
            "start all of them, with an address and a port that they can reach and no other program uses",
            file=sys.stderr,
        )
        return 2
    text = "".join(held)
    if code == -signal.SIGABRT and _FATAL in text:
        print(f"error: {_describe_lost(text)}; {_how_to_continue(folder)}", file=sys.stderr)
        return LOST
    sys.stderr.write(text)
    if code in _CRASHES:
        print(f"error: the process was {describe_end(code)}; {_how_to_continue(folder)}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def attach() -> None:
    """In the watched process: end when the watching process ends, for whatever reason."""
    if _VARIABLE not in os.environ:
        return
    alive = int(os.environ[_VARIABLE].partition(",")[0])

    def watch() -> None:
        os.read(alive, 1)  # returns when the other end is closed
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, name="supervisor", daemon=True).start()


def report_to_watcher(text: str) -> None:
    """Report to the watching process: first that the processes have met, then which folder the run writes."""
    if _VARIABLE in os.environ:
        os.write(int(os.environ[_VARIABLE].partition(",")[2]), text.encode())


def _describe_lost(held: str) -> str:
    gone = re.search(r"stopped sending heartbeats\):\n((?:\d+\n)+)", held)
    if gone:
        numbers = gone.group(1).split()
        which = f"process{'es' * (len(numbers) > 1)} {', '.join(numbers)}"
    else:
        which = "process 0" if "Socket closed" in held or "UNAVAILABLE" in held else "another process"
    return f"{which} of the run ended or stopped responding, so this one ends too"


def _how_to_continue(folder: str) -> str:
    saved = steps(as_path(folder) / "checkpoints") if folder else []
    if not saved:
        return "nothing was saved: start all processes again"
    return f"the last checkpoint is step {saved[-1]}: start all processes again with resume={folder}"
