"""Put batches onto devices; each process reads only the rows that its own devices hold."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Integer

from moezoo.data import Batch


class Feed:
    """Puts batches [..., batch, seq] onto devices, laid out by `sharding`.

    `rows` are the indices of the rows that this process needs, in ascending order. Rows are always read whole, even if
    devices split the sequence; `order` is the order in which devices get their tokens (`Execution.token_order`).
    """

    def __init__(self, sharding: Sharding, shape: tuple[int, ...], order: Integer[np.ndarray, " seq"]):
        self._sharding, self._shape, self._order = sharding, shape, order
        here = [index[-2] for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
        self.rows: Integer[np.ndarray, " rows"] = np.unique(
            np.concatenate([np.arange(shape[-2])[rows] for rows in here])
        )

    def __call__(self, batch: Batch) -> Batch:
        """Return global arrays from the `rows` of a batch, NumPy arrays [..., rows, seq]."""

        def to_devices(x: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                wanted = np.arange(self._shape[-2])[index[-2]]
                return x[(*index[:-2], np.searchsorted(self.rows, wanted), slice(None))][..., self._order[index[-1]]]

            return jax.make_array_from_callback(self._shape, self._sharding, part)

        return Batch(*map(to_devices, batch))
