"""The pages, their code and their commands.

A command is a line of an indented block or of a block fenced as `sh`. All other code is fenced with its language. Code
in sentences and tables that begins with a program of `INLINE` is a command too, though often without all its words.
Comments before a block mark it:

- `<!-- not run here: REASON -->`: `pytest -m docs` does not run the block;
- `<!-- not run on this page: REASON -->`: nor any block of the page;
- `<!-- run with: A=B ... -->`: in the block, the word A stands for something such as B.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# The pages of docs/api hold only names.
_FOUND = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.parent.name != "api"]
PAGES = ("README.md", "CONTRIBUTING.md", "tests/README.md", *(str(path.relative_to(ROOT)) for path in _FOUND))
INLINE = ("moezoo", "python", "python3", "pytest", "pip")
_MARK = re.compile(r"<!-- (not run here|not run on this page|run with): (.+) -->")
# Bash, which finds no program, calls the first function for each. So loops, braces, quotes and variables are its own.
_RECORDER = r"""
command_not_found_handle() { printf '%s\x1f' "$WHERE" "$@" $'\x1e' >> record; return $CODE; }
exec() { "$@"; }
.() { :; }
cd() { :; }
ulimit() { :; }
"""


class Block(NamedTuple):
    """Code of a page.

    Attributes:
        line: The number of its first line, or of its fence.
        language: That of its fence; "sh" where it is indented.
        text: The code.
        not_run: Why `pytest -m docs` does not run it, or nothing.
        stands_for: What words stand for.
    """

    line: int
    language: str
    text: str
    not_run: str
    stands_for: Mapping[str, str]

    @property
    def script(self) -> str:
        """The code with other words in place of those that stand for something."""
        words = sorted(self.stands_for, key=len, reverse=True)
        pattern = "|".join(rf"(?<![A-Z_]){re.escape(word)}(?![A-Z_])" for word in words)
        return re.sub(pattern, lambda found: self.stands_for[found[0]], self.text) if words else self.text


class Command(NamedTuple):
    """A program and its arguments, and where they stand: PAGE:LINE. `whole` is false for code in a sentence."""

    where: str
    words: tuple[str, ...]
    whole: bool = True


class Page(NamedTuple):
    """The code of a page, and its other lines, with an empty line in place of each line of code."""

    name: str
    blocks: tuple[Block, ...]
    prose: str

    @property
    def shell(self) -> list[Block]:
        """The blocks of commands."""
        return [block for block in self.blocks if block.language == "sh"]


def read(name: str) -> Page:
    """Return a page."""
    lines = (ROOT / name).read_text().splitlines()
    blocks, prose, marks, whole, number = [], [], {}, "", 0
    while number < len(lines):
        line, start = lines[number], number
        number += 1
        fence = re.match(r" *```(\w*)", line)
        if fence or (line.startswith("    ") and not (start and lines[start - 1].strip())):
            while number < len(lines) and (
                lines[number].strip() != "```" if fence else lines[number].startswith("    ")
            ):
                number += 1
            code = lines[start + 1 : number] if fence else [each[4:] for each in lines[start:number]]
            number += bool(fence)
            stands_for = dict(word.split("=", 1) for word in marks.get("run with", "").split())
            not_run = marks.get("not run here", whole)
            blocks.append(Block(start + 1, fence[1] if fence else "sh", "\n".join(code), not_run, stands_for))
            prose += [""] * (number - start)
            marks = {}
            continue
        if marked := _MARK.fullmatch(line.strip()):
            marks[marked[1]] = marked[2]
            whole = marks.get("not run on this page", whole)
        elif line.strip():
            marks = {}
        prose.append(line)
    return Page(name, tuple(blocks), "\n".join(prose))


def inline(page: Page) -> Iterator[tuple[int, str]]:
    """Yield the number of the line and the text of each piece of code in sentences and tables."""
    for span in re.finditer(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", page.prose, re.DOTALL):
        yield page.prose.count("\n", 0, span.start()) + 1, " ".join(span[2].replace("\\|", "|").split())


def commands(page: Page) -> list[Command]:
    """Return the commands of a page, those of blocks as bash expands them; variables last to the end of the page."""
    found = _record([(f"{page.name}:{block.line}", block.script) for block in page.shell])
    for line, text in inline(page):
        for part in re.split(r" (?:&&|\|) ", text):
            if part.startswith(tuple(f"{program} " for program in INLINE)):
                found.append(Command(f"{page.name}:{line}", tuple(shlex.split(part)), whole=False))
    return found


def _record(scripts: list[tuple[str, str]]) -> list[Command]:
    """Return the commands that bash would run, each once, where all of them succeed and where all of them fail."""
    found: dict[Command, None] = {}
    text = "".join(f"WHERE={where}\neval {shlex.quote(script)}\n" for where, script in scripts)
    for code in ("0", "1"):
        record = Path("record")
        record.write_text("")
        settings = {"PATH": os.devnull, "CODE": code, "SLURM_ARRAY_TASK_ID": "0"}
        bash = [shutil.which("bash") or "bash", "--norc", "-c", _RECORDER + text]
        done = subprocess.run(bash, env=settings, capture_output=True, text=True, check=False)
        assert not done.stderr, f"{scripts[0][0]}: no commands; fence other text with its language: {done.stderr}"
        for entry in record.read_text().split("\x1e\x1f")[:-1]:
            where, *words = entry.split("\x1f")[:-1]
            found[Command(where, tuple(words))] = None
            inner = [word.removeprefix("--command=") for word in words if word.startswith("--command=")]
            inner += words[2:3] if words[:2] == ["bash", "-c"] else []
            found |= dict.fromkeys(each for script in inner for each in _record([(where, script)]))
    return list(found)
