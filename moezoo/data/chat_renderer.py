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

# Limits of one rendering: bytes of text, items of loops and calls of functions, bytes of memory of the process, and as
# the last guard, against what is not counted, seconds of processor time.
MOST_BYTES, STEPS, MEMORY, SECONDS = 10_000_000, 20_000_000, 2**30, 120.0
# The sandbox of older ones can be left.
_OLDEST = (3, 1, 6)
_CHILD = Path(__file__).with_name("chat_child.py")


class RenderError(UserError):
    """A template does not render a chat; `fault` says why, as `chat_child` does."""

    def __init__(self, message: str, fault: str):
        super().__init__(message)
        self.fault = fault


class RefusedError(RenderError):
    """A template refuses a chat, or fails for it."""


class About(NamedTuple):
    """A template, read: whether it has blocks `{% generation %}`, and the variables that it takes as given."""

    marked: bool
    names: frozenset[str]


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
        limits = {"seconds": SECONDS, "most": MOST_BYTES, "steps": STEPS, "memory": MEMORY}
        self._setup = {"templates": template.texts, "variables": template.variables, "date": date, **limits}

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            children, self._all, self._idle = self._all, [], []
        for child in children:
            child.close()

    def about(self, *, tools: bool) -> About:
        """Return what the template of chats with, or without, tools is. Raises `UserError` if it is damaged."""
        child = self._take()
        self._give_back(child)
        name = "tool_use" if tools and "tool_use" in self._template.texts else "default"
        return About(child.about["marked"][name], frozenset(child.about["names"][name]))

    def render(self, request: Mapping[str, Any]) -> str:
        """Return the text of a chat; `request` is as `chat_child.Chats.answer` takes it.

        Raises:
            UserError: The template is damaged.
            RefusedError: It refuses the chat, or fails.
            RenderError: It reaches for what the sandbox has not, or needs too much time, text or memory; or its process
                has ended.
        """
        child = self._take()
        answer = child.ask(request)
        self._give_back(child)
        if "fault" in answer:
            kind = RefusedError if answer["fault"] in ("failed", "raised") else RenderError
            raise kind(self._explain(answer), answer["fault"])
        return answer["text"]

    def _take(self) -> "_Child":
        """Return a process that has read the template."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._all.append(child := _Child())
        if "fault" in (answer := child.start(self._setup)):
            child.close()
            raise UserError(self._explain(answer, reading=True))
        return child

    def _give_back(self, child: "_Child") -> None:
        """Let others use a process, if it can be asked again."""
        with self._lock:
            self._idle += [child] if child.about else []

    def _explain(self, answer: Mapping[str, Any], *, reading: bool = False) -> str:
        """Return the message about a template that cannot be read, or a chat that cannot be rendered."""
        shown, fault, words = self._template.shown, answer["fault"], show(answer.get("text", ""))
        at = shown if answer.get("line") is None else f"{shown} line {answer['line']}"
        limit = {
            "time": f"takes more than {SECONDS:.0f} seconds of processor time, the last guard",
            "steps": f"takes more than {STEPS:,} steps, items of loops and calls of functions",
            "size": f"gives more than {MOST_BYTES / 10**6:.0f} MB of text",
            "memory": f"needs more than {MEMORY / 2**30:.0f} GiB of memory",
        }.get(fault, f"ended its process (exit code {answer.get('code')})")
        met = f"rendering it by {shown} {limit}; correct the template or leave the chat out"
        return {
            "syntax": f"{at} is not a chat template ({words}); correct it",
            "raised": f"{shown} refuses this chat: {words}",
            "unsafe": f"{at} does what a template must not do ({words}); give another",
            "failed": f"{at} fails for this chat ({words}); correct one of them",
        }.get(fault, f"{shown} is not a chat template: reading it {limit}; give another" if reading else met)


def _jinja2() -> tuple[int, ...]:
    """Return the version of jinja2; empty if it is not installed."""
    try:
        return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("jinja2"))[:3])
    except importlib.metadata.PackageNotFoundError:
        return ()


class _Child:
    """A process of `chat_child`. One thread uses it at a time."""

    def __init__(self):
        self._process: Any = None
        self.about: dict[str, Any] = {}  # what it has read; empty where it does not run

    def start(self, setup: Mapping[str, Any]) -> dict[str, Any]:
        """Start the process, and return its answer to the setup."""
        # -P: the other files of this folder are no modules at the top. In a group of its own it gets no Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self.about = self.ask(setup)
        return self.about

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the process, or that it has ended."""
        process, line = self._process, b""
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
        process, self._process, self.about = self._process, None, {}
        if process is None:
            return None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        # It ends when its stdin does, unless a template keeps it busy for the rest of its time.
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
