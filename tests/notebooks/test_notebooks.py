"""Each notebook runs from top to bottom in a separate process without an error, and is committed with its outputs."""

from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient

CACHE = "jax_compilation_cache_dir"
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("name", [p.name for p in sorted(NOTEBOOKS.glob("*.ipynb"))])
@pytest.mark.filterwarnings("default")  # Jupyter itself warns
def test_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", getattr(jax.config, CACHE) or "")
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    shown = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in shown), "commit the notebook executed"
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
