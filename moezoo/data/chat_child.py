"""The process that renders chats. Only this module uses jinja2, and it imports nothing of moezoo.

`chat_renderer` starts this file. A template is a program from the internet, so it runs here: in jinja2's sandbox, which
has no loader and no attributes of Python's own, within limits of text, steps and memory, and of processor time, after
which the system ends the process. Requests and answers are lines of JSON, as the functions here read and return them.
"""

import datetime
import functools
import json
import re
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes, runtime, sandbox, utils
from jinja2.exceptions import SecurityError

_NAME = "<chat template>"
_COUNTED = "moezoo_counted"  # the filter around what each loop goes through
# JSON's escapes of a character of plane 16, which only moezoo puts into texts.
_ESCAPED = re.compile(r"\\u(db[c-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")
_REPRESENTED = re.compile(r"\\U(0010[0-9a-f]{4})")


class RefusalError(Exception):
    """The template or the record is at fault: `kind` and `facts` of the answer."""

    def __init__(self, kind: str, **facts: Any):
        super().__init__(kind)
        self.answer = {"fault": kind, **facts}


class _Generation(ext.Extension):
    """The block `{% generation %}`: what the assistant has written stands between marks."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it
    marks, within = ("", ""), False

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text = caller()
        begin, end = (len(text) - len(text.lstrip()), len(text.rstrip())) if self.within else (0, len(text))
        return text[:begin] + self.marks[0] + text[begin : max(begin, end)] + self.marks[1] + text[max(begin, end) :]


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, in which what is not allowed ends the template, instead of being empty text.

    It counts what a rendering does, so that the same chats are refused on every machine.
    """

    left: int  # the steps that a rendering may still take

    def take(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise RefusalError("steps")

    def count(self, items: Any) -> list[Any]:
        """Return the items that a loop goes through."""
        found = list(items)
        self.take(len(found))
        return found

    def call(self, context: Any, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        self.take(1)
        if isinstance(obj, runtime.LoopContext) and arguments:  # a recursive loop
            arguments = (self.count(arguments[0]), *arguments[1:])
        return super().call(context, obj, *arguments, **named)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__}")


class _Namespace(utils.Namespace):
    """What `namespace()` makes, without names that Python keeps for itself."""

    def __init__(self, /, *items: Any, **named: Any):
        super().__init__()
        for name, value in dict(*items, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace with {name!r}")
        super().__setitem__(name, value)


class Chats:
    """The templates of a tokenizer.

    Args:
        setup: `templates` (name -> text), `variables` of all chats, `date` (that templates see, as YYYY-MM-DD), and the
            most that a rendering may have: `most`, bytes of text, and `steps`, items of loops and calls of functions.
    """

    def __init__(self, setup: Mapping[str, Any]):
        self._variables, self._most, self._steps = setup["variables"], setup["most"], setup["steps"]
        date = datetime.datetime.fromisoformat(setup["date"])
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        environment.left = self._steps
        environment.filters |= {"tojson": _to_json, _COUNTED: environment.count}
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: date.strftime(form)}
        environment.globals |= {"dict": lambda *items, **named: dict(*items, **named), "namespace": _Namespace}
        # They would render a chat differently in every run.
        del environment.filters["random"], environment.globals["lipsum"]
        self._environment, self._texts = environment, setup["templates"]
        self._templates: dict[str, jinja2.Template] = {}

    def read(self) -> dict[str, tuple[bool, list[str]]]:
        """Return, by template, whether it has blocks `{% generation %}`, and the variables that it takes as given."""
        return {name: self._read(name, text) for name, text in self._texts.items()}

    def _read(self, name: str, text: str) -> tuple[bool, list[str]]:
        environment: Any = self._environment
        try:
            tree = environment.parse(text, name, _NAME)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
            code = environment.compile(tree.set_environment(environment), name, _NAME)
            made = environment.template_class.from_code(environment, code, environment.make_globals(None))
            self._templates[name] = made
            return tree.find(nodes.ExtensionAttribute) is not None, sorted(_find_printed(tree))
        except (jinja2.TemplateError, RecursionError, SyntaxError, OverflowError, ValueError) as error:
            line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
            raise RefusalError("syntax", line=line, text=_words(error)) from error

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `text` of a chat.

        Args:
            request: `messages`, `tools` (or null), `variables` of this chat, `prompt`, whether the beginning of an
                answer is added, and `marks`, the texts around each block `{% generation %}`; where `within`, they stand
                inside its white space.
        """
        template = self._templates["tool_use" if request["tools"] and "tool_use" in self._templates else "default"]
        _Generation.marks, _Generation.within = request["marks"], request["within"]
        self._environment.left = self._steps
        values = {**self._variables, **request["variables"], "messages": request["messages"]}
        parts, size = [], 0
        for part in template.generate(
            documents=None, tools=request["tools"], add_generation_prompt=request["prompt"], **values
        ):
            size += len(part.encode())
            if size > self._most:
                raise RefusalError("size")
            parts.append(part)
        # Python writes characters of plane 16 in a list or an object as escapes.
        return {"text": _REPRESENTED.sub(lambda found: chr(int(found[1], 16)), "".join(parts))}


def _find_printed(tree: nodes.Template) -> set[str]:
    """Return the variables that a template reads, neither sets nor asks for."""
    asked = [loop.test for loop in tree.find_all((nodes.If, nodes.CondExpr))]
    asked += [found for found in tree.find_all(nodes.Filter) if found.name in ("default", "d")]
    names = {each.name for node in asked for each in (node, *node.find_all(nodes.Name)) if isinstance(each, nodes.Name)}
    return meta.find_undeclared_variables(tree) - names


def _raise(message: Any) -> None:
    raise RefusalError("raised", text=str(message)[:1000])


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON without the escapes of HTML that jinja2's own filter has."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    return _ESCAPED.sub(lambda found: json.loads(f'"{found[0]}"'), text) if ensure_ascii else text


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000] if type(error).__module__ == "builtins" else str(error)[:1000]


def _fault(error: Exception) -> dict[str, Any]:
    """Return the answer about an error, with the line of the template in which it was raised."""
    if isinstance(error, RefusalError):
        return error.answer
    kind = "unsafe" if isinstance(error, SecurityError) else "failed"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _NAME]
    return {"fault": kind, "text": _words(error), "line": lines[-1] if lines else None}


def main() -> None:
    """Answer each line of stdin by a line of stdout, until stdin ends with the process that wrote it.

    The first line is the setup, and its answer what `Chats.read` returns.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = json.loads(sys.stdin.readline())
    limits = {resource.RLIMIT_AS: setup["memory"], resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for limit, most in limits.items():
        with suppress(ValueError, OSError):  # not every system has all of them
            resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
    try:
        chats = Chats(setup)
        ask = chats.read
        while True:
            # The last guard, against what is not counted. By default this signal ends the process, whatever it is
            # doing. Other work of the machine does not count.
            signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
            try:
                answer = ask()
            except MemoryError:
                answer = {"fault": "memory"}
            except Exception as error:  # a template can raise whatever Python raises
                answer = _fault(error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(answer), flush=True)
            if not (line := sys.stdin.readline()):
                return
            ask = functools.partial(chats.answer, json.loads(line))
    except MemoryError:  # a line is too long to be read
        print('{"fault": "memory"}', flush=True)


if __name__ == "__main__":
    main()
