"""The oracle's routers: how a token's experts are chosen and its gates follow (Jiang et al., 2024; DeepSeek-V3, 2024).

A choice bias has no gradient: a rule moves it after each step.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from oracle import top_indices
from tape import Value, exp, total


@dataclass(frozen=True)
class Choice:
    """How a token's experts are chosen, and how its gates follow from the scores.

    Gates that are `renormalised` divide by their sum plus `added`, or by `least_sum` where that is larger.
    """

    score: Literal["softmax", "sigmoid"]
    groups: int
    kept_groups: int
    group_score: Literal["max", "sum_of_top2"]
    renormalised: bool
    scale: float
    least_sum: float = 0.0
    added: float = 0.0

    def route(self, logits: Value, bias: np.ndarray, count: int) -> tuple[dict[int, Value], Value]:
        """Return the gates of the `count` chosen experts, and the scores of all experts scaled to a sum of 1."""
        if self.score == "softmax":
            scores = exp(logits) / exp(logits).sum()
            probabilities = scores
        else:
            scores = 1 / (1 + exp(-logits))
            probabilities = scores / scores.sum()
        chosen = self._choose(scores.data + bias, count)
        divisor = total(scores[e] for e in chosen) + self.added if self.renormalised else 1
        if isinstance(divisor, Value) and float(divisor.data) < self.least_sum:
            divisor = self.least_sum
        return {e: self.scale * (scores[e] / divisor) for e in chosen}, probabilities

    def _choose(self, eligibility: np.ndarray, count: int) -> list[int]:
        """Return the most eligible experts of the kept groups.

        A group's score is its largest eligibility, or the sum of its two largest.
        """
        groups = np.split(np.arange(len(eligibility)), self.groups)
        terms = 1 if self.group_score == "max" else 2
        group_scores = [sum(sorted(eligibility[group].tolist())[-terms:]) for group in groups]
        kept = [int(e) for group in top_indices(group_scores, self.kept_groups) for e in groups[group]]
        return [kept[i] for i in top_indices([float(eligibility[e]) for e in kept], count)]


def softmax(renormalised: bool) -> Choice:
    """Return the router of Mixtral, Qwen3-MoE and OLMoE."""
    return Choice("softmax", 1, 1, "max", renormalised, 1.0)


def moved(bias: np.ndarray, load: np.ndarray, rate: float) -> np.ndarray:
    """Return choice biases [layer, expert] after a step with this load.

    Those of experts below the mean load rise, and those of experts above it fall (V3, section 2.1.2).
    """
    bias = bias.copy()
    layers, count = load.shape
    for layer in range(layers):
        assignments = int(load[layer].sum())
        for e in range(count):
            missing = assignments - count * int(load[layer, e])
            bias[layer, e] += rate * ((missing > 0) - (missing < 0))
    return bias
