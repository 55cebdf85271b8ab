"""The oracle's layers of Gemma 4 (Google, 2026), which differ from those with grouped-query attention in nearly all.

- An MLP is beside the experts, each between two norms of its own; the router reads the residual stream itself.
- In layers without a window values are what keys are projected to. Values have a norm without a scale.
- Each layer ends in a product with a number, which is not trained.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from oracle import Coordinates, Routing, TapedParameters, norm, run_experts
from oracle_grouped import Grouped
from oracle_rope import Rope
from tape import Value, as_value, exp


def gelu_gated(gate: Value, up: Value) -> Value:
    """Return gelu(gate) * up, by the approximation with a tanh."""
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + exp(-2 * inner)) * up


@dataclass(frozen=True, kw_only=True)
class Gemma4(Grouped):
    """The settings of a model that its arrays do not show; all layers have heads of one size."""

    scales: np.ndarray  # what each layer ends in
    full_rope: Rope  # the positions of layers without a window

    def layers(self, p: TapedParameters, x: Value, at: Coordinates) -> tuple[Value, list[Routing]]:
        """Run each layer: attention, then an MLP beside experts."""
        routing = []
        for layer, scale in enumerate(self.scales.tolist()):

            def normed(x: Value, name: str, layer: int = layer) -> Value:
                return norm(x, p(f"{name}_norm", layer), self.norm_eps)

            kind = replace(self, rope=self.full_rope) if layer in self.full else self
            x = x + normed(kind.attention(p, layer, normed(x, "attention"), at), "after_attention")
            h = normed(x, "before_shared")
            inner = gelu_gated(h @ p("shared_gate", layer), h @ p("shared_up", layer))
            beside = normed(inner @ p("shared_down", layer), "after_shared")
            read = norm(x, p("router_input_scale", layer), self.norm_eps) / math.sqrt(x.data.shape[1])
            h = normed(x, "before_experts")
            y, of_layer = run_experts(p, layer, h, lambda x, i=layer: self._route(p, i, x), gelu_gated, read)
            routing.append(of_layer)
            x = x + normed(normed(y, "after_experts") + beside, "after_feed_forward")
            x = x * scale
        return x, routing

    def _route(self, p: TapedParameters, layer: int, logits: Value) -> tuple[dict[int, Value], Value]:
        gates, probabilities = self.choice.route(logits, np.zeros(logits.data.shape), self.experts_per_token)
        return {e: gate * p("router_expert_scale", layer, e) for e, gate in gates.items()}, probabilities

    def _heads(self, p: TapedParameters, name: str, layer: int, x: Value) -> list[Value]:
        """Return the queries, keys or values of each head before the rotation."""
        if name != "value":
            return super()._heads(p, name, layer, x)
        own = layer not in self.full
        at = layer - sum(i < layer for i in self.full)  # among the layers with a matrix of values
        made = [
            p("value", at, slice(None), head) if own else p("key", layer, slice(None), head)
            for head in range(p.shape("key")[2])
        ]
        return [norm(x @ weight, as_value(1.0), self.norm_eps) for weight in made]
