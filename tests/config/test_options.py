"""A command's own arguments."""

import dataclasses
from typing import Literal

import pytest

from moezoo.config.options import describe_keys, key, take
from moezoo.convert import Range
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Own:
    folder: str = key("where to write", "FOLDER")
    prompt: tuple[str, ...] = ()
    count: int = key("how many", default=4, valid=Range(at_least=1))
    rate: float = 0.5
    top: int | None = None
    stop: Literal["eos", "length"] = "eos"


def test_takes_its_own_and_leaves_the_rest():
    taken = take(
        Own, ["folder=a=b", "mesh=ep8", "prompt=x: [1", "prompt= ", "count=7", "top=null", "rate=1e-2", "steps"]
    )
    assert taken == (Own("a=b", ("x: [1", " "), 7, 0.01, None, "eos"), ["mesh=ep8", "steps"])
    assert take(Own, ["folder=1"]).options == Own("1")


def test_describes_its_keys():
    kind = dataclasses.make_dataclass(
        "Keys", [("to", str, key("x", "FILE")), ("count", int, key("how many", default=4))]
    )
    assert describe_keys(kind) == [("to=FILE", "x"), ("count=4", "how many")]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["count=1"], ["folder is missing; write folder=FOLDER", "where to write"]),
        (["folder=a", "count=0"], ["count=0 must be at least 1"]),
        (["folder=a", "count=1.5"], ["count=1.5: expected a whole number", "found a decimal number"]),
        (["folder=a", "count=many"], ["count=many: expected a whole number", "found text"]),
        (["folder=a", "rate=fast"], ["rate=fast: expected a number", "found text"]),
        (["folder=a", "stop=never"], ["stop=never: expected one of eos, length", "never"]),
        (["folder=a", "count=1", "count=2"], ["count=2: count is given twice"]),
    ],
)
def test_mistakes(arguments, parts):
    with pytest.raises(UserError) as error:
        take(Own, arguments)
    assert [part for part in parts if part not in str(error.value)] == []
