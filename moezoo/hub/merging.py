"""The tensors of a Hugging Face folder with an adapter merged into them."""

import numpy as np

from moezoo.hub.adapters import Adapter
from moezoo.hub.tensors import Tensor, arrays_by_path
from moezoo.hub.values import Values
from moezoo.models.base import LanguageModel


class MergedValues(Values):
    """Those of a folder plus scale A B of each pair, summed in float32 and rounded once to the dtypes of `shapes`."""

    def __init__(self, values: Values, adapter: Adapter, shapes: LanguageModel):
        """Merge `adapter` into `values`, which are read in float32."""
        super().__init__(arrays_by_path(shapes))
        self._values, self._adapter = values, adapter

    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        return self._values.stored_dtype(tensor)

    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        found = self._values.read(tensor, process)
        if found is None:
            return None
        if any(path in self._adapter.pairs for path, _ in tensor.parts):
            products = [
                self._adapter.product(path, index, shape)
                for (path, index), shape in zip(tensor.parts, tensor.shapes, strict=True)
            ]
            found = found + tensor.to_file(products)
        with np.errstate(over="ignore"):
            return found.astype(self.dtype(tensor), copy=False)
