"""Sizes of blocks by compute capability, as measured: the table `blocks.json` beside this file.

`python scripts/bench.py accelerator tune=true` measures them on a GPU and writes the table; without an entry a backend
takes the sizes that stand in its file. An entry holds the fields of the backend's named tuple of sizes:

    {"9.0": {"blocked": {"products": [512, 128], "experts": [512, 128]}}}
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moezoo.errors import UserError
from moezoo.parallel.kernels import Target

TABLE = Path(__file__).with_name("blocks.json")
# Capability -> backend -> sizes by field.
Table = Mapping[str, Mapping[str, Mapping[str, Any]]]
_Sizes = TypeVar("_Sizes", bound=NamedTuple)
_tried: Table | None = None


def read() -> Table:
    """Return the table; empty where there is none."""
    if _tried is not None:
        return _tried
    try:
        return json.loads(TABLE.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{TABLE} is not JSON ({error}); remove it, or measure again") from None


@contextlib.contextmanager
def trying(table: Table) -> Iterator[None]:
    """Let `table` stand for the file in programs that are traced meanwhile."""
    global _tried
    before, _tried = _tried, table
    try:
        yield
    finally:
        _tried = before


def measured(otherwise: _Sizes, backend: str, gpu: Target) -> _Sizes:
    """Return the sizes of a backend for a GPU; `otherwise` where none are measured.

    Raises:
        UserError: The table has an entry that is no such sizes.
    """
    found = read().get(gpu.capability or "", {}).get(backend, {})
    kinds = {name: type(value) for name, value in otherwise._asdict().items()}
    sizes = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    for name, value in sizes.items():
        numbers = value if isinstance(value, tuple) else (value,)
        fits = kinds.get(name) is type(value) and numbers and all(type(n) is int and n > 0 for n in numbers)
        if not fits:
            expected = f"fields {', '.join(kinds)} with integers above 0"
            raise UserError(f"{TABLE}: {gpu.capability} {backend} has {name}={found[name]}, expected {expected}")
    return otherwise._replace(**sizes)
