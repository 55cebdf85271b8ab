"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): every MLP of a Mistral-style transformer a mixture of experts.

Top to bottom: the configuration, one layer, the model. Pre-norm residual layers; grouped-query attention with rotary
positions and an optional sliding window; SwiGLU experts behind a softmax router; untied embeddings; no biases.
"""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.errors import UserError, check_positive
from moezoo.models.base import LanguageModel, LayerOutput, TokenEmbedding, Unembedding
from moezoo.models.config import ModelConfig, check_rotary
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention, Context
from moezoo.nn.cache import Past
from moezoo.nn.norm import RMSNorm
from moezoo.parallel.axes import Stack
from moezoo.parallel.execution import Execution


@dataclasses.dataclass(frozen=True)
class MixtralConfig(ModelConfig):
    """Sizes of a Mixtral-style model; the defaults are the laptop size. Raises `UserError` on sizes that contradict.

    `kv_heads`: key-value heads, each of which serves as many query heads. `head_dim`: width of a head.
    `rope_base`: base of the rotary frequencies. The other fields are `moezoo.models.config.ModelConfig`'s.
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
    window: int | None = None
    rope_base: float = 1e6
    max_length: int = 32768
    norm_eps: float = 1e-5
    load_balance: float = 0.01
    load_balance_over: Literal["batch", "sequence"] = "batch"
    z_loss: float = 0.001
    init_std: float = 0.02

    def __post_init__(self):
        super().__post_init__()
        check_positive("model", self, "kv_heads", "head_dim", "rope_base")
        if self.window is not None and self.window < 1:
            raise UserError(f"model.window={self.window} must be at least 1, or null for no window")
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}; "
                f"every key-value head serves as many heads, so choose a multiple of {self.kv_heads}"
            )
        check_rotary(self, "head_dim")

    @property
    def kept_dims(self) -> tuple[int, ...]:
        """Its key and its value."""
        return (self.kv_heads * self.head_dim,) * 2

    @property
    def dims_of_a_pair(self) -> int:
        """Both of them."""
        return 2 * self.head_dim


class Layer(eqx.Module):
    """Attention, then experts, each behind a norm and beside the residual stream."""

    attention_norm: RMSNorm
    attention: Attention
    moe_norm: RMSNorm
    moe: MoE

    def __init__(self, config: MixtralConfig, *, dtype: jnp.dtype, key: Array):
        c = config
        for_attention, for_router, for_experts = jax.random.split(key, 3)
        out_std = (2 * c.layers) ** -0.5
        self.attention_norm = RMSNorm(c.embed, c.norm_eps, dtype=dtype)
        self.attention = Attention(
            c.embed,
            c.heads,
            c.kv_heads,
            c.head_dim,
            rope_base=c.rope_base,
            window=c.window,
            out_std=out_std,
            dtype=dtype,
            key=for_attention,
        )
        self.moe_norm = RMSNorm(c.embed, c.norm_eps, dtype=dtype)
        self.moe = MoE(
            Router(c.embed, c.experts, c.experts_per_token, Choice(), dtype=dtype, key=for_router),
            Experts(c.experts, c.embed, c.expert_mlp, out_std=out_std, dtype=dtype, key=for_experts),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: Execution, past: Past | None = None
    ) -> LayerOutput:
        """The layer's activations, routing sums, keys and values."""
        with jax.named_scope("attention"):
            y, kept = self.attention(self.attention_norm(x), context, execution, past)
            x = x + y
        with jax.named_scope("moe"):
            y, _, sums = self.moe(self.moe_norm(x), context.queries.segment > 0, execution)
        return LayerOutput(x + y, sums, kept)


class Mixtral(LanguageModel):
    """`model(tokens)` -> logits and routing."""

    embedding: TokenEmbedding
    stacks: tuple[Stack, ...]
    unembedding: Unembedding
    config: MixtralConfig = eqx.field(static=True)

    def __init__(self, config: MixtralConfig, *, dtype: DTypeLike = jnp.float32, key: Array):
        c, dtype = config, jnp.dtype(dtype)
        for_embedding, for_layers, for_head = jax.random.split(key, 3)
        self.config = c
        self.embedding = TokenEmbedding(c.vocab, c.embed, std=c.init_std, dtype=dtype, key=for_embedding)
        layers = jax.vmap(lambda k: Layer(c, dtype=dtype, key=k))(jax.random.split(for_layers, c.layers))
        self.stacks = (Stack(layers, c.layers),)
        self.unembedding = Unembedding(c.embed, c.vocab, epsilon=c.norm_eps, std=c.init_std, dtype=dtype, key=for_head)

    def slots(self, length: int) -> int:
        """A window's."""
        return length if self.config.window is None else min(length, self.config.window)


# Our arrays and the tensors of a Hugging Face folder.
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
    "moe_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "moe.router.weight": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "moe.experts.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "moe.experts.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "moe.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}
