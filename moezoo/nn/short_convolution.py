"""A causal convolution over the last few tokens of a document, one filter per channel."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moezoo.nn.linear import normal
from moezoo.parallel.axes import Bias, Scale


def convolve(
    filters: Float[Array, "tap *channels"],
    x: Float[Array, "batch tokens *channels"],
    segment: Int[Array, "batch tokens"],
    before: Float[Array, "batch reach *channels"],
    segment_before: Int[Array, "batch reach"],
) -> Float[Array, "batch tokens *channels"]:
    """Return y[t] = sum_j filters[taps - 1 - j] x[t - j] over the tokens t - j of t's document, j < taps, in float32.

    Args:
        filters: One filter per channel. The last tap is that of the token itself, as in PyTorch's `Conv1d`.
        x: The tokens.
        segment: Their documents.
        before: The taps - 1 tokens before them.
        segment_before: The documents of these.
    """
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1).astype(jnp.float32)
    segments, tokens = jnp.concatenate([segment_before, segment], axis=1), x.shape[1]
    y = jnp.zeros((), jnp.float32)
    for tap in range(len(filters)):
        seen = _over_channels(segments[:, tap : tap + tokens] == segment, x)
        y += jnp.where(seen, whole[:, tap : tap + tokens] * filters[tap].astype(jnp.float32)[None, None], 0)
    return y


def _over_channels(
    is_seen: Bool[Array, "batch tokens"], x: Float[Array, "batch tokens *channels"]
) -> Bool[Array, "batch tokens *ones"]:
    """Return a condition on tokens with the dimensions of `x`."""
    return is_seen.reshape(*is_seen.shape, *(1,) * (x.ndim - 2))


class ShortConvolution(eqx.Module):
    """silu(bias + `convolve`(weight, x)), computed in float32, returned in x's dtype.

    Attributes:
        weight: One filter per channel.
        bias: What is added, or None.
        activates: Whether silu follows.
    """

    weight: Scale[Array, "tap heads head_dim"]
    bias: Bias[Array, "heads head_dim"] | None
    activates: bool = eqx.field(static=True)

    def __init__(
        self,
        taps: int,
        heads: int,
        head_dim: int,
        *,
        has_bias: bool = False,
        activates: bool = True,
        dtype: jnp.dtype,
        key: Array,
    ):
        self.weight = normal(key, (taps, heads, head_dim), taps**-0.5, dtype)
        self.bias = jnp.zeros((heads, head_dim), dtype) if has_bias else None
        self.activates = activates

    @property
    def reach(self) -> int:
        """The number of tokens before a token that it reads."""
        return self.weight.shape[-3] - 1

    def __call__(
        self,
        x: Float[Array, "batch tokens heads head_dim"],
        segment: Int[Array, "batch tokens"],
        before: Float[Array, "batch reach heads head_dim"],
        segment_before: Int[Array, "batch reach"],
    ) -> Float[Array, "batch tokens heads head_dim"]:
        """Filter tokens, whose documents are `segment`, behind the tokens `before` with theirs."""
        y = convolve(self.weight, x, segment, before, segment_before)
        if self.bias is not None:
            y += self.bias.astype(jnp.float32)[None, None]
        return (jax.nn.silu(y) if self.activates else y).astype(x.dtype)


def last(
    x: Float[Array, "batch tokens *channels"], segment: Int[Array, "batch tokens"], count: int
) -> Float[Array, "batch count *channels"]:
    """Return the last `count` tokens, zeros for those of other documents than the last token and where there is none.

    Behind such tokens a text goes on as one document.
    """
    mine = jnp.where(_over_channels(segment == segment[:, -1:], x), x, 0)
    missing = ((0, 0), (max(count - x.shape[1], 0), 0), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(mine, missing)[:, -count:] if count else mine[:, :0]
