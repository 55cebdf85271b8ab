"""`moezoo doctor`: what is installed here, and whether it works, as a report to paste into an issue.

This process does not import JAX, so that it can report that JAX does not work. What needs JAX is in
`moezoo.tools.doctor.devices`, which runs in a process of its own.
"""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import moezoo.interrupts as interrupts
from moezoo.cli.command import KeysCommand
from moezoo.config.options import key, read, take_switches
from moezoo.errors import last_words
from moezoo.tools.doctor import installed as doctor_installed
from moezoo.tools.doctor import machine as doctor_machine
from moezoo.tools.doctor.entries import DEVICES, MARK, ON_DEVICES, Entry, Part, facts, mask, problem
from moezoo.typed import Range

_WIDTH, _TITLE = 100, 13


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    folder: str = key("where runs go: its disk is tried with a file of 64 MB, which is removed", default="runs")
    seconds: float = key("how long one part may take on the devices", default=180.0, valid=Range(at_least=1.0))


@dataclasses.dataclass(frozen=True)
class Switches:
    """The command's options with dashes."""

    markdown: bool = key("put the report between lines of ```, to paste it into an issue", default=False)
    json: bool = key("print the report as JSON, alone on stdout", default=False)


def main(arguments: Sequence[str]) -> int:
    """Print the report; return 1 if something that a run needs does not work."""
    switches, words = take_switches(Switches, arguments)
    keys = read(Keys, words)
    found: list[Entry] = []
    title = ""
    if switches.markdown and not switches.json:
        print("```text")
    for entry in examine(Path(keys.folder), keys.seconds):
        entry = entry._replace(text=mask(entry.text))
        found.append(entry)
        if not switches.json and entry.kind == "fact":
            print("\n".join(_lines("" if entry.title == title else entry.title, entry.text)), flush=True)
            title = entry.title
    advice = [entry for entry in found if entry.kind != "fact"]
    problems = [entry for entry in advice if entry.kind == "problem"]
    if switches.json:
        print(_as_json(found))
    else:
        print(
            "\n".join(["", *(line for entry in advice for line in _lines(entry.kind, f"{entry.title}: {entry.text}"))])
        )
        works = "what a run needs is there and works"
        print("\n".join(_lines("result", f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else works)))
    if switches.markdown and not switches.json:
        print("```")
    return 1 if problems else 0


def examine(folder: Path, seconds: float) -> Iterator[Entry]:
    """Yield the entries of all parts of the report, as they are found; arguments as the command's keys."""
    for part in (
        Part("moezoo", doctor_installed.find_versions),
        Part("libraries", doctor_installed.find_libraries),
        Part("extras", doctor_installed.find_extras, needed=False),
        Part("machine", doctor_machine.find_machine, needed=False),
        Part("environment", doctor_machine.find_environment, needed=False),
        Part("disk", partial(doctor_machine.find_disk, folder)),
    ):
        yield from part.entries()
    yield from examine_devices(seconds)


def examine_devices(seconds: float) -> Iterator[Entry]:
    """Yield the entries of the parts that start JAX; if devices do not start, those of the others on the CPU.

    A process that crashes, or is silent for `seconds`, ends the part that it runs, and another runs the parts after it.
    """
    left, environment = list(ON_DEVICES), dict(os.environ)
    while left:
        begun = yield from _run_parts(left, environment, seconds)
        if begun == 0:
            return
        last, left = left[begun - 1], left[begun:]
        if last == DEVICES:
            if environment.get("JAX_PLATFORMS") == "cpu":
                return
            environment["JAX_PLATFORMS"] = "cpu"
            yield from facts(DEVICES, "what follows is of the CPU")


def command_of(titles: Sequence[str]) -> list[str]:
    """Return the command that runs parts and prints what they find."""
    return [sys.executable, "-P", "-c", f"from moezoo.tools.doctor.devices import child; child({list(titles)})"]


def _run_parts(titles: Sequence[str], environment: dict[str, str], seconds: float) -> Generator[Entry, None, int]:
    """Run parts in a process of their own and yield their entries; return how many it began, of which the last failed.

    If none failed it is the number of all.
    """
    begun, is_done = 0, False
    with tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command_of(titles),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # so that what it starts can be ended with it
        )

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        with process, interrupts.undoing(kill):
            reason = None
            for message in messages(process, MARK, lambda: seconds):
                if message is None:
                    reason = f"no answer for {seconds:g} s (seconds= sets this limit)"
                    kill()
                    break
                begun += "begin" in message
                is_done = message.get("end") == titles[begun - 1]
                if "entry" in message:
                    yield Entry(*message["entry"])
            ended = process.wait()
        if is_done and begun == len(titles):
            return begun
        if reason is None and ended == 0:  # the devices do not start, which is reported
            return begun
        err.seek(0)
        said = last_words(err.read().decode(errors="replace"))
        how = f"ended by {signal.Signals(-ended).name}" if ended < 0 else f"ended with code {ended}"
        reason = reason or f"its process {how}{': ' * bool(said)}{said}"
        if begun == 0:
            yield problem("jax", f"moezoo was not imported with JAX: {reason}")
        else:
            title = titles[begun - 1]
            yield Part(title, tuple, ON_DEVICES[title]).failure(reason)
    return begun


def messages(process: subprocess.Popen[str], mark: str, wait: Callable[[], float]) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON of the lines that a process prints with `mark` at their start.

    If none comes for the seconds that `wait` returns before each, it yields None, and nothing after it.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def receive() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, wait()))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        if line.startswith(mark):
            yield json.loads(line.removeprefix(mark))


def _lines(title: str, text: str) -> list[str]:
    """Return an entry as lines of at most `_WIDTH` characters, with its title in the first column."""
    first, rest = f"{title:<{_TITLE}}", " " * _TITLE
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=f"{rest}  ", break_on_hyphens=False) or [
        first.rstrip()
    ]


def _as_json(found: Sequence[Entry]) -> str:
    by_title: dict[str, list[str]] = {}
    for entry in found:
        if entry.kind == "fact":
            by_title.setdefault(entry.title, []).append(entry.text)
    advice = {
        f"{kind}s": [{"part": entry.title, "text": entry.text} for entry in found if entry.kind == kind]
        for kind in ("note", "problem")
    }
    return json.dumps({"facts": by_title, **advice}, indent=2)


COMMAND = KeysCommand(
    "doctor",
    "report what is installed here, and whether it works",
    main,
    description="Report versions, devices, the kernels that a run would take, disk and environment, train two steps of "
    "a tiny model, and end with advice. The exit code is 1 if something that a run needs does not work. Nothing is "
    "sent anywhere, and the report shows neither keys nor your name, so you can paste it into an issue. "
    "Page: docs/start.md of the repository.",
    keys=Keys,
    switches=Switches,
    examples=("--markdown > report.md", "folder=/shared/runs seconds=600"),
    alone=True,
)
