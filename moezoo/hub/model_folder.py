"""A folder of a model that is ready to be written, and what it has from the folder that it is a copy of."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moezoo.hub.holdings import FewBits, Holding
from moezoo.hub.plan import Leaving, Plan
from moezoo.hub.tensors import count, list_names
from moezoo.hub.weight_files import WeightFiles
from moezoo.hub.writing import Seen, as_bits, ignore, write_folder
from moezoo.parallel import distributed


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a folder has from the one that it was written like.

    Attributes:
        tensors: Names of tensors that no parameter of the model has, by their purpose.
        files: Names of files other than weights and config.json, copied as they are.
        skipped: Names in the other folder that were not copied.
        changed: Whether the model's own tensors differ from those of the other folder, as after training.
        rounded: Names of the model's tensors that are those of the other folder in a less precise dtype.
    """

    tensors: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    changed: bool = False
    rounded: tuple[str, ...] = ()


class Like(NamedTuple):
    """The folder that a new one is a copy of.

    Attributes:
        files: Its weights.
        holdings: The tensors of the model there, by their names.
        carried: What the new folder has from it, without the comparison of numbers.
    """

    files: WeightFiles
    holdings: Mapping[str, Holding]
    carried: Carried

    def notes(self, carried: Carried) -> Iterator[str]:
        """Yield what a user should know of a copy, given its `carried`.

        That is: which tensors are beside others than those that they were trained with, and which are those of this
        folder but for rounding.
        """
        like = self.files.folder
        if carried.changed and carried.tensors:
            parts = (
                f"{count(names)} from there, for {use}: {list_names(names)}" for use, names in carried.tensors.items()
            )
            yield f"the model's weights differ from those of {like}, but {'; '.join(parts)}"
        wide = [name for name in carried.rounded if self.files.stored_dtype(name) == np.float64]
        if wide:
            yield (
                f"{count(wide)} less precise than in {like}, which has float64; no model is more precise than float32: "
                f"{list_names(wide)}"
            )
        if names := [name for name in carried.rounded if name not in wide]:
            yield f"{count(names)} less precise than in {like}; dtype=float32 keeps them: {list_names(names)}"


class ModelFolder(NamedTuple):
    """A folder of a model that is ready to be written.

    Attributes:
        plan: Its files.
        leaves: How the tensors of the model are written.
        like: The folder that it is a copy of; None for a folder of the model alone.
    """

    plan: Plan
    leaves: Leaving
    like: Like | None = None

    def write(self, folder: Path, seen: Seen = ignore) -> Carried:
        """Write the folder, and return what it has from the one that it is like. All processes call this.

        `folder` and `seen` are those of `write_folder`. Raises `UserError` as it does.
        """
        if self.like is None:
            write_folder(folder, self.plan, seen)
            return Carried()
        comparison = _Comparison(self.like, seen)
        write_folder(folder, self.plan, comparison.see)
        return comparison.carried()

    def notes(self, carried: Carried) -> Iterator[str]:
        """Yield what a user should know of the folder, given what `write` returned."""
        if self.like is not None:
            yield from self.like.notes(carried)
        yield from self.leaves.notes()


class _Comparison:
    """The numbers that are written against those of the folder that the new one is like. `seen`: sees them too."""

    def __init__(self, like: Like, seen: Seen):
        self._like, self._seen, self._changed, self._rounded = like, seen, False, list[str]()

    def see(self, name: str, value: np.ndarray) -> None:
        """Compare a tensor of the model."""
        holding, files = self._like.holdings.get(name), self._like.files
        if isinstance(holding, FewBits) and value.dtype != np.uint8:
            stored = holding.read(value.dtype)
        elif name in files.tensors:
            stored = files.read(name)
        else:
            stored = np.zeros(0, np.uint8)
        if value.dtype == np.uint8:
            same = exact = np.array_equal(as_bits(value), as_bits(stored))
        else:
            same, exact = _same_bits(value, stored), _same_bits(stored, value)
        self._changed = self._changed or not same
        self._rounded += [name] if same and not exact else []
        self._seen(name, value)

    def carried(self) -> Carried:
        """Return what the new folder has from the other one, as all processes together have found."""
        found = list(map(json.loads, distributed.gather_texts(json.dumps([self._changed, self._rounded]))))
        rounded = tuple(name for _, names in found for name in names)
        return dataclasses.replace(self._like.carried, changed=any(changed for changed, _ in found), rounded=rounded)


def _same_bits(value: np.ndarray, stored: np.ndarray) -> bool:
    """Return whether `value` is what loading makes of a stored tensor."""
    with np.errstate(over="ignore"):
        return np.array_equal(as_bits(value), as_bits(stored.astype(value.dtype)))
