"""A family for tests: layers that differ in everything they may, in a pattern, with norms after each part."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moezoo.models.base import LanguageModel, TokenEmbedding, Unembedding
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig
from moezoo.models.layers import make_stacks
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention
from moezoo.nn.mlp import MLP, Activation
from moezoo.nn.norm import RMSNorm
from moezoo.nn.rotary import Rotary

F32 = jnp.dtype("float32")


class Kind(NamedTuple):
    """The structure of a layer: a window or None, and whether it has experts."""

    window: int | None
    experts: bool


LOCAL, GLOBAL, DENSE = Kind(3, True), Kind(None, True), Kind(None, False)
KINDS = [LOCAL, GLOBAL, LOCAL, GLOBAL, DENSE]


@dataclasses.dataclass(frozen=True)
class Clamped(Activation):
    """An activation that no family has: clamped and shifted, like that of gpt-oss."""

    limit: float = 0.5

    def __call__(self, gate: Array, up: Array) -> Array:
        """Return the activation; 0 where the gate is."""
        return jnp.minimum(gate, self.limit) * jax.nn.sigmoid(1.7 * gate) * (jnp.clip(up, -self.limit, self.limit) + 1)


@dataclasses.dataclass(frozen=True)
class PatternedConfig(GroupedAttentionConfig):
    """Tiny sizes."""

    vocab: int = 40
    embed: int = 16
    layers: int = len(KINDS)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    expert_mlp: int = 12
    experts: int = 8
    experts_per_token: int = 2
    rope_base: float = 10.0
    max_length: int = 64
    norm_eps: float = 1e-3
    load_balance: float = 0.1
    load_balance_over: Any = "batch"
    z_loss: float = 0.01
    init_std: float = 0.5
    tied_embeddings: bool = False


def make_block(kind: Kind, key: Array) -> Block:
    """Return one layer."""
    c, keys = PatternedConfig(), jax.random.split(key, 4)
    attention = Attention(
        c.embed,
        c.heads,
        c.kv_heads,
        c.head_dim,
        rotary=Rotary(4, c.rope_base),
        norm_over="head",
        biases="all",
        window=kind.window,
        out_std=1.0,
        dtype=F32,
        key=keys[0],
    )
    shared = MLP(c.embed, 20, activation=Clamped(), out_std=1.0, dtype=F32, key=keys[1])
    experts = Experts(c.experts, c.embed, c.expert_mlp, activation=Clamped(), out_std=1.0, dtype=F32, key=keys[2])
    choice = Choice(choice_bias="learned", bias_rate=0.25)
    router = Router(c.embed, c.experts, c.experts_per_token, choice, bias="trained", dtype=F32, key=keys[3])
    norms = [RMSNorm(c.embed, c.norm_eps, dtype=F32) for _ in range(4)]
    feed_forward = MoE(router, experts, shared) if kind.experts else shared
    return Block(norms[0], attention, norms[1], feed_forward, norms[2], norms[3])


def new_model() -> LanguageModel:
    """Return a model of two stacks: two periods of two kinds, and one layer."""
    c, key = PatternedConfig(), jax.random.key(0)
    return LanguageModel(
        TokenEmbedding(c.vocab, c.embed, std=c.init_std, dtype=F32, key=key),
        make_stacks(KINDS, make_block, jax.random.split(key, len(KINDS))),
        Unembedding(c.embed, c.vocab, epsilon=c.norm_eps, std=c.init_std, dtype=F32, key=key),
        c,
    )


def make_model() -> LanguageModel:
    """Return a model with random numbers in every array, also where a new model has zeros or ones.

    Numbers come from NumPy: compiling the initial values of five kinds of layer takes seconds.
    """
    rng = np.random.default_rng(0)

    def fill(path: Any, shape: Any) -> Array:
        name, std = jax.tree_util.keystr(path), 0.25
        return jnp.asarray(("scale" in name) + std * rng.standard_normal(shape.shape), shape.dtype)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(new_model))
