"""The oracle's mixer by the delta rule, token by token (Yang et al., 2024, arXiv:2412.06464), and the models with it.

Each head of keys serves consecutive heads of values. In Qwen3.5 a value head has one decay, and its gate is silu of a
projection. In Kimi Linear each channel of a key has a decay, and the gate is a sigmoid, both of low rank (Kimi Team,
2025, arXiv:2510.26692).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import oracle_deepseek
from oracle import Coordinates, Parameters, TapedParameters, layers_of, norm, stacked_of
from oracle_grouped import Grouped
from tape import Value, as_value, exp, log, stack

_TINY = 1e-6  # below the root of the norms of queries and keys
_PATHS = {"query": "query", "key": "key", "value": "value", "strength": "strength", "out": "out", "norm": "norm.scale"}
_PATHS |= {f"{name}_filter": f"convolutions.{i}.weight" for i, name in enumerate(("query", "key", "value"))}
_PATHS |= {"decay": "decay.weight", "decay_down": "decay.down", "decay_up": "decay.up"}
_PATHS |= {"decay_rate": "decay.rate", "decay_bias": "decay.bias"}
_PATHS |= {"gate": "gate.weight", "gate_down": "gate.down", "gate_up": "gate.up"}


def parameters_of(model: Any) -> Parameters:
    """Return the arrays of a model, or of its gradients or moments, by the oracle's names, in float64.

    Those of attention are stacked over its layers, and those of the delta rule, `delta_*`, over the others.
    """
    mixes, attends = [], []
    for layer in layers_of(model):
        (mixes if layer.array("attention.strength") is not None else attends).append(layer)
    plain = ("query", "key", "value", "out", "query_down", "query_up", "kv_down", "key_up", "value_up")
    paths = {name: name for name in plain} | {"attention_gate": "gate"}
    paths |= {name: f"{name}.scale" for name in ("query_norm", "key_norm", "kv_norm")}
    found = {name: stacked_of(attends, f"attention.{path}") for name, path in paths.items()}
    found |= {f"delta_{name}": stacked_of(mixes, f"attention.{path}") for name, path in _PATHS.items()}
    return oracle.parameters_of(model, {}) | {name: x.astype(np.float64) for name, x in found.items() if x is not None}


def delta(p: TapedParameters, layer: int, x: Value, at: Coordinates, epsilon: float) -> Value:
    """Return what mixer number `layer` makes of one row, computed head by head."""
    segments, result, heads = at.segments, as_value(0), p.shape("delta_value")[2]
    served = heads // p.shape("delta_key")[2]
    for head in range(heads):
        q, k = (_unit(_filtered(p, name, layer, head // served, x, segments)) for name in ("query", "key"))
        v, q = _filtered(p, "value", layer, head, x, segments), q / math.sqrt(q.data.shape[1])
        strength = _sigmoid(x @ p("delta_strength", layer, slice(None), slice(head, head + 1)))
        faded, rows, empty = _faded(p, layer, head, x), [], as_value(np.zeros((k.data.shape[1], v.data.shape[1])))
        state = empty
        for t in range(len(segments)):
            state = empty if t == 0 or segments[t] != segments[t - 1] else state
            state = faded[t][:, None] * state
            state = state + k[t][:, None] * (strength[t] * (v[t] - k[t] @ state))[None]
            rows.append(q[t] @ state)
        y = norm(stack(rows), p("delta_norm", layer), epsilon) * _gate(p, layer, head, x)
        result = result + y @ p("delta_out", layer, head)
    return result


def _faded(p: TapedParameters, layer: int, head: int, x: Value) -> Value:
    """Return the factors on the rows of a state, one for all or one for each."""
    if "delta_decay" in p.whole:
        raw = x @ p("delta_decay", layer, slice(None), slice(head, head + 1))
    else:
        raw = x @ p("delta_decay_down", layer) @ p("delta_decay_up", layer, slice(None), head)
    return exp(-exp(p("delta_decay_rate", layer, head)) * log(1 + exp(raw + p("delta_decay_bias", layer, head))))


def _gate(p: TapedParameters, layer: int, head: int, x: Value) -> Value:
    """Return the factors on what states answer."""
    if "delta_gate" in p.whole:
        y = x @ p("delta_gate", layer, slice(None), head)
        return y * _sigmoid(y)
    return _sigmoid(x @ p("delta_gate_down", layer) @ p("delta_gate_up", layer, slice(None), head))


def _filtered(p: TapedParameters, name: str, layer: int, head: int, x: Value, segments: np.ndarray) -> Value:
    """Return silu of the sum over a token and those before it in its document, each times its tap."""
    y, found, tokens = x @ p(f"delta_{name}", layer, slice(None), head), as_value(0), len(segments)
    taps = p.shape(f"delta_{name}_filter")[1]
    for back in range(taps):
        moved = np.eye(tokens, k=-back) * (segments[:, None] == segments[None])
        found = found + as_value(moved) @ y * p(f"delta_{name}_filter", layer, taps - 1 - back, head)
    return found * _sigmoid(found)


def _unit(x: Value) -> Value:
    return x * ((x * x).sum(1) + _TINY) ** -0.5


def _sigmoid(x: Value) -> Value:
    return 1 / (1 + exp(-x))


@dataclass(frozen=True)
class KimiLinear(oracle_deepseek.DeepSeek):
    """A DeepSeek-V3 in which only the layers `attends` have its attention, and others the delta rule."""

    attends: Collection[int] = ()

    def _mix(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        earlier = sum(other in self.attends for other in range(layer))
        if layer in self.attends:
            return self._attention(p, earlier, x, at)
        return delta(p, layer - earlier, x, at, self.norm_eps)


@dataclass(frozen=True)
class Qwen35(Grouped):
    """A model with grouped-query attention in the layers `attends`, the delta rule in others, and norms around one.

    Attention is times a sigmoid, and the shared experts are times that of one number per token.
    """

    attends: Collection[int] = ()

    def norm(self, x: Value, scale: Value) -> Value:
        """Return the norm around one."""
        return norm(x, 1 + scale, self.norm_eps)

    def mix(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return what a layer's attention or its delta rule makes of a row."""
        earlier = sum(other in self.attends for other in range(layer))
        if layer in self.attends:
            return self.attention(p, earlier, x, at)
        return delta(p, layer - earlier, x, at, self.norm_eps)
