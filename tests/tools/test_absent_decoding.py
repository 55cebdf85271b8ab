"""Decoding over a long cache, compiled for absent devices."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import moezoo
from moezoo.nn.attention import Attention
from moezoo.nn.cache import Kept, Past
from moezoo.nn.latent_attention import LatentAttention, LatentSizes
from moezoo.nn.positions import Context
from moezoo.nn.rotary import Rotary
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.mesh import mesh_of
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.tools.absent import absent_devices, compile_for, memory_of

LAYERS, TEXTS, SLOTS, EMBED = 4, 4, 32768, 128
OPTIONS: Any = {"out_std": 1.0, "dtype": jnp.dtype("bfloat16")}


def grouped(key) -> Attention:
    """Return 32 query heads over 8 key heads."""
    return Attention(EMBED, 32, 8, 128, rotary=Rotary(128, 1e4), **OPTIONS, key=key)


def latent(key) -> LatentAttention:
    """Return DeepSeek-V3's 128 heads over one latent."""
    return LatentAttention(EMBED, LatentSizes(128, None, 512, 128, 64, 128), rotary=Rotary(64, 1e4), **OPTIONS, key=key)


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(
    ("make", "kind", "share"),
    [(grouped, "v5p", 0.05), (latent, "v5p", 0.8), (grouped, "h200", 1.05), (latent, "h200", 1.7)],
)
def test_one_token_over_a_long_cache(make, kind, share):
    """Temporaries are a small part of a layer's slots on a TPU, and one copy of these on a GPU, with the scores."""
    layer = eqx.filter_eval_shape(make, jax.random.key(0))
    shape: Any = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    declared = lambda kept: shape(LAYERS, TEXTS, *kept.sizes.values())  # noqa: E731
    slots = jax.tree.map(declared, layer.state(SLOTS), is_leaf=lambda x: isinstance(x, Kept))
    device = absent_devices(kind)[0]
    execution = on_mesh(moezoo.Execution(mesh_of(moezoo.MeshShape(), [device]), dtype="bfloat16"))
    at: Any = lambda tokens: Coordinates(*(shape(TEXTS, tokens, dtype=jnp.int32),) * 2)  # noqa: E731

    def token(layer, x, slots, now, keys, column):
        def one(x, number):
            out = layer(x, Context(now, now), execution, Past(slots, number, column, keys))
            return x + out.y, out.kept

        return lax.scan(one, x, jnp.arange(LAYERS))

    given = layer, shape(TEXTS, 1, EMBED), slots, at(1), at(SLOTS), shape(dtype=jnp.int32)
    memory = memory_of(compile_for(device, token, *given))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(slots)) / LAYERS
    assert memory is not None
    assert memory.temporaries < share * held, (memory.temporaries / 1e6, held / 1e6)
