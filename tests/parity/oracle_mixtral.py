"""Mixtral's layers for the oracle (Jiang et al., 2024): grouped-query attention, experts chosen by softmax."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle import Family, Losses, Parameters, Routing, Split, Visibility, attend, best, experts, norm, rotate
from tape import Value, exp, total_of, value


def parameters_of(model: Any) -> Parameters:
    """The arrays of a Mixtral (or of anything in its shape: gradients, moments) by name; layers stacked, float64."""
    layer = model.stacks[0].layer
    named = {
        "embedding": model.embedding.weight,
        "attention_norm": layer.attention_norm.scale,
        "query": layer.attention.query,
        "key": layer.attention.key,
        "value": layer.attention.value,
        "out": layer.attention.out,
        "moe_norm": layer.moe_norm.scale,
        "router": layer.moe.router.weight,
        "gate": layer.moe.experts.gate,
        "up": layer.moe.experts.up,
        "down": layer.moe.experts.down,
        "final_norm": model.unembedding.norm.scale,
        "unembedding": model.unembedding.weight,
    }
    return {name: np.asarray(array, np.float64) for name, array in named.items()}


@dataclass(frozen=True)
class Mixtral(Family):
    """What the arrays' shapes do not say."""

    experts_per_token: int
    rope_base: float
    norm_eps: float
    window: int | None
    losses: Losses

    def layers(self, p: Split, x: Value, visibility: Visibility) -> tuple[Value, list[Routing]]:
        """All alike."""
        routing = []
        for layer in range(p.shape("query")[0]):
            x = x + self._attention(p, layer, norm(x, p("attention_norm", layer), self.norm_eps), visibility)
            y, one = experts(p, layer, norm(x, p("moe_norm", layer), self.norm_eps), self._route)
            x = x + y
            routing.append(one)
        return x, routing

    def _attention(self, p: Split, layer: int, x: Value, visibility: Visibility) -> Value:
        """One row, head by head."""
        _, _, heads, size = p.shape("query")
        kv_heads = p.shape("key")[2]
        half = size // 2
        pairs = [(i, i + half) for i in range(half)]
        frequencies = [self.rope_base ** (-2 * i / size) for i in range(half)]
        seen = visibility.seen
        if self.window is not None:
            seen &= visibility.positions[:, None] - visibility.positions[None, :] < self.window
        result = value(0)
        for head in range(heads):
            shared = head * kv_heads // heads
            q = rotate(x @ p("query", layer, slice(None), head), visibility.positions, frequencies, pairs)
            k = rotate(x @ p("key", layer, slice(None), shared), visibility.positions, frequencies, pairs)
            v = x @ p("value", layer, slice(None), shared)
            result = result + attend(q @ k.T / math.sqrt(size), seen, v) @ p("out", layer, head)
        return result

    def _route(self, logits: Value) -> tuple[dict[int, Value], Value]:
        """The K most probable experts, with their probabilities renormalised."""
        exponentials = exp(logits)
        probabilities = exponentials / exponentials.sum()
        chosen = best(probabilities.data.tolist(), self.experts_per_token)
        share = total_of(probabilities[e] for e in chosen)
        return {e: probabilities[e] / share for e in chosen}, probabilities
