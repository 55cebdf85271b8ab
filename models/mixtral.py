"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): a transformer in which every MLP is a mixture of experts.

The file has, in this order, the configuration, the layers, and their mapping to Hugging Face folders.

    x = embedding[tokens]                                 # [B, S, d]
    for each layer:
        x = x + attention(norm(x))                        # grouped queries, rotary positions, optional window
        x = x + sum_k gate_k * expert_k(norm(x))          # the K best of E experts per token
    logits = norm(x) @ unembedding                        # [B, S, vocab]

B batch, S sequence, d `embed`, E `experts`, K `experts_per_token`. Gates are a softmax over the K largest router logits
(section 2.1); expert(x) = (silu(x W_gate) * (x W_up)) W_down, with inner width `expert_mlp` (SwiGLU). There are no
biases, and the unembedding is a matrix of its own or, with `tied_embeddings`, the embedding's transpose.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.convert import Size
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention
from moezoo.nn.norm import RMSNorm
from moezoo.nn.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class MixtralConfig(GroupedAttentionConfig):
    """Settings of a Mixtral model. The defaults are the laptop size.

    `window`: the tokens that a query sees, itself included; None for all. `moezoo.models.config` describes the others.
    """

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    expert_mlp: int = 256
    experts: int = 8
    experts_per_token: int = 2
    window: Size | None = None
    rope_base: float = 1e6
    max_length: int = 32768
    norm_eps: float = 1e-5
    load_balance: float = 0.01
    load_balance_over: Literal["batch", "sequence"] = "batch"
    z_loss: float = 0.001
    init_std: float = 0.02
    tied_embeddings: bool = False


def kinds(c: MixtralConfig) -> list[list[str]]:
    """Layers of one kind."""
    return [["moe"] * c.layers]


def make_block(kind: str, c: MixtralConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    del kind
    for_attention, for_router, for_experts = jax.random.split(key, 3)
    out_std = (2 * c.layers) ** -0.5
    return Block(
        RMSNorm(c.embed, c.norm_eps, dtype=dtype),
        Attention(
            c.embed,
            c.heads,
            c.kv_heads,
            c.head_dim,
            rotary=Rotary(c.head_dim, c.rope_base),
            window=c.window,
            out_std=out_std,
            dtype=dtype,
            key=for_attention,
        ),
        RMSNorm(c.embed, c.norm_eps, dtype=dtype),
        MoE(
            Router(c.embed, c.experts, c.experts_per_token, Choice(), dtype=dtype, key=for_router),
            Experts(c.experts, c.embed, c.expert_mlp, out_std=out_std, dtype=dtype, key=for_experts),
        ),
    )


# Path of our array -> tensor name in a Hugging Face folder.
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "unembedding.norm.scale": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "attention.query": "model.layers.{layer}.self_attn.q_proj.weight",
    "attention.key": "model.layers.{layer}.self_attn.k_proj.weight",
    "attention.value": "model.layers.{layer}.self_attn.v_proj.weight",
    "attention.out": "model.layers.{layer}.self_attn.o_proj.weight",
    "feed_forward_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "feed_forward.router.weight": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "feed_forward.experts.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "feed_forward.experts.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}
