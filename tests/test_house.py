"""The house: which package may import which, read from the source; and names that would hide a module."""

import ast
import graphlib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

import moezoo

ROOT = Path(__file__).parent.parent
# From top to bottom. A package imports from those below its line only; those on one line know nothing of each other.
ORDER = (
    ("__init__", "__main__"),
    ("cli",),
    ("bench",),
    ("analysis",),
    ("training",),
    ("generation",),
    ("config",),
    ("hub",),
    ("optim", "data", "models"),
    ("moe",),
    ("nn",),
    ("kernels",),
    ("parallel",),
    ("convert",),
    ("errors",),
)
LINE = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
# A function named as its package.
HIDES = {"moezoo.kernels.grouped_matmul"}

Graph = Mapping[str, set[str]]


def sources() -> dict[str, str]:
    """Module -> its source, of the package and of the folders that are linked into it."""
    found = {}
    for top, name in (("moezoo", "moezoo"), ("models", "moezoo.models"), ("kernels", "moezoo.kernels")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            if top != "moezoo" or parts[0] not in ("models", "kernels", "conf"):
                found[".".join((name, *parts)).removesuffix(".__init__")] = path.read_text()
    return found


def imports(code: Mapping[str, str]) -> Graph:
    """Module -> the modules of ours that it names in an import, wherever in its source that stands."""

    def named(node: ast.AST) -> Iterable[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written out in full"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in code else str(node.module)

    return {
        module: {name for node in ast.walk(ast.parse(text)) for name in named(node) if name in code}
        for module, text in code.items()
    }


def room(module: str) -> str:
    """The package that a module is in, or its own name where it lies at the root."""
    return module.split(".")[1] if "." in module else "__init__"


def wrong_arrows(graph: Graph) -> list[str]:
    """Imports that do not point down."""
    arrows = [(module, other) for module, others in graph.items() for other in sorted(others)]
    return [f"{a} -> {b}" for a, b in arrows if room(a) != room(b) and LINE[room(b)] <= LINE[room(a)]]


@pytest.fixture(scope="module")
def code() -> dict[str, str]:
    return sources()


def test_every_package_has_its_place(code):
    assert {room(module) for module in code} == set(LINE)


def test_arrows_point_down(code):
    assert wrong_arrows(imports(code)) == []


def test_there_are_no_circles(code):
    """Neither of packages nor of modules; `graphlib` raises where there is one."""
    graph = imports(code)
    packages: dict[str, set[str]] = {}
    for module, others in graph.items():
        packages.setdefault(room(module), set()).update(room(other) for other in others if room(other) != room(module))
    for one in (graph, packages):
        graphlib.TopologicalSorter(one).prepare()


@pytest.mark.parametrize(
    ("module", "line", "arrow"),
    [
        ("moezoo.parallel.rules", "from moezoo.nn import rope", "moezoo.parallel.rules -> moezoo.nn.rope"),
        ("moezoo.nn.rope", "    import moezoo.training.step", "moezoo.nn.rope -> moezoo.training.step"),
        ("moezoo.optim.sgd", "from moezoo.data import Batch", "moezoo.optim.sgd -> moezoo.data"),
        ("moezoo.config.build", "from moezoo import Execution", "moezoo.config.build -> moezoo"),
    ],
)
def test_a_planted_arrow_is_found(code, module, line, arrow):
    """Also in a function, between packages of one line, and to the package itself."""
    planted = {**code, module: f"{code[module]}\ndef later():\n    {line.strip()}\n"}
    assert wrong_arrows(imports(planted)) == [arrow]


def test_a_planted_circle_is_found(code):
    planted = {**code, "moezoo.nn.norm": f"{code['moezoo.nn.norm']}\nfrom moezoo.nn import latent_attention\n"}
    with pytest.raises(graphlib.CycleError):
        test_there_are_no_circles(planted)


def hidden(package: ModuleType) -> set[str]:
    """Modules of a package that its name of theirs does not give."""
    inside = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return {
        f"{package.__name__}.{name}"
        for name in inside & set(vars(package))
        if not isinstance(getattr(package, name), ModuleType)
    }


def test_no_name_hides_a_module(code):
    packages = [importlib.import_module(name) for name in code if any(other.startswith(f"{name}.") for other in code)]
    assert set().union(*map(hidden, packages)) == HIDES
    assert {name for name in moezoo.__all__ if f"moezoo.{name}" in code} == {"data", "kernels", "models", "moe"}


def test_the_exception():
    from moezoo.kernels import grouped_matmul

    assert callable(grouped_matmul)
