"""The balanced order: each device has an early and a late chunk, and as much work of causal attention as any other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshes import auto_mesh
from refusals import refused

import moezoo
from moezoo.config.build import build_execution
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.parallel.sequence_order import balanced_order


def test_two_devices_and_eight_tokens():
    assert balanced_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@given(devices=st.integers(1, 12), chunk=st.integers(1, 5))
def test_every_device_does_equal_work(devices, chunk):
    """Every token is there once, and causal attention has equally many pairs of a query and a key on every device."""
    length = 2 * devices * chunk
    order = balanced_order(length, devices)
    assert sorted(order) == list(range(length))
    pairs = (order.reshape(devices, -1) + 1).sum(1)
    assert len(set(pairs.tolist())) == 1


@pytest.mark.parametrize(("length", "fitting"), [(20, "seq_len=16 or seq_len=32, or"), (9, "set seq_len=16, or")])
def test_a_length_that_is_not_divisible(length, fitting):
    with refused(f"seq_len={length} is not divisible by 16", "8 devices", fitting, "sequence_order=contiguous"):
        balanced_order(length, 8)


def execution(*overrides: str) -> MeshExecution:
    """Return the execution of the laptop-sized Mixtral, or another model."""
    return on_mesh(build_execution(moezoo.compose("batch_size=8", "seq_len=16", *overrides)))


@pytest.mark.parametrize(
    ("overrides", "order"),
    [
        (("mesh=ep8",), "natural"),  # the sequence is whole
        (("mesh.context=2",), "balanced"),
        (("mesh.context=2", "model.window=8"), "natural"),
        (("mesh.context=2", "model.window=8", "execution.sequence_order=balanced"), "balanced"),
        (("mesh.context=2", "execution.sequence_order=contiguous"), "natural"),
        (("mesh.expert=2", "rules=ep_as_cp"), "balanced"),
    ],
)
def test_default(overrides, order):
    """Balanced where the sequence is split, except where every layer has a window."""
    wanted = balanced_order(16, 2) if order == "balanced" else np.arange(16)
    np.testing.assert_array_equal(execution(*overrides).token_order(16), wanted)


def test_whole_rows_keep_their_order():
    """Generation splits rows instead of sequences."""
    execution = moezoo.Execution(auto_mesh(context=2), moezoo.compose().rules, sequence_order="balanced")
    whole = on_mesh(execution).for_rows(4)
    np.testing.assert_array_equal(whole.token_order(7), np.arange(7))
