"""Layers and their parts, made with the settings that every family has."""

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig, ModelConfig
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention
from moezoo.nn.base import FeedForward, Mixer
from moezoo.nn.mlp import MLP
from moezoo.nn.norm import RMSNorm


def out_std(c: ModelConfig) -> float:
    """Return the factor on the initial values of matrices that write to the residual stream."""
    return (2 * c.layers) ** -0.5


def block(c: ModelConfig, dtype: jnp.dtype, attention: Mixer, feed_forward: FeedForward) -> Block:
    """Return a layer of these parts."""
    first, second = (RMSNorm(c.embed, c.norm_eps, around_one=c.norms_around_one, dtype=dtype) for _ in range(2))
    return Block(first, attention, second, feed_forward)


def grouped_attention(c: GroupedAttentionConfig, dtype: jnp.dtype, key: Array, **options: Any) -> Attention:
    """Return grouped-query attention. `options`: those of `Attention` that differ by family."""
    sizes = (c.embed, c.heads, c.kv_heads, c.head_dim)
    norms: dict[str, Any] = {"norm_eps": c.norm_eps, "norm_around_one": c.norms_around_one}
    return Attention(*sizes, out_std=out_std(c), dtype=dtype, key=key, **norms, **options)


def mlp(c: ModelConfig, dtype: jnp.dtype, key: Array, width: int, gated: bool = False) -> MLP:
    """Return an MLP, `gated` by one number per token or not."""
    return MLP(c.embed, width, gated=gated, out_std=out_std(c), dtype=dtype, key=key)


def mixture(
    c: ModelConfig,
    dtype: jnp.dtype,
    keys: Sequence[Array],
    choice: Choice,
    *,
    shared: int = 0,
    shared_gated: bool = False,
    bias: Literal["none", "trained"] = "none",
    **options: Any,
) -> MoE:
    """Return a mixture of experts.

    Args:
        c: The configuration.
        dtype: The dtype of parameters.
        keys: A random key each for the router, the experts and the shared MLP, if there is one.
        choice: How the router chooses experts.
        shared: The width of the shared MLP; 0 for none.
        shared_gated: Whether it is gated by one number per token.
        bias: Whether the router has a bias.
        options: Those of `Experts` that differ by family.
    """
    router = Router(c.embed, c.experts, c.experts_per_token, choice, bias=bias, dtype=dtype, key=keys[0])
    experts = Experts(c.experts, c.embed, c.expert_mlp, out_std=out_std(c), dtype=dtype, key=keys[1], **options)
    return MoE(router, experts, mlp(c, dtype, keys[2], shared, shared_gated) if shared else None)
