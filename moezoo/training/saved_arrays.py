"""The arrays of a checkpoint, read in parts onto the host, without a device that holds them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from moezoo.errors import UserError
from moezoo.hub.tensors import Tensor, arrays_by_path
from moezoo.hub.values import ModelValues
from moezoo.models.base import LanguageModel
from moezoo.training.checkpoint import FROZEN, array_name, check_arrays, check_kept, saved_arrays


class SavedArray:
    """An array of a checkpoint, indexed by numbers of its leading dimensions.

    The checkpoint stores it in chunks, each of which is decoded as a whole. Indexing reads the chunks that have the
    index, and keeps them until another index needs others, or `forget` is called.

    Attributes:
        dtype: Its dtype.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype):
        self.dtype = dtype
        self._folder, self._name, self._store = folder, name, None
        self.forget()

    def start_of_block(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return where the chunks that have the index begin in the indexed dimensions."""
        chunk = self._open().chunk_layout.read_chunk.shape
        return tuple(number // size * size for number, size in zip(index, chunk, strict=False))

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        start = self.start_of_block(index)
        if self._block is None or self._start != start:
            self.forget()
            self._start, self._block = start, self._read_block(start)
        return self._block[tuple(number - first for number, first in zip(index, start, strict=True))]

    def _read_block(self, start: tuple[int, ...]) -> np.ndarray:
        store = self._open()
        chunk = store.chunk_layout.read_chunk.shape
        spans = tuple(slice(i, min(i + n, end)) for i, n, end in zip(start, chunk, store.shape, strict=False))
        try:
            return np.asarray(store[spans].read().result())
        except Exception as error:  # tensorstore raises many kinds
            raise self._unreadable(error) from None

    def forget(self) -> None:
        """Release the chunks."""
        self._start: tuple[int, ...] = ()
        self._block: np.ndarray | None = None

    def _open(self) -> Any:
        if self._store is None:
            import tensorstore  # orbax stores arrays with it; slow to import

            base = {"driver": "file", "path": f"{self._folder}/"}
            place = {"driver": "ocdbt", "base": base, "path": f"{self._name.replace('/', '.')}/"}
            try:
                self._store = tensorstore.open({"driver": "zarr", "kvstore": place}, read=True).result()
            except Exception as error:
                raise self._unreadable(error) from None
        return self._store

    def _unreadable(self, error: Exception) -> UserError:
        if self._folder.name != FROZEN:
            check_kept(self._folder.parent)
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        return UserError(f"{self._folder}: {self._name} cannot be read ({reason})")


class SavedValues(ModelValues):
    """The numbers of a checkpoint's model, in other dtypes if wanted.

    The arrays of one tensor are in memory, and of these only the chunks that have it. Tensors of the same chunks have
    keys next to each other, so each chunk is read once.
    """

    def __init__(
        self, checkpoint: Path, about: Mapping[str, Any], saved: LanguageModel, wanted: LanguageModel, elsewhere: PyTree
    ):
        """Read `checkpoint`, which `about` describes, a model of the shapes `saved`, in the dtypes of `wanted`.

        `elsewhere` has the arrays that the checkpoint does not hold, and None in place of the others. Raises
        `UserError` if the checkpoint holds the arrays of another model.
        """
        here = jax.tree.map(lambda array: array is None, elsewhere, is_leaf=lambda array: array is None)
        check_arrays(saved_arrays(about, "model"), eqx.filter(saved, here), int(checkpoint.name))
        model, frozen = (checkpoint / "model").resolve(), (checkpoint.parent / FROZEN).resolve()  # no `..` is opened

        def array(path: Any, x: Any) -> SavedArray:
            name = array_name(path)
            return SavedArray(model if name in about["arrays"]["model"] else frozen, name, np.dtype(x.dtype))

        arrays = eqx.combine(jax.tree_util.tree_map_with_path(array, eqx.filter(saved, here)), elsewhere)
        self._open = list[SavedArray]()
        super().__init__(arrays_by_path(arrays), arrays_by_path(wanted))

    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        needed = [array for path, _ in tensor.parts for array in self._saved(path)]
        for array in self._open:
            if array not in needed:
                array.forget()
        self._open = needed
        return super().read(tensor, process)

    def key(self, tensor: Tensor) -> tuple[Any, ...]:
        path, index = tensor.parts[0]
        return path, *(array.start_of_block(index) for array in self._saved(path))

    def _saved(self, path: str) -> list[SavedArray]:
        """Return the arrays of a parameter that are in the checkpoint."""
        return [array for array in jax.tree.leaves(self._arrays[path]) if isinstance(array, SavedArray)]
