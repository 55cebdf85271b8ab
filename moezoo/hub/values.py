"""Where the numbers of a new folder come from, one tensor at a time.

What writes a folder asks for each of its tensors, which may be made of several arrays of the model:

| class | reads |
|---|---|
| `ModelValues` | a model in memory, and by `moezoo.training.saved_arrays` a checkpoint |
| `FolderValues` | another folder, also where it has the same arrays in other tensors or in few bits |
| `moezoo.hub.adapter_files.MergedValues` | one of these, with pairs added |
"""

import abc
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.hub.holdings import FewBits as InFewBits
from moezoo.hub.holdings import Holding, read_part
from moezoo.hub.tensors import Tensor, arrays_by_path
from moezoo.models.base import LanguageModel
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.fetch import fetch
from moezoo.parallel.stored import Stored, materialise


class Values(abc.ABC):
    """The numbers of a model's tensors.

    Attributes:
        wanted: The arrays of the model, or their shapes, by their paths: what is read has their dtypes. Arrays inside
            of containers of few bits are there too.
    """

    def __init__(self, wanted: Mapping[str, Any]):
        self.wanted = {**wanted, **inside(wanted)}

    def has(self, tensor: Tensor) -> bool:
        """Return whether the model has the arrays of a tensor, such as the scales of a container."""
        return all(path in self.wanted for path, _ in tensor.parts)

    def dtype(self, tensor: Tensor) -> np.dtype:
        """Return the dtype that `read` gives."""
        return np.dtype(self.wanted[tensor.parts[0][0]].dtype)

    @abc.abstractmethod
    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        """Return the tensor as a file has it on `process`, and None in the others. All must make the same calls.

        A number too large for the dtype becomes infinite.
        """

    @abc.abstractmethod
    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        """Return the dtype that the numbers have where they are read from."""

    def key(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return what a single process sorts tensors by before it reads them; equal keys keep their order."""
        del tensor
        return ()


class ModelValues(Values):
    """Those of a model, whose arrays lie on any devices."""

    def __init__(self, arrays: Mapping[str, Any], wanted: Mapping[str, Any] | None = None):
        """Read `arrays`, by their paths (`arrays_by_path`), in the dtypes of `wanted`, by default in their own."""
        super().__init__(arrays if wanted is None else wanted)
        self._arrays = {**arrays, **inside(arrays)}

    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        return np.dtype(self._arrays[tensor.parts[0][0]].dtype)

    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        dtype = self.stored_dtype(tensor)
        parts = [self._read_part(self._arrays[path], index, process, dtype) for path, index in tensor.parts]
        here = [part for part in parts if part is not None]
        with np.errstate(over="ignore"):
            return tensor.to_file(here).astype(self.dtype(tensor), copy=False) if here else None

    @staticmethod
    def _read_part(parameter: Any, index: tuple[int, ...], process: int, dtype: np.dtype) -> np.ndarray | None:
        """Return one part of a parameter; a container gives what it stands for, in `dtype`."""
        if not isinstance(parameter, Stored):
            return fetch(parameter, index, process)
        part = jax.tree.map(lambda array: fetch(array, index, process), parameter)
        if process != jax.process_index():
            return None
        return np.asarray(materialise(jax.tree.map(jnp.asarray, part), dtype))


def inside(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of containers of few bits, by the paths that `FewBitTensor` gives them."""
    few = {path: container for path, container in arrays.items() if isinstance(container, FewBits)}
    return {
        f"{path}.{name}": getattr(container, name) for path, container in few.items() for name in ("values", "scale")
    }


class FolderValues(Values):
    """Those of a folder, in the dtypes of `shapes`, the shapes of its model."""

    def __init__(self, holdings: Iterable[Holding], shapes: LanguageModel):
        super().__init__(arrays_by_path(shapes))
        # By the parts of the tensor that is asked for: whole tensors of the folder, and what containers have of them.
        self._holdings = {holding.tensor.parts: holding for holding in holdings}
        self._stored: dict[Any, tuple[InFewBits, str]] = {}
        for holding in self._holdings.values():
            if isinstance(holding, InFewBits):
                few = holding.few
                self._stored |= {each.parts: (holding, each.name) for each in (few.kept_values, few.kept_scale)}
        # Tensors of other parts or layouts than any here, as of experts in another form, are made of those of a layer.
        self._of_layer: dict[Any, list[Holding]] = {}
        kept = ((parts, holding) for parts, (holding, _) in self._stored.items())
        for parts, holding in itertools.chain(self._holdings.items(), kept):
            for path, index in parts:
                self._of_layer.setdefault((path, index[:1]), []).append(holding)

    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        if found := self._stored.get(tensor.parts):
            return found[0].files.stored_dtype(found[1])
        path, index = tensor.parts[0]
        return self._holdings.get(tensor.parts, self._of_layer[path, index[:1]][0]).stored_dtype

    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        if process != jax.process_index():
            return None
        if found := self._stored.get(tensor.parts):
            return found[0].read_stored(found[1])
        holding = self._holdings.get(tensor.parts)
        if holding is not None and holding.plain.layout == tensor.layout:
            return holding.read(self.dtype(tensor))
        parts = ((path, self.wanted[path].shape, index) for path, index in tensor.parts)
        dtype = self.dtype(tensor)
        return tensor.to_file([read_part(self._of_layer[part[0], part[2][:1]], *part, dtype) for part in parts])
