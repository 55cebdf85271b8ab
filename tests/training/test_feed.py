"""Rows on their way to devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from meshes import auto_mesh
from refusals import refused

from moezoo.data import Batch
from moezoo.training.feed import Feed

SHAPE = (2, 8, 6)  # micro-steps, rows, seq


def test_each_device_gets_its_part_of_the_rows_of_its_process(monkeypatch):
    """A process whose devices hold rows 2, 3, 6 and 7, and halves of the sequence in another order."""
    sharding = NamedSharding(auto_mesh(fsdp=4, context=2), PartitionSpec(None, "fsdp", "context"))
    everywhere = sharding.devices_indices_map(SHAPE)
    here = {device: index for device, index in everywhere.items() if index[1].start in (2, 6)}
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", lambda self, shape: here)
    parts = []

    def make_array(shape, sharding, part):
        parts.append({device: part(index) for device, index in here.items()})
        return jnp.zeros(())

    monkeypatch.setattr(jax, "make_array_from_callback", make_array)
    order = np.array([4, 0, 5, 1, 3, 2])
    feed = Feed(sharding, SHAPE, order)
    assert feed.rows.tolist() == [2, 3, 6, 7]
    whole = np.arange(4 * np.prod(SHAPE), dtype=np.int32).reshape(4, *SHAPE)
    given = whole[:, :, feed.rows]
    feed(Batch(*given))
    np.testing.assert_array_equal(given, whole[:, :, feed.rows])  # the host's arrays keep their order
    for array, part in zip(whole, parts, strict=True):
        for device, index in here.items():
            np.testing.assert_array_equal(part[device], array[..., order][index])


@pytest.mark.parametrize(
    ("segments", "positions", "token"),
    [
        ([1, 1, 2, 2, 0, 0], [0, 1, 0, 1, 0, 0], None),  # padding last
        ([0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 0, 1], None),  # padding first
        ([0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5], None),
        ([1, 1, 2, 1, 0, 0], [0, 1, 0, 2, 0, 0], 3),
        ([1, 1, 1, 2, 2, 2], [0, 2, 1, 0, 1, 2], 2),
        ([1, 0, 1, 1, 1, 1], [0, 0, 1, 2, 3, 4], 2),  # padding inside
        ([0, 1, 1, 1, 1, 0], [0, 0, 1, 2, 3, 0], 5),
    ],
)
def test_tokens_out_of_order_are_refused(segments, positions, token):
    """Attention goes by the order of keys, which is known when a step is traced."""
    sharding = NamedSharding(auto_mesh(fsdp=1), PartitionSpec())
    feed = Feed(sharding, (2, 6), np.arange(6))
    numbers = np.zeros((2, 6), np.int32)
    rows = [np.asarray([[1, 1, 1, 1, 1, 1], x], np.int32) for x in (segments, positions)]
    rows[1][0] = np.arange(6)
    batch = Batch(numbers, numbers, *rows)
    if token is None:
        feed(batch)
    else:
        with refused(f"a batch has row 1 out of order at token {token}", "padding (segment 0) at one end"):
            feed(batch)
