"""The oracle's layers of DeepSeek (DeepSeek-AI, 2024: V2, section 2.1; V3, section 2.1).

Attention is multi-head latent attention with YaRN (Peng et al., 2023). The first layers have an MLP. The other layers
have shared experts and routed experts. In Mistral 4 queries have a factor that grows
with their position.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
from oracle import (
    Coordinates,
    Family,
    Losses,
    Parameters,
    Routing,
    TapedParameters,
    attend,
    norm,
    run_experts,
    swiglu,
)
from oracle_rope import Rope
from oracle_router import Choice, moved
from tape import Value, as_value

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
class DeepSeek(Family):
    """The settings of a model that its arrays do not show, and the choice bias [layer with experts, expert]."""

    experts_per_token: int
    dense_layers: int
    nope_dim: int
    rope: Rope | None  # None: nothing is rotated
    choice: Choice
    bias: np.ndarray
    bias_rate: float
    norm_eps: float
    losses: Losses
    query_scale: tuple[float, int] = (0.0, 1)  # beta and length of the factor on queries

    def layers(self, p: TapedParameters, x: Value, at: Coordinates) -> tuple[Value, list[Routing]]:
        """Run the layers with an MLP, then those with experts."""
        routing = []
        for layer in range(p.shape("attention_norm")[0]):
            x = x + self._mix(p, layer, norm(x, p("attention_norm", layer), self.norm_eps), at)
            h = norm(x, p("feed_forward_norm", layer), self.norm_eps)
            if layer < self.dense_layers:
                x = x + swiglu(h, p("dense_gate", layer), p("dense_up", layer), p("dense_down", layer))
            else:
                i = layer - self.dense_layers
                y, of_layer = run_experts(
                    p, i, h, lambda logits, i=i: self.choice.route(logits, self.bias[i], self.experts_per_token)
                )
                routing.append(of_layer)
                if "shared_gate" in p.whole:
                    y = y + swiglu(h, p("shared_gate", i), p("shared_up", i), p("shared_down", i))
                x = x + y
        return x, routing

    def after_step(self, load: np.ndarray) -> "DeepSeek":
        """Raise the bias of experts below the mean load and lower it for those above (V3, section 2.1.2)."""
        return replace(self, bias=moved(self.bias, load, self.bias_rate))

    def _mix(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return what the layer's mixer makes of one row."""
        return self._attention(p, layer, x, at)

    def _attention(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return the attention of one row, computed head by head.

        The keys and values of all heads are projections of one latent. All heads share one rotated key.
        """
        latent_size = p.shape("kv_norm")[1]
        down = x @ p("kv_down", layer)
        latent = norm(down[:, :latent_size], p("kv_norm", layer), _LATENT_EPS)
        shared_key = self._rotated(down[:, latent_size:], at)
        if "query" in p.whole:
            source, to_query = x, "query"
        else:
            source, to_query = norm(x @ p("query_down", layer), p("query_norm", layer), _LATENT_EPS), "query_up"
        heads, size = p.shape(to_query)[2:]
        factor = 1 / math.sqrt(size)
        if self.rope is not None:
            factor *= self.rope.attention_factor(self.rope.mscale_all) ** 2
        beta, length = self.query_scale
        growth = np.array([1 + beta * math.log(1 + int(position) // length) for position in at.positions])
        visible, result = at.visible, as_value(0)
        for head in range(heads):
            q = source @ p(to_query, layer, slice(None), head)
            key = latent @ p("key_up", layer, slice(None), head)
            v = latent @ p("value_up", layer, slice(None), head)
            rotated = self._rotated(q[:, self.nope_dim :], at)
            scores = (q[:, : self.nope_dim] @ key.T + rotated @ shared_key.T) * growth[:, None]
            result = result + attend(scores * factor, visible, v) @ p("out", layer, head)
        return result

    def _rotated(self, x: Value, at: Coordinates) -> Value:
        return x if self.rope is None else self.rope.rotate(x, at.positions)
