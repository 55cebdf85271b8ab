"""The oracle: a training step as plain loops over rows, tokens and chosen experts, in float64, on one device.

Here is what families share: norm, experts, losses, gradients, optimisers. `oracle_grouped` (Mixtral, Qwen3-MoE, OLMoE)
and `oracle_deepseek` add their layers. Nothing of moezoo or JAX computes in any of them; parameters are read out of the
model by attribute. In float64 the oracle's rounding is nothing beside float32's, so that whatever difference is found
is the tested code's.

Letters: D embed, H heads, E experts, K experts a token. Operations run one by one, so a routing decision is made by
sorting concrete numbers. A padding token is left out altogether, which is what "padding counts nowhere" means.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from tape import Value, exp, gradients, log, stack, total_of, value

Parameters = dict[str, Any]

# Two figures closer than this could be ordered otherwise in float32, and a comparison would say nothing.
_TIE = 1e-5


class Layer(NamedTuple):
    """One layer of a model: its block, whose arrays hold that of every period of the run, and the period."""

    block: Any
    period: int

    def array(self, path: str) -> np.ndarray | None:
        """The array of this layer that lies at these attributes, None if there is none."""
        found = self.block
        for name in path.split("."):
            found = getattr(found, name, None)
        return None if found is None else np.asarray(found)[self.period]


def layers_of(model: Any) -> list[Layer]:
    """A model's, in order."""
    return [Layer(block, period) for stack in model.stacks for period in range(stack.count) for block in stack.blocks]


# Of what follows attention. Those of an MLP, of experts, and of the MLP beside experts have names of their own.
_FEED_FORWARD = {
    "feed_forward_norm": "feed_forward_norm.scale",
    "dense_gate": "feed_forward.gate",
    "dense_up": "feed_forward.up",
    "dense_down": "feed_forward.down",
    "router": "feed_forward.router.weight",
    "gate": "feed_forward.experts.gate",
    "up": "feed_forward.experts.up",
    "down": "feed_forward.experts.down",
    "shared_gate": "feed_forward.shared.gate",
    "shared_up": "feed_forward.shared.up",
    "shared_down": "feed_forward.shared.down",
}


def stacked(model: Any, path: str) -> np.ndarray | None:
    """The arrays at `path` of all layers that have it, in order; None if no layer has."""
    found = [array for layer in layers_of(model) if (array := layer.array(path)) is not None]
    return np.stack(found) if found else None


def parameters_of(model: Any, attention: Mapping[str, str]) -> Parameters:
    """The arrays of a model (or of anything in its shape: gradients, moments) by name, float64.

    `attention`: what is called how in an attention module, by the oracle's names. Arrays of layers are stacked.
    """
    paths = {"attention_norm": "attention_norm.scale"} | {name: f"attention.{at}" for name, at in attention.items()}
    of_layers = {name: stacked(model, path) for name, path in (paths | _FEED_FORWARD).items()}
    whole = {
        "embedding": model.embedding.weight,
        "final_norm": model.unembedding.norm.scale,
        "unembedding": model.unembedding.weight,
    }
    there = {name: array for name, array in (whole | of_layers).items() if array is not None}
    return {name: np.asarray(array, np.float64) for name, array in there.items()}


@dataclass(frozen=True)
class Losses:
    """The routing losses' coefficients, and what the balance is taken over."""

    load_balance: float
    z_loss: float
    balance: Literal["batch", "sequence"]


@dataclass(frozen=True)
class Outcome:
    """One step's losses with their coefficients, gradients, and assignments [MoE layer, experts]."""

    loss: float
    load_balance_loss: float
    z_loss: float
    gradients: Parameters
    load: np.ndarray

    @property
    def gradient_norm(self) -> float:
        """Of all gradients together."""
        return math.sqrt(sum(float((g**2).sum()) for g in self.gradients.values()))

    @property
    def max_violation(self) -> float:
        """The largest load over the mean load, less 1, of the worst layer."""
        return max(float(row.max() / row.mean()) - 1 for row in self.load)


class Split:
    """Parameters on the tape, and the matrices that loops ask for again and again, cut out once."""

    def __init__(self, parameters: Parameters):
        self.whole = {name: Value(x) for name, x in parameters.items()}
        self._cut: dict[Any, Value] = {}

    def __call__(self, name: str, *index: Any) -> Value:
        """`name[index]`."""
        key = (name, *map(str, index))
        if key not in self._cut:
            self._cut[key] = self.whole[name][index] if index else self.whole[name]
        return self._cut[key]

    def shape(self, name: str) -> tuple[int, ...]:
        """The array's."""
        return self.whole[name].data.shape


@dataclass(frozen=True)
class Visibility:
    """Where each token of a row stands: the number of its document, and its position in it."""

    segments: np.ndarray
    positions: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """Whether token i sees token j: of its own document, at its own position or before."""
        s, p = self.segments, self.positions
        tokens = range(len(s))
        return np.array([[s[i] == s[j] and p[j] <= p[i] for j in tokens] for i in tokens])


@dataclass
class Routing:
    """One layer's routing of one row; probabilities and z summed over its tokens."""

    counts: np.ndarray
    probabilities: Value
    z: Value


# Logits of a token to the gates of its chosen experts, and all experts' probabilities.
Route = Callable[[Value], tuple[dict[int, Value], Value]]


class Family(abc.ABC):
    """What the oracle is told of a model besides its parameters."""

    experts_per_token: int
    norm_eps: float
    losses: Losses

    @abc.abstractmethod
    def layers(self, p: Split, x: Value, visibility: Visibility) -> tuple[Value, list[Routing]]:
        """One row [tokens, D] through all layers, and the routing of those that have experts."""

    def after_step(self, load: np.ndarray) -> "Family":
        """The family after a step with this load."""
        del load
        return self


def norm(x: Value, scale: Value, epsilon: float) -> Value:
    """x over its root mean square, times `scale`."""
    return x * ((x * x).sum(-1) / x.data.shape[-1] + epsilon) ** -0.5 * scale


def attend(scores: Value, seen: np.ndarray, values: Value) -> Value:
    """Each query's average of the values it sees, weighed by the softmax of its scores."""
    weights = exp(scores) * seen
    return weights / weights.sum(1) @ values


def swiglu(x: Value, gate: Value, up: Value, down: Value) -> Value:
    """down(silu(gate x) * up x)."""
    inner = x @ gate
    return inner / (1 + exp(-inner)) * (x @ up) @ down


def best(numbers: Sequence[float], count: int) -> list[int]:
    """Where the `count` largest are."""
    order = sorted(range(len(numbers)), key=lambda i: -numbers[i])
    if count < len(order):
        gap = numbers[order[count - 1]] - numbers[order[count]]
        assert gap > _TIE, "choose another seed: this token's choice is a tie"
    return order[:count]


def experts(p: Split, layer: int, x: Value, route: Route) -> tuple[Value, Routing]:
    """Each token of a row through the experts that `route` gives it; `layer` counts those with experts."""
    number = p.shape("router")[2]
    rows, routing = [], Routing(np.zeros(number, np.int64), value(0), value(0))
    for i in range(len(x.data)):
        token = x[i]
        logits = token @ p("router", layer)
        gates, probabilities = route(logits)
        y = value(0)
        for e, gate in gates.items():
            y = y + gate * swiglu(token, p("gate", layer, e), p("up", layer, e), p("down", layer, e))
            routing.counts[e] += 1
        routing.probabilities = routing.probabilities + probabilities
        routing.z = routing.z + log(exp(logits).sum()) ** 2
        rows.append(y)
    return stack(rows), routing


def _row(p: Split, row: dict[str, np.ndarray], family: Family) -> tuple[Value, list[Routing]]:
    """One row's nats over its predicted tokens, and each layer's routing."""
    real = row["segments"] > 0
    tokens, labels, segments, positions = (row[k][real] for k in ("tokens", "labels", "segments", "positions"))
    x = stack([p("embedding", int(token)) for token in tokens])
    x, routing = family.layers(p, x, Visibility(segments, positions))
    nats = value(0)
    for i, label in enumerate(labels.tolist()):
        if label >= 0:
            logits = norm(x[i], p("final_norm"), family.norm_eps) @ p("unembedding")
            nats = nats + log(exp(logits).sum()) - logits[label]
    return nats, routing


def _balance(counts: np.ndarray, probabilities: Value, k: int) -> Value:
    """E * sum_e f_e P_e: f the share of the K * T assignments, P the mean probability over the T tokens."""
    tokens = int(counts.sum()) // k
    return (value(counts / (k * tokens)) * (probabilities / tokens)).sum() * len(counts)


def _micro_step(p: Split, rows: list[dict[str, np.ndarray]], family: Family) -> tuple[Value, Value, Value, np.ndarray]:
    """Nats over all predicted tokens, the two routing losses (means over layers), and the load [layer, experts]."""
    done = [_row(p, row, family) for row in rows if (row["segments"] > 0).any()]
    k, losses, layers = family.experts_per_token, family.losses, p.shape("router")[0]
    balance, z, load = value(0), value(0), []
    for layer in range(layers):
        routing = [r[layer] for _, r in done]
        counts = np.sum([r.counts for r in routing], axis=0)
        if losses.balance == "batch":
            one = _balance(counts, total_of(r.probabilities for r in routing), k)
        else:
            one = total_of(_balance(r.counts, r.probabilities, k) for r in routing) / len(routing)
        balance = balance + losses.load_balance * one / layers
        z = z + losses.z_loss * total_of(r.z for r in routing) / (int(counts.sum()) / k) / layers
        load.append(counts)
    return total_of(nats for nats, _ in done), balance, z, np.stack(load)


def differentiate(parameters: Parameters, batch: dict[str, np.ndarray], micro_steps: int, family: Family) -> Outcome:
    """One step of `batch` arrays [rows, seq], cut in `micro_steps` runs of rows.

    The objective is the cross-entropy a predicted token of the whole step plus the mean over micro-steps of the two
    routing losses.
    """
    rows = [{name: array[i] for name, array in batch.items()} for i in range(len(batch["tokens"]))]
    share = len(rows) // micro_steps
    p = Split(parameters)
    cut = (rows[i * share : (i + 1) * share] for i in range(micro_steps))
    nats, balances, zs, loads = zip(*(_micro_step(p, some, family) for some in cut), strict=True)
    loss = total_of(nats) / int((batch["labels"] >= 0).sum())
    balance, z = total_of(balances) / micro_steps, total_of(zs) / micro_steps
    found = gradients(loss + balance + z, list(p.whole.values()))
    named = dict(zip(p.whole, found, strict=True))
    return Outcome(float(loss.data), float(balance.data), float(z.data), named, np.sum(loads, axis=0))


def sgd(parameters: Parameters, gradients: Parameters, rate: float) -> Parameters:
    """Plain gradient descent."""
    return {name: p - rate * gradients[name] for name, p in parameters.items()}


def cosine_rate(peak: float, warmup: int, steps: int, final_ratio: float, step: int) -> float:
    """The rate of update `step` (from 0): linear to the peak at update `warmup` - 1, then half a cosine to the last."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (steps - 1 - warmup)
    return peak * (final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * progress)) / 2)


@dataclass
class AdamW:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2), after clipping the gradient's global norm."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float
    first: Parameters
    second: Parameters
    count: int = 0

    def update(self, parameters: Parameters, outcome: Outcome, rate: float) -> Parameters:
        """New parameters; moments are kept here."""
        self.count += 1
        scale = min(1.0, self.clip_norm / outcome.gradient_norm)
        new = {}
        for name, p in parameters.items():
            g = outcome.gradients[name] * scale
            self.first[name] = self.beta1 * self.first[name] + (1 - self.beta1) * g
            self.second[name] = self.beta2 * self.second[name] + (1 - self.beta2) * g**2
            first = self.first[name] / (1 - self.beta1**self.count)
            second = self.second[name] / (1 - self.beta2**self.count)
            # Only what multiplies activations as a matrix does decays.
            decay = 0 if name == "embedding" or name.endswith(("norm", "bias")) else self.weight_decay
            new[name] = p - rate * (first / (np.sqrt(second) + self.epsilon) + decay * p)
        return new
