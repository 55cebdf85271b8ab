"""Rendering chats by a template, in processes of their own (`chat_child`), within limits of time and size."""

import contextlib
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.data.chat_template import Template
from moezoo.errors import UserError
from moezoo.typed import show

# Limits of one chat: seconds of processor time, bytes of rendered text, bytes of memory of the process.
SECONDS, MOST_BYTES, MEMORY = 5.0, 10_000_000, 2**30
# Two characters for private use, which no text may have: they stand around what the assistant has written.
MARKS = ("\U0010fffc", "\U0010fffd")
# The sandbox of older ones can be left.
_OLDEST = (3, 1, 6)
_CHILD = Path(__file__).with_name("chat_child.py")


class Rendered(NamedTuple):
    """A rendered chat.

    - `text`: all of it;
    - `spans`: the parts of it that the assistant has written, as [begin, end];
    - `marked`: whether these are the template's own blocks `{% generation %}`, not differences of texts.
    """

    text: str
    spans: list[tuple[int, int]]
    marked: bool


class Renderer:
    """Renders chats, from any number of threads, each of which has a process meanwhile; `close` ends the processes.

    Args:
        template: The template and its variables.
        date: What the template sees as today, as YYYY-MM-DD, so that every run has the same texts.

    Raises:
        UserError: The library jinja2 is not installed, or too old.
    """

    def __init__(self, template: Template, date: str):
        if (found := _jinja2()) < _OLDEST:
            have = f"{'.'.join(map(str, found))} is installed" if found else "which renders chats"
            raise UserError(f"{template.shown} needs jinja2 3.1.6 or newer, {have}; pip install 'moezoo[chat]'")
        self._template, self._lock = template, threading.Lock()
        self._idle: list[_Child] = []
        self._all: list[_Child] = []
        self._setup = {
            "templates": template.texts,
            "variables": template.variables,
            "date": date,
            "marks": MARKS,
            "seconds": SECONDS,
            "most": MOST_BYTES,
            "memory": MEMORY,
        }

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            children, self._all, self._idle = self._all, [], []
        for child in children:
            child.close()

    def render(self, request: Mapping[str, Any]) -> Rendered:
        """Return the text of a chat; `request` is as `chat_child.Chats.answer` takes it.

        Raises:
            UserError: The template is damaged, refuses the chat, reaches for what the sandbox has not, or needs too
                much time, text or memory for it; what it writes does not begin with what it wrote for fewer messages.
        """
        child = self._take()
        if (fault := child.start(self._setup)) is not None:
            child.close()
            raise UserError(self._explain_setup(fault))
        answer = child.ask(request)
        if child.alive:
            with self._lock:
                self._idle.append(child)
        if "fault" in answer:
            raise UserError(self._explain(answer))
        return Rendered(answer["text"], [(begin, end) for begin, end in answer["spans"]], answer["marked"])

    def _take(self) -> "_Child":
        with self._lock:
            if self._idle:
                return self._idle.pop()
            child = _Child()
            self._all.append(child)
            return child

    def _explain_setup(self, fault: Mapping[str, Any]) -> str:
        """Return the message about a template that cannot be read."""
        if fault["fault"] == "syntax":
            return f"{self._template.shown}{_at_line(fault)} is not a chat template ({show(fault['text'])}); correct it"
        return f"{self._template.shown} is not a chat template: reading it {_limit(fault)}; give another"

    def _explain(self, answer: Mapping[str, Any]) -> str:
        """Return the message about a chat that cannot be rendered."""
        shown, fault = self._template.shown, answer["fault"]
        some = f" the first {answer['until']} messages of" if "until" in answer else ""
        if fault == "no_prefix":
            first, second = show(json.dumps(answer["first"])), show(json.dumps(answer["second"]))
            number = answer["message"] + 1
            texts = {
                "answer": f"the beginning of an answer is rendered as {first}, and message {number} as {second}",
                "history": f"the chat up to message {number} ends with {first}, and the whole has {second} there",
            }
            last = ", or set data.loss_on=last" if answer["what"] == "history" else ""
            return (
                f"{shown} does not show which text is the assistant's: {texts[answer['what']]}; give a template that "
                f"has {{% generation %}} around it{last}"
            )
        if fault == "raised":
            return f"{shown} refuses{some} this chat: {show(answer['text'])}"
        if fault == "unsafe":
            return f"{shown}{_at_line(answer)} does what a template must not do ({show(answer['text'])}); give another"
        if fault == "failed":
            return f"{shown}{_at_line(answer)} fails for{some} this chat ({show(answer['text'])}); correct one of them"
        return f"rendering{some} it by {shown} {_limit(answer)}; correct the template or leave the chat out"


def _jinja2() -> tuple[int, ...]:
    """Return the version of jinja2; empty if it is not installed."""
    try:
        return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("jinja2"))[:3])
    except importlib.metadata.PackageNotFoundError:
        return ()


def _at_line(answer: Mapping[str, Any]) -> str:
    return "" if answer["line"] is None else f" line {answer['line']}"


def _limit(answer: Mapping[str, Any]) -> str:
    """Return which limit rendering has met."""
    limits = {
        "time": f"takes more than {SECONDS:.0f} seconds",
        "size": f"gives more than {MOST_BYTES / 10**6:.0f} MB of text",
        "memory": f"needs more than {MEMORY / 2**30:.0f} GiB of memory",
    }
    return limits.get(answer["fault"]) or f"ended its process (exit code {answer['code']})"


class _Child:
    """A process of `chat_child`. One thread uses it at a time."""

    def __init__(self):
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process is not None

    def start(self, setup: Mapping[str, Any]) -> dict[str, Any] | None:
        """Start the process, if it does not run yet, and return what is wrong with the setup, if anything is."""
        if self._process is not None:
            return None
        # -P: the other files of this folder are no modules at the top. In a group of its own it gets no Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        return self.ask(setup) or None

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the process, or that it has ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            pass
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.close()
        return {"fault": "time"} if code == -signal.SIGPROF else {"fault": "ended", "code": code}

    def close(self) -> int | None:
        """End the process, and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        # It ends when its stdin does, unless a template keeps it busy for the rest of its time.
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
