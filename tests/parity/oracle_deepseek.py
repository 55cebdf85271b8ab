"""DeepSeek's layers for the oracle (DeepSeek-AI, 2024: V2, section 2.1; V3, section 2.1).

Multi-head latent attention with YaRN (Peng et al., 2023); the first layers dense, the others with shared experts and
routed ones that are chosen within groups, by scores with a bias that a rule moves and no gradient.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import oracle
from oracle import Family, Losses, Parameters, Routing, Split, Visibility, attend, best, experts, norm, swiglu
from oracle_rope import Rope
from tape import Value, exp, total_of, value

_LATENT_EPS = 1e-6  # of the latents' norms, in all released models


def parameters_of(model: Any) -> Parameters:
    """The arrays of a DeepSeek (or of anything in its shape: gradients, moments) by name, float64."""
    matrices = ("query", "query_down", "query_up", "kv_down", "key_up", "value_up", "out")
    norms = {name: f"{name}.scale" for name in ("query_norm", "kv_norm")}
    return oracle.parameters_of(model, {name: name for name in matrices} | norms)


def bias_of(model: Any) -> np.ndarray | None:
    """The choice biases [MoE layer, experts], if the model has any."""
    return oracle.stacked(model, "feed_forward.router.choice_bias")


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
            h = norm(x, p("feed_forward_norm", layer), self.norm_eps)
            if layer < self.dense_layers:
                x = x + swiglu(h, p("dense_gate", layer), p("dense_up", layer), p("dense_down", layer))
            else:
                i = layer - self.dense_layers
                y, one = experts(p, i, h, lambda logits, i=i: self._route(logits, i))
                routing.append(one)
                if "shared_gate" in p.whole:
                    y = y + swiglu(h, p("shared_gate", i), p("shared_up", i), p("shared_down", i))
                x = x + y
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

    def _attention(self, p: Split, layer: int, x: Value, visibility: Visibility) -> Value:
        """One row, head by head; keys and values of all heads come from one latent, and one rotated key serves all."""
        latent_size = p.shape("kv_norm")[1]
        down = x @ p("kv_down", layer)
        latent = norm(down[:, :latent_size], p("kv_norm", layer), _LATENT_EPS)
        shared_key = self.rope.rotate(down[:, latent_size:], visibility.positions)
        if "query" in p.whole:
            source, to_query = x, "query"
        else:
            source, to_query = norm(x @ p("query_down", layer), p("query_norm", layer), _LATENT_EPS), "query_up"
        heads, size = p.shape(to_query)[2:]
        factor = self.rope.attention_factor(self.rope.mscale_all) ** 2 / math.sqrt(size)
        seen, result = visibility.seen, value(0)
        for head in range(heads):
            q = source @ p(to_query, layer, slice(None), head)
            key = latent @ p("key_up", layer, slice(None), head)
            v = latent @ p("value_up", layer, slice(None), head)
            turned = self.rope.rotate(q[:, self.nope_dim :], visibility.positions)
            scores = q[:, : self.nope_dim] @ key.T + turned @ shared_key.T
            result = result + attend(scores * factor, seen, v) @ p("out", layer, head)
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
