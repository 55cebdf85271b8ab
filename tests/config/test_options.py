"""A script's own arguments."""

import dataclasses
from typing import Literal

import pytest

from moezoo.config.options import take
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Own:
    folder: str
    prompt: tuple[str, ...] = ()
    count: int = 4
    rate: float = 0.5
    top: int | None = None
    stop: Literal["eos", "length"] = "eos"


def test_takes_its_own_and_leaves_the_rest():
    taken = take(
        Own, ["folder=a=b", "mesh=ep8", "prompt=x: [1", "prompt= ", "count=7", "top=null", "rate=1e-2", "steps"]
    )
    assert taken == (Own("a=b", ("x: [1", " "), 7, 0.01, None, "eos"), ["mesh=ep8", "steps"])
    assert take(Own, ["folder=1"]).options == Own("1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["count=1"], "folder is missing; set it to text"),
        (["folder=a", "count=1.5"], "count=1.5: expected a whole number such as 4, found a decimal number"),
        (["folder=a", "count=many"], "count=many: expected a whole number such as 4, found text"),
        (["folder=a", "rate=fast"], "rate=fast: expected a number such as 0.5, found text"),
        (["folder=a", "stop=never"], "stop=never: expected one of eos, length, found never"),
        (["folder=a", "count=1", "count=2"], "count=2: count is asked for twice; leave one out"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(UserError) as error:
        take(Own, arguments)
    assert str(error.value) == message
