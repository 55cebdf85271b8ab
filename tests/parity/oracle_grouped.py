"""Layers with grouped-query attention for the oracle: Mixtral, Qwen3-MoE and OLMoE.

Jiang et al., 2024; Qwen Team, 2025; Muennighoff et al., 2024. Experts are chosen by softmax. The three differ in what
happens to queries, keys and values between their matrices and the rotation, in which layers have experts, and in
whether gates are renormalised.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import oracle
from oracle import Family, Losses, Parameters, Routing, Split, Visibility, attend, best, experts, norm, swiglu
from oracle_rope import Rope
from tape import Value, clamp, exp, total_of, value

# A number closer than this to the bound of a clamp could be on its other side in float32.
_EDGE = 2e-6


def parameters_of(model: Any) -> Parameters:
    """The arrays of a model (or of anything in its shape: gradients, moments) by name, float64."""
    projections = ("query", "key", "value", "out")
    attention = {name: name for name in projections} | {f"{name}_bias": f"{name}_bias" for name in projections}
    return oracle.parameters_of(model, attention | {"query_norm": "query_norm.scale", "key_norm": "key_norm.scale"})


def with_experts(layers: int, every: int = 1, without: Collection[int] = ()) -> tuple[bool, ...]:
    """Whether each layer has experts: every `every`-th one, if it is not in `without`, which counts from 0."""
    return tuple(layer not in without and (layer + 1) % every == 0 for layer in range(layers))


@dataclass(frozen=True)
class Grouped(Family):
    """What the arrays' names and shapes do not say.

    Arrays that may be there: `query_norm` and `key_norm`, of the width of one head or of all together; biases.
    """

    experts_per_token: int
    sparse: tuple[bool, ...]  # whether each layer has experts
    rope: Rope
    norm_eps: float
    renormalised: bool  # a token's gates: to a sum of 1
    window: int | None
    clip: float | None  # queries, keys and values stay within -clip and clip
    losses: Losses

    def layers(self, p: Split, x: Value, visibility: Visibility) -> tuple[Value, list[Routing]]:
        """Attention, then experts or an MLP."""
        routing = []
        for layer, sparse in enumerate(self.sparse):
            x = x + self._attention(p, layer, norm(x, p("attention_norm", layer), self.norm_eps), visibility)
            h = norm(x, p("feed_forward_norm", layer), self.norm_eps)
            if sparse:
                y, one = experts(p, len(routing), h, self._route)
                routing.append(one)
            else:
                i = layer - len(routing)
                y = swiglu(h, p("dense_gate", i), p("dense_up", i), p("dense_down", i))
            x = x + y
        return x, routing

    def _attention(self, p: Split, layer: int, x: Value, visibility: Visibility) -> Value:
        """One row, head by head; some heads share a key and a value."""
        queries, keys, values = (self._heads(p, name, layer, x) for name in ("query", "key", "value"))
        seen, positions = visibility.seen, visibility.positions
        if self.window is not None:
            seen &= positions[:, None] - positions[None, :] < self.window
        result = value(0)
        for head, query in enumerate(queries):
            shared = head * len(keys) // len(queries)
            q, k = self.rope.rotate(query, positions), self.rope.rotate(keys[shared], positions)
            scores = q @ k.T / math.sqrt(q.data.shape[1])
            result = result + attend(scores, seen, values[shared]) @ p("out", layer, head)
        return result + p("out_bias", layer) if "out_bias" in p.whole else result

    def _heads(self, p: Split, name: str, layer: int, x: Value) -> list[Value]:
        """All heads' queries, keys or values before the rotation: projected, moved by a bias, normed, clipped."""
        heads = [x @ p(name, layer, slice(None), head) for head in range(p.shape(name)[2])]
        if f"{name}_bias" in p.whole:
            heads = [one + p(f"{name}_bias", layer, head) for head, one in enumerate(heads)]
        if f"{name}_norm" in p.whole:
            heads = self._normed(heads, p(f"{name}_norm", layer))
        if self.clip is not None:
            edge = min(float(abs(abs(one.data) - self.clip).min()) for one in heads)
            assert edge > _EDGE, "choose another bound: a number is next to this one"
            heads = [clamp(one, self.clip) for one in heads]
        return heads

    def _normed(self, heads: list[Value], scale: Value) -> list[Value]:
        """Each head by itself, or all together as one long vector a token."""
        size = heads[0].data.shape[1]
        if scale.data.shape == (size,):
            return [norm(one, scale, self.norm_eps) for one in heads]
        mean_square = total_of((one * one).sum(-1) for one in heads) / (size * len(heads))
        shrunk = [one * (mean_square + self.norm_eps) ** -0.5 for one in heads]
        return [one * scale[i * size : (i + 1) * size] for i, one in enumerate(shrunk)]

    def _route(self, logits: Value) -> tuple[dict[int, Value], Value]:
        """The K most probable experts, with their probabilities, renormalised or not."""
        exponentials = exp(logits)
        probabilities = exponentials / exponentials.sum()
        chosen = best(probabilities.data.tolist(), self.experts_per_token)
        share = total_of(probabilities[e] for e in chosen) if self.renormalised else 1
        return {e: probabilities[e] / share for e in chosen}, probabilities
