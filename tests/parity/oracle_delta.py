"""The oracle's mixer by the delta rule, token by token (Yang et al., 2024, arXiv:2412.06464), and Kimi Linear's layers.

Its decay is one per channel and its gate a sigmoid, both of low rank (Kimi Team, 2025, arXiv:2510.26692).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import oracle_deepseek
from oracle import Coordinates, Parameters, TapedParameters, layers_of, norm
from tape import Value, as_value, exp, log, stack

_TINY = 1e-6  # below the root of the norms of queries and keys
_PATHS = {"query": "query", "key": "key", "value": "value", "strength": "strength", "out": "out", "norm": "norm.scale"}
_PATHS |= {f"{name}_filter": f"convolutions.{i}.weight" for i, name in enumerate(("query", "key", "value"))}
_PATHS |= {"decay_down": "decay.down", "decay_up": "decay.up", "decay_rate": "decay.rate", "decay_bias": "decay.bias"}
_PATHS |= {"gate_down": "gate.down", "gate_up": "gate.up"}


def of_mixers(model: Any) -> Parameters:
    """Return the arrays of the mixers by the delta rule, stacked in the order of their layers."""
    mine = [layer for layer in layers_of(model) if layer.array("attention.strength") is not None]
    found: dict[str, list[Any]] = {
        name: [layer.array(f"attention.{path}") for layer in mine] for name, path in _PATHS.items()
    }
    return {f"delta_{name}": np.stack(arrays).astype(np.float64) for name, arrays in found.items()}


def delta(p: TapedParameters, layer: int, x: Value, at: Coordinates, epsilon: float) -> Value:
    """Return what mixer number `layer` makes of one row, computed head by head."""
    segments, result = at.segments, as_value(0)
    down, gate_down = x @ p("delta_decay_down", layer), x @ p("delta_gate_down", layer)
    for head in range(p.shape("delta_out")[1]):
        q, k, v = (_filtered(p, name, layer, head, x, segments) for name in ("query", "key", "value"))
        q, k = (y * ((y * y).sum(1) + _TINY) ** -0.5 for y in (q, k))
        q = q / math.sqrt(q.data.shape[1])
        strength = _sigmoid(x @ p("delta_strength", layer, slice(None), slice(head, head + 1)))
        raw = down @ p("delta_decay_up", layer, slice(None), head) + p("delta_decay_bias", layer, head)
        faded = exp(-exp(p("delta_decay_rate", layer, head)) * log(1 + exp(raw)))
        rows, empty = [], as_value(np.zeros((k.data.shape[1], v.data.shape[1])))
        state = empty
        for t in range(len(segments)):
            state = empty if t == 0 or segments[t] != segments[t - 1] else state
            state = faded[t][:, None] * state
            state = state + k[t][:, None] * (strength[t] * (v[t] - k[t] @ state))[None]
            rows.append(q[t] @ state)
        gate = _sigmoid(gate_down @ p("delta_gate_up", layer, slice(None), head))
        result = result + norm(stack(rows), p("delta_norm", layer), epsilon) * gate @ p("delta_out", layer, head)
    return result


def _filtered(p: TapedParameters, name: str, layer: int, head: int, x: Value, segments: np.ndarray) -> Value:
    """Return silu of the sum over a token and those before it in its document, each times its tap."""
    y, found, tokens = x @ p(f"delta_{name}", layer, slice(None), head), as_value(0), len(segments)
    taps = p.shape(f"delta_{name}_filter")[1]
    for back in range(taps):
        moved = np.eye(tokens, k=-back) * (segments[:, None] == segments[None])
        found = found + as_value(moved) @ y * p(f"delta_{name}_filter", layer, taps - 1 - back, head)
    return found * _sigmoid(found)


def _sigmoid(x: Value) -> Value:
    return 1 / (1 + exp(-x))


def parameters_of(model: Any) -> Parameters:
    """Return the arrays of a Kimi Linear, or of its gradients or moments, by the oracle's names, in float64."""
    of_all = oracle.parameters_of(model, {"kv_norm": "kv_norm.scale", "query_norm": "query_norm.scale"})
    names = ("query", "query_down", "query_up", "kv_down", "key_up", "value_up", "out")
    attends = [layer for layer in layers_of(model) if layer.array("attention.kv_down") is not None]
    found: dict[str, list[Any]] = {name: [layer.array(f"attention.{name}") for layer in attends] for name in names}
    attention = {name: np.stack(x).astype(np.float64) for name, x in found.items() if x[0] is not None}
    return of_all | attention | of_mixers(model)


@dataclass(frozen=True)
class KimiLinear(oracle_deepseek.DeepSeek):
    """A DeepSeek-V3 in which only the layers `attends` have its attention, and others the delta rule."""

    attends: Collection[int] = ()

    def _mix(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        earlier = sum(other in self.attends for other in range(layer))
        if layer in self.attends:
            return self._attention(p, earlier, x, at)
        return delta(p, layer - earlier, x, at, self.norm_eps)
