"""Whole weights in an adapter's file: copies of the base's, as PEFT writes of the head and of `modules_to_save`.

A copy that equals the base changes nothing. One that was trained is no low-rank pair, and is refused.
"""

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from moezoo.errors import UserError
from moezoo.hub.tensors import Tensor, tensors
from moezoo.hub.values import Values
from moezoo.hub.weight_files import WeightFiles
from moezoo.models.hub import Hub
from moezoo.parallel import distributed

_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save(\.default)?)(?=\.)")


class Copies(NamedTuple):
    """The weights of a file, by name, and the tensor of the model that each is a copy of."""

    files: WeightFiles
    tensors: Mapping[str, Tensor]

    @classmethod
    def find(cls, files: WeightFiles, names: Collection[str], prefix: str, model: Any, hub: Hub) -> "Copies":
        """Return those of `names` that are tensors of the model, or of its shapes, after PEFT's words in them.

        A tied unembedding is a copy of the embedding.
        """
        if not names:
            return cls(files, {})
        by_name = {tensor.name: tensor for tensor in tensors(model, hub)}
        own = {row.ours[0]: row.name for row in hub.rows(model.config)}
        if model.config.tied_embeddings:
            by_name[own["unembedding.weight"]] = by_name[own["embedding.weight"]]
        meant = {name: _WRAPPERS.sub("", name.removeprefix(prefix)) for name in names}
        return cls(files, {name: by_name[found] for name, found in meant.items() if found in by_name})

    def check(self, values: Values) -> None:
        """Raise `UserError` unless each equals the base in `values`, both in the smaller of their two dtypes."""
        for name, tensor in self.tensors.items():
            distributed.first(functools.partial(self._compare, name, values.read(tensor, 0)))

    def _compare(self, name: str, base: Any) -> None:
        self.files.check(name, base.shape)
        copy = self.files.read(name)
        dtype = min(base.dtype, copy.dtype, key=lambda kind: kind.itemsize)
        if not np.array_equal(copy.astype(dtype), base.astype(dtype)):
            raise UserError(
                f"{self.files.tensors[name].path.parent}: {name} is a whole weight that differs from the base's; merge "
                "with PEFT, then load the merged folder"
            )
