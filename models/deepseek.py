"""DeepSeek-V2 (2024, arXiv:2405.04434), V3 (2024, arXiv:2412.19437) and their kin. The settings choose among them.

The file has, in this order, the configuration and the two kinds of layer. `moezoo.models.deepseek_hub` maps them to
Hugging Face folders.

    x = embedding[tokens]                                              # [B, S, d]
    for each layer:
        x = x + latent_attention(norm(x))                              # V2, section 2.1
        x = x + mlp(norm(x))                                           # the first `dense_layers` layers
        x = x + shared(norm(x)) + sum_k gate_k * expert_k(norm(x))     # the other layers; V3, section 2.1.2
    logits = norm(x) @ unembedding                                     # [B, S, vocab]

B batch, S sequence, d `embed`. A token chooses the best K = `experts_per_token` of `experts` experts, by the rules of
`router`; `shared` is an MLP as wide as `shared_experts` experts.

| router | score | best groups | choice bias | gates |
|---|---|---|---|---|
| V2 | softmax | by their best expert | none | scores |
| V3 | sigmoid | by the sum of their two best experts | learned | scores, normalised to sum to 1 |
| Mistral 4 | softmax | by the sum of their two best experts | none | scores, normalised to sum to 1 |

Kimi K2, Moonlight and GLM-4.7-Flash are V3 with other numbers. Mistral 4 also multiplies queries by a factor that grows
with their position. DeepSeek-V3.2 and GLM-5 let each token attend to the `index_topk` tokens that an index finds best.
The index is not built: up to so many tokens it selects all, and longer texts are refused.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.convert import Count, Positive, Size
from moezoo.errors import UserError
from moezoo.models.base import OfExperts
from moezoo.models.block import Block
from moezoo.models.config import Limit, ModelConfig, check_rotary
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.latent_attention import LatentAttention, LatentSizes
from moezoo.nn.mlp import MLP
from moezoo.nn.norm import RMSNorm
from moezoo.nn.query_scale import QueryScale
from moezoo.nn.rope import Pairs
from moezoo.nn.rotary import Rotary
from moezoo.nn.yarn import Yarn

# DeepSeek-V3's router, with groups for the experts of the laptop size.
_ROUTER = Choice("sigmoid", groups=4, kept_groups=2, group_score="sum_of_top2", scale=2.5, choice_bias="learned")


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig(ModelConfig):
    """Settings of a DeepSeek model. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `dense_layers`, `mlp` | number of first layers that have an MLP instead of experts, and its width |
    | `shared_experts` | width of the shared MLP, in experts; 0 for none |
    | `q_lora`, `kv_lora` | sizes of the latents of queries (None: no latent) and of keys and values |
    | `nope_dim`, `rope_dim`, `value_dim` | per head: the plain and the rotated part of a key, and a value |
    | `router` | how experts are chosen and gates computed |
    | `rope_base`, `rope_pairs` | base of the rotary frequencies; which dimensions turn together |
    | `yarn` | the extension to longer texts; a factor of 1 is none |
    | `query_scale` | the factor on queries that grows with their position; a `beta` of 0 is none |
    | `index_topk` | how many tokens the index of sparse attention selects for each; None: no index |
    | `index_pairs` | which dimensions turn together in the index: in V3.2 halves, in GLM-5 interleaved |

    The index is not built, as it has no effect on texts of up to `index_topk` tokens; `longest` is that limit.

    `moezoo.models.config.ModelConfig` describes the others.
    """

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    dense_layers: Count = 1
    heads: int = 4
    q_lora: Size | None = 64
    kv_lora: Size = 32
    nope_dim: Size = 32
    rope_dim: Size = 16
    value_dim: Size = 32
    mlp: int = 512
    expert_mlp: int = 128
    experts: int = 16
    experts_per_token: int = 4
    shared_experts: Count = 1
    router: Choice = _ROUTER
    rope_base: Positive = 1e4
    rope_pairs: Pairs = "interleaved"
    yarn: Yarn = dataclasses.field(default_factory=Yarn)
    query_scale: QueryScale = dataclasses.field(default_factory=QueryScale)
    index_topk: Size | None = None
    index_pairs: Pairs = "halves"
    max_length: int = 4096
    norm_eps: float = 1e-6
    load_balance: float = 0.0001
    load_balance_over: Literal["batch", "sequence"] = "sequence"
    z_loss: float = 0.0
    init_std: float = 0.02
    tied_embeddings: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.dense_layers and self.mlp < 1:
            raise UserError(f"model.mlp={self.mlp} must be greater than 0 with model.dense_layers={self.dense_layers}")
        if self.dense_layers >= self.layers:
            raise UserError(
                f"model.dense_layers={self.dense_layers} leaves no layer of model.layers={self.layers} with experts; "
                f"set it below {self.layers}"
            )
        if self.index_topk is not None and self.q_lora is None:
            raise UserError(
                f"model.index_topk={self.index_topk} needs model.q_lora, because the index reads the latent of "
                "queries; set both or none"
            )
        check_rotary(self, "rope_dim")
        self.router.check(self.experts, self.experts_per_token)

    @property
    def longest(self) -> Limit:
        """`max_length`, or the lower `index_topk`: as many tokens as the index selects, it selects all."""
        if self.index_topk is None or self.index_topk >= self.max_length:
            return super().longest
        why = "beyond it DeepSeek's sparse attention would select tokens, which is not built"
        return Limit("model.index_topk", self.index_topk, why)

    @property
    def dims_of_a_pair(self) -> int:
        """The two parts of the score, and the value."""
        return self.nope_dim + self.rope_dim + self.value_dim


def kinds(c: DeepSeekConfig) -> list[list[Literal["dense", "moe"]]]:
    """The feed-forward part of each layer, in two runs."""
    return [["dense"] * c.dense_layers, ["moe"] * (c.layers - c.dense_layers)]


def make_block(kind: Literal["dense", "moe"], c: DeepSeekConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    for_attention, first, for_experts, for_shared = jax.random.split(key, 4)
    out_std = (2 * c.layers) ** -0.5
    attention = LatentAttention(
        c.embed,
        LatentSizes(c.heads, c.q_lora, c.kv_lora, c.nope_dim, c.rope_dim, c.value_dim),
        rotary=Rotary(c.rope_dim, c.rope_base, c.yarn, c.rope_pairs),
        query_scale=c.query_scale,
        out_std=out_std,
        dtype=dtype,
        key=for_attention,
    )
    if kind == "dense":
        feed_forward = MLP(c.embed, c.mlp, out_std=out_std, dtype=dtype, key=first)
    else:
        width = c.shared_experts * c.expert_mlp
        feed_forward = MoE(
            Router(c.embed, c.experts, c.experts_per_token, c.router, dtype=dtype, key=first),
            Experts(c.experts, c.embed, c.expert_mlp, out_std=out_std, dtype=dtype, key=for_experts),
            MLP(c.embed, width, out_std=out_std, dtype=dtype, key=for_shared) if width else None,
        )
    norms = (RMSNorm(c.embed, c.norm_eps, dtype=dtype) for _ in range(2))
    return Block(next(norms), attention, next(norms), feed_forward)


# Path of our array -> tensor name in a Hugging Face folder; the arrays of a tuple are joined in one tensor.
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "unembedding.norm.scale": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}
_MLP = "model.layers.{layer}.mlp"
LAYER_NAMES = {
    "attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "attention.query": "model.layers.{layer}.self_attn.q_proj.weight",
    "attention.query_down": "model.layers.{layer}.self_attn.q_a_proj.weight",
    "attention.query_norm.scale": "model.layers.{layer}.self_attn.q_a_layernorm.weight",
    "attention.query_up": "model.layers.{layer}.self_attn.q_b_proj.weight",
    "attention.kv_down": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.scale": "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
    ("attention.key_up", "attention.value_up"): "model.layers.{layer}.self_attn.kv_b_proj.weight",
    "attention.out": "model.layers.{layer}.self_attn.o_proj.weight",
    "feed_forward_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "feed_forward.gate": f"{_MLP}.gate_proj.weight",
    "feed_forward.up": f"{_MLP}.up_proj.weight",
    "feed_forward.down": f"{_MLP}.down_proj.weight",
    "feed_forward.router.weight": f"{_MLP}.gate.weight",
    "feed_forward.router.choice_bias": f"{_MLP}.gate.e_score_correction_bias",
    "feed_forward.experts.gate": f"{_MLP}.experts.{{expert}}.gate_proj.weight",
    "feed_forward.experts.up": f"{_MLP}.experts.{{expert}}.up_proj.weight",
    "feed_forward.experts.down": f"{_MLP}.experts.{{expert}}.down_proj.weight",
    "feed_forward.shared.gate": f"{_MLP}.shared_experts.gate_proj.weight",
    "feed_forward.shared.up": f"{_MLP}.shared_experts.up_proj.weight",
    "feed_forward.shared.down": f"{_MLP}.shared_experts.down_proj.weight",
}
# Mistral 4 has one tensor for all experts of a layer.
JOINED_NAMES = {ours: name for ours, name in LAYER_NAMES.items() if "{expert}" not in name}
JOINED_NAMES |= {
    ("feed_forward.experts.gate", "feed_forward.experts.up"): OfExperts(f"{_MLP}.experts.gate_up_proj"),
    "feed_forward.experts.down": OfExperts(f"{_MLP}.experts.down_proj"),
}
