import dataclasses
from collections.abc import Mapping
from typing import Literal

import pytest

from moezoo.convert import Checks, Range, convert, plain, set_key, show
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Cat:
    lives: int = 9


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


CHECKS = Checks({"pet": ("name", {"cat": Cat, "fish": Fish})}, {"pet.lives": Range(at_least=1, below=10)})
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
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], 1, 1),
        (int | None, None, None),
        (int | None, 3, 3),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[str, ...], (), ()),
        (Mapping[str, tuple[int, ...]], {"a": [1]}, {"a": (1,)}),
        (Cat, {}, Cat()),
    ],
)
def test_converts(kind, value, result):
    converted = convert(kind, value, "key")
    assert converted == result
    assert type(converted) is type(result)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, "3", "key=3: expected a whole number such as 4, found text"),
        (int, True, "key=true: expected a whole number such as 4, found true or false"),
        (int, 3.0, "key=3.0: expected a whole number such as 4, found a decimal number"),
        (int, None, "key=null: expected a whole number such as 4, found null"),
        (float, True, "key=true: expected a number such as 0.5, found true or false"),
        (float, float("inf"), "key=inf: expected a number such as 0.5, found no finite number"),
        (float, 10**400, f"key={10**400}: expected a number such as 0.5, found a whole number"),
        (bool, 1, "key=1: expected true or false, found a whole number"),
        (str, "", "key=: expected text, found nothing"),
        (str, "\n", None),
        (str, 3, "key=3: expected text, found a whole number; quotes inside quotes make it text: '\"...\"'"),
        (Literal["a", "b"], "c", "key=c: expected one of a, b, found c"),
        (Literal[1, 2], True, "key=true: expected one of 1, 2, found true"),
        (int | None, "x", "key=x: expected a whole number such as 4, or null, found text"),
        (tuple[int, ...], 3, "key=3: expected a list such as [a, b], found a whole number"),
        (tuple[int, ...], [1, "x"], "key[1]=x: expected a whole number such as 4, found text"),
        (Mapping[str, int], [1], "key=[1]: expected names and their values such as {a: [b]}, found a list"),
        (
            Mapping[str, int],
            {1: 1},
            "key={1: 1}: expected names and their values such as {a: [b]}, found names and values",
        ),
        (Mapping[str, int], {"a": "x"}, "key.a=x: expected a whole number such as 4, found text"),
        (Cat, 3, "key=3: expected a section with keys, found a whole number"),
        (Cat, {"live": 3}, "key.live: there is no key 'live' in key; did you mean 'lives'?"),
        (Cat, {"lives": "x"}, "key.lives=x: expected a whole number such as 4, found text"),
    ],
)
def test_refuses(kind, value, said):
    if said is None:
        assert convert(kind, value, "key") == value
        return
    with pytest.raises(UserError) as caught:
        convert(kind, value, "key")
    assert str(caught.value) == said


def test_there_and_back():
    assert convert(Home, MAPPING, "", CHECKS) == HOME
    assert plain(HOME, "", CHECKS) == MAPPING


def test_plain_shares_nothing_with_what_it_was_made_from():
    mapping = plain(HOME, "", CHECKS)
    mapping["cellar"]["table"]["x"].append("w")
    assert HOME.cellar.table == {"x": ("y", "z")}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rooms": ...}, "rooms is missing; set it to a list such as [a, b]"),
        ({"cellar": ...}, "cellar is missing; set it to a section with keys"),
        ({"cellar": {}}, "cellar.table is missing; set it to names and their values such as {a: [b]}"),
        ({"pet": {}}, "pet.name is missing; set it to one of cat, fish"),
        ({"pet": {"name": "cta"}}, "pet.name=cta: no such pet; did you mean 'cat'?"),
        ({"pet": {"name": ["cat"]}}, "pet.name=[cat]: no such pet; did you mean 'cat'?"),
        ({"pet": {"name": "fish", "lives": 3}}, "pet.lives: there is no key 'lives' in pet fish; valid: depth"),
        ({"pet": {"name": "cat", "lives": 0}}, "pet.lives=0 must be at least 1 and below 10"),
        ({"pet": {"name": "cat", "lives": 10}}, "pet.lives=10 must be at least 1 and below 10"),
        ({"pet": None}, "pet=null: expected a section with keys, found null"),
    ],
)
def test_refuses_sections(changed, said):
    mapping = {key: value for key, value in {**MAPPING, **changed}.items() if value is not ...}
    with pytest.raises(UserError) as caught:
        convert(Home, mapping, "", CHECKS)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("key", "value", "changed"),
    [
        ("open", True, {"open": True}),
        ("pet.lives", 4, {"pet": {"name": "cat", "lives": 4}}),
        ("cellar.table", {}, {"cellar": {"table": {}}}),
        ("cellar.table.x", [], {"cellar": {"table": {"x": []}}}),
        ("cellar.table.new", ["a"], {"cellar": {"table": {"x": ["y"], "new": ["a"]}}}),
        ("cellar.size", 4, {"cellar": {"table": {"x": ["y"]}, "size": 4}}),  # which was left to its default
    ],
)
def test_sets_keys(key, value, changed):
    mapping = {"rooms": ["a"], "pet": {"name": "cat"}, "cellar": {"table": {"x": ["y"]}}, "open": False}
    before = dict(mapping)
    set_key(Home, mapping, key, value, CHECKS)
    assert mapping == {**before, **changed}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("opne", "opne: there is no key 'opne'; did you mean 'open'?"),
        ("lives", "lives: there is no key 'lives' at the top; did you mean 'pet.lives'?"),
        ("pet", "pet=0: pet is a section; set its keys, such as pet.name=VALUE"),
        ("pet.name", "pet.name=0: pet is chosen together with its keys; write pet=NAME"),
        ("pet.live", "pet.live: there is no key 'live' in pet cat; did you mean 'lives'?"),
        ("pet.depth", "pet.depth: there is no key 'depth' in pet cat; valid: lives"),
        ("open.x", "open.x: open is one value and has no keys; write open=VALUE"),
        ("pet.lives.x", "pet.lives.x: pet.lives is one value and has no keys; write pet.lives=VALUE"),
        (
            "cellar.table.x.y",
            "cellar.table.x.y: cellar.table.x is one value and has no keys; write cellar.table.x=VALUE",
        ),
    ],
)
def test_refuses_to_set(key, said):
    mapping = plain(HOME, "", CHECKS)
    with pytest.raises(UserError) as caught:
        set_key(Home, mapping, key, 0, CHECKS)
    assert str(caught.value) == said
    assert mapping == MAPPING


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
    ],
)
def test_shows_on_one_line(value, shown):
    assert show(value) == shown


@dataclasses.dataclass(frozen=True)
class Stone:
    pass


def test_a_section_without_keys_says_so():
    with pytest.raises(UserError, match=r"^home\.foo: there is no key 'foo'.*; it takes none$"):
        convert(Stone, {"foo": 1}, "home")
