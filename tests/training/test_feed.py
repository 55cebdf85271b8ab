"""Rows on their way to devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from meshes import auto_mesh

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
