"""The pages: links, fences, files, pictures, the reference of the API. `mkdocs build --strict` checks the site."""

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from pages import INLINE, PAGES, ROOT, inline, read

import moezoo

LANGUAGES = {"json", "python", "sh", "text", "toml", "yaml"}
LINKING = (*PAGES, "CHANGELOG.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/api/*.md"))))
FOLDERS = ("benchmarks", "conf", "docs", "kernels", "models", "moezoo", "notebooks", "scripts", "tests")
DRAWN = re.compile(r"!\[[^\]]+\]\(([^)]+)\)\n\nDrawn by `([^`]+)`[^.]*, \d{4}-\d\d-\d\d\.")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", LINKING)
def test_links_lead_to_files_and_headings(name):
    page = read(name)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.prose):
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


@pytest.mark.parametrize("name", PAGES)
def test_code_has_a_language_and_commands_are_where_they_are_checked(name):
    assert not re.search(r"^(<{7}|={7}$|>{7})", read(name).prose, re.MULTILINE), "what a merge has left"
    for block in read(name).blocks:
        where = f"{name}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: write one of {LANGUAGES} behind the fence"
        if block.language in ("text", "python"):
            lines = [line for line in block.text.splitlines() if line.startswith(tuple(f"{each} " for each in INLINE))]
            assert not lines, f"{where}: indent commands, or fence them as sh: {lines[0]}"


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name):
    for line, text in inline(read(name)):
        for path in re.findall(rf"(?<!\S)(?:{'|'.join(FOLDERS)})/[\w/]*(?:\.py|/)(?!\S)", text):
            if not re.search("[A-Z]{2,}", path):
                assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), f"{name}:{line}: {path}"


@pytest.mark.parametrize("name", PAGES)
def test_a_picture_names_what_draws_it_and_when(name):
    page = read(name)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.prose)
    assert [picture for picture, _ in DRAWN.findall(page.prose)] == pictures


def test_every_picture_is_on_a_page():
    shown = {
        ((ROOT / name).parent / picture).resolve()
        for name in PAGES
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", read(name).prose)
    }
    assert {path.resolve() for path in ROOT.glob("docs/**/*.png")} == shown


def find_object(path: str) -> Any:
    """Return what a dotted path names."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{path}: there is no such name")


REFERENCE = re.findall(r"^::: (\S+)$", "\n".join(p.read_text() for p in ROOT.glob("docs/api/*.md")), re.MULTILINE)


def documented() -> Iterator[tuple[str, Any]]:
    """Yield every object of the reference: what its pages name, and the public classes and functions of modules."""
    for path in REFERENCE:
        found = find_object(path)
        yield path, found
        if isinstance(found, ModuleType):
            for name, member in vars(found).items():
                if (
                    not name.startswith("_")
                    and getattr(member, "__module__", None) == found.__name__
                    and callable(member)
                ):
                    yield f"{path}.{name}", member


def members(path: str, found: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object and the public methods and properties that a class defines; `Attributes:` has its fields."""
    yield path, found
    if inspect.isclass(found):
        for name, member in vars(found).items():
            if (
                name[0] != "_"
                and name not in inspect.get_annotations(found)
                and (inspect.isfunction(member) or isinstance(member, property | classmethod))
            ):
                yield f"{path}.{name}", getattr(found, name)


def test_the_reference_has_every_public_name_and_every_contract():
    """Also those that docs/extending.md names, alone or in a module of the reference."""
    named = {*REFERENCE}
    page = "\n".join(text for _, text in inline(read("docs/extending.md")))
    wanted = {f"moezoo.{name}" for name in moezoo.__all__} | {*re.findall(r"\bmoezoo(?:\.\w+)+", page)}
    for path in sorted(wanted - {"moezoo.conf"}):
        found = find_object(path)
        modules = {path, getattr(found, "__module__", ""), path.rpartition(".")[0]}
        inside = isinstance(found, ModuleType) and any(each.startswith(f"{found.__name__}.") for each in named)
        assert modules & named or inside, f"{path} is not in docs/api"


def test_what_is_in_the_reference_has_a_docstring():
    bare = [name for each in documented() for name, member in members(*each) if not inspect.getdoc(member)]
    assert bare == []
