"""A command's own arguments."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from refusals import by_table, refused

from moezoo.config.options import describe_keys, describe_switches, key, take, take_switches
from moezoo.typed import Size


@dataclasses.dataclass(frozen=True)
class Own:
    folder: str = key("where to write", "FOLDER")
    prompt: tuple[str, ...] = ()
    count: Size = key("how many", default=4)
    rate: float = 0.5
    top: int | None = None
    stop: Literal["eos", "length"] = "eos"
    sizes: tuple[Size, ...] = key("some sizes", default=())
    ways: tuple[Literal["up", "down"], ...] = ("up",)
    named: Mapping[str, Any] | None = None


def test_takes_its_own_and_leaves_the_rest():
    taken = take(
        Own, ["folder=a=b", "mesh=ep8", "prompt=x: [1", "prompt= ", "count=7", "top=null", "rate=1e-2", "steps"]
    )
    assert taken == (Own("a=b", ("x: [1", " "), 7, 0.01, None, "eos"), ["mesh=ep8", "steps"])
    assert take(Own, ["folder=1"]).options == Own("1")
    assert take(Own, ["folder=1", "sizes=3", "ways=down", "sizes=2"]).options == Own("1", sizes=(3, 2), ways=("down",))
    named = ["named.a=False", "named.b=null", "named.c=2", "named.d=some words", "named.e='1'", "named.f=[x,{y: 1}]"]
    values = {"a": False, "b": None, "c": 2, "d": "some words", "e": "1", "f": ["x", {"y": 1}]}
    assert take(Own, ["folder=1", *named, "name.a=1"]) == (Own("1", named=values), ["name.a=1"])


def test_describes_its_keys():
    kind = dataclasses.make_dataclass(
        "Keys",
        [
            ("to", str, key("x", "FILE")),
            ("count", int, key("how many", default=4)),
            ("named", Mapping[str, Any] | None, key("y", "VALUE", default=None)),
        ],
    )
    assert describe_keys(kind) == [("to=FILE", "x"), ("count=4", "how many"), ("named.NAME=VALUE", "y")]


@dataclasses.dataclass(frozen=True)
class Switches:
    only_names: bool = key("leave out the rest", default=False)
    sort: Literal["name", "size"] = key("the order", "name|size", default="name")
    filter: str | None = key("which", "WORD", default=None)
    depth: int = key("how deep", "N", default=2)


@by_table(
    """
    words => line
    count=1 => folder is missing; write folder=FOLDER ... where to write
    folder=a count=0 => count=0 must be at least 1
    folder=a count=1.5 => count=1.5: expected a whole number ... found a decimal number
    folder=a count=many => count=many: expected a whole number ... found text
    folder=a rate=fast => rate=fast: expected a number ... found text
    folder=a stop=never => stop=never: expected one of eos, length ... never
    folder=a sizes=3 sizes=0 => sizes=0 must be at least 1
    folder=a ways=left => ways=left: expected one of up, down ... left
    folder=a prompt= => prompt=: expected text ... write prompt=TEXT
    folder=a count=1 count=2 => count=2: count is given twice
    folder=a named=1 => named=1: expected named.NAME=VALUE
    folder=a named.a.b=1 => named.a.b=1: expected named.NAME=VALUE
    folder=a named.a=1 named.a=2 => named.a=2: named.a is given twice
    folder=a named.a=[1 => named.a=[1: the value cannot be read; close its brackets
    --sort=date => --sort=date: expected one of name, size, found date
    --depth=deep => --depth=deep: expected a whole number such as 4, found text
    --only-names=true => --only-names=true: --only-names takes no value; write --only-names, or leave it out
    --only-names --only-names => --only-names is given twice; leave one out
    --filter => --filter: expected a value; write --filter=WORD
    --sort --only-names => --sort: expected a value; write --sort=name|size
    """
)
def test_mistakes(words, line):
    with refused(line):
        take_switches(Switches, words.split()) if words.startswith("--") else take(Own, words.split())


def test_takes_switches_and_leaves_the_rest():
    given = ["a=1", "--only-names", "--sort=size", "--other", "--filter", "b=2 c", "--depth=3", "d=4"]
    assert take_switches(Switches, given) == (Switches(True, "size", "b=2 c", 3), ["a=1", "--other", "d=4"])
    assert take_switches(Switches, []) == (Switches(), [])
    assert describe_switches(Switches)[:2] == [
        ("--only-names", "leave out the rest"),
        ("--sort=name|size", "the order"),
    ]
