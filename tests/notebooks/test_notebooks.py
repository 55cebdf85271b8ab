"""Each notebook runs from top to bottom, and is committed with what it prints and draws. README lists all of them."""

import re
from pathlib import Path

import jax
import nbformat
import pytest
from execute import MACHINE_PATH, METADATA, NOTEBOOKS, run, texts

CACHE = "jax_compilation_cache_dir"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
MOST_BYTES = 300_000


# CI runs the first steps, and from a folder to a trained one. The suite has what the others do.
EACH_WEEK = ("layouts.ipynb", "own_dispatch.ipynb")


def read(name):
    return nbformat.read(NOTEBOOKS / name, as_version=4)


@pytest.fixture(params=NAMES)
def notebook(request):
    return read(request.param)


@pytest.mark.notebooks
@pytest.mark.filterwarnings("default")  # Jupyter itself warns
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.weekly] * (name in EACH_WEEK)) for name in NAMES]
)
def test_runs(name, tmp_path, monkeypatch):
    """Its assertions hold: agreement with plain loops, with one device, and the like."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", getattr(jax.config, CACHE) or "")
    run(read(name), tmp_path)


def test_is_committed_executed(notebook):
    """From top to bottom, once, without an error, and without what only the machine of its last run explains."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run tests/notebooks/execute.py"
    assert [output for cell in cells for output in cell.outputs if output.output_type == "error"] == []
    assert [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"] == []
    assert notebook.metadata == METADATA
    assert [cell.metadata for cell in notebook.cells if cell.metadata] == []
    assert [found for cell in notebook.cells for found in MACHINE_PATH.findall(texts(cell))] == []


def test_has_claims_that_are_checked(notebook):
    assert sum("assert " in cell.source for cell in notebook.cells) >= 2


def test_starts_with_a_title_and_a_question(notebook):
    title, question, *_ = notebook.cells[0].source.split("\n\n")
    assert title.startswith("# ")
    assert re.fullmatch(r"\*.+\?\*", question.replace("\n", " "))


@pytest.mark.parametrize("name", NAMES)
def test_is_small(name):
    assert (NOTEBOOKS / name).stat().st_size < MOST_BYTES


def test_every_notebook_is_listed():
    """README names each, and no page or notebook links to one that is not there."""
    root = NOTEBOOKS.parent
    assert set(re.findall(r"notebooks/(\w+\.ipynb)", (root / "README.md").read_text())) == set(NAMES)
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        assert set(re.findall(r"notebooks/(\w+\.ipynb)", page.read_text())) <= set(NAMES), page.name


def test_links_lead_somewhere(notebook):
    """Of a notebook: to files of the repository."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\((?!https?:)([^)#]+)", cell.source):
                assert (NOTEBOOKS / link).exists(), link


@pytest.mark.parametrize(
    "text", ["/home/me/x", "run_dir /tmp/a/b", "'/opt/venv/lib/x.py'", r"C:\Users\me", "(/usr/lib/x)"]
)
def test_paths_of_a_machine_are_found(text):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize(
    "text",
    ["0.96/0.92", "layers/weights", "runs/a/b", "https://a.org/b/c", "~/.cache/moezoo/x", "a / b / c", "../docs/x.md"],
)
def test_other_slashes_are_none(text):
    assert not MACHINE_PATH.search(text)


@pytest.mark.notebooks
@pytest.mark.filterwarnings("default")
def test_a_claim_that_does_not_hold_stops_a_notebook(tmp_path):
    source = "import moezoo\nassert moezoo.compose('steps=3').steps == 4"
    wrong = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)], metadata=METADATA)
    with pytest.raises(Exception, match="AssertionError"):
        run(wrong, Path(tmp_path))
