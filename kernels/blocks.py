"""Sizes of blocks by compute capability, as measured: the table `blocks.json` beside this file.

`python scripts/bench.py device tune=true` measures them on a GPU and writes the table; without an entry a backend
takes the sizes that stand in its file. An entry holds the fields of the backend's named tuple of sizes:

    {"9.0": {"blocked": {"products": [512, 128], "experts": [512, 128]}}}
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
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
        table = json.loads(TABLE.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{TABLE} is not JSON ({error}); remove it, or measure again") from None
    is_nested = isinstance(table, dict) and all(isinstance(each, dict) for each in table.values())
    if not (is_nested and all(isinstance(sizes, dict) for each in table.values() for sizes in each.values())):
        raise UserError(f'{TABLE} is no table {{"9.0": {{"BACKEND": {{FIELD: SIZE}}}}}}; remove it, or measure again')
    return table


@contextlib.contextmanager
def trying(table: Table) -> Iterator[None]:
    """Let `table` stand for the file in programs that are traced meanwhile."""
    global _tried
    before, _tried = _tried, table
    try:
        yield
    finally:
        _tried = before


def measured(
    otherwise: _Sizes, backend: str, gpu: Target, refusal: Callable[[_Sizes], str | None] = lambda sizes: None
) -> _Sizes:
    """Return the sizes of a backend for a GPU; `otherwise` where none are measured.

    Args:
        otherwise: The sizes that stand in the backend's file.
        backend: Its name.
        gpu: The GPU.
        refusal: A function that says why sizes cannot work; None if they can.

    Raises:
        UserError: The table has an entry that is no such sizes, or that cannot work.
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
    replaced = otherwise._replace(**sizes)
    if sizes and (reason := refusal(replaced)):
        raise UserError(f"{TABLE}: {gpu.capability} {backend}: {reason}; remove the entry, or measure again")
    return replaced
