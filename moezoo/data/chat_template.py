"""Chat templates: as Hugging Face folders hold them, with the special tokens that they name, and rendering by them.

A template is rendered in processes of its own (`chat_child`), within limits of time and size.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.errors import UserError
from moezoo.host import check_file, read_text
from moezoo.json_files import read_json
from moezoo.typed import show

CONFIG, TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, OTHERS = "chat_template.jinja", "additional_chat_templates"
_STANDARD = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_GIVE = "give a .jinja file, or a tokenizer_config.json that has chat_template"
# Limits of one rendering: bytes of text, items of loops and calls of functions, bytes of memory of the process, and as
# the last guard, against what is not counted, seconds of processor time.
MOST_BYTES, STEPS, MEMORY, SECONDS = 10_000_000, 20_000_000, 2**30, 120.0
# The sandbox of older ones can be left.
_OLDEST = (3, 1, 6)
_CHILD = Path(__file__).with_name("chat_child.py")


class Template(NamedTuple):
    """A chat template.

    - `shown`: what the user wrote, or the file, as messages begin;
    - `texts`: the text of the template, "default", and of the one for chats with tools, "tool_use", if it is another;
    - `variables`: the special tokens, by the names that templates have for them, such as eos_token.
    """

    shown: str
    texts: dict[str, str]
    variables: dict[str, Any]


def folder_template(folder: str | Path, *, key: str, advice: str = "set data.template=FILE") -> Template:
    """Return the chat template of a Hugging Face folder.

    Its chat_template.jinja comes before the chat_template of its tokenizer_config.json, which has the special tokens.

    Raises `UserError`, naming `key`, if there is none, which `advice` mends, or a file is damaged.
    """
    folder = Path(os.path.expanduser(folder))
    own = (folder / TEMPLATE).exists()
    shown = show(str(folder / (TEMPLATE if own else CONFIG)))
    texts = _read_templates(folder / (TEMPLATE if own else CONFIG), shown)
    for path in sorted((folder / OTHERS).glob("*.jinja")) if own else ():
        texts[path.stem] = read_text(path, show(str(path)), _GIVE)
    if not texts:
        raise UserError(
            f"{key}: {show(str(folder))} has no chat template ({TEMPLATE}, or chat_template in {CONFIG}); {advice}"
        )
    return Template(shown, texts, special_tokens(folder))


def file_template(path: str, *, key: str, tokenizer: str | None) -> Template:
    """Return the chat template in a file: its text, or the chat_template of a .json file.

    The special tokens are those of the tokenizer_config.json beside `tokenizer` or, for None, beside the template.

    Raises `UserError`, naming `key`, if the file does not exist, is damaged, or has no template.
    """
    file, shown = Path(os.path.expanduser(path)), show(f"{key}={path}")
    beside = file if tokenizer is None else Path(os.path.expanduser(tokenizer))
    check_file(file, shown, _GIVE)
    texts = _read_templates(file, shown)
    if not texts:
        raise UserError(f"{shown} has no chat_template; {_GIVE}")
    return Template(shown, texts, special_tokens(beside.parent))


def missing_tokens(template: Template, names: Iterable[str]) -> str | None:
    """Return a line about the special tokens without a text among `names`, the variables that a template prints.

    It prints nothing in their place, so a turn would have no end, or a chat no beginning, without a word.
    """
    missing = sorted({name for name in names if name.endswith("_token") and name not in template.variables})
    if not missing:
        return None
    it = "it" if len(missing) == 1 else "them"
    return (
        f"{template.shown} prints nothing for {' and '.join(missing)}: no {CONFIG} or {TOKENS} beside the tokenizer "
        f"has {it}; if the model needs {it}, write {it} into {CONFIG}"
    )


def _read_templates(file: Path, shown: str) -> dict[str, str]:
    """Return the templates in a file: its text, or those of a .json file, one text or a list of named ones."""
    if file.suffix != ".json":
        return {"default": read_text(file, shown, _GIVE)}
    found = _read_config(file, shown).get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    named = found if isinstance(found, list) else []
    texts = {each.get("name"): each.get("template") for each in named if isinstance(each, dict)}
    if not all(isinstance(part, str) for pair in texts.items() for part in pair) or "default" not in texts:
        raise UserError(f"{shown}: chat_template is neither a text nor a list with one named default; {_GIVE}")
    return texts  # pyright: ignore[reportReturnType] checked above


def special_tokens(folder: Path) -> dict[str, Any]:
    """Return the variables that the files of a tokenizer give to templates, as transformers 5.24 does.

    special_tokens_map.json, of older versions, is read where tokenizer_config.json has no added_tokens_decoder. It
    comes first for the names of `_STANDARD`, of which null removes one, and last for texts with other names.
    """
    config = _read_config(folder / CONFIG, show(str(folder / CONFIG)))
    older = {} if "added_tokens_decoder" in config else _read_config(folder / TOKENS, show(str(folder / TOKENS)))
    other = {name: value for name, value in config.items() if name not in _STANDARD and isinstance(value, str)}
    # Here a name need not end with _token.
    extra: dict[str, Any] = {}
    for each in (config, older):
        if isinstance(found := each.get("extra_special_tokens"), dict):
            extra |= found
    named = {name: value for name, value in {**config, **older, **other}.items() if name.endswith("_token")}
    found = {name: _token_text(value) for name, value in {**named, **extra}.items()}
    return {name: text for name, text in found.items() if text is not None}


def _token_text(value: Any) -> str | None:
    """Return the text of a token, which may be in an object; None for what is no token."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _read_config(path: Path, shown: str) -> dict[str, Any]:
    """Return the object in a JSON file; empty without the file."""
    return read_json(path, shown, "copy or download it again") if path.exists() else {}


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
    names: list[str]


class Renderer:
    """Renders chats, from any number of threads, each of which has a process meanwhile; `close` ends the processes.

    Args:
        template: The template and its variables.
        date: What the template sees as today, as YYYY-MM-DD, so that every run has the same texts.

    Raises:
        UserError: The library jinja2 is not installed, or too old.
    """

    def __init__(self, template: Template, date: str):
        try:
            version = importlib.metadata.version("jinja2")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _OLDEST:
            have = f"{version} is installed" if version else "which renders chats"
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
        return About(*self._ask(None)["tool_use" if tools and "tool_use" in self._template.texts else "default"])

    def render(self, request: Mapping[str, Any]) -> str:
        """Return the text of a chat; `request` is as `chat_child.Chats.answer` takes it.

        Raises:
            UserError: The template is damaged.
            RefusedError: It refuses the chat, or fails.
            RenderError: It reaches for what the sandbox has not, or needs too much time, text or memory; or its process
                has ended.
        """
        answer = self._ask(request)
        if "fault" in answer:
            kind = RefusedError if answer["fault"] in ("failed", "raised") else RenderError
            raise kind(self._explain(answer), answer["fault"])
        return answer["text"]

    def _ask(self, request: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the answer of a process that has read the template; without a request, what it has read."""
        with self._lock:
            child = self._idle.pop() if self._idle else _Child()
            self._all += [] if child.about else [child]
        if not child.about:
            if "fault" in (found := child.ask(self._setup)):
                child.close()
                raise UserError(self._explain(found, reading=True))
            child.about = found
        answer = child.about if request is None else child.ask(request)
        with self._lock:
            self._idle += [child] if child.about else []  # it may have ended
        return answer

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


class _Child:
    """A process of `chat_child`. One thread uses it at a time."""

    def __init__(self):
        # -P: the other files of this folder are no modules at the top. In a group of its own it gets no Ctrl-C.
        pipe, command = subprocess.PIPE, [sys.executable, "-P", str(_CHILD)]
        self._process: Any = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0
        )
        self.about: dict[str, Any] = {}  # what it has read; empty before that, and where it does not run

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the process, or that it has ended."""
        process, line = self._process, b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.close()
        return {"fault": "time"} if code == -signal.SIGPROF else {"fault": "ended", "code": code}

    def close(self) -> int | None:
        """End the process, and return its exit code."""
        process, self._process, self.about = self._process, None, {}
        if process is None:
            return None
        # It ends when its stdin does, unless a template keeps it busy for the rest of its time.
        try:
            process.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return process.returncode
