"""The oracle's gated short convolutions, tap by tap, and the model with them (Liquid AI, 2025, arXiv:2511.23404)."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
from oracle import Coordinates, Parameters, TapedParameters, layers_of, stacked_of
from oracle_grouped import Grouped
from tape import Value, as_value

_ATTENTION = {"query": "query", "key": "key", "value": "value", "out": "out"}
_ATTENTION |= {"query_norm": "query_norm.scale", "key_norm": "key_norm.scale"}
_PATHS = {name: name for name in ("input_gate", "output_gate", "value", "out")}
_PATHS |= {f"{name}_bias": f"{name}_bias" for name in (*_PATHS, "filter")} | {"filter": "filters"}


def parameters_of(model: Any) -> Parameters:
    """Return the arrays of a model, or of its gradients or moments, by the oracle's names, in float64.

    Those of attention are stacked over its layers, and those of convolutions, `convolution_*`, over the others.
    """
    convolves, attends = [], []
    for layer in layers_of(model):
        (convolves if layer.array("attention.filters") is not None else attends).append(layer)
    found = {name: stacked_of(attends, f"attention.{path}") for name, path in _ATTENTION.items()}
    found |= {f"convolution_{name}": stacked_of(convolves, f"attention.{path}") for name, path in _PATHS.items()}
    return oracle.parameters_of(model, {}) | {name: x.astype(np.float64) for name, x in found.items() if x is not None}


def convolution(p: TapedParameters, layer: int, x: Value, segments: np.ndarray) -> Value:
    """Return what convolution number `layer` makes of one row."""

    def projected(name: str, x: Value) -> Value:
        return x @ p(f"convolution_{name}", layer) + p(f"convolution_{name}_bias", layer)

    inputs, tokens = projected("input_gate", x) * projected("value", x), len(segments)
    found, taps = p("convolution_filter_bias", layer), p.shape("convolution_filter")[1]
    for back in range(taps):
        moved = np.eye(tokens, k=-back) * (segments[:, None] == segments[None])
        found = found + as_value(moved) @ inputs * p("convolution_filter", layer, taps - 1 - back)
    return projected("out", projected("output_gate", x) * found)


@dataclass(frozen=True)
class Lfm2(Grouped):
    """A model with grouped-query attention in the layers `attends`, and gated convolutions with biases in others."""

    attends: Collection[int] = ()

    def mix(self, p: TapedParameters, layer: int, x: Value, at: Coordinates) -> Value:
        """Return what a layer's attention or its convolution makes of a row."""
        earlier = sum(other in self.attends for other in range(layer))
        if layer in self.attends:
            return self.attention(p, earlier, x, at)
        return convolution(p, layer - earlier, x, at.segments)
