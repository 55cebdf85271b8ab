"""The numbers of a model's tensors, read one tensor at a time from where they are.

| class | where the numbers are |
|---|---|
| `ModelValues` | the arrays of a model, on any devices |
| `FolderValues` | the files of a Hugging Face folder |
| `moezoo.training.saved_arrays.SavedValues` | a checkpoint |

A `Tensor` names its parts: for each one the path of an array of ours, and the index of its layer and expert. A weight
of few bits is two tensors in a file, the numbers and their scales. Their parts have the paths PATH.values and
PATH.scale, where PATH is that of the container.
"""

import abc
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.hub.holdings import FewBits as FewBitsHolding
from moezoo.hub.holdings import Holding, read_part
from moezoo.hub.tensors import Tensor, arrays_by_path
from moezoo.models.base import LanguageModel
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.fetch import fetch
from moezoo.parallel.stored import Stored, materialise


class Values(abc.ABC):
    """A source of the numbers of a model's tensors.

    Attributes:
        wanted: The arrays of the model, or their shapes, by path, those inside containers of few bits too. What is read
            has their dtypes.
    """

    def __init__(self, wanted: Mapping[str, Any]):
        self.wanted = {**wanted, **inside(wanted)}

    def has(self, tensor: Tensor) -> bool:
        """Return whether the model has all arrays of a tensor; it has no scales where it has arrays for containers."""
        return all(path in self.wanted for path, _ in tensor.parts)

    def dtype(self, tensor: Tensor) -> np.dtype:
        """Return the dtype of what `read` returns."""
        return np.dtype(self.wanted[tensor.parts[0][0]].dtype)

    @abc.abstractmethod
    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        """Return the tensor as a file has it, on the host of `process`; None in other processes.

        All processes must make the same calls in the same order. A number too large for the dtype becomes infinite.
        """

    @abc.abstractmethod
    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        """Return the dtype that the numbers have where they are, before they are cast to `dtype`."""

    def key(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return what tensors are sorted by before they are read, where one process reads all; the sort is stable."""
        del tensor
        return ()


class ModelValues(Values):
    """The numbers of a model whose arrays lie on any devices of any processes."""

    def __init__(self, arrays: Mapping[str, Any], wanted: Mapping[str, Any] | None = None):
        """Read `arrays`, by path (`arrays_by_path`), in the dtypes of `wanted`, by default in their own."""
        super().__init__(arrays if wanted is None else wanted)
        self._arrays = {**arrays, **inside(arrays)}

    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        return np.dtype(self._arrays[tensor.parts[0][0]].dtype)

    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        dtype = self.stored_dtype(tensor)
        fetched = [self._read_part(self._arrays[path], index, process, dtype) for path, index in tensor.parts]
        parts = [part for part in fetched if part is not None]
        with np.errstate(over="ignore"):
            return tensor.to_file(parts).astype(self.dtype(tensor), copy=False) if parts else None

    @staticmethod
    def _read_part(parameter: Any, index: tuple[int, ...], process: int, dtype: np.dtype) -> np.ndarray | None:
        """Return `parameter[index]` on `process`, and None elsewhere; of a container what it stands for, in `dtype`."""
        if not isinstance(parameter, Stored):
            return fetch(parameter, index, process)
        part = jax.tree.map(lambda array: fetch(array, index, process), parameter)
        if process != jax.process_index():
            return None
        return np.asarray(materialise(jax.tree.map(jnp.asarray, part), dtype))


def inside(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and the scales of each container of few bits, as PATH.values and PATH.scale."""
    containers = {path: array for path, array in arrays.items() if isinstance(array, FewBits)}
    return {f"{path}.{name}": getattr(x, name) for path, x in containers.items() for name in ("values", "scale")}


class FolderValues(Values):
    """The numbers of a folder, in the dtypes of `shapes`, the shapes of its model. Each process reads for itself."""

    def __init__(self, holdings: Iterable[Holding], shapes: LanguageModel):
        super().__init__(arrays_by_path(shapes))
        self._holdings = {holding.tensor.parts: holding for holding in holdings}
        # The tensors of numbers and of scales, by their parts: the weight of few bits, and the tensor's name in files.
        self._of_containers: dict[Any, tuple[FewBitsHolding, str]] = {}
        for holding in self._holdings.values():
            if isinstance(holding, FewBitsHolding):
                few = holding.few
                self._of_containers |= {each.parts: (holding, each.name) for each in (few.kept_values, few.kept_scale)}
        # All that this folder has of an array and a layer. Tensors are made of it that have other parts or another
        # layout than any here: those of another folder, which may have each expert in a tensor, or all in one.
        self._by_layer: dict[Any, list[Holding]] = {}
        of_containers = ((parts, holding) for parts, (holding, _) in self._of_containers.items())
        for parts, holding in itertools.chain(self._holdings.items(), of_containers):
            for path, index in parts:
                self._by_layer.setdefault((path, index[:1]), []).append(holding)

    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        if found := self._of_containers.get(tensor.parts):
            return found[0].files.stored_dtype(found[1])
        path, index = tensor.parts[0]
        return self._holdings.get(tensor.parts, self._by_layer[path, index[:1]][0]).stored_dtype

    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        if process != jax.process_index():
            return None
        if found := self._of_containers.get(tensor.parts):
            return found[0].read_stored(found[1])
        holding = self._holdings.get(tensor.parts)
        if holding is not None and holding.plain.layout == tensor.layout:
            return holding.read(self.dtype(tensor))
        dtype = self.dtype(tensor)
        parts = (
            read_part(self._by_layer[path, index[:1]], path, self.wanted[path].shape, index, dtype)
            for path, index in tensor.parts
        )
        return tensor.to_file([*parts])
