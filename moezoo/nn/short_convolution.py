"""A causal convolution over the last few tokens of a document, one filter per channel."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.nn.linear import normal
from moezoo.parallel.axes import Bias, Scale


class ShortConvolution(eqx.Module):
    """y[t] = silu(bias + sum_j weight[taps - 1 - j] x[t - j]) over the tokens t - j of t's document, j < taps.

    Computed in float32, returned in x's dtype. The last tap is that of the token itself, as in PyTorch's `Conv1d`.

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
        whole = jnp.concatenate([before.astype(x.dtype), x], axis=1).astype(jnp.float32)
        segments, tokens = jnp.concatenate([segment_before, segment], axis=1), x.shape[1]
        y = jnp.zeros((), jnp.float32)
        for tap in range(self.reach + 1):
            seen = (segments[:, tap : tap + tokens] == segment)[..., None, None]
            y += jnp.where(seen, whole[:, tap : tap + tokens] * self.weight[tap].astype(jnp.float32)[None, None], 0)
        if self.bias is not None:
            y += self.bias.astype(jnp.float32)[None, None]
        return (jax.nn.silu(y) if self.activates else y).astype(x.dtype)


def last(
    x: Float[Array, "batch tokens heads head_dim"], segment: Int[Array, "batch tokens"], count: int
) -> Float[Array, "batch count heads head_dim"]:
    """Return the last `count` tokens, zeros for those of other documents than the last token and where there is none.

    Behind such tokens a text goes on as one document.
    """
    mine = jnp.where((segment == segment[:, -1:])[..., None, None], x, 0)
    return (
        jnp.pad(mine, ((0, 0), (max(count - x.shape[1], 0), 0), (0, 0), (0, 0)))[:, -count:] if count else mine[:, :0]
    )
