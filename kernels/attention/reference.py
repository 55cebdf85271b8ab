"""The naive backend: all scores of up to `QUERY_CHUNK` queries, and their softmax."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moezoo.kernels.attention.base import NOTHING, Attended, Place
from moezoo.parallel.collectives import ATTENTION

# Bounds the memory for scores to [batch, heads, QUERY_CHUNK, keys].
QUERY_CHUNK = 512
_MASKED = -1e30  # finite: a query that sees no key gets uniform weights instead of NaN


def attend(
    q: Float[Array, "batch queries kv_heads group head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    queries: Place,
    keys: Place,
    *,
    scale: float | Float[Array, ""],
    window: int | None,
) -> Attended:
    """Attend chunk by chunk of queries, each over all keys."""
    length = q.shape[1]
    if length <= QUERY_CHUNK:
        return _named(_attend(q, queries, k, v, keys, scale, window))
    pad = -length % QUERY_CHUNK

    def chunks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return rearrange(padded, "b (n c) ... -> n b c ...", c=QUERY_CHUNK)

    @jax.checkpoint  # scores are recomputed in the backward pass
    def one(chunk: tuple[Array, Place]) -> Attended:
        return _attend(*chunk, k, v, keys, scale, window)

    parts = jax.lax.map(one, (chunks(q), Place(*map(chunks, queries))))
    return _named(Attended(*(rearrange(x, "n b c ... -> b (n c) ...")[:, :length] for x in parts)))


def _named(attended: Attended) -> Attended:
    """Give both results the checkpoint name under which policies of rematerialisation may save them."""
    return Attended(*(checkpoint_name(x, ATTENTION) for x in attended))


def _attend(
    q: Array, queries: Place, k: Array, v: Array, keys: Place, scale: float | Array, window: int | None
) -> Attended:
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k, preferred_element_type=jnp.float32) * scale
    distance = queries.position[:, :, None] - keys.position[:, None, :]
    seen = (queries.segment[:, :, None] == keys.segment[:, None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    masked = jnp.where(seen[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(masked)
    result = jnp.einsum("bkgqs,bskh->bqkgh", weights.astype(v.dtype), v)
    logsumexp = rearrange(jax.nn.logsumexp(masked, axis=-1), "b k g q -> b q k g")
    some = seen.any(-1)[:, :, None, None]
    return Attended(jnp.where(some[..., None], result, 0), jnp.where(some, logsumexp, NOTHING))
