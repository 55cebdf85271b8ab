"""Models with grouped-query attention whose layers are an MLP or a mixture of experts. The settings choose the model.

`moezoo.models.grouped_hub` maps them to Hugging Face folders.

    x = embedding[tokens]                                          # [B, S, d]
    for each layer:
        x = x + attention(norm(x))
        x = x + mlp(norm(x))                                       # layers without experts
        x = x + shared(norm(x)) + sum_k gate_k * expert_k(norm(x)) # layers with experts
        x = x + sigmoid(w . norm(x)) * shared(norm(x)) + sum_k ... # the same of `qwen2_moe`
    logits = norm(x) @ unembedding                                 # [B, S, vocab]

B batch, S sequence, d `embed`. A token chooses the best K = `experts_per_token` of `experts` experts, by the rules of
`router`; `shared` is an MLP as wide as `shared_experts` experts, or one of width `shared_mlp` with a gate of one number
per token. The unembedding is a matrix of its own or, with `tied_embeddings`, the embedding's transpose.

| `model_type` | norms of queries and keys | rotated | biases | router | shared experts |
|---|---|---|---|---|---|
| `qwen3_moe` (Yang et al., 2025, arXiv:2505.09388) | each head | all | none or all | softmax | none |
| `qwen2_moe` (Yang et al., 2024, arXiv:2407.10671) | none | all | none or inputs | softmax | one, with a gate |
| `glm4_moe` (GLM-4.5 Team, 2025, arXiv:2508.06471) | each head or none | a share | none or inputs | sigmoid | yes |
| `sarvam_moe` (Sarvam AI, 2026) | each head or none | all | none | sigmoid | yes |
| `minimax_m2` (MiniMax, 2025) | whole projection | a share | none | sigmoid | none |
| `hy_v3` (Tencent, 2026, Hunyuan 3) | each head | all | none or all | sigmoid | yes |
| `dots1` (rednote-hilab, 2025, arXiv:2506.05767) | each head | all | none or all | sigmoid | yes |
| `solar_open` (Upstage, 2025, Solar Open) | none | all | none or inputs | sigmoid | yes |
| `ernie4_5_moe` (Baidu, 2025, ERNIE 4.5) | none | all, interleaved | none | softmax | yes or none |

The sigmoid routers are DeepSeek-V3's (2024, arXiv:2412.19437, section 2.1.2); they and ERNIE's have a choice bias.
"""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import (
    GroupedAttentionConfig,
    Limit,
    Window,
    check_experts,
    check_layers,
    extended,
    with_experts,
)
from moezoo.models.parts import block, grouped_attention, mixture, mlp
from moezoo.moe.router import Choice
from moezoo.nn.attention import Biases, NormOver
from moezoo.nn.rotary import Pairs, Rotary, Yarn
from moezoo.typed import AtMost, Count, Even, Size

Type = Literal[
    "qwen3_moe",
    "qwen2_moe",
    "glm4_moe",
    "sarvam_moe",
    "solar_open",
    "minimax_m2",
    "hy_v3",
    "dots1",
    "ernie4_5_moe",
]


@dataclasses.dataclass(frozen=True)
class GroupedConfig(GroupedAttentionConfig):
    """Settings of a model with grouped-query attention. The defaults are a laptop-sized Qwen3-MoE.

    | field | meaning |
    |---|---|
    | `model_type` | the names in its Hugging Face folder; it changes no number |
    | `moe_every`, `mlp_layers` | layer i has experts if `moe_every` divides i + 1 and `mlp_layers` does not name i |
    | `mlp` | width of the MLP in layers without experts |
    | `shared_experts` | width of the shared MLP, in experts; 0 for none |
    | `shared_mlp` | width of a shared MLP that a gate of one number per token multiplies; 0 for none |
    | `router` | how experts are chosen and gates computed |
    | `norm_over` | what the norms of queries and keys are over; `nothing` for no norms |
    | `attention_bias` | which projections of attention have biases; `inputs` are those to queries, keys and values |
    | `window` | the tokens that a query sees, itself included; None for all |
    | `rotary_dims` | the first dimensions of each head, which are rotated; None for all |
    | `rope_pairs` | which dimensions turn together |
    | `yarn` | the extension to longer texts; a factor of 1 is none |

    `moezoo.models.config` describes the others.
    """

    model_type: Type = "qwen3_moe"
    mlp: Size = 512
    shared_experts: Count = 0
    shared_mlp: Count = 0
    moe_every: Size = 1
    mlp_layers: tuple[int, ...] = ()
    router: Choice = dataclasses.field(default_factory=Choice)
    norm_over: NormOver = "head"
    attention_bias: Biases = "none"
    window: Window | None = None
    rotary_dims: Annotated[Even, AtMost("head_dim")] | None = None
    rope_base: float = 1e6
    rope_pairs: Pairs = "halves"
    yarn: Yarn = dataclasses.field(default_factory=lambda: Yarn(mscale=0.0, mscale_all=0.0))
    max_length: int = 32768
    norm_eps: float = 1e-6
    load_balance: float = 0.001

    def __post_init__(self):
        super().__post_init__()
        self.router.check(self.experts, self.experts_per_token)
        check_layers(self, "mlp_layers")
        if self.shared_experts and self.shared_mlp:
            raise UserError(
                f"model.shared_experts={self.shared_experts} and model.shared_mlp={self.shared_mlp} are two shared "
                "MLPs, and a layer has one; set one of them to 0"
            )
        check_experts(self, self.moe_every, self.mlp_layers)

    @property
    def longest(self) -> Limit:
        """`max_length`, or what YaRN extends texts to."""
        return extended(self.max_length, self.yarn)

    @property
    def variant(self) -> str:
        """The `model_type`."""
        return self.model_type


def kinds(c: GroupedConfig) -> list[list[Literal["mlp", "moe"]]]:
    """The feed-forward part of each layer."""
    experts = with_experts(c.layers, c.moe_every, c.mlp_layers)
    return [["moe" if i in experts else "mlp" for i in range(c.layers)]]


def make_block(kind: Literal["mlp", "moe"], c: GroupedConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    first, *others = jax.random.split(key, 4)
    rotary = Rotary(c.rotary_dims or c.head_dim, c.rope_base, c.yarn, c.rope_pairs)
    options: dict[str, Any] = {"norm_over": c.norm_over, "biases": c.attention_bias, "window": c.window}
    attention = grouped_attention(c, dtype, first, rotary=rotary, **options)
    if kind == "mlp":
        return block(c, dtype, attention, mlp(c, dtype, others[0], c.mlp))
    shared = {"shared": c.shared_mlp or c.shared_experts * c.expert_mlp, "shared_gated": c.shared_mlp > 0}
    return block(c, dtype, attention, mixture(c, dtype, others, c.router, **shared))
