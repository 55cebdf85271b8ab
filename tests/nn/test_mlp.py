"""The MLP with SwiGLU by its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import context_of

from moezoo.nn.mlp import MLP, GeGLU, SwiGLU
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import on_mesh


@pytest.mark.parametrize("gated", [False, True])
def test_formula(gated):
    """A gate is one factor per token."""
    mlp = MLP(4, 6, gated=gated, out_std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0))
    assert mlp.activation == SwiGLU()
    x = np.random.default_rng(0).standard_normal((2, 3, 4), np.float32)
    out = jax.jit(lambda mlp, x: mlp(x, context_of(np.ones((2, 3))), on_mesh(Execution())))(mlp, x)
    gate, up, down = (np.asarray(w, np.float64) for w in (mlp.gate, mlp.up, mlp.down))
    g = x @ gate
    wanted = (g / (1 + np.exp(-g)) * (x @ up)) @ down
    if gated:
        wanted = wanted / (1 + np.exp(-(x @ np.asarray(mlp.token_gate, np.float64))))
    np.testing.assert_allclose(out.y, wanted, rtol=0, atol=1e-5)
    assert out.sums is None
    assert out.routed is None


def test_gelu_by_tanh():
    """The approximation of gelu, not gelu: at 2 they differ by 3e-4."""
    gate, up = np.linspace(-4, 4, 17), np.linspace(1, 3, 17)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
    mlp = MLP(4, 6, activation=GeGLU(), out_std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0))
    found = mlp.activation(jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    np.testing.assert_allclose(found, gate / 2 * (1 + tanh) * up, rtol=0, atol=1e-6)
