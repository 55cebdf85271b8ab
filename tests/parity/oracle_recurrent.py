"""The oracle's layers of Qwen3.5: the gated delta rule (Yang et al., 2024), and grouped-query attention with a gate.

Norms multiply by 1 + scale, except that of what states answer. Attention is that of `oracle_grouped`, times a sigmoid.
The shared experts are times the sigmoid of one number per token. A layer by the delta rule has a state per value head,
zero where a document begins, and reads token after token.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
from oracle import Coordinates, Layer, Parameters, TapedParameters, layers_of, norm, stacked_of
from oracle_grouped import Grouped
from tape import Value, as_value, exp, log, stack

_UNIT = 1e-6  # below the root of the norms of queries and keys, in all released models
_MATRICES = ("query", "key", "value", "strength", "out")
_DELTA = {name: name for name in _MATRICES}
_DELTA |= {f"{name}_filter": f"convolutions.{i}.weight" for i, name in enumerate(_MATRICES[:3])}
_DELTA |= {"decay": "decay.weight", "rate": "decay.rate", "decay_bias": "decay.bias"}
_DELTA |= {"gate": "gate.weight", "norm": "norm.scale"}


def _is_recurrent(layer: Layer) -> bool:
    return hasattr(layer.block.attention, "convolutions")


def parameters_of(model: Any) -> Parameters:
    """Return the arrays of a model, or of its gradients or moments, by the oracle's names, in float64.

    Those of attention are stacked over its layers, and those of the delta rule, `delta_*`, over the others.
    """
    layers = layers_of(model)
    attention = {name: name for name in ("query", "key", "value", "out")} | {"attention_gate": "gate"}
    attention |= {"query_norm": "query_norm.scale", "key_norm": "key_norm.scale"}
    found = {
        name: stacked_of([x for x in layers if not _is_recurrent(x)], f"attention.{at}")
        for name, at in attention.items()
    }
    recurrent = [x for x in layers if _is_recurrent(x)]
    found |= {f"delta_{name}": stacked_of(recurrent, f"attention.{at}") for name, at in _DELTA.items()}
    return oracle.parameters_of(model, {}) | {
        name: np.asarray(x, np.float64) for name, x in found.items() if x is not None
    }


@dataclass(frozen=True)
class Recurrent(Grouped):
    """The settings of a model that its arrays do not show, and which layers are recurrent."""

    recurrent: tuple[bool, ...] = ()

    def norm(self, x: Value, scale: Value) -> Value:
        """Return the norm around one."""
        return norm(x, 1 + scale, self.norm_eps)

    def mix(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return what a layer's attention or its delta rule makes of a row."""
        number = sum(each == self.recurrent[layer] for each in self.recurrent[:layer])
        return self._delta(p, number, x, at) if self.recurrent[layer] else self.attention(p, number, x, at)

    def _delta(self, p: TapedParameters, i: int, x: Value, at: Coordinates) -> Value:
        heads, each = p.shape("delta_value")[2], p.shape("delta_value")[2] // p.shape("delta_key")[2]
        strengths = 1 / (1 + exp(-(x @ p("delta_strength", i))))
        fades = -exp(p("delta_rate", i)) * log(1 + exp(x @ p("delta_decay", i) + p("delta_decay_bias", i)))
        result = as_value(0)
        for head in range(heads):
            q, k = (_unit(self._filtered(p, name, i, head // each, x, at)) for name in ("query", "key"))
            v = self._filtered(p, "value", i, head, x, at)
            q, state, answers = q / math.sqrt(q.data.shape[1]), as_value(0), []
            for t in range(len(at.segments)):
                begins = t == 0 or at.segments[t] != at.segments[t - 1]
                state = np.zeros((k.data.shape[1], v.data.shape[1])) if begins else state * exp(fades[t, head])
                state = as_value(state)
                error = v[t] - k[t] @ state
                state = state + k[t][:, None] * (strengths[t, head] * error)[None]
                answers.append(q[t] @ state)
            gate = x @ p("delta_gate", i, slice(None), head)
            y = norm(stack(answers), p("delta_norm", i), self.norm_eps) * (gate / (1 + exp(-gate)))
            result = result + y @ p("delta_out", i, head)
        return result

    def _filtered(self, p: TapedParameters, name: str, i: int, head: int, x: Value, at: Coordinates) -> Value:
        """Return silu of a filter over the tokens of each document; its last tap is that of the token itself."""
        made, filters = x @ p(f"delta_{name}", i, slice(None), head), p.shape(f"delta_{name}_filter")[1]
        result, segments = as_value(0), at.segments
        for back in range(filters):
            earlier = np.array(
                [
                    [s == t - back and segments[s] == segments[t] for s in range(len(segments))]
                    for t in range(len(segments))
                ]
            )
            result = result + (as_value(earlier) @ made) * p(f"delta_{name}_filter", i, filters - 1 - back, head)
        return result / (1 + exp(-result))


def _unit(x: Value) -> Value:
    return x * ((x * x).sum(-1) + _UNIT) ** -0.5
