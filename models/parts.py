"""Layers and their parts, made with the settings that every family has."""

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from moezoo.models.block import Block
from moezoo.models.config import KeyValueHeadsConfig, ModelConfig
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import BranchNorms, GatesOn, Latent, MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention
from moezoo.nn.base import FeedForward, Mixer, NoMixer
from moezoo.nn.mlp import MLP, SWIGLU, Activation
from moezoo.nn.norm import RMSNorm


def out_std(c: ModelConfig) -> float:
    """Return the factor on the initial values of matrices that write to the residual stream."""
    return (2 * c.layers) ** -0.5


def norm(c: ModelConfig, dtype: jnp.dtype) -> RMSNorm:
    """Return a norm of the residual stream."""
    form: dict[str, Any] = {"around_one": c.norms_around_one, "cast_last": c.norms_cast_last}
    return RMSNorm(c.embed, c.norm_eps, dtype=dtype, **form)


def block(c: ModelConfig, dtype: jnp.dtype, attention: Mixer, feed_forward: FeedForward) -> Block:
    """Return a layer of these parts."""
    return Block(norm(c, dtype), attention, norm(c, dtype), feed_forward)


def block_of_one(c: ModelConfig, dtype: jnp.dtype, part: Mixer | FeedForward) -> Block:
    """Return a layer of this part alone."""
    if isinstance(part, Mixer):
        return Block(norm(c, dtype), part, None, None)
    return Block(None, NoMixer(), norm(c, dtype), part)


def grouped_attention(c: KeyValueHeadsConfig, dtype: jnp.dtype, key: Array, **options: Any) -> Attention:
    """Return grouped-query attention. `options`: those of `Attention` that differ by family."""
    norms = {"norm_eps": c.norm_eps, "norm_around_one": c.norms_around_one, "norm_cast_last": c.norms_cast_last}
    options = {"kv_heads": c.kv_heads, "head_dim": c.head_dim, **norms, **options}
    return Attention(c.embed, c.heads, out_std=out_std(c), dtype=dtype, key=key, **options)


def mlp(
    c: ModelConfig, dtype: jnp.dtype, key: Array, width: int, gated: bool = False, activation: Activation = SWIGLU
) -> MLP:
    """Return an MLP, `gated` by one number per token or not."""
    return MLP(c.embed, width, activation=activation, gated=gated, out_std=out_std(c), dtype=dtype, key=key)


def mixture(
    c: ModelConfig,
    dtype: jnp.dtype,
    keys: Sequence[Array],
    choice: Choice,
    *,
    shared: int = 0,
    shared_gated: bool = False,
    norms: BranchNorms | None = None,
    bias: Literal["none", "trained"] = "none",
    scales: Literal["none", "trained"] = "none",
    activation: Activation = SWIGLU,
    gates_on: GatesOn = "results",
    latent: int | None = None,
    **options: Any,
) -> MoE:
    """Return a mixture of experts.

    Args:
        c: The configuration.
        dtype: The dtype of parameters.
        keys: A random key each for the router, the experts, the shared MLP, if there is one, and the latent.
        choice: How the router chooses experts.
        shared: The width of the shared MLP; 0 for none.
        shared_gated: Whether it is gated by one number per token.
        norms: Norms around experts and the shared MLP, where the mixture reads the residual stream as it is.
        bias: Whether the router has a bias.
        scales: Whether the router scales its input and gates by trained numbers.
        activation: That of experts and of the shared MLP.
        gates_on: What gates multiply.
        latent: The width of a latent that the experts are in; None for none.
        options: Those of `Experts` that differ by family.
    """
    sizes = (c.embed, c.experts, c.experts_per_token)
    router = Router(*sizes, choice, bias=bias, scales=scales, norm_eps=c.norm_eps, dtype=dtype, key=keys[0])
    options = {"activation": activation, "out_std": out_std(c) if latent is None else 1.0, **options}
    experts = Experts(c.experts, latent or c.embed, c.expert_mlp, dtype=dtype, key=keys[1], **options)
    beside = mlp(c, dtype, keys[2], shared, shared_gated, activation) if shared else None
    around = latent and Latent(c.embed, latent, out_std=out_std(c), dtype=dtype, key=keys[3])
    return MoE(router, experts, beside, norms, gates_on, around or None)
