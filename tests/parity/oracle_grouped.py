"""The oracle's layers with grouped-query attention, then experts or an MLP.

They are those of Mixtral (Jiang et al., 2024), OLMoE (Muennighoff et al., 2024), Qwen3-MoE (Qwen Team, 2025), GLM-4.5
(GLM-4.5 Team, 2025) and gpt-oss (OpenAI, 2025), which differ in:

- the biases, norms and limits of queries, keys and values before the rotation, and the dimensions that are rotated;
- the sinks, and the layers that have a window;
- the layers that have experts, the activation of these, and whether there are shared experts;
- the router.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
from oracle import (
    Activation,
    Coordinates,
    Family,
    Losses,
    Parameters,
    Routing,
    TapedParameters,
    attend,
    run_experts,
    silu_gated,
    swiglu,
)
from oracle_rope import Rope
from oracle_router import Choice, moved
from tape import Value, as_value, clamp, exp, total

# Where a number is closer than this to the bound of a clamp, float32 may put it on the other side.
_EDGE = 2e-6


def parameters_of(model: Any) -> Parameters:
    """Return the arrays of a model, or of its gradients or moments, by the oracle's names, in float64."""
    projections = ("query", "key", "value", "out")
    attention = {name: name for name in projections} | {f"{name}_bias": f"{name}_bias" for name in projections}
    attention["sinks"] = "sinks"
    return oracle.parameters_of(model, attention | {"query_norm": "query_norm.scale", "key_norm": "key_norm.scale"})


def _clamped(x: Value, low: float, high: float) -> Value:
    """Return `x` limited to [low, high], and refuse a number that float32 may put on the other side of a limit."""
    edge = min(float(abs(x.data - limit).min()) for limit in (low, high))
    assert edge > _EDGE, f"a number is within {edge:.1e} of {low} or {high}; choose other limits"
    return clamp(x, low, high)


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """Return the activation of gpt-oss: of a gate with an upper limit, and of 1 more than the other, clamped factor."""

    def activation(gate: Value, up: Value) -> Value:
        gate, up = _clamped(gate, -math.inf, limit), _clamped(up, -limit, limit)
        return gate / (1 + exp(-alpha * gate)) * (up + 1)

    return activation


def with_experts(layers: int, every: int = 1, without: Collection[int] = ()) -> tuple[bool, ...]:
    """Return, for each layer, whether it has experts.

    Each `every`-th layer has experts, except those whose index, counted from 0, is in `without`.
    """
    return tuple(layer not in without and (layer + 1) % every == 0 for layer in range(layers))


@dataclass(frozen=True)
class Grouped(Family):
    """The settings of a model that its arrays do not show.

    Four kinds of arrays are optional: `query_norm` and `key_norm` (as wide as one head or as all heads), biases, sinks.
    """

    experts_per_token: int
    sparse: tuple[bool, ...]  # whether each layer has experts
    rope: Rope
    norm_eps: float
    choice: Choice
    window: int | None  # how many positions a token attends to, its own included
    clip: float | None  # the bound of queries, keys and values in absolute value
    losses: Losses
    full: Collection[int] = ()  # the layers without the window
    activation: Activation = silu_gated
    rotary_dims: int | None = None  # the first dimensions of a head, which are rotated; None for all
    bias: np.ndarray | None = None  # the choice bias [layer with experts, expert]
    bias_rate: float = 0.0
    score_scale: float | None = None  # the factor of scores; None for the usual one
    embedding_factor: float = 1.0
    logit_cap: float | None = None
    gates_on_inputs: bool = False

    def layers(self, p: TapedParameters, x: Value, at: Coordinates) -> tuple[Value, list[Routing]]:
        """Run each layer: attention, then experts or an MLP."""
        routing = []
        for layer, sparse in enumerate(self.sparse):
            x = x + self.mix(p, layer, self.norm(x, p("attention_norm", layer)), at)
            h = self.norm(x, p("feed_forward_norm", layer))
            if sparse:
                i = len(routing)
                bias = np.zeros(p.shape("router")[2]) if self.bias is None else self.bias[i]
                y, of_layer = run_experts(
                    p,
                    i,
                    h,
                    lambda logits, bias=bias: self.choice.route(logits, bias, self.experts_per_token),
                    self.activation,
                    on_inputs=self.gates_on_inputs,
                )
                routing.append(of_layer)
                if "shared_gate" in p.whole:
                    shared = swiglu(h, p("shared_gate", i), p("shared_up", i), p("shared_down", i))
                    if "shared_token_gate" in p.whole:
                        shared = shared / (1 + exp(-(h @ p("shared_token_gate", i))))
                    y = y + shared
            else:
                i = layer - len(routing)
                y = swiglu(h, p("dense_gate", i), p("dense_up", i), p("dense_down", i))
            x = x + y
        return x, routing

    def after_step(self, load: np.ndarray) -> "Grouped":
        """Move the choice bias."""
        return self if self.bias is None else replace(self, bias=moved(self.bias, load, self.bias_rate))

    def mix(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return what a layer's attention makes of a row."""
        return self.attention(p, layer, x, at)

    def attention(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return the attention of one row, computed head by head. Groups of query heads share a key and a value."""
        queries, keys, values = (self._heads(p, name, layer, x) for name in ("query", "key", "value"))
        visible, positions = at.visible, at.positions
        if self.window is not None and layer not in self.full:
            visible &= positions[:, None] - positions[None, :] < self.window
        result = as_value(0)
        for head, query in enumerate(queries):
            shared = head * len(keys) // len(queries)
            scores = self._turned(query, positions) @ self._turned(keys[shared], positions).T
            scores = scores / math.sqrt(query.data.shape[1]) if self.score_scale is None else scores * self.score_scale
            y = attend(scores, visible, values[shared], self.sink(p, layer, head))
            if "attention_gate" in p.whole:
                y = y / (1 + exp(-(x @ p("attention_gate", layer, slice(None), head))))
            result = result + y @ p("out", layer, head)
        return result + p("out_bias", layer) if "out_bias" in p.whole else result

    def sink(self, p: TapedParameters, layer: int, head: int) -> Value | None:
        """Return a head's sink, or None in a model without sinks."""
        return p("sinks", layer, head) if "sinks" in p.whole else None

    def _turned(self, x: Value, positions: np.ndarray) -> Value:
        """Return a head's queries or keys after the rotation of the first dimensions."""
        dims, size = self.rotary_dims, x.data.shape[1]
        if dims is None:
            return self.rope.rotate(x, positions)
        # Parts of a head become columns of a whole one, because the tape cannot join arrays.
        first, rest = np.eye(size)[:dims], np.eye(size)[dims:]
        return self.rope.rotate(x[:, :dims], positions) @ first + x[:, dims:] @ rest

    def _heads(self, p: TapedParameters, name: str, layer: int, x: Value) -> list[Value]:
        """Return the queries, keys or values of each head before the rotation: projection, bias, norm, clip."""
        heads = [x @ p(name, layer, slice(None), head) for head in range(p.shape(name)[2])]
        if f"{name}_bias" in p.whole:
            heads = [x + p(f"{name}_bias", layer, head) for head, x in enumerate(heads)]
        if f"{name}_norm" in p.whole:
            heads = self._normed(heads, p(f"{name}_norm", layer))
        if self.clip is not None:
            heads = [_clamped(x, -self.clip, self.clip) for x in heads]
        return heads

    def _normed(self, heads: list[Value], scale: Value) -> list[Value]:
        """Return the heads after the norm, which is over each head or over all heads of a token together."""
        size = heads[0].data.shape[1]
        if scale.data.shape == (size,):
            return [self.norm(x, scale) for x in heads]
        mean_square = total((x * x).sum(-1) for x in heads) / (size * len(heads))
        normed = [x * (mean_square + self.norm_eps) ** -0.5 for x in heads]
        return [x * scale[i * size : (i + 1) * size] for i, x in enumerate(normed)]
