"""The process that renders chats. Only this module uses jinja2, and it imports nothing of moezoo.

`chat_renderer` starts this file. A template is a program from the internet, so it runs here: in jinja2's sandbox, which
has no loader and no attributes of Python's own, within a limit of memory, and a limit of processor time after which the
system ends the process. Requests and answers are lines of JSON, as this module's functions read and return them.
"""

import datetime
import itertools
import json
import re
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jinja2
from jinja2 import ext, nodes, sandbox, utils
from jinja2.exceptions import SecurityError

_NAME = "<chat template>"
# How much of two texts that differ is shown, on each side of the first difference.
_AROUND = 30
# JSON's escapes of a character of plane 16, which only moezoo puts into texts.
_ESCAPED = re.compile(r"\\u(db[c-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")


class RefusalError(Exception):
    """The template or the record is at fault: `kind` and `facts` of the answer."""

    def __init__(self, kind: str, **facts: Any):
        super().__init__(kind)
        self.answer = {"fault": kind, **facts}


class _RaisedError(Exception):
    """The template called `raise_exception`."""


class _Rendered(NamedTuple):
    """A text, and the parts of it that blocks `{% generation %}` have made, as [begin, end]."""

    text: str
    spans: list[list[int]]


class _Generation(ext.Extension):
    """The block `{% generation %}`: what the assistant has written stands between marks."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it
    marks = ("", "")

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return self.marks[0] + caller() + self.marks[1]


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, in which what is not allowed ends the template, instead of being empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__}")


class _Namespace(utils.Namespace):
    """What `namespace()` makes, without names that Python keeps for itself."""

    def __init__(self, /, *items: Any, **named: Any):
        for name in (values := dict(*items, **named)):
            _check_name(name)
        utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace with {name!r}")


class Chats:
    """The templates of a tokenizer.

    Args:
        setup: `templates` (name -> text), `variables` of all chats, `date` (that templates see, as YYYY-MM-DD), `marks`
            (two characters that are in no text), and `most`, the largest number of bytes of a rendered text.
    """

    def __init__(self, setup: Mapping[str, Any]):
        begin, end = _Generation.marks = tuple(setup["marks"])
        self._marked = re.compile(f"({begin}[^{begin}{end}]*{end})")
        self._stray = re.compile(f"[{begin}{end}]")
        self._variables, self._most = setup["variables"], setup["most"]
        date = datetime.datetime.fromisoformat(setup["date"])
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: date.strftime(form)}
        environment.globals |= {"dict": lambda *items, **named: dict(*items, **named), "namespace": _Namespace}
        # They would render a chat differently in every run.
        del environment.filters["random"], environment.globals["lipsum"]
        self._templates = {name: self._compile(environment, name, text) for name, text in setup["templates"].items()}
        # Comments and texts may have the word too.
        self._marks = {
            name: any(kind == "name" and word == "endgeneration" for _, kind, word in environment.lex(text))
            for name, text in setup["templates"].items()
        }

    def _compile(self, environment: Any, name: str, text: str) -> jinja2.Template:
        try:
            code = environment.compile(text, name, _NAME)
            return environment.template_class.from_code(environment, code, environment.make_globals(None))
        except jinja2.TemplateError as error:
            raise RefusalError(
                "syntax", template=name, line=getattr(error, "lineno", None), text=_words(error)
            ) from error
        except (RecursionError, SyntaxError, OverflowError, ValueError) as error:
            raise RefusalError("syntax", template=name, line=None, text=_words(error)) from error

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Render a chat.

        Args:
            request: `messages`, `tools` (or null), `variables` of this chat, and `task`: `prompt` adds the beginning of
                an answer; `all` renders the messages alone, and `assistant` and `last` also find what the assistant
                has written, in all messages or in its last one.

        Returns:
            `text`; `spans`, the parts of it that the assistant has written, as [begin, end]; and `marked`, whether they
            are those of blocks `{% generation %}`.
        """
        messages, task = request["messages"], request["task"]
        name = "tool_use" if request["tools"] and "tool_use" in self._templates else "default"

        def render(until: int, prompt: bool = False) -> _Rendered:
            try:
                return self._render(self._templates[name], request, messages[:until], prompt)
            except RefusalError as error:
                if until < len(messages):
                    error.answer["until"] = until
                raise

        whole = render(len(messages), task == "prompt")
        answer: dict[str, Any] = {"text": whole.text, "spans": [], "marked": self._marks[name]}
        if task not in ("assistant", "last"):
            return answer
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        turns = turns[-1:] if task == "last" else turns
        if not self._marks[name]:
            answer["spans"] = [_find_turn(number, render, whole.text) for number in turns]
        elif task == "assistant":
            answer["spans"] = whole.spans
        elif turns:
            before = len(render(turns[0]).spans) if turns[0] else 0
            answer["spans"] = whole.spans[before:]
        return answer

    def _render(
        self, template: jinja2.Template, request: Mapping[str, Any], messages: Sequence[Any], prompt: bool
    ) -> _Rendered:
        values = {**self._variables, **request["variables"], "messages": messages, "add_generation_prompt": prompt}
        parts, size = [], 0
        try:
            for part in template.generate(documents=None, tools=request["tools"], **values):
                size += len(part.encode())
                if size > self._most:
                    raise RefusalError("size")
                parts.append(part)
        except RefusalError:
            raise
        except _RaisedError as error:
            raise RefusalError("raised", text=_words(error)) from error
        except SecurityError as error:
            raise RefusalError("unsafe", text=_words(error), line=_line(error)) from error
        except MemoryError as error:
            raise RefusalError("memory") from error
        except Exception as error:  # a template can raise whatever Python raises
            raise RefusalError("failed", text=_words(error), line=_line(error)) from error
        text, spans, begin = "", [], 0
        for part in self._marked.split("".join(parts)):
            if self._marked.fullmatch(part):
                part = part[1:-1]
                spans.append([begin, begin + len(part)])
            if self._stray.search(part):
                raise RefusalError("failed", text="a block {% generation %} is inside another, or cut", line=None)
            text += part
            begin += len(part)
        return _Rendered(text, [span for span in spans if span[0] < span[1]])


def _find_turn(number: int, render: Any, whole: str) -> list[int]:
    """Return the part of `whole` that message `number` adds to the beginning of an answer to the messages before it."""
    before = render(number, prompt=True).text
    with_turn = render(number + 1).text
    for what, begin, text in (("answer", before, with_turn), ("history", with_turn, whole)):
        if not text.startswith(begin):
            at = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(begin, text, strict=False)))
            around = slice(max(0, at - _AROUND), at + _AROUND)
            raise RefusalError("no_prefix", what=what, message=number, first=begin[around], second=text[around])
    return [len(before), len(with_turn)]


def _raise(message: Any) -> None:
    raise _RaisedError(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON without the escapes of HTML that jinja2's own filter has."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    return _ESCAPED.sub(lambda found: json.loads(f'"{found[0]}"'), text) if ensure_ascii else text


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000] if type(error).__module__ == "builtins" else str(error)[:1000]


def _line(error: BaseException) -> int | None:
    """Return the line of the template in which an error was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _NAME]
    return lines[-1] if lines else None


def _serve(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the answer to each line: that of the first, the setup, is empty."""
    chats, seconds = None, 0.0
    for line in lines:
        message = json.loads(line)
        if chats is None:
            seconds = message["seconds"]
            for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
                with suppress(ValueError, OSError):  # not every system has all of them
                    most = message["memory"] if limit == resource.RLIMIT_AS else 0
                    resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
        # By default this signal ends the process, whatever it is doing. Other work of the machine does not count.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            if chats is None:
                chats, answer = Chats(message), {}
            else:
                answer = chats.answer(message)
        except RefusalError as refusal:
            answer = refusal.answer
        except MemoryError:
            answer = {"fault": "memory"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        yield answer


def main() -> None:
    """Answer each line of stdin by a line of stdout, until stdin ends with the process that wrote it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for answer in _serve(iter(sys.stdin.readline, "")):
            print(json.dumps(answer), flush=True)
    except MemoryError:  # a line is too long to be read
        print('{"fault": "memory"}', flush=True)


if __name__ == "__main__":
    main()
