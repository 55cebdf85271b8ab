"""Conversion of plain values to dataclasses and back."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from refusals import refused

from moezoo.typed import AtMost, Checks, Count, Even, Range, Size, check_fields, convert, put, show, to_plain


@dataclasses.dataclass(frozen=True)
class Cat:
    lives: Annotated[int, Range(at_least=1, below=10)] = 9


@dataclasses.dataclass(frozen=True)
class Fish:
    depth: float | None = None


@dataclasses.dataclass(frozen=True)
class Cellar:
    table: Mapping[str, tuple[str, ...]]
    size: int = 7


@dataclasses.dataclass(frozen=True)
class Home:
    rooms: tuple[str, ...]
    pet: Cat | Fish
    cellar: Cellar
    open: bool = True


CHECKS = Checks({"pet": ("name", {"cat": Cat, "fish": Fish})})
MAPPING = {
    "rooms": ["a"],
    "pet": {"name": "cat", "lives": 3},
    "cellar": {"table": {"x": ["y", "z"]}, "size": 5},
    "open": False,
}
HOME = Home(("a",), Cat(3), Cellar({"x": ("y", "z")}, 5), open=False)


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 0.5, 0.5),
        (bool, True, True),
        (str, "x", "x"),
        (str, "\n", "\n"),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], 1, 1),
        (int | None, None, None),
        (int | None, 3, 3),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[str, ...], (), ()),
        (Mapping[str, tuple[int, ...]], {"a": [1]}, {"a": (1,)}),
        (Cat, {}, Cat()),
        (int, np.int64(3), 3),
        (float, np.float32(0.5), 0.5),
        (float, np.int8(3), 3.0),
        (str, Path("a/b"), "a/b"),
    ],
)
def test_converts(kind, value, result):
    converted = convert(kind, value, "key")
    assert converted == result
    assert type(converted) is type(result)


# Parts of the message, in order, separated by "|".
@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, "3", "key=3|a whole number such as 4|text"),
        (int, True, "key=true|a whole number such as 4|true or false"),
        (int, 3.0, "key=3.0|a whole number such as 4|a decimal number"),
        (int, None, "key=null|a whole number such as 4|null"),
        (float, True, "key=true|a number such as 0.5|true or false"),
        (float, float("inf"), "key=inf|a number such as 0.5|no finite number"),
        (float, "-.INF", "key=-.INF|a number such as 0.5|no finite number"),
        (float, 10**400, "key=1000|... (401 characters)|a number such as 0.5|a whole number"),
        (bool, 1, "key=1|true or false|a whole number"),
        (str, "", "key=|text|nothing"),
        (str, 3, "key=3|text|a whole number"),
        (Literal["a", "b"], "c", "key=c|one of a, b|c"),
        (Literal[1, 2], True, "key=true|one of 1, 2|true"),
        (int, np.float32(3), "key=3.0|a whole number such as 4|a decimal number"),
        (int, 2**31, "key=2147483648 must be at most 2147483647"),
        (float, np.float32("nan"), "key=nan|a number such as 0.5|no finite number"),
        (float, {1}, "key={1}|a number such as 0.5|a set"),
        (str, ["a" * 400], "key=[aaa|... (402 characters)|text|a list"),
        (int | None, "x", "key=x|a whole number such as 4, or null|text"),
        (tuple[int, ...], 3, "key=3|a list such as [a, b]|a whole number"),
        (tuple[int, ...], [1, "x"], "key[1]=x|a whole number such as 4|text"),
        (Mapping[str, int], [1], "key=[1]|names and their values such as {a: [b]}|a list"),
        (
            Mapping[str, int],
            {1: 1},
            "key={1: 1}|names and their values such as {a: [b]}|names and values",
        ),
        (Mapping[str, int], {"a": "x"}, "key.a=x|a whole number such as 4|text"),
        (Cat, 3, "key=3|a section with keys|a whole number"),
        (Cat, {"live": 3}, "key.live|'live' in key|did you mean 'lives'?"),
        (Cat, {"lives": "x"}, "key.lives=x|a whole number such as 4|text"),
    ],
)
def test_refuses(kind, value, said):
    with refused(*said.split("|")):
        convert(kind, value, "key")


def test_round_trip():
    assert convert(Home, MAPPING, "", CHECKS) == HOME
    assert to_plain(HOME, "", CHECKS) == MAPPING


def test_plain_returns_copies():
    mapping = to_plain(HOME, "", CHECKS)
    mapping["cellar"]["table"]["x"].append("w")
    assert HOME.cellar.table == {"x": ("y", "z")}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rooms": ...}, "rooms|a list such as [a, b]"),
        ({"cellar": ...}, "cellar|a section with keys"),
        ({"cellar": {}}, "cellar.table|names and their values such as {a: [b]}"),
        ({"pet": {}}, "pet.name|one of cat, fish"),
        ({"pet": {"name": "cta"}}, "pet.name=cta|pet|did you mean 'cat'?"),
        ({"pet": {"name": ["cat"]}}, "pet.name=[cat]|pet|did you mean 'cat'?"),
        ({"pet": {"name": "fish", "lives": 3}}, "pet.lives|'lives' in pet fish|valid: depth"),
        ({"pet": {"name": "cat", "lives": 0}}, "pet.lives=0|at least 1|10"),
        ({"pet": {"name": "cat", "lives": 10}}, "pet.lives=10|at least 1|10"),
        ({"pet": None}, "pet=null|a section with keys|null"),
    ],
)
def test_refuses_sections(changed, said):
    mapping = {key: value for key, value in {**MAPPING, **changed}.items() if value is not ...}
    with refused(*said.split("|")):
        convert(Home, mapping, "", CHECKS)


@pytest.mark.parametrize(
    ("key", "value", "changed"),
    [
        ("open", True, {"open": True}),
        ("pet.lives", 4, {"pet": {"name": "cat", "lives": 4}}),
        ("cellar.table", {}, {"cellar": {"table": {}}}),
        ("cellar.table.x", [], {"cellar": {"table": {"x": []}}}),
        ("cellar.table.new", ["a"], {"cellar": {"table": {"x": ["y"], "new": ["a"]}}}),
        ("cellar.size", 4, {"cellar": {"table": {"x": ["y"]}, "size": 4}}),  # omitted before
    ],
)
def test_sets_keys(key, value, changed):
    mapping = {"rooms": ["a"], "pet": {"name": "cat"}, "cellar": {"table": {"x": ["y"]}}, "open": False}
    before = copy.deepcopy(mapping)
    assert put(mapping, key, value) == {**before, **changed}
    assert mapping == before


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("opne", "opne|'opne'|did you mean 'open'?"),
        ("lives", "lives|'lives'|did you mean 'pet.lives'?"),
        ("pet", "pet=0: expected a section with keys"),
        ("pet.live", "pet.live|'live' in pet cat|did you mean 'lives'?"),
        ("pet.depth", "pet.depth|'depth' in pet cat|valid: lives"),
        ("open.x", "open.x: open|open=VALUE"),
        ("pet.lives.x", "pet.lives.x: pet.lives|pet.lives=VALUE"),
        (
            "cellar.table.x.y",
            "cellar.table.x.y: cellar.table.x|cellar.table.x=VALUE",
        ),
    ],
)
def test_refuses_to_set(key, said):
    with refused(*said.split("|")):
        convert(Home, put(MAPPING, key, 0), "", CHECKS)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (1e-5, "1e-05"),
        ("a b", "a b"),
        ("a\nb", r"'a\nb'"),
        ([1, None], "[1, null]"),
        ({"a": [False]}, "{a: [false]}"),
        ([10**5000], "[a number of 5001 digits]"),
        (["a" * 400], f"[{'a' * 149}... (402 characters)"),
    ],
)
def test_shows_on_one_line(value, shown):
    assert show(value) == shown


@dataclasses.dataclass(frozen=True)
class Stone:
    pass


def test_a_section_without_keys():
    with refused("home.foo", "takes none"):
        convert(Stone, {"foo": 1}, "home")


@dataclasses.dataclass(frozen=True)
class Animal:
    """What a class states of its fields holds for those of its subclasses."""

    legs: Size = 4

    def __post_init__(self):
        check_fields("animal", self)


@dataclasses.dataclass(frozen=True)
class Dog(Animal):
    legs: int = 4
    ears: Annotated[Count, AtMost("legs")] = 2
    weight: Annotated[float, Range(above=0)] | None = None
    names: tuple[str, ...] = ()
    friends: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    size: Literal["small", "large"] = "small"
    fed: bool = True
    cat: Cat | None = None
    home: Cat | Fish = dataclasses.field(default_factory=Cat)
    bark: Callable[[], Any] | None = None
    toes: Even = 16
    spots: Annotated[Count, AtMost("toes", strict=True)] | None = None


def dog(**fields: Any) -> Dog:
    return Dog(**fields)


@dataclasses.dataclass(frozen=True)
class Litter:
    mine: Annotated[Count, AtMost("all", strict=True)] | None = None
    all: Size | None = None

    def __post_init__(self):
        check_fields("litter", self)


@pytest.mark.parametrize("given", [{"mine": 3}, {"all": 3}, {}])
def test_a_relation_waits_for_both_values(given):
    """Beside a null nothing is compared."""
    made = Litter(**given)
    assert (made.mine, made.all) == (given.get("mine"), given.get("all"))
    with refused("litter.mine=3 must be below litter.all=3"):
        Litter(3, 3)


def test_a_dataclass_converts_its_fields():
    """As `convert` does; what no configuration can hold is left as it is."""
    given = {"legs": np.int64(3), "weight": 2, "names": ["a"], "friends": {"b": [np.int8(1)]}, "bark": dict}
    made = dog(**given, cat=Cat(3), home=Fish())
    assert (dog(ears=4).ears, dog(spots=15).spots) == (4, 15)
    assert made == Dog(3, weight=2.0, names=("a",), friends={"b": (1,)}, cat=Cat(3), home=Fish(), bark=dict)
    assert [type(value) for value in (made.legs, made.weight, made.friends["b"][0])] == [int, float, int]
    assert convert(Dog, {"names": ["a"], "weight": 2}, "dog") == dog(names=("a",), weight=2.0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"legs": 4.0}, "animal.legs=4.0: expected a whole number such as 4, found a decimal number"),
        ({"legs": "4"}, "animal.legs=4: expected a whole number|found text"),
        ({"legs": True}, "animal.legs=true: expected a whole number|found true or false"),
        ({"legs": 0}, "animal.legs=0 must be at least 1"),
        ({"legs": 2**31}, "animal.legs=2147483648 must be at most 2147483647"),
        ({"ears": -1}, "animal.ears=-1 must be at least 0"),
        ({"ears": 5}, "animal.ears=5 must be at most animal.legs=4"),
        ({"legs": 1}, "animal.ears=2 must be at most animal.legs=1"),
        ({"toes": 7}, "animal.toes=7 must be at least 2 and a multiple of 2"),
        ({"spots": 16}, "animal.spots=16 must be below animal.toes=16"),
        ({"weight": math.nan}, "animal.weight=nan: expected a number|no finite number"),
        ({"weight": 0}, "animal.weight=0 must be above 0, or null"),
        ({"names": "a"}, "animal.names=a: expected a list|found text"),
        ({"names": [1]}, "animal.names[0]=1: expected text, found a whole number"),
        ({"friends": {"a": 1}}, "animal.friends.a=1: expected a list"),
        ({"friends": [1]}, "animal.friends=[1]: expected names and their values|found a list"),
        ({"size": "x"}, "animal.size=x: expected one of small, large"),
        ({"fed": 1}, "animal.fed=1: expected true or false"),
        ({"cat": {"lives": 3}}, "animal.cat={lives: 3}: expected a value of Cat, found names and values"),
        ({"cat": Cat}, "animal.cat=|expected a value of Cat, found the class Cat"),
        ({"home": "cat"}, "animal.home=cat: expected a value of Cat or Fish, found text|moezoo.compose takes names"),
    ],
)
def test_a_dataclass_refuses(fields, said):
    with refused(*said.split("|")):
        dog(**fields)


def test_ranges_include_their_bounds():
    """`at_least` and `at_most` do; `above` and `below` do not."""
    assert [Range(at_least=1, at_most=3).holds(number) for number in range(5)] == [False, True, True, True, False]
    assert [Range(above=1, below=3).holds(number) for number in range(5)] == [False, False, True, False, False]
