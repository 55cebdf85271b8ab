"""The oracle: one training step written as plain loops over rows, tokens and chosen experts.

The oracle runs in float64 on one device, in NumPy (`tape` differentiates it). No code of moezoo or JAX computes
anything in it. It reads the parameters from the model's attributes, once, and converts them to float64. Its own
rounding is a few 1e-9 of float32's, so a difference from the tested step is the tested step's error.

The objective of a step is `cross_entropy + balance + z`:

| term | definition |
|---|---|
| cross_entropy | the sum of -log p(label) over the predicted tokens of the step, divided by their number |
| balance | `load_balance` times E * sum_e f_e * P_e; the mean over micro-steps, by their tokens, and over layers |
| z | `z_loss` times the mean over the step's tokens of logsumexp(router logits)**2; the mean over layers |

f_e is the fraction of the K * T assignments that go to expert e. P_e is the mean probability of expert e over T tokens.
The T tokens are those of a micro-step (balance "batch"), or those of one row, and then rows are averaged ("sequence").
Padding tokens are removed before anything is computed, so they cannot count anywhere.

This file has what all families share: norm, experts, losses, gradients, optimisers. `oracle_grouped` adds layers with
grouped-query attention, `oracle_deepseek` those of DeepSeek. `tests/hub` compares the oracle with transformers.

Letters in shapes: D embed, H heads, E experts, K experts per token.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from tape import Value, as_value, exp, gradients, log, stack, total

Parameters = dict[str, Any]

# Where two scores are closer than this, float32 may order them the other way, and the comparison would prove nothing.
_TIE = 1e-5


class Layer(NamedTuple):
    """One layer of a model: a block, whose arrays have a leading dimension of periods, and the layer's period."""

    block: Any
    period: int

    def array(self, path: str) -> np.ndarray | None:
        """Return this layer's array at a dotted path of attributes, or None where the layer has no such array."""
        found: Any = self.block
        for name in path.split("."):
            found = found[int(name)] if name.isdecimal() and found is not None else getattr(found, name, None)
        return None if found is None else np.asarray(found)[self.period]


def layers_of(model: Any) -> list[Layer]:
    """Return the layers of a model in order."""
    return [Layer(block, period) for stack in model.stacks for period in range(stack.count) for block in stack.blocks]


# The oracle's name of each array after attention, and its path in a block. `dense_*`: the MLP of a layer without
# experts. `shared_*`: the MLP that every token of a layer with experts goes through.
_FEED_FORWARD = {
    "feed_forward_norm": "feed_forward_norm.scale",
    "dense_gate": "feed_forward.gate",
    "dense_up": "feed_forward.up",
    "dense_down": "feed_forward.down",
    "router": "feed_forward.router.weight",
    "router_bias": "feed_forward.router.bias",
    "gate": "feed_forward.experts.gate",
    "up": "feed_forward.experts.up",
    "down": "feed_forward.experts.down",
    "gate_bias": "feed_forward.experts.gate_bias",
    "up_bias": "feed_forward.experts.up_bias",
    "down_bias": "feed_forward.experts.down_bias",
    "shared_gate": "feed_forward.shared.gate",
    "shared_up": "feed_forward.shared.up",
    "shared_down": "feed_forward.shared.down",
    "shared_token_gate": "feed_forward.shared.token_gate",
    "router_input_scale": "feed_forward.router.input_scale",
    "router_expert_scale": "feed_forward.router.expert_scale",
    "after_attention_norm": "after_attention_norm.scale",
    "after_feed_forward_norm": "after_feed_forward_norm.scale",
} | {
    f"{at}_{part}_norm": f"feed_forward.norms.{at}_{part}.scale"
    for at in ("before", "after")
    for part in ("experts", "shared")
}


def stacked(model: Any, path: str) -> np.ndarray | None:
    """Return the arrays at `path` of all layers that have one, stacked in order; None if no layer has one."""
    return stacked_of(layers_of(model), path)


def stacked_of(layers: Sequence[Layer], path: str) -> np.ndarray | None:
    """Return the arrays at `path` of these layers that have one, stacked in order; None if none has."""
    found = [array for layer in layers if (array := layer.array(path)) is not None]
    return np.stack(found) if found else None


def parameters_of(model: Any, attention: Mapping[str, str]) -> Parameters:
    """Return the arrays of a model by the oracle's names, in float64, with those of layers stacked.

    Args:
        model: A model, or a tree of the same structure such as gradients or moments.
        attention: The oracle's name of each array of an attention module, and its path in that module.
    """
    paths = {"attention_norm": "attention_norm.scale"} | {name: f"attention.{at}" for name, at in attention.items()}
    of_layers = {name: stacked(model, path) for name, path in (paths | _FEED_FORWARD).items()}
    outside_layers = {
        "embedding": model.embedding.weight,
        "final_norm": model.unembedding.norm.scale,
        "unembedding": model.unembedding.weight,
    }
    arrays = outside_layers | of_layers
    return {name: np.asarray(array, np.float64) for name, array in arrays.items() if array is not None}


@dataclass(frozen=True)
class Losses:
    """The coefficients of the two routing losses, and the tokens that the balance is computed over."""

    load_balance: float
    z_loss: float
    balance: Literal["batch", "sequence"]


@dataclass(frozen=True)
class Outcome:
    """The results of one step.

    `loss` is the cross-entropy alone. The two routing losses include their coefficients. `gradients` are those of the
    sum of the three. `load` counts assignments: [layer with experts, expert].
    """

    loss: float
    load_balance_loss: float
    z_loss: float
    gradients: Parameters
    load: np.ndarray

    @property
    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients together."""
        return math.sqrt(sum(float((g**2).sum()) for g in self.gradients.values()))

    @property
    def balance(self) -> dict[str, float]:
        """How evenly experts are used: entropy relative to its largest value, violation of balance, and use."""
        shares = [[n / sum(row) for n in row.tolist()] for row in self.load]
        entropies = [-sum(p * math.log(p) for p in row if p) / math.log(len(row)) for row in shares]
        violations = [max(row) * len(row) - 1 for row in shares]
        used = [p > 0 for row in shares for p in row]
        return {
            "mean_entropy": sum(entropies) / len(entropies),
            "lowest_entropy": min(entropies),
            "mean_violation": sum(violations) / len(violations),
            "max_violation": max(violations),
            "experts_in_use": sum(used) / len(used),
        }


class TapedParameters:
    """The parameters as values on the tape. Slices are cached, because the loops read the same ones many times."""

    def __init__(self, parameters: Parameters):
        self.whole = {name: Value(x) for name, x in parameters.items()}
        self._slices: dict[Any, Value] = {}

    def __call__(self, name: str, *index: Any) -> Value:
        """Return `name[index]`, or the whole array without an index."""
        key = (name, *map(str, index))
        if key not in self._slices:
            self._slices[key] = self.whole[name][index] if index else self.whole[name]
        return self._slices[key]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole array."""
        return self.whole[name].data.shape


@dataclass(frozen=True)
class Coordinates:
    """For each token of a row, the number of its document and its position in that document."""

    segments: np.ndarray
    positions: np.ndarray

    @property
    def visible(self) -> np.ndarray:
        """Whether token i attends to token j: j is in the same document, at i's position or before."""
        s, p = self.segments, self.positions
        tokens = range(len(s))
        return np.array([[s[i] == s[j] and p[j] <= p[i] for j in tokens] for i in tokens])


@dataclass
class Routing:
    """The routing of one row in one layer: assignments per expert; probabilities and z summed over the tokens."""

    counts: np.ndarray
    probabilities: Value
    z: Value


# From a token's router logits: the gates of its chosen experts, by expert, and the probabilities of all experts.
Route = Callable[[Value], tuple[dict[int, Value], Value]]
# Of an expert's products with gate and up.
Activation = Callable[[Value, Value], Value]


class Family(abc.ABC):
    """The numbers and choices of a model that its arrays do not show, and its layers."""

    experts_per_token: int
    norm_eps: float
    losses: Losses
    embedding_factor: float = 1.0
    logit_cap: float | None = None  # what logits stay below

    @abc.abstractmethod
    def layers(self, p: TapedParameters, x: Value, at: Coordinates) -> tuple[Value, list[Routing]]:
        """Return one row [tokens, D] after all layers, and the routing of each layer with experts."""

    def norm(self, x: Value, scale: Value) -> Value:
        """Return the norm of the residual stream."""
        return norm(x, scale, self.norm_eps)

    def after_step(self, load: np.ndarray) -> "Family":
        """Return the family after a step with this load; only a choice bias changes."""
        del load
        return self


def norm(x: Value, scale: Value, epsilon: float) -> Value:
    """Return x / sqrt(mean(x**2) + epsilon) * scale, over the last dimension."""
    return x * ((x * x).sum(-1) / x.data.shape[-1] + epsilon) ** -0.5 * scale


def attend(scores: Value, visible: np.ndarray, values: Value, sink: Value | None = None) -> Value:
    """Return, for each query, the mean of the visible values, weighted by the softmax of the scores.

    A sink is one more score in the softmax, of a value of zero.
    """
    weights = exp(scores) * visible
    return weights / (weights.sum(1) + (0 if sink is None else exp(sink))) @ values


def swiglu(x: Value, gate: Value, up: Value, down: Value) -> Value:
    """Return down(silu(gate x) * up x)."""
    return silu_gated(x @ gate, x @ up) @ down


def silu_gated(gate: Value, up: Value) -> Value:
    """Return silu(gate) * up."""
    return gate / (1 + exp(-gate)) * up


def top_indices(numbers: Sequence[float], count: int) -> list[int]:
    """Return the indices of the `count` largest numbers, and refuse a tie at the border."""
    order = sorted(range(len(numbers)), key=lambda i: -numbers[i])
    if count < len(order):
        gap = numbers[order[count - 1]] - numbers[order[count]]
        assert gap > _TIE, f"the last chosen and the first rejected score differ by {gap:.1e}; choose another seed"
    return order[:count]


def run_experts(
    p: TapedParameters,
    layer: int,
    x: Value,
    route: Route,
    activation: Activation = silu_gated,
    read: Value | None = None,
    on_inputs: bool = False,
) -> tuple[Value, Routing]:
    """Return the sum over each token's experts of gate * expert(token), and the routing.

    Args:
        layer: The index among the layers with experts.
        x: The tokens of one row [tokens, D].
        route: A function that chooses a token's experts from its logits.
        activation: A function of an expert's two products, to each of which its bias is added if there are biases.
            Without a gate it gets the other product twice.
        read: What the router reads in place of `x`.
        on_inputs: Whether gates multiply what experts read in place of their results.
    """
    num_experts = p.shape("router")[2]

    def product(x: Value, name: str, *index: int) -> Value:
        y = x @ p(name, *index)
        return y + p(f"{name}_bias", *index) if f"{name}_bias" in p.whole else y

    rows, routing = [], Routing(np.zeros(num_experts, np.int64), as_value(0), as_value(0))
    for i in range(len(x.data)):
        token = x[i]
        logits = product(token if read is None else read[i], "router", layer)
        gates, probabilities = route(logits)
        y = as_value(0)
        for e, gate in gates.items():
            given, factor = (gate * token, 1) if on_inputs else (token, gate)
            up = product(given, "up", layer, e)
            inner = activation(product(given, "gate", layer, e) if "gate" in p.whole else up, up)
            y = y + factor * product(inner, "down", layer, e)
            routing.counts[e] += 1
        routing.probabilities = routing.probabilities + probabilities
        routing.z = routing.z + log(exp(logits).sum()) ** 2
        rows.append(y)
    return stack(rows), routing


def _row(p: TapedParameters, row: dict[str, np.ndarray], family: Family) -> tuple[Value, list[Routing]]:
    """Return the nats of one row, summed over its predicted tokens, and the routing of each layer with experts."""
    real = row["segments"] > 0
    tokens, labels, segments, positions = (row[k][real] for k in ("tokens", "labels", "segments", "positions"))
    x = stack([p("embedding", int(token)) for token in tokens]) * family.embedding_factor
    x, routing = family.layers(p, x, Coordinates(segments, positions))
    # Tied embeddings: one table, whose gradient is the sum of both uses.
    unembedding = p("unembedding") if "unembedding" in p.whole else p("embedding").T
    nats = as_value(0)
    for i, label in enumerate(labels.tolist()):
        if label >= 0:
            logits = family.norm(x[i], p("final_norm")) @ unembedding
            if family.logit_cap is not None:  # cap * tanh(logits / cap)
                logits = family.logit_cap * (2 / (1 + exp(-2 / family.logit_cap * logits)) - 1)
            nats = nats + log(exp(logits).sum()) - logits[label]
    return nats, routing


def _balance(counts: np.ndarray, probabilities: Value, k: int) -> Value:
    """Return E * sum_e f_e * P_e, from the assignments per expert and the probabilities summed over tokens."""
    tokens = int(counts.sum()) // k
    return (as_value(counts / (k * tokens)) * (probabilities / tokens)).sum() * len(counts)


def _micro_step(
    p: TapedParameters, rows: list[dict[str, np.ndarray]], family: Family
) -> tuple[Value, Value, Value, np.ndarray]:
    """Return the summed nats, the two routing losses (means over layers) and the load [layer, expert] of some rows."""
    done = [_row(p, row, family) for row in rows if (row["segments"] > 0).any()]
    k, losses, layers = family.experts_per_token, family.losses, p.shape("router")[0]
    balance, z, load = as_value(0), as_value(0), []
    for layer in range(layers):
        routing = [r[layer] for _, r in done]
        counts = np.sum([r.counts for r in routing], axis=0)
        if losses.balance == "batch":
            of_layer = _balance(counts, total(r.probabilities for r in routing), k)
        else:
            of_layer = total(_balance(r.counts, r.probabilities, k) for r in routing) / len(routing)
        balance = balance + losses.load_balance * of_layer / layers
        z = z + losses.z_loss * total(r.z for r in routing) / (int(counts.sum()) / k) / layers
        load.append(counts)
    return total(nats for nats, _ in done), balance, z, np.stack(load)


def differentiate(parameters: Parameters, batch: dict[str, np.ndarray], micro_steps: int, family: Family) -> Outcome:
    """Return the losses, gradients and load of one step.

    Args:
        parameters: Arrays by the oracle's names, float64.
        batch: `tokens`, `labels`, `segments` and `positions`, each [rows, seq]. Label -1 predicts nothing, segment 0 is
            padding.
        micro_steps: The rows are cut into this number of equal consecutive parts.
        family: The layers, and the coefficients of the losses.
    """
    rows = [{name: array[i] for name, array in batch.items()} for i in range(len(batch["tokens"]))]
    size = len(rows) // micro_steps
    p = TapedParameters(parameters)
    tokens = [int(part.sum()) for part in np.split(batch["segments"] > 0, micro_steps)]
    parts = [rows[i * size : (i + 1) * size] for i in range(micro_steps) if tokens[i]]
    nats, balances, zs, loads = zip(*(_micro_step(p, part, family) for part in parts), strict=True)
    loss = total(nats) / int((batch["labels"] >= 0).sum())
    shares = [count / sum(tokens) for count in tokens if count]
    balance, z = (total(x * n for x, n in zip(each, shares, strict=True)) for each in (balances, zs))
    found = gradients(loss + balance + z, list(p.whole.values()))
    named = dict(zip(p.whole, found, strict=True))
    return Outcome(float(loss.data), float(balance.data), float(z.data), named, np.sum(loads, axis=0))


def sgd(parameters: Parameters, gradients: Parameters, rate: float) -> Parameters:
    """Return the parameters after one update of plain gradient descent."""
    return {name: p - rate * gradients[name] for name, p in parameters.items()}


def cosine_rate(peak: float, warmup: int, steps: int, final_ratio: float, step: int) -> float:
    """Return the rate of update `step`, counted from 0.

    The rate is linear up to `peak` at update `warmup` - 1, and then half a cosine down to `final_ratio` * `peak` at the
    last update.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (steps - 1 - warmup)
    return peak * (final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * progress)) / 2)


class SGD:
    """Plain gradient descent."""

    def update(self, parameters: Parameters, outcome: Outcome, rate: float) -> Parameters:
        """Return the new parameters."""
        return sgd(parameters, outcome.gradients, rate)

    def moments(self) -> Parameters:
        """Return nothing: there is no state."""
        return {}


@dataclass
class AdamW:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2), applied to a gradient whose global norm is clipped first."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float
    first: Parameters
    second: Parameters
    count: int = 0

    def update(self, parameters: Parameters, outcome: Outcome, rate: float) -> Parameters:
        """Return the new parameters, and keep the new moments in this object."""
        self.count += 1
        clip = min(1.0, self.clip_norm / outcome.gradient_norm)
        new = {}
        for name, p in parameters.items():
            g = outcome.gradients[name] * clip
            self.first[name] = self.beta1 * self.first[name] + (1 - self.beta1) * g
            self.second[name] = self.beta2 * self.second[name] + (1 - self.beta2) * g**2
            first = self.first[name] / (1 - self.beta1**self.count)
            second = self.second[name] / (1 - self.beta2**self.count)
            # Only matrices that multiply activations decay.
            decay = 0 if name == "embedding" or name.endswith(_NOT_PRODUCTS) else self.weight_decay
            new[name] = p - rate * (first / (np.sqrt(second) + self.epsilon) + decay * p)
        return new

    def moments(self) -> Parameters:
        """Return both moments of every array."""
        orders = {"1": self.first, "2": self.second}
        return {f"{name} {order}": x for order, arrays in orders.items() for name, x in arrays.items()}


# How the names of arrays end that multiply no activations.
_NOT_PRODUCTS = ("norm", "bias", "sinks", "scale", "rate", "filter")
# What Muon orthogonalises, by the oracle's names: i and o number inputs and outputs, m numbers matrices of their own.
# Dimensions before these number layers, and experts where the array has them.
_MATRICES = {"query": "ioo", "key": "ioo", "value": "ioo", "out": "iio", "query_down": "io", "kv_down": "io"}
_MATRICES |= {"query_up": "imo", "key_up": "imo", "value_up": "imo"}
_MATRICES |= {f"delta_{name}": "ioo" for name in ("query", "key", "value", "decay_up", "gate", "gate_up")}
_MATRICES |= {f"delta_{name}": "io" for name in ("decay", "decay_down", "gate_down", "strength")}
_MATRICES |= {f"convolution_{name}": "io" for name in ("input_gate", "output_gate", "value", "out")}
_MATRICES |= {"delta_out": "iio", "attention_gate": "ioo"}
_MATRICES |= {f"mamba_{name}": "ioo" for name in ("gate", "value", "write", "read")}
_MATRICES |= {"mamba_step": "io", "mamba_out": "iio", "latent_down": "io", "latent_up": "io"}
_MATRICES |= {f"{kind}{name}": "io" for kind in ("", "dense_", "shared_") for name in ("gate", "up", "down")}


# ... and what has one matrix per head, where that is set.
_PER_HEAD = (
    "query",
    "key",
    "value",
    "attention_gate",
    *(f"delta_{name}" for name in ("query", "key", "value", "gate")),
)


def orthogonalise(matrix: np.ndarray) -> np.ndarray:
    """Return five Newton-Schulz steps (Jordan et al., 2024)."""
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def muon_direction(name: str, mix: np.ndarray, per_head: bool) -> np.ndarray:
    """Return the orthogonalised matrices of an array, one by one, times 0.2 sqrt(max(inputs, outputs))."""
    letters = "imo" if per_head and name in _PER_HEAD else _MATRICES[name]
    letters = "m" * (mix.ndim - len(letters)) + letters
    order = [dim for letter in "mio" for dim, found in enumerate(letters) if found == letter]
    shape = [mix.shape[dim] for dim in order]
    inputs, outputs = (
        math.prod(size for size, x in zip(mix.shape, letters, strict=True) if x == side) for side in "io"
    )
    result = np.empty((math.prod(shape) // (inputs * outputs), inputs, outputs))
    for i, matrix in enumerate(mix.transpose(order).reshape(result.shape)):
        result[i] = 0.2 * math.sqrt(max(inputs, outputs)) * orthogonalise(matrix)
    return result.reshape(shape).transpose(np.argsort(order))


@dataclass
class Muon:
    """Muon (Jordan et al., 2024; Liu et al., 2025) for the matrices of layers, and `adamw` for the rest."""

    momentum: float
    per_head: bool
    adamw: AdamW
    buffers: Parameters

    def update(self, parameters: Parameters, outcome: Outcome, rate: float) -> Parameters:
        """Return the new parameters, and keep the new moments in this object."""
        new, adamw = self.adamw.update(parameters, outcome, rate), self.adamw
        clip = min(1.0, adamw.clip_norm / outcome.gradient_norm)
        for name in self.buffers:
            g = outcome.gradients[name] * clip
            self.buffers[name] = self.momentum * self.buffers[name] + g
            direction = muon_direction(name, g + self.momentum * self.buffers[name], self.per_head)
            new[name] = parameters[name] - rate * (direction + adamw.weight_decay * parameters[name])
        return new

    def moments(self) -> Parameters:
        """Return the momentum of matrices, and both moments of other arrays."""
        rest = {key: x for key, x in self.adamw.moments().items() if key.split()[0] not in self.buffers}
        return rest | {f"{name} 1": x for name, x in self.buffers.items()}


def muon_names(parameters: Parameters) -> list[str]:
    """Return the names of the arrays that Muon updates by default."""
    return [name for name in parameters if name in _MATRICES]
