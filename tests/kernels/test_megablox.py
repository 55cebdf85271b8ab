"""The kernels for TPUs of `grouped_matmul`, interpreted on a CPU, compared with a loop over groups in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from test_grouped_matmul import GROUPS, check, compare_with_loop, operands, value_and_gradients

from moezoo.errors import UserError
from moezoo.kernels.grouped_matmul import api, chosen_backend, grouped_matmul
from moezoo.parallel.kernels import KernelOrder, Target, anywhere

# Three tiles of rows, of which the last is padded, and widths of two tiles in one direction.
ROWS, INPUTS, OUTPUTS = 42, 136, 72


@pytest.fixture
def _interpreted(monkeypatch):
    from moezoo.kernels.grouped_matmul import megablox

    monkeypatch.setitem(api.BACKENDS, "megablox", api.BACKENDS["megablox"]._replace(runs_on=anywhere))
    monkeypatch.setattr(megablox, "ROWS", 16)
    monkeypatch.setattr(megablox, "BYTES", 256)
    for name in ("gmm", "tgmm"):
        monkeypatch.setattr(megablox, name, functools.partial(getattr(megablox, name), interpret=True))


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_product_and_its_gradients(dtype):
    run = jax.jit(functools.partial(value_and_gradients, "megablox"))
    examples = [
        (0, 0, ROWS, 0),
        (0, 16, 16, 0),  # whole tiles
        (1, 14, 1, 1),  # four groups in two tiles, and one row in the second
    ]
    compare_with_loop(run, examples, rows=ROWS, dtype=dtype, inputs=INPUTS, outputs=OUTPUTS)


@pytest.mark.usefixtures("_interpreted")
def test_on_two_devices():
    """Rows and sizes differ by device, weights do not; their gradient is the sum over devices."""
    x, weights, cotangent = operands(2 * ROWS, "float32", 0, 24, 16)
    sizes = jnp.asarray([(7, 0, 20, 3), (0, 1, ROWS - 1, 0)], jnp.int32)

    def local(x, weights, sizes, cotangent):
        value, *gradients = value_and_gradients("megablox", x, weights, sizes[0], cotangent)
        assert [set(jax.typeof(y).mat.varying) for y in (value, *gradients)] == [{"a"}, {"a"}, set()]
        return value, *gradients

    split, whole = PartitionSpec("a"), PartitionSpec()
    specs = {"in_specs": (split, whole, split, split), "out_specs": (split, split, whole)}
    results = jax.jit(jax.shard_map(local, mesh=auto_mesh(a=2), **specs))(x, weights, sizes, cotangent)
    parts = [
        value_and_gradients("reference", x[mine], weights, sizes[i], cotangent[mine])
        for i, mine in enumerate((slice(ROWS), slice(ROWS, None)))
    ]
    value, by_rows, by_weights = zip(*parts, strict=True)
    wanted = jnp.concatenate(value), jnp.concatenate(by_rows), sum(by_weights)
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, want, atol=1e-5)


@pytest.mark.usefixtures("_interpreted")
def test_on_a_mesh_whose_axes_nothing_varies_over():
    """As in a training step on one device, which is a `shard_map` too."""
    x, weights, cotangent = operands(ROWS, "float32", 0, 24, 16)
    sizes, whole = (7, 0, 20, 3), PartitionSpec()
    local = functools.partial(value_and_gradients, "megablox")
    run = jax.jit(jax.shard_map(local, mesh=auto_mesh(a=1), in_specs=whole, out_specs=whole))
    check(run(x, weights, jnp.asarray(sizes, jnp.int32), cotangent), x, weights, sizes, cotangent)


def test_the_choice():
    """By name only, and on TPUs only: elsewhere it is refused before anything is traced."""
    tpu = Target("tpu")
    assert chosen_backend(tpu) == "ragged_dot"
    assert chosen_backend(tpu, ("megablox", "ragged_dot")) == "megablox"
    assert chosen_backend(tpu, ("megablox", "ragged_dot"), "float16") == "ragged_dot"
    x, weights, _ = operands(GROUPS)
    for order in ("megablox", KernelOrder(("megablox",), Target("cpu"))):
        wanted = (
            "^grouped_matmul=megablox: does not run on cpu with float32; choose reference or blocked or ragged_dot$"
        )
        with pytest.raises(UserError, match=wanted):
            grouped_matmul(x, weights, jnp.zeros(4, jnp.int32), implementation=order)
