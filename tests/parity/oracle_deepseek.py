"""DeepSeek's layers for the oracle (DeepSeek-AI, 2024: V2, section 2.1; V3, section 2.1).

Multi-head latent attention with YaRN (Peng et al., 2023); the first layers dense, the others with shared experts and
routed ones that are chosen within groups, by scores with a bias that a rule moves and no gradient.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from oracle import (
    Family,
    Losses,
    Parameters,
    Routing,
    Split,
    Visibility,
    attend,
    best,
    experts,
    norm,
    rotate,
    swiglu,
)
from tape import Value, exp, total_of, value

_LATENT_EPS = 1e-6  # of the latents' norms, in all released models


def parameters_of(model: Any) -> Parameters:
    """The arrays of a DeepSeek (or of anything in its shape: gradients, moments) by name, float64.

    Attention's arrays, `attention_norm` and `mlp_norm` are those of all layers in order, the first ones dense.
    """
    dense, sparse = (stack.layer for stack in model.stacks)

    def attention(name: str) -> list[Any]:
        return [getattr(layer.attending.attention, name) for layer in (dense, sparse)]

    def latent_norm(name: str) -> list[Any]:
        return [getattr(found, "scale", None) for found in attention(name)]

    matrices = ("query", "query_down", "query_up", "kv_down", "key_up", "value_up", "out")
    named = {name: attention(name) for name in matrices}
    named |= {
        "embedding": [model.embedding.weight],
        "attention_norm": [dense.attending.norm.scale, sparse.attending.norm.scale],
        "query_norm": latent_norm("query_norm"),
        "kv_norm": latent_norm("kv_norm"),
        "mlp_norm": [dense.mlp_norm.scale, sparse.moe_norm.scale],
        "dense_gate": [dense.mlp.gate],
        "dense_up": [dense.mlp.up],
        "dense_down": [dense.mlp.down],
        "router": [sparse.moe.router.weight],
        "gate": [sparse.moe.experts.gate],
        "up": [sparse.moe.experts.up],
        "down": [sparse.moe.experts.down],
        "shared_gate": [sparse.shared.gate],
        "shared_up": [sparse.shared.up],
        "shared_down": [sparse.shared.down],
        "final_norm": [model.unembedding.norm.scale],
        "unembedding": [model.unembedding.weight],
    }
    there = {name: parts for name, parts in named.items() if parts[0] is not None}
    return {name: np.concatenate([np.asarray(part, np.float64) for part in parts]) for name, parts in there.items()}


@dataclass(frozen=True)
class Rope:
    """Frequencies of rotary positions, extended by YaRN where `factor` exceeds 1."""

    base: float
    interleaved: bool
    factor: float
    length: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all: float

    def pairs(self, size: int) -> list[tuple[int, int]]:
        """Dimensions that turn together."""
        half = size // 2
        return [(2 * i, 2 * i + 1) if self.interleaved else (i, i + half) for i in range(half)]

    def frequencies(self, size: int) -> list[float]:
        """Of each pair.

        Pair i turns length * base ** (-2 i / size) / (2 pi) times within `length`. From the last pair that turns
        `beta_fast` times, to the first that turns less than `beta_slow` times, frequencies go over from what they are
        to a `factor`-th, in equal parts a pair.
        """
        plain = [self.base ** (-2 * i / size) for i in range(size // 2)]
        if self.factor == 1:
            return plain

        def pair(turns: float) -> float:
            return size / 2 * math.log(self.length / (2 * math.pi * turns), self.base)

        first, last = max(0, math.floor(pair(self.beta_fast))), min(size - 1, math.ceil(pair(self.beta_slow)))
        result = []
        for i, frequency in enumerate(plain):
            extended = min(1.0, max(0.0, (i - first) / (last - first)))
            result.append((1 - extended) * frequency + extended * frequency / self.factor)
        return result

    def _attention_factor(self, mscale: float) -> float:
        return 1 + 0.1 * mscale * math.log(self.factor)

    @property
    def magnitude(self) -> float:
        """Of what is rotated."""
        return self._attention_factor(self.mscale) / self._attention_factor(self.mscale_all)

    @property
    def score_factor(self) -> float:
        """Of all scores."""
        return self._attention_factor(self.mscale_all) ** 2


@dataclass(frozen=True)
class Choice:
    """How a token's experts are chosen and weighed."""

    score: Literal["softmax", "sigmoid"]
    groups: int
    kept_groups: int
    group_score: Literal["max", "sum_of_top2"]
    renormalised: bool
    scale: float


@dataclass(frozen=True)
class DeepSeek(Family):
    """What the arrays' shapes do not say, and the choice bias [MoE layer, experts], which is no parameter."""

    experts_per_token: int
    dense_layers: int
    nope_dim: int
    rope: Rope
    choice: Choice
    bias: np.ndarray
    bias_rate: float
    norm_eps: float
    losses: Losses

    def layers(self, p: Split, x: Value, visibility: Visibility) -> tuple[Value, list[Routing]]:
        """The dense ones, then those with experts."""
        routing = []
        for layer in range(p.shape("out")[0]):
            x = x + self._attention(p, layer, norm(x, p("attention_norm", layer), self.norm_eps), visibility)
            h = norm(x, p("mlp_norm", layer), self.norm_eps)
            if layer < self.dense_layers:
                x = x + swiglu(h, p("dense_gate", layer), p("dense_up", layer), p("dense_down", layer))
            else:
                i = layer - self.dense_layers
                shared = swiglu(h, p("shared_gate", i), p("shared_up", i), p("shared_down", i))
                y, one = experts(p, i, h, lambda logits, i=i: self._route(logits, i))
                x = x + y + shared
                routing.append(one)
        return x, routing

    def after_step(self, load: np.ndarray) -> "DeepSeek":
        """Experts with less than their share become more eligible, those with more less: V3, section 2.1.2."""
        bias = self.bias.copy()
        layers, count = load.shape
        for layer in range(layers):
            total = int(load[layer].sum())
            for e in range(count):
                missing = total - count * int(load[layer, e])
                bias[layer, e] += self.bias_rate * ((missing > 0) - (missing < 0))
        return replace(self, bias=bias)

    def _rotate(self, x: Value, visibility: Visibility) -> Value:
        size = x.data.shape[1]
        return self.rope.magnitude * rotate(x, visibility.positions, self.rope.frequencies(size), self.rope.pairs(size))

    def _attention(self, p: Split, layer: int, x: Value, visibility: Visibility) -> Value:
        """One row, head by head; keys and values of all heads come from one latent, and one rotated key serves all."""
        latent_size = p.shape("kv_norm")[1]
        down = x @ p("kv_down", layer)
        latent = norm(down[:, :latent_size], p("kv_norm", layer), _LATENT_EPS)
        shared_key = self._rotate(down[:, latent_size:], visibility)
        if "query" in p.whole:
            source, to_query = x, "query"
        else:
            source, to_query = norm(x @ p("query_down", layer), p("query_norm", layer), _LATENT_EPS), "query_up"
        heads, size = p.shape(to_query)[2:]
        seen, result = visibility.seen, value(0)
        for head in range(heads):
            q = source @ p(to_query, layer, slice(None), head)
            key = latent @ p("key_up", layer, slice(None), head)
            v = latent @ p("value_up", layer, slice(None), head)
            scores = q[:, : self.nope_dim] @ key.T + self._rotate(q[:, self.nope_dim :], visibility) @ shared_key.T
            weighed = attend(scores * (self.rope.score_factor / math.sqrt(size)), seen, v)
            result = result + weighed @ p("out", layer, head)
        return result

    def _route(self, logits: Value, layer: int) -> tuple[dict[int, Value], Value]:
        c = self.choice
        if c.score == "softmax":
            scores = exp(logits) / exp(logits).sum()
            probabilities = scores
        else:
            scores = 1 / (1 + exp(-logits))
            probabilities = scores / scores.sum()
        chosen = self._choose(scores.data + self.bias[layer])
        share = total_of(scores[e] for e in chosen) if c.renormalised else 1
        return {e: c.scale * (scores[e] / share) for e in chosen}, probabilities

    def _choose(self, eligibility: np.ndarray) -> list[int]:
        """The K best of the best groups."""
        c = self.choice
        groups = np.split(np.arange(len(eligibility)), c.groups)
        terms = 1 if c.group_score == "max" else 2
        worth = [sum(sorted(eligibility[group].tolist())[-terms:]) for group in groups]
        left = [int(e) for group in best(worth, c.kept_groups) for e in groups[group]]
        return [left[i] for i in best([float(eligibility[e]) for e in left], self.experts_per_token)]
