"""Do tests fail when the code is wrong? Plant known errors in a copy of the repository, one at a time.

`pytest -m mutations` plants all of them (`pytest -n 0 -m mutations -k "window"` those whose name has this word) and
lists, at the end, which test caught each, and the errors that survived. The default suite checks only that every error
can still be planted. The tables are the files `*.toml` here; CONTRIBUTING.md explains how to add an error.
"""

import ast
import functools
import itertools
from pathlib import Path

import pytest
from cover import EXTRA_CASES, RECURRENT_CASES, STRETCH_CASES, cover
from planted import REPOSITORY, Planted, before_and_after, copy_repository, is_caught, read_tables, run_tests

ERRORS = read_tables()


@functools.cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_error_can_be_planted():
    """Each entry changes one place of its file, and its tests exist."""
    assert len({error.name for error in ERRORS}) == len(ERRORS)
    for error in ERRORS:
        changed = error.change((REPOSITORY / error.file).read_text())
        assert error.before != error.after
        if error.file.endswith(".py"):
            compile(changed, error.file, "exec")
        assert error.tests
    cases = {str(case) for case in [*cover(), *EXTRA_CASES, *RECURRENT_CASES, *STRETCH_CASES]}
    for test in set(itertools.chain.from_iterable(error.tests for error in ERRORS)):
        file, *function = test.partition("[")[0].split("::")
        assert set(function) <= _functions(REPOSITORY / file), test
        if function == ["test_whole_step"] and "[" in test:  # the cover moves when a family or a layout is added
            assert test.partition("[")[2].removesuffix("]") in cases, f"{test} is not in the cover; name another case"


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("drop: squares` + epsilon`", "squares + epsilon", "squares"),
        ("drop: y = `f(`x`, 1)`", "y = f(x, 1)", "y = x"),
        ("swap: f(`x`, y, `z`)", "f(x, y, z)", "f(z, y, x)"),
        ("flip: row `<` stop", "row < stop", "row <= stop"),
        ("flip: axis=`1`", "axis=1", "axis=0"),
        ("add_one: 2 * `x`", "2 * x", "2 * (x + 1)"),
        ("None: scale", "scale", "None"),
        ("- a: b\n-     c\n+ d", "a: b\n    c", "d"),
    ],
)
def test_operators_and_signs(change, before, after):
    assert before_and_after(change) == (before, after)


@pytest.fixture(scope="session")
def copy(tmp_path_factory, request):
    """A copy of the repository, in which the tests of all chosen errors pass: only then an error can fail them."""
    copy = copy_repository(tmp_path_factory.mktemp("copy"))
    chosen = [item.callspec.params["error"].tests for item in request.session.items if hasattr(item, "callspec")]
    tests = sorted(set(itertools.chain.from_iterable(chosen)))
    for first in range(0, len(tests), 40):
        result = run_tests(copy, tuple(tests[first : first + 40]))
        assert result.code == 0, f"without an error, tests fail\n{result.output[-2000:]}"
    return copy


@pytest.mark.mutations
@pytest.mark.timeout(0)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_is_caught(copy, error: Planted, record_property):
    record_property("caught by", is_caught(copy, error).failed)
