"""The oracle's layers of DeepSeek (DeepSeek-AI, 2024: V2, section 2.1; V3, section 2.1).

Attention is multi-head latent attention with YaRN (Peng et al., 2023). The first layers have an MLP. The other layers
have shared experts and routed experts. A token's experts are chosen in the best groups of experts, by score plus choice
bias. The choice bias has no gradient: a rule moves it after each step.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import oracle
from oracle import (
    Family,
    Losses,
    Parameters,
    Place,
    Routing,
    TapedParameters,
    attend,
    norm,
    run_experts,
    swiglu,
    top_indices,
)
from oracle_rope import Rope
from tape import Value, as_value, exp, total

_LATENT_EPS = 1e-6  # the epsilon of the latents' norms in all released models


def parameters_of(model: Any) -> Parameters:
    """Return the arrays of a model, or of its gradients or moments, by the oracle's names, in float64."""
    matrices = ("query", "query_down", "query_up", "kv_down", "key_up", "value_up", "out")
    norms = {name: f"{name}.scale" for name in ("query_norm", "kv_norm")}
    return oracle.parameters_of(model, {name: name for name in matrices} | norms)


def bias_of(model: Any) -> np.ndarray | None:
    """Return the choice biases [layer with experts, expert], or None for a model without them."""
    return oracle.stacked(model, "feed_forward.router.choice_bias")


@dataclass(frozen=True)
class Choice:
    """How a token's experts are chosen, and how its gates follow from the scores."""

    score: Literal["softmax", "sigmoid"]
    groups: int
    kept_groups: int
    group_score: Literal["max", "sum_of_top2"]
    renormalised: bool
    scale: float


@dataclass(frozen=True)
class DeepSeek(Family):
    """The settings of a model that its arrays do not show, and the choice bias [layer with experts, expert]."""

    experts_per_token: int
    dense_layers: int
    nope_dim: int
    rope: Rope
    choice: Choice
    bias: np.ndarray
    bias_rate: float
    norm_eps: float
    losses: Losses

    def layers(self, p: TapedParameters, x: Value, place: Place) -> tuple[Value, list[Routing]]:
        """Run the layers with an MLP, then those with experts."""
        routing = []
        for layer in range(p.shape("out")[0]):
            x = x + self._attention(p, layer, norm(x, p("attention_norm", layer), self.norm_eps), place)
            h = norm(x, p("feed_forward_norm", layer), self.norm_eps)
            if layer < self.dense_layers:
                x = x + swiglu(h, p("dense_gate", layer), p("dense_up", layer), p("dense_down", layer))
            else:
                i = layer - self.dense_layers
                y, of_layer = run_experts(p, i, h, lambda logits, i=i: self._route(logits, i))
                routing.append(of_layer)
                if "shared_gate" in p.whole:
                    y = y + swiglu(h, p("shared_gate", i), p("shared_up", i), p("shared_down", i))
                x = x + y
        return x, routing

    def after_step(self, load: np.ndarray) -> "DeepSeek":
        """Raise the bias of experts below the mean load and lower it for those above (V3, section 2.1.2)."""
        bias = self.bias.copy()
        layers, count = load.shape
        for layer in range(layers):
            assignments = int(load[layer].sum())
            for e in range(count):
                missing = assignments - count * int(load[layer, e])
                bias[layer, e] += self.bias_rate * ((missing > 0) - (missing < 0))
        return replace(self, bias=bias)

    def _attention(self, p: TapedParameters, layer: int, x: Value, place: Place) -> Value:
        """Return the attention of one row, computed head by head.

        The keys and values of all heads are projections of one latent. All heads share one rotated key.
        """
        latent_size = p.shape("kv_norm")[1]
        down = x @ p("kv_down", layer)
        latent = norm(down[:, :latent_size], p("kv_norm", layer), _LATENT_EPS)
        shared_key = self.rope.rotate(down[:, latent_size:], place.positions)
        if "query" in p.whole:
            source, to_query = x, "query"
        else:
            source, to_query = norm(x @ p("query_down", layer), p("query_norm", layer), _LATENT_EPS), "query_up"
        heads, size = p.shape(to_query)[2:]
        factor = self.rope.attention_factor(self.rope.mscale_all) ** 2 / math.sqrt(size)
        visible, result = place.visible, as_value(0)
        for head in range(heads):
            q = source @ p(to_query, layer, slice(None), head)
            key = latent @ p("key_up", layer, slice(None), head)
            v = latent @ p("value_up", layer, slice(None), head)
            rotated = self.rope.rotate(q[:, self.nope_dim :], place.positions)
            scores = q[:, : self.nope_dim] @ key.T + rotated @ shared_key.T
            result = result + attend(scores * factor, visible, v) @ p("out", layer, head)
        return result

    def _route(self, logits: Value, layer: int) -> tuple[dict[int, Value], Value]:
        """Return the gates of the chosen experts, and the scores of all experts scaled to a sum of 1."""
        c = self.choice
        if c.score == "softmax":
            scores = exp(logits) / exp(logits).sum()
            probabilities = scores
        else:
            scores = 1 / (1 + exp(-logits))
            probabilities = scores / scores.sum()
        chosen = self._choose(scores.data + self.bias[layer])
        divisor = total(scores[e] for e in chosen) if c.renormalised else 1
        return {e: c.scale * (scores[e] / divisor) for e in chosen}, probabilities

    def _choose(self, eligibility: np.ndarray) -> list[int]:
        """Return the K most eligible experts of the kept groups.

        A group's score is its largest eligibility, or the sum of its two largest.
        """
        c = self.choice
        groups = np.split(np.arange(len(eligibility)), c.groups)
        terms = 1 if c.group_score == "max" else 2
        group_scores = [sum(sorted(eligibility[group].tolist())[-terms:]) for group in groups]
        kept = [int(e) for group in top_indices(group_scores, c.kept_groups) for e in groups[group]]
        return [kept[i] for i in top_indices([float(eligibility[e]) for e in kept], self.experts_per_token)]
