"""Put batches onto devices; each process reads only the rows that its own devices hold."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Integer

from moezoo.data import Batch
from moezoo.errors import UserError


class Feed:
    """Puts batches [..., batch, seq] onto devices, laid out by `sharding`.

    `rows` are the indices of the rows that this process needs, in ascending order. Rows are always read whole, even if
    devices split the sequence; `order` is the order in which devices get their tokens (`MeshExecution.token_order`).
    """

    def __init__(self, sharding: Sharding, shape: tuple[int, ...], order: Integer[np.ndarray, " seq"]):
        self._sharding, self._shape, self._order = sharding, shape, order
        here = [index[-2] for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
        self.rows: Integer[np.ndarray, " rows"] = np.unique(
            np.concatenate([np.arange(shape[-2])[rows] for rows in here])
        )

    def __call__(self, batch: Batch) -> Batch:
        """Return global arrays from the `rows` of a batch, NumPy arrays [..., rows, seq].

        Raises:
            UserError: Tokens are not in the order of documents and positions, which attention relies on.
        """
        _check_order(batch)

        def to_devices(x: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                wanted = np.arange(self._shape[-2])[index[-2]]
                return x[(*index[:-2], np.searchsorted(self.rows, wanted), slice(None))][..., self._order[index[-1]]]

            return jax.make_array_from_callback(self._shape, self._sharding, part)

        return Batch(*map(to_devices, batch))


def _check_order(batch: Batch) -> None:
    """Raise `UserError` if a row is not sorted by segment, then position, with padding first or last."""
    segment, position = (np.asarray(x, np.int64) for x in (batch.segments, batch.positions))
    last = np.where(segment[..., :1] == 0, 0, np.iinfo(np.int32).max)
    segment = np.where(segment == 0, last, segment)
    step, ahead = np.diff(segment, axis=-1), np.diff(position, axis=-1)
    wrong = (step < 0) | ((step == 0) & (ahead < 0))
    if wrong.any():
        *_, row, token = np.argwhere(wrong)[0]
        raise UserError(
            f"a batch has row {row} out of order at token {token + 1}: the token before it is of a later document or "
            "position; sort each row by segments, then positions, with padding (segment 0) at one end"
        )
