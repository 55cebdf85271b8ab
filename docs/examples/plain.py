# In moezoo: kernels/attention/plain.py
import jax
import jax.numpy as jnp

from moezoo.kernels.attention import Attended, Backend, register
from moezoo.kernels.attention.base import NOTHING, sees


def attend(operands, scale):
    """Average the values by a softmax over the keys that a query sees."""
    q, k, v = operands.q, operands.k, operands.v
    scores = scale * jnp.einsum("bqkgd,bskd->bqkgs", q, k, preferred_element_type=jnp.float32)
    seen = sees(operands.queries, operands.keys, operands.window)[:, :, None, None]  # [batch, queries, 1, 1, keys]
    scores = jnp.where(seen, scores, NOTHING)
    weights = jnp.where(seen, jax.nn.softmax(scores), 0)
    result = jnp.einsum("bqkgs,bskd->bqkgd", weights.astype(v.dtype), v)
    return Attended(result, jnp.where(seen.any(-1), jax.nn.logsumexp(scores, axis=-1), NOTHING))


register("plain", Backend(attend))  # in moezoo: an entry of BACKENDS
