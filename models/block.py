"""The block: every layer of every family is one.

    x = x + attention(norm(x))
    x = x + feed_forward(norm(x))        # an MLP or a mixture of experts
    x = x * scale                        # in few families

with x [batch, seq, embed] (the pre-norm residual layer of Xiong et al., 2020, arXiv:2002.04745). In few families blocks
have one of the two parts. Devices that share heads or the width of MLPs have the same x, and the block sums their
partial results (Shoeybi et al., 2019, arXiv:1909.08053, section 3).
"""

from typing import NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from moezoo.moe.mixture import MoE
from moezoo.moe.routing import LayerSums
from moezoo.nn.base import FeedForward, Mixer
from moezoo.nn.cache import Past
from moezoo.nn.norm import RMSNorm
from moezoo.nn.positions import Context
from moezoo.parallel.axes import Buffer
from moezoo.parallel.mesh_execution import MeshExecution


class LayerOutput(NamedTuple):
    """The activations `x`, the routing `sums` (None without experts), and what the mixer `kept` for later tokens."""

    x: Float[Array, "batch seq embed"]
    sums: LayerSums | None
    kept: PyTree


class Block(eqx.Module):
    """Attention, then an MLP or a mixture of experts. Each reads the normalised residual stream and adds to it.

    The two `after` norms are for families that also normalise what a part adds. Without a `feed_forward_norm` that part
    reads the residual stream as it is, and has norms of its own. The residual stream is multiplied by `scale`, one
    stored number, which is not trained.

    A block of one part has no `feed_forward`, or `NoMixer` and no `attention_norm`.
    """

    attention_norm: RMSNorm | None
    attention: Mixer
    feed_forward_norm: RMSNorm | None
    feed_forward: FeedForward | None
    after_attention_norm: RMSNorm | None = None
    after_feed_forward_norm: RMSNorm | None = None
    scale: Buffer[Array, "layer_scale"] | None = None

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution, past: Past | None = None
    ) -> LayerOutput:
        """Run the layer. Its weights are gathered already. With a `past`, see `run_layers`."""
        kept = sums = None
        if self.attention_norm is not None:
            with jax.named_scope("attention"):
                out = self.attention(self.attention_norm(x), context, execution, past)
                y, kept = out.leave(execution.inner_group("heads")), out.kept
                x = x + (y if self.after_attention_norm is None else self.after_attention_norm(y))
        if self.feed_forward is not None:
            with jax.named_scope("feed_forward"):
                given = x if self.feed_forward_norm is None else self.feed_forward_norm(x)
                y, sums, _ = self.feed_forward(given, context, execution)
                y = y if self.feed_forward.is_whole else execution.inner_group("mlp").leave(y)
                x = x + (y if self.after_feed_forward_norm is None else self.after_feed_forward_norm(y))
        if self.scale is not None:
            x = x * self.scale.astype(x.dtype)[None, None]
        return LayerOutput(x, sums, kept)

    @property
    def width(self) -> int:
        """The width of the residual stream. The block may be that of a stack, and hold shapes."""
        norm = self.feed_forward_norm if self.attention_norm is None else self.attention_norm
        assert norm is not None, "a block without a mixer has a norm before its feed-forward part"
        return norm.scale.shape[-1]

    @property
    def moe(self) -> MoE | None:
        """The mixture of experts, or None."""
        return self.feed_forward if isinstance(self.feed_forward, MoE) else None
