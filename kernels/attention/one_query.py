"""The backend for one query per row, as in generation: keys and values are read once, in the order they are stored in.

With the dimensions of all key heads in one, scores are a plain product of keys [keys, heads dim] and a matrix
[heads dim, heads group] that holds each query at the rows of its key head and zeros elsewhere. So nothing is
transposed. The zeros cost as many times the operations as there are key heads, which take less time than reading keys.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from moezoo.kernels.attention.base import NOTHING, Attended, Operands, Scale, sees

# With more key heads, products with zeros take longer than a transposition.
_MOST_HEADS = 16


def suits(queries: int, kv_heads: int) -> bool:
    """Return whether this is the fastest way on a CPU."""
    return queries == 1 and kv_heads <= _MOST_HEADS


def attend(operands: Operands, scale: Scale) -> Attended:
    """Attend with any number of queries; made for one."""
    q, k, v = operands.q, operands.k, operands.v
    heads, group = q.shape[2:4]
    own = jnp.eye(heads, dtype=q.dtype)
    spread = rearrange(q, "b q k g h -> b k h q g")[:, :, :, :, None] * own.reshape(1, heads, 1, 1, heads, 1)
    spread = rearrange(spread, "b k h q l g -> b (k h) (q l g)")
    flat_keys, flat_values = (rearrange(x, "b s k h -> b s (k h)") for x in (k, v))
    scores = jnp.einsum("bsi,bij->bsj", flat_keys, spread, preferred_element_type=jnp.float32) * scale
    scores = rearrange(scores, "b s (q n) -> b q n s", q=q.shape[1])
    seen = sees(operands.queries, operands.keys, operands.window)
    masked = jnp.where(seen[:, :, None], scores, NOTHING)
    weights = jax.nn.softmax(masked)
    sums = jnp.einsum("bqns,bsi->bqni", weights.astype(v.dtype), flat_values)
    sums = rearrange(sums, "b q (l g) (k h) -> b q l g k h", l=heads, k=heads)
    result = jnp.stack([sums[:, :, head, :, head] for head in range(heads)], axis=2).astype(v.dtype)
    logsumexp = rearrange(jax.nn.logsumexp(masked, axis=-1), "b q (k g) -> b q k g", g=group)
    some = seen.any(-1)[:, :, None, None]
    return Attended(jnp.where(some[..., None], result, 0), jnp.where(some, logsumexp, NOTHING))
