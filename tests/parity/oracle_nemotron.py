"""The oracle's layers of Nemotron 3 (NVIDIA, 2026), of one part each, and its mixer by state space duality.

The mixer is Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060), token by token: each group of heads shares a B (`write`) and
a C (`read`). MLPs and experts are down(max(up x, 0)^2), and experts may be in a latent.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
from oracle import Coordinates, Parameters, Routing, TapedParameters, layers_of, run_experts, stacked_of
from oracle_grouped import Grouped
from tape import Value, as_value, clamp, exp, log, stack

_MAMBA = {name: name for name in ("gate", "value", "write", "read", "step", "step_bias", "rate", "out")}
_MAMBA |= {"skip_scale": "skip", "norm": "norm.scale"}
_MAMBA |= {f"{name}_filter": f"convolutions.{i}.weight" for i, name in enumerate(("read", "write", "value"))}
_MAMBA |= {f"{name}_filter_bias": f"convolutions.{i}.bias" for i, name in enumerate(("read", "write", "value"))}


def parameters_of(model: Any) -> Parameters:
    """Return the arrays of a model, or of its gradients or moments, by the oracle's names, in float64.

    Those of attention are stacked over its layers, and those of the other mixers, `mamba_*`, over theirs.
    """
    mixes, attends = [], []
    for layer in layers_of(model):
        (attends if layer.array("attention.rate") is None else mixes).append(layer)
    found = {name: stacked_of(attends, f"attention.{name}") for name in ("query", "key", "value", "out")}
    found |= {f"mamba_{name}": stacked_of(mixes, f"attention.{path}") for name, path in _MAMBA.items()}
    found |= {f"latent_{name}": oracle.stacked(model, f"feed_forward.latent.{name}") for name in ("down", "up")}
    return oracle.parameters_of(model, {}) | {name: x.astype(np.float64) for name, x in found.items() if x is not None}


def squared(up: Value, _: Any = None) -> Value:
    """Return max(up, 0)^2."""
    return clamp(up, 0, math.inf) ** 2


@dataclass(frozen=True, kw_only=True)
class NemotronH(Grouped):
    """The settings of a model that its arrays do not show."""

    pattern: str

    def layers(self, p: TapedParameters, x: Value, at: Coordinates) -> tuple[Value, list[Routing]]:
        """Run each layer: a mixer, an MLP or experts."""
        routing, counts = [], Counter[str]()
        for letter in self.pattern:
            kind = "attention" if letter in "M*" else "feed_forward"
            h = self.norm(x, p(f"{kind}_norm", counts[kind]))
            i = counts[letter]
            counts.update((letter, kind))
            if letter == "M":
                y = self._mamba(p, i, h, at)
            elif letter == "*":
                y = self.attention(p, i, h, at)
            elif letter == "-":
                y = squared(h @ p("dense_up", i)) @ p("dense_down", i)
            else:
                y, of_layer = self._experts(p, i, h)
                routing.append(of_layer)
            x = x + y
        return x, routing

    def _turned(self, x: Value, positions: np.ndarray) -> Value:
        return x

    def _experts(self, p: TapedParameters, i: int, h: Value) -> tuple[Value, Routing]:
        """Return what a layer with experts adds to a row, and its routing."""
        assert self.bias is not None

        def route(logits: Value) -> tuple[dict[int, Value], Value]:
            return self.choice.route(logits, self.bias[i], self.experts_per_token)  # type: ignore[index]

        within = "latent_down" in p.whole
        read = h @ p("latent_down", i) if within else h
        y, routing = run_experts(p, i, read, route, squared, h)
        y = y @ p("latent_up", i) if within else y
        return y + squared(h @ p("shared_up", i)) @ p("shared_down", i), routing

    def _mamba(self, p: TapedParameters, i: int, x: Value, at: Coordinates) -> Value:
        """Return what a mixer makes of one row, computed head by head; the norm is over the heads of a group."""
        segments, result = at.segments, as_value(0)
        heads, groups = p.shape("mamba_value")[2], p.shape("mamba_write")[2]
        each = heads // groups
        for group in range(groups):
            b, c = (_filtered(p, name, i, group, x, segments) for name in ("write", "read"))
            made = [self._head(p, i, head, x, b, c, segments) for head in range(group * each, (group + 1) * each)]
            square = sum(((y * y).sum(-1) for y in made), start=as_value(0))
            scale = (square / (each * made[0].data.shape[1]) + self.norm_eps) ** -0.5
            for head, y in enumerate(made, group * each):
                result = result + (y * scale * p("mamba_norm", i, head)) @ p("mamba_out", i, head)
        return result

    def _head(self, p: TapedParameters, i: int, head: int, x: Value, b: Value, c: Value, segments: np.ndarray) -> Value:
        """Return what a head's state answers, plus its skip, times silu of the gate."""
        v = _filtered(p, "value", i, head, x, segments)
        raw = x @ p("mamba_step", i, slice(None), slice(head, head + 1)) + p("mamba_step_bias", i, head)
        step = log(1 + exp(raw))
        factor = exp(-exp(p("mamba_rate", i, head)) * step)
        rows, empty = [], as_value(np.zeros((b.data.shape[1], v.data.shape[1])))
        state = empty
        for t in range(len(segments)):
            state = empty if t == 0 or segments[t] != segments[t - 1] else state
            state = factor[t][:, None] * state + b[t][:, None] * (step[t] * v[t])[None]
            rows.append(c[t] @ state + p("mamba_skip_scale", i, head) * v[t])
        gate = x @ p("mamba_gate", i, slice(None), head)
        return stack(rows) * gate / (1 + exp(-gate))


def _filtered(p: TapedParameters, name: str, i: int, head: int, x: Value, segments: np.ndarray) -> Value:
    """Return silu of the bias and the sum over a token and those before it in its document, each times its tap."""
    y, found, tokens = x @ p(f"mamba_{name}", i, slice(None), head), as_value(0), len(segments)
    taps = p.shape(f"mamba_{name}_filter")[1]
    for back in range(taps):
        moved = np.eye(tokens, k=-back) * (segments[:, None] == segments[None])
        found = found + as_value(moved) @ y * p(f"mamba_{name}_filter", i, taps - 1 - back, head)
    found = found + p(f"mamba_{name}_filter_bias", i, head)
    return found / (1 + exp(-found))
