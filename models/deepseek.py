"""DeepSeek-V2 (2024, arXiv:2405.04434), V3 (2024, arXiv:2412.19437) and their kin. The settings choose among them.

`moezoo.models.deepseek_hub` maps them to Hugging Face folders.

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
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import Limit, ModelConfig, extended
from moezoo.models.parts import block, mixture, mlp, out_std
from moezoo.moe.router import Choice
from moezoo.nn.latent_attention import LatentAttention, LatentSizes
from moezoo.nn.rotary import Pairs, QueryScale, Rotary, Yarn
from moezoo.typed import AtMost, Count, Even, Positive, Size

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

    dense_layers: Annotated[Count, AtMost("layers", strict=True)] = 1  # others have experts
    q_lora: Size | None = 64
    kv_lora: Size = 32
    nope_dim: Size = 32
    rope_dim: Even = 16
    value_dim: Size = 32
    mlp: int = 512
    shared_experts: Count = 1
    router: Choice = _ROUTER
    rope_base: Positive = 1e4
    rope_pairs: Pairs = "interleaved"
    yarn: Yarn = dataclasses.field(default_factory=Yarn)
    query_scale: QueryScale = dataclasses.field(default_factory=QueryScale)
    index_topk: Size | None = None
    index_pairs: Pairs = "halves"
    norm_eps: float = 1e-6
    load_balance: float = 0.0001
    load_balance_over: Literal["batch", "sequence"] = "sequence"

    def __post_init__(self):
        super().__post_init__()
        if self.dense_layers and self.mlp < 1:
            raise UserError(f"model.mlp={self.mlp} must be greater than 0 with model.dense_layers={self.dense_layers}")
        if self.index_topk is not None and self.q_lora is None:
            raise UserError(
                f"model.index_topk={self.index_topk} needs model.q_lora, because the index reads the latent of "
                "queries; set both or none"
            )
        self.router.check(self.experts, self.experts_per_token)

    @property
    def longest(self) -> Limit:
        """That of YaRN, or the lower `index_topk`: as many tokens as the index selects, it selects all."""
        limit = extended(self.max_length, self.yarn)
        if self.index_topk is None or self.index_topk >= limit.tokens:
            return limit
        why = "beyond it DeepSeek's sparse attention would select tokens, which is not built"
        return Limit("model.index_topk", self.index_topk, why)


def kinds(c: DeepSeekConfig) -> list[list[Literal["dense", "moe"]]]:
    """The feed-forward part of each layer, in two runs."""
    return [["dense"] * c.dense_layers, ["moe"] * (c.layers - c.dense_layers)]


def make_block(kind: Literal["dense", "moe"], c: DeepSeekConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    first, *others = jax.random.split(key, 4)
    attention = LatentAttention(
        c.embed,
        LatentSizes(c.heads, c.q_lora, c.kv_lora, c.nope_dim, c.rope_dim, c.value_dim),
        rotary=Rotary(c.rope_dim, c.rope_base, c.yarn, c.rope_pairs),
        query_scale=c.query_scale,
        out_std=out_std(c),
        dtype=dtype,
        key=first,
    )
    if kind == "dense":
        return block(c, dtype, attention, mlp(c, dtype, others[0], c.mlp))
    return block(c, dtype, attention, mixture(c, dtype, others, c.router, shared=c.shared_experts * c.expert_mlp))
