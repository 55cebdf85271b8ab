"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): a transformer in which every MLP is a mixture of experts.

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

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig, Window
from moezoo.models.hub import SILU, Hub, Key, ModelType, Settings, common, common_dense, head_dim, rope
from moezoo.models.names import BLOCK_SPARSE, DENSE
from moezoo.models.parts import block, grouped_attention, mixture
from moezoo.moe.router import Choice
from moezoo.nn.rotary import Llama3, Rotary


@dataclasses.dataclass(frozen=True)
class MixtralConfig(GroupedAttentionConfig):
    """Settings of a Mixtral model. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `window` | the tokens that a query sees, itself included; None for all |
    | `llama3` | the extension to longer texts; a factor of 1 is none |

    `moezoo.models.config` describes the others.
    """

    expert_mlp: int = 256
    experts: int = 8
    experts_per_token: int = 2
    window: Window | None = None
    rope_base: float = 1e6
    max_length: int = 32768
    z_loss: float = 0.001
    llama3: Llama3 = dataclasses.field(default_factory=Llama3)


def make_block(kind: None, c: MixtralConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    first, *others = jax.random.split(key, 3)
    attention = grouped_attention(c, dtype, first, rotary=Rotary(c.head_dim, c.rope_base, c.llama3), window=c.window)
    return block(c, dtype, attention, mixture(c, dtype, others, Choice()))


_SETTINGS = common(131072) | {
    "expert_mlp": Key("intermediate_size"),
    "window": Key("sliding_window", None),
    "load_balance": Key("router_aux_loss_coef", 0.001),
    "kv_heads": Key("num_key_value_heads", null=lambda found: found["heads"]),
    "head_dim": Key("head_dim", None, null=head_dim),
    "experts": Key("num_local_experts num_experts"),
}
_ONLY = {"attention_bias": (False,), "router_jitter_noise": (0,)}
_FURTHER: Settings = {"rope": rope("llama3", 1e6), "hidden_act": SILU}
HUB = Hub(
    {"mixtral": "softmax router; Mixtral 8x7B and 8x22B"},
    {"mixtral": ModelType("Mixtral", _SETTINGS, _FURTHER, BLOCK_SPARSE, _ONLY)},
    lambda config: "mixtral",
)
_REST: Settings = {"head_dim": Key("head_dim", None, null=head_dim), "rope": rope("llama3")}
_NO_BIAS = {"attention_bias": (False,)}


DENSE_HUB = Hub(
    {
        "mistral": "Mistral 7B and Nemo",
        "llama": "Llama 2, Llama 3 to 3.3 and their kin",
    },
    {
        "mistral": ModelType(
            "Mistral",
            common_dense(131072, kv_heads=8) | {"window": Key("sliding_window", 4096)},
            _REST,
            DENSE,
            _NO_BIAS,
        ),
        "llama": ModelType(
            "Llama",
            common_dense(2048, kv_heads=None),
            _REST,
            DENSE,
            _NO_BIAS | {"rope_interleaved": (False,)},
            "is_llama_config max_sequence_length transformers.js_config",
        ),
    },
    lambda config: "llama",  # both have the same names
)
