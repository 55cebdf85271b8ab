"""The exchange of rows against a loop over pairs of devices: as CPUs emulate it, and as TPUs and GPUs are asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import moezoo
from moezoo.moe import transport

DEVICES, EMBED, MOST = 4, 3, 5


def documented(rows, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Do what JAX documents of `ragged_all_to_all`, by gathering everything; NaN where a caller breaks its rules."""
    rows, start, size, land = (lax.all_gather(x, axis_name) for x in (rows, input_offsets, send_sizes, output_offsets))
    me, slot, result = lax.axis_index(axis_name), jnp.arange(len(output))[:, None], output
    wrong = (recv_sizes != size[:, me]).any()
    for sender in range(len(rows)):
        first, count = land[sender, me], size[sender, me]
        taken = rows[sender][jnp.clip(start[sender, me] + slot[:, 0] - first, 0, rows.shape[1] - 1)]
        result = jnp.where((slot >= first) & (slot < first + count), taken, result)
        wrong |= (count > 0) & ((first + count > len(output)) | (start[sender, me] + count > rows.shape[1]))
    return jnp.where(wrong, jnp.nan, result)


@pytest.fixture
def _real_call(monkeypatch):
    """Take the call that a TPU or GPU runs, with its documented meaning."""
    monkeypatch.setattr(lax, "ragged_all_to_all", documented)
    monkeypatch.setattr(
        transport, "_emulate", lambda rows, transfer, room, most, axes: transport._ragged_all_to_all(
            rows, transfer, room=room, axes=axes
        )
    )  # fmt: skip


def check_against_loop():
    rng = np.random.default_rng(7)
    size = rng.integers(0, MOST + 1, (DEVICES, DEVICES)).astype(np.int32)
    size[1], size[:, 2] = 0, 0  # nothing to send, nothing to receive
    start, land = np.cumsum(size, 1, dtype=np.int32) - size, np.cumsum(size, 0, dtype=np.int32) - size
    count, room = int(size.sum(1).max()) + 2, int(size.sum(0).max()) + 1
    rows = rng.standard_normal((DEVICES, count, EMBED)).astype(np.float32)
    back = rng.standard_normal((DEVICES, room, EMBED)).astype(np.float32)
    wanted, gradient = np.zeros((DEVICES, room, EMBED), np.float32), np.zeros_like(rows)
    for sender, receiver in np.ndindex(DEVICES, DEVICES):
        for row in range(size[sender, receiver]):
            here, there = start[sender, receiver] + row, land[sender, receiver] + row
            wanted[receiver, there] = rows[sender, here]
            gradient[sender, here] = back[receiver, there]

    def local(rows, back):
        transfer = transport.Transfer(jnp.asarray(start), jnp.asarray(size), jnp.asarray(land))
        received, pull = jax.vjp(
            lambda rows: transport.exchange(rows[0], transfer, room, MOST, ("expert",))[None], rows
        )
        return received, pull(back)[0]

    mesh = moezoo.make_mesh(moezoo.MeshShape(expert=DEVICES))
    spec = PartitionSpec("expert")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    received, pulled = run(*(jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in (rows, back)))
    np.testing.assert_array_equal(received, wanted)
    np.testing.assert_array_equal(pulled, gradient)


def test_the_emulation_equals_the_loop():
    check_against_loop()


@pytest.mark.usefixtures("_real_call")
def test_the_real_call_equals_the_loop_by_its_documented_meaning():
    """Offsets into the receivers' arrays are the sender's to give; the way back swaps all roles."""
    check_against_loop()
