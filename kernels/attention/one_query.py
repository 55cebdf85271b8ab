"""The backend for one query per row, as in generation: the keys of each head are read once, as a cache stores them.

Products are [keys, dim] x [dim, group] and [group, keys] x [keys, dim] for each key head, in an order that a CPU
computes fast; accelerators split them over keys, with many keys and few heads. The layers of a cache hold the keys of
each head one after another (`moezoo.nn.cache.Slots`), so nothing is transposed.
"""

import jax
import jax.numpy as jnp

from moezoo.kernels.attention.base import NOTHING, Attended, Operands, Scale, sees


def attend(operands: Operands, scale: Scale) -> Attended:
    """Attend with any number of queries; made for one."""
    q, k, v = operands.q, operands.k, operands.v
    scores = jnp.einsum("bskh,bqkgh->bkqsg", k, q, preferred_element_type=jnp.float32).swapaxes(3, 4) * scale
    seen = sees(operands.queries, operands.keys, operands.window)
    masked = jnp.where(seen[:, None, :, None], scores, NOTHING)
    weights = jax.nn.softmax(masked)
    result = jnp.einsum("bkqgs,bskh->bkqgh", weights.astype(v.dtype), v).astype(v.dtype)
    some = seen.any(-1)[:, None, :, None]
    logsumexp = jnp.where(some, jax.nn.logsumexp(masked, axis=-1), NOTHING)
    return Attended(*(x.swapaxes(1, 2) for x in (jnp.where(some[..., None], result, 0), logsumexp)))
