"""House rules, read from the source: which package imports which, names that hide a module, entries of docstrings."""

import ast
import graphlib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

import moezoo

ROOT = Path(__file__).parent.parent
# From top to bottom. A package imports only from packages below its line, and none from its own line.
ORDER = (
    ("__init__", "__main__"),
    ("public", "commands"),
    ("analysis",),
    ("tools",),
    ("cli",),
    ("training",),
    ("generation",),
    ("config",),
    ("hub",),
    ("optim", "data", "models", "trackers"),
    ("moe",),
    ("nn",),
    ("kernels", "profiling"),
    ("parallel",),
    ("json_files",),
    ("typed",),
    ("host", "progress"),
    ("remote",),
    ("errors", "interrupts", "tables"),
)
LINE = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
# A function with the name of its package.
HIDES = {"moezoo.kernels.grouped_matmul"}
# `models`, `kernels` and `conf` are linked into the package: imports of the folders would load second copies.
# `benchmarks` uses the package, and is not installed with it.
OURS = {"moezoo", "models", "kernels", "conf", "benchmarks"}
# The modules that import by a name: what a user plugs in, and the files of the folder of strategies.
BY_NAME = ("moezoo.config.own", "moezoo.moe.dispatch")

Graph = Mapping[str, set[str]]


def sources() -> dict[str, str]:
    """Return the source of each module of the package and of the folders that are linked into it."""
    found = {}
    for top, name in (("moezoo", "moezoo"), ("models", "moezoo.models"), ("kernels", "moezoo.kernels")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            if top != "moezoo" or parts[0] not in ("models", "kernels", "conf"):
                found[".".join((name, *parts)).removesuffix(".__init__")] = path.read_text()
    return found


def imports(module: str, text: str, modules: Collection[str]) -> set[str]:
    """Return the ones of `modules` that `module` imports, anywhere in its source.

    Other ways of importing fail the test, because they would hide an import from it.
    """

    def find(node: ast.AST) -> Iterable[str]:
        where = f"{module}, line {getattr(node, 'lineno', '')}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name in modules:
                    yield alias.name
                else:
                    assert alias.name.split(".")[0] not in OURS, f"{where}: write from {alias.name} import ..."
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            assert node.level == 0, f"{where}: write the whole name of what is imported"
            assert origin.split(".")[0] not in OURS - {"moezoo"}, f"{where}: import from moezoo, not {origin}"
            if origin.split(".")[0] == "moezoo":
                assert origin in modules, f"{where}: there is no module {origin}"
                yield from (f"{origin}.{a.name}" if f"{origin}.{a.name}" in modules else origin for a in node.names)
        elif isinstance(node, ast.Call) and module not in BY_NAME:
            called = ast.unparse(node.func).split(".")[-1]
            assert called not in ("import_module", "__import__"), f"{where}: import by a statement"
        elif isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "sys.modules", f"{where}: import by a statement"

    return {name for node in ast.walk(ast.parse(text)) for name in find(node)}


def room(module: str) -> str:
    """Return the package of a module, or the module's own name if it is at the root."""
    return module.split(".")[1] if "." in module else "__init__"


def find_wrong_arrows(graph: Graph) -> list[str]:
    """Return the imports that do not point down."""
    arrows = [(module, other) for module, others in graph.items() for other in sorted(others)]
    return [f"{a} -> {b}" for a, b in arrows if room(a) != room(b) and LINE[room(b)] <= LINE[room(a)]]


def check_circles(graph: Graph) -> None:
    """Raise `graphlib.CycleError` for a circle of modules or of packages."""
    packages: dict[str, set[str]] = {}
    for module, others in graph.items():
        packages.setdefault(room(module), set()).update(room(other) for other in others if room(other) != room(module))
    for each in (graph, packages):
        graphlib.TopologicalSorter(each).prepare()


@pytest.fixture(scope="module")
def code() -> dict[str, str]:
    return sources()


@pytest.fixture(scope="module")
def graph(code) -> Graph:
    return {module: imports(module, text, code) for module, text in code.items()}


def test_every_package_has_its_place(code):
    assert {room(module) for module in code} == set(LINE)


def test_arrows_point_down(graph):
    assert find_wrong_arrows(graph) == []


def test_there_are_no_circles(graph):
    check_circles(graph)


@pytest.mark.parametrize(
    ("module", "line", "arrow"),
    [
        ("moezoo.parallel.rules", "from moezoo.nn import rotary", "moezoo.parallel.rules -> moezoo.nn.rotary"),
        ("moezoo.nn.rotary", "from moezoo.training import step", "moezoo.nn.rotary -> moezoo.training.step"),
        ("moezoo.optim.sgd", "from moezoo.data import Batch", "moezoo.optim.sgd -> moezoo.data"),
        ("moezoo.config.build", "from moezoo import Execution", "moezoo.config.build -> moezoo"),
    ],
)
def test_a_planted_arrow_is_found(code, graph, module, line, arrow):
    """Also in a function, between packages of one line, and to the package itself."""
    planted = imports(module, f"{code[module]}\ndef later():\n    {line}\n", code)
    assert find_wrong_arrows({**graph, module: planted}) == [arrow]


def test_a_planted_circle_is_found(graph):
    planted = {**graph, "moezoo.nn.norm": graph["moezoo.nn.norm"] | {"moezoo.nn.latent_attention"}}
    with pytest.raises(graphlib.CycleError):
        check_circles(planted)


@pytest.mark.parametrize(
    "line",
    [
        "import moezoo.training.step",
        "from ..training import step",
        "from models import mixtral",
        "from benchmarks import timing",
        "from moezoo.conf import train",
        "importlib.import_module('moezoo.training.step')",
        "__import__('moezoo.cli')",
        "sys.modules['moezoo.training.step']",
    ],
)
def test_imports_that_cannot_be_followed_are_refused(code, line):
    with pytest.raises(AssertionError, match=r"^moezoo.nn.rotary, line \d+: "):
        imports("moezoo.nn.rotary", f"{code['moezoo.nn.rotary']}\n{line}\n", code)


def test_a_module_that_is_imported_by_its_path_is_found(code):
    assert "moezoo.training.step" in imports("moezoo.nn.rotary", "import moezoo.training.step as step", code)


def find_hidden(code: Mapping[str, str]) -> set[str]:
    """Return modules whose name is bound to something else in their package, by import, definition or assignment."""
    found = set()
    for module, text in code.items():
        for node in ast.parse(text).body:
            bound = []
            if isinstance(node, ast.ImportFrom):  # importing a module under its own name does not hide it
                bound = [a.asname or a.name for a in node.names if f"{node.module}.{a.name}" not in code]
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound = [node.name]
            elif isinstance(node, ast.Assign):
                bound = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= {f"{module}.{name}" for name in bound} & set(code)
    return found


def test_no_name_hides_a_module(code):
    assert find_hidden(code) == HIDES
    for name in moezoo.__all__:
        assert f"moezoo.{name}" not in code or isinstance(getattr(moezoo, name), ModuleType)


@pytest.mark.parametrize("line", ["def rules(): ...", "from moezoo.errors import UserError as rules", "rules = 1"])
def test_a_planted_name_is_found(code, line):
    assert find_hidden({name: "" for name in code} | {"moezoo.parallel": line}) == {"moezoo.parallel.rules"}


def test_a_function_may_have_the_name_of_its_package():
    from moezoo.kernels import grouped_matmul

    assert callable(grouped_matmul)


def find_wrong_entries(text: str) -> list[str]:
    """Return entries of `Args:`, `Attributes:` and `Raises:` that name several things, or begin or end differently."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    sections = re.findall(r"^(?:Args|Attributes|Raises):\n((?:\n| .*\n?)+)", "\n".join(docs), re.MULTILINE)
    entries = [entry.strip() for each in sections for entry in re.split(r"^ {4}(?=\S)", each, flags=re.MULTILINE)[1:]]
    allowed = re.compile(r"\w+: ([A-Z`\"\[\d]|(float|int|uint)\d).*\.", re.DOTALL)
    return [entry for entry in entries if not allowed.fullmatch(entry)]


def test_entries_of_docstrings_are_alike(code):
    assert [(module, entry) for module, text in code.items() for entry in find_wrong_entries(text)] == []


@pytest.mark.parametrize(
    "entry", ["x: the tokens.", "x: The tokens", "x, z: Tokens.", "x The tokens.", "x: Tokens,\n            and more"]
)
def test_a_planted_entry_is_found(entry):
    sections = f"Args:\n        y: int32 [T].\n        {entry}\n\n    Raises:\n        E: So."
    assert len(find_wrong_entries(f'def f(x):\n    """Return x.\n\n    {sections}\n    """')) == 1
