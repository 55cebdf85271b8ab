"""Errors to plant: read their tables, put one into a copy of the repository, and run the tests that must fail."""

import itertools
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
# Longer than the tests of any error take, and shorter than the time limit of one test.
_SECONDS = 800
_FAILED, _PASSED = 1, 0
# What takes the place of a marked part, by operator.
_OPERATORS = {"drop": "", **{constant: constant for constant in ("0", "1", "1.0", "None", "True", "False", "pass")}}
_OPERATORS |= {"add_one": "({} + 1)", "subtract_one": "({} - 1)", "times_zero": "(0 * ({}))", "reverse": "({})[::-1]"}
_PAIRS = [("<", "<="), (">", ">="), ("+", "-"), ("*", "/"), ("==", "!="), ("0", "1"), ("any", "all"), ("min", "max")]
_PAIRS += [("minimum", "maximum"), ("floor", "ceil")]
_FLIPPED = dict(_PAIRS) | {right: left for left, right in _PAIRS}


class Planted(NamedTuple):
    """An entry of a table.

    - `name`: what is wrong, in a few words;
    - `file`: the file to change, and `before`: the only place in it that is this text, replaced by `after`;
    - `tests`: node ids, of which at least one must fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def change(self, text: str) -> str:
        """Return the text of the file with the error."""
        assert text.count(self.before) == 1, f"{self.file} has {text.count(self.before)} places like {self.before!r}"
        return text.replace(self.before, self.after)


class Result(NamedTuple):
    """What pytest did: its exit code, the line about the first test that failed, and all that it printed."""

    code: int
    failed: str
    output: str


def before_and_after(change: str) -> tuple[str, str]:
    """Return the text that an entry replaces, and what takes its place.

    An entry is an operator and a text in which backticks mark a part or several, as in "drop: squares` + epsilon`" and
    "swap: f(`x`, `y`)"; without backticks all of it is the part. Other entries are lines with - and + in front.
    """
    operator, _, text = change.partition(": ")
    if operator in ("swap", "flip", *_OPERATORS):
        pieces = text.split("`") if "`" in text else ["", text, ""]
        parts, before = pieces[1::2], "".join(pieces)
        if operator == "swap":
            pieces[1::2] = reversed(parts)
        else:
            pieces[1::2] = [_FLIPPED[x] if operator == "flip" else _OPERATORS[operator].format(x) for x in parts]
        return before, "".join(pieces)
    lines = change.splitlines()
    assert all(line[:2] in ("- ", "+ ", "-", "+") for line in lines), f"a line has no sign: {change}"
    before, after = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
    return before, after


def read_tables() -> list[Planted]:
    """Return the entries of all tables: file -> tests, with " or " between them -> name -> change."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.toml"))]
    found = []
    for file, groups in itertools.chain.from_iterable(tomllib.loads(text).items() for text in texts):
        for tests, errors in groups.items():
            for name, change in errors.items():
                found.append(Planted(name, file, *before_and_after(change), tuple(tests.split(" or "))))
    return found


def copy_repository(folder: Path) -> Path:
    """Copy the files that git tracks or would track; return the copy, from which Python then imports moezoo."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = REPOSITORY / name, folder / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    found = _run(folder, "-c", "import moezoo; print(moezoo.__file__)").stdout.strip()
    assert Path(found).is_relative_to(folder), f"Python imports {found}, not the copy {folder}"
    return folder


def run_tests(copy: Path, tests: tuple[str, ...]) -> Result:
    """Run tests of the copy until the first failure."""
    # Copies share compiled programs with each other and with later runs. They do not share the suite's own.
    cache = f"cache_dir={REPOSITORY / '.pytest_cache' / 'mutations'}"
    options = ["-m", "pytest", "-n", "0", "-x", "-q", "--tb=line", "-rfE", "-m", "not full", "-o", cache]
    try:
        done = _run(copy, *options, *tests)
    except subprocess.TimeoutExpired:
        return Result(-1, "", f"not finished after {_SECONDS} s")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return Result(done.returncode, failed[0] if failed else "", done.stdout + done.stderr)


def is_caught(copy: Path, error: Planted) -> Result:
    """Plant an error in the copy, run its tests, and restore the file.

    Raises:
        AssertionError: The error survived, or the tests could not run.
    """
    path = copy / error.file
    whole = path.read_text()
    path.write_text(error.change(whole))
    try:
        result = run_tests(copy, error.tests)
    finally:
        path.write_text(whole)
    assert result.code != _PASSED, f"SURVIVED: {error.name} ({error.file}): {', '.join(error.tests)} pass"
    assert result.code == _FAILED, f"{error.name} ({error.file}): tests did not run\n{result.output[-2000:]}"
    return result


def _run(copy: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    # No cached bytecode: an error may leave a file's size and its time in seconds as they were. Pytest cuts the line
    # about a failure, which ends with the reason, at the width of the terminal.
    settings = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "240"}
    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={**left, **settings},
        timeout=_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
