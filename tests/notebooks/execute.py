"""Run notebooks from top to bottom, and write them with what they print and draw.

python tests/notebooks/execute.py [NAME.ipynb ...]        # by default all; after each change of a notebook
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
# What a notebook says of itself. Versions of this machine would differ at each run.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
# A path of some machine: two or more names behind a slash or a drive that begins a word.
MACHINE_PATH = re.compile(r"(?<![\w.~\])}>/:<-])(?:/|[A-Za-z]:\\+)[\w.@+-]+[/\\][\w./\\@+-]+")


def run(notebook: Any, folder: Path) -> None:
    """Run the cells of a notebook in `folder`, in a process of their own; their outputs replace earlier ones.

    Raises `nbclient.exceptions.CellExecutionError` at the first cell that raises.
    """
    # Sockets in files: a port found free may be another's by the time that a new kernel binds it.
    with tempfile.TemporaryDirectory() as sockets:
        NotebookClient(
            notebook,
            km=AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel"),
            timeout=900,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        ).execute()


def clean(notebook: Any, folder: Path) -> None:
    """Shorten paths of this machine in what cells printed, and leave out what describes this machine alone."""
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            for name, long in ((".", str(folder)), ("~", str(Path.home()))):
                if "text" in output:
                    output.text = output.text.replace(long, name)
                for kind, text in output.get("data", {}).items():
                    if kind.startswith("text/"):
                        output.data[kind] = text.replace(long, name)


def texts(cell: Any) -> str:
    """Return what a cell and its outputs say as text."""
    found = [cell.source]
    for output in cell.get("outputs", ()):
        found += [output.get("text", ""), *output.get("traceback", ())]
        found += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(found)


def main(names: list[str]) -> None:
    """Run notebooks by their names, and write them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name in names or sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")):
        began, notebook = time.monotonic(), nbformat.read(NOTEBOOKS / name, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, Path(folder))
            clean(notebook, Path(folder))
        nbformat.write(notebook, NOTEBOOKS / name)
        size = (NOTEBOOKS / name).stat().st_size
        print(f"{name}: {time.monotonic() - began:.0f} s, {size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
