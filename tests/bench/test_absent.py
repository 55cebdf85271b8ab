"""Compiling for devices that are not here."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from moezoo.absent import ABSENT, absent_devices
from moezoo.bench.compiling import compile_all, largest_array
from moezoo.bench.shapes import ACCELERATOR
from moezoo.errors import UserError


@pytest.fixture
def _uncached():
    """What is compiled for devices that are not here cannot be read back from a cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def test_unknown_kind():
    with pytest.raises(UserError, match=r"^absent device h100: not known; did you mean 'h200'\?$"):
        absent_devices("h100")


def test_says_what_to_install(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda\nand more")

    monkeypatch.setattr("moezoo.absent.topologies.get_topology_desc", missing)
    with pytest.raises(
        UserError, match=r"^cannot compile for v5p here \(topology not implemented for cuda\); pip inst"
    ):
        absent_devices("v5p")


@pytest.mark.absent
@pytest.mark.parametrize("kind", ABSENT)
def test_eight_devices(kind):
    devices = absent_devices(kind)
    assert len(devices) == 8
    assert {d.platform for d in devices} == {"gpu" if kind == "h200" else "tpu"}


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("kind", ["h200", "v5p"])
def test_no_row_is_copied_for_every_expert(kind):
    """Nor anything else of that size, in a forward and backward pass; temporaries are what is said and no more."""
    for result in compile_all([kind], ["L1", "S2"], jnp.bfloat16):
        shape = ACCELERATOR[result.name]
        weights, rows = shape.experts * shape.embed * shape.mlp, shape.rows * max(shape.embed, shape.mlp)
        assert largest_array(result.text) <= max(weights, rows), result[:3]
        # In float32: a weight's gradient or a product before they are rounded, and a layer's activations.
        bound = {"grouped_matmul": weights + rows, "moe_layer": 3 * weights + 6 * rows}[result.part]
        assert result.temporaries < 4 * 1.05 * bound, result[:3]
        assert ("tpu_custom_call" in result.text) == (kind == "v5p"), result[:3]
