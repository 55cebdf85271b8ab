"""The oracle: Mixtral's training step as plain loops over rows, tokens and chosen experts, in float64, on one device.

Nothing of moezoo or JAX computes here; parameters are read out of the model by attribute. In float64 the oracle's own
rounding is nothing beside float32's, so that whatever difference is found is the tested code's.

Letters: D embed, H heads, E experts, K experts a token. Operations run one by one, so a routing decision is made by
sorting concrete numbers. A padding token is left out altogether, which is what "padding counts nowhere" means.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tape import Value, exp, gradients, log, stack, total_of, value

Parameters = dict[str, Any]

# Neither norm scales nor the embedding decay: only what multiplies activations as a matrix does.
MATRICES = ("query", "key", "value", "out", "router", "gate", "up", "down", "unembedding")
# Two probabilities closer than this could be ordered otherwise in float32, and a comparison would say nothing.
_TIE = 1e-5


@dataclass(frozen=True)
class Sizes:
    """What the arrays' shapes do not say."""

    experts_per_token: int
    rope_base: float
    norm_eps: float
    window: int | None
    load_balance: float
    z_loss: float
    balance: Literal["batch", "sequence"]


@dataclass(frozen=True)
class Outcome:
    """One step's losses with their coefficients, gradients, and assignments [layer, experts]."""

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


def parameters_of(model: Any) -> Parameters:
    """The arrays of a Mixtral (or of anything in its shape: gradients, moments) by name; layers stacked, float64."""
    layer = model.stacks[0].layer
    named = {
        "embedding": model.embedding.weight,
        "attention_norm": layer.attention_norm.scale,
        "query": layer.attention.query,
        "key": layer.attention.key,
        "value": layer.attention.value,
        "out": layer.attention.out,
        "moe_norm": layer.moe_norm.scale,
        "router": layer.moe.router.weight,
        "gate": layer.moe.experts.gate,
        "up": layer.moe.experts.up,
        "down": layer.moe.experts.down,
        "final_norm": model.unembedding.norm.scale,
        "unembedding": model.unembedding.weight,
    }
    return {name: np.asarray(value, np.float64) for name, value in named.items()}


class _Split:
    """Parameters on the tape, and the matrices that loops ask for again and again, cut out once."""

    def __init__(self, parameters: Parameters):
        self.whole = {name: Value(x) for name, x in parameters.items()}
        self.layers, _, self.heads, self.head_dim = parameters["query"].shape
        self.kv_heads, self.experts = parameters["key"].shape[2], parameters["router"].shape[2]
        self._cut: dict[Any, Value] = {}

    def __call__(self, name: str, *index: Any) -> Value:
        """`name[index]`."""
        key = (name, *map(str, index))
        if key not in self._cut:
            self._cut[key] = self.whole[name][index] if index else self.whole[name]
        return self._cut[key]


def _norm(x: Value, scale: Value, epsilon: float) -> Value:
    return x * ((x * x).sum(-1) / x.data.shape[-1] + epsilon) ** -0.5 * scale


def _rotate(x: Value, positions: np.ndarray, base: float) -> Value:
    """x [tokens, head_dim]: the pair (i, i + head_dim / 2) turned by position * base ** (-2 i / head_dim)."""
    size = x.data.shape[1]
    half = size // 2
    angle = positions[:, None] * np.array([base ** (-2 * (i % half) / size) for i in range(size)])
    turned = np.zeros((size, size))  # x @ turned: the pair (a, b) becomes (-b, a)
    for i in range(half):
        turned[i + half, i], turned[i, i + half] = -1, 1
    return x * np.cos(angle) + (x @ turned) * np.sin(angle)


def _attention(p: _Split, layer: int, x: Value, segments: np.ndarray, positions: np.ndarray, sizes: Sizes) -> Value:
    """One row, head by head."""
    tokens = range(len(segments))
    seen = np.array([[segments[i] == segments[j] and positions[j] <= positions[i] for j in tokens] for i in tokens])
    if sizes.window is not None:
        seen &= np.array([[positions[i] - positions[j] < sizes.window for j in tokens] for i in tokens])
    result = value(0)
    for head in range(p.heads):
        shared = head * p.kv_heads // p.heads
        q = _rotate(x @ p("query", layer, slice(None), head), positions, sizes.rope_base)
        k = _rotate(x @ p("key", layer, slice(None), shared), positions, sizes.rope_base)
        scores = exp(q @ k.T / math.sqrt(p.head_dim)) * seen
        weights = scores / scores.sum(1)
        result = result + weights @ (x @ p("value", layer, slice(None), shared)) @ p("out", layer, head)
    return result


@dataclass
class _Routing:
    """One layer's routing of one row; probabilities and z summed over its tokens."""

    counts: np.ndarray
    probabilities: Value
    z: Value


def _experts(p: _Split, layer: int, x: Value, k: int) -> tuple[Value, _Routing]:
    """Each token of a row through its K most probable experts."""
    rows, routing = [], _Routing(np.zeros(p.experts, np.int64), value(0), value(0))
    for i in range(len(x.data)):
        token = x[i]
        exponentials = exp(token @ p("router", layer))
        total = exponentials.sum()
        probabilities = exponentials / total
        number = probabilities.data.tolist()
        order = sorted(range(p.experts), key=lambda e: -number[e])
        assert number[order[k - 1]] - number[order[k]] > _TIE, "choose another seed: this token's choice is a tie"
        chosen = order[:k]
        share = total_of(probabilities[e] for e in chosen)
        y = value(0)
        for e in chosen:
            gate = token @ p("gate", layer, e)
            inner = gate / (1 + exp(-gate)) * (token @ p("up", layer, e))
            y = y + probabilities[e] / share * (inner @ p("down", layer, e))
            routing.counts[e] += 1
        routing.probabilities = routing.probabilities + probabilities
        routing.z = routing.z + log(total) ** 2
        rows.append(y)
    return stack(rows), routing


def _row(p: _Split, row: dict[str, np.ndarray], sizes: Sizes) -> tuple[Value, list[_Routing]]:
    """One row's nats over its predicted tokens, and each layer's routing."""
    real = row["segments"] > 0
    tokens, labels, segments, positions = (row[k][real] for k in ("tokens", "labels", "segments", "positions"))
    x = stack([p("embedding", int(token)) for token in tokens])
    routing = []
    for layer in range(p.layers):
        h = _norm(x, p("attention_norm", layer), sizes.norm_eps)
        x = x + _attention(p, layer, h, segments, positions, sizes)
        y, one = _experts(p, layer, _norm(x, p("moe_norm", layer), sizes.norm_eps), sizes.experts_per_token)
        x = x + y
        routing.append(one)
    nats = value(0)
    for i, label in enumerate(labels.tolist()):
        if label >= 0:
            logits = _norm(x[i], p("final_norm"), sizes.norm_eps) @ p("unembedding")
            nats = nats + log(exp(logits).sum()) - logits[label]
    return nats, routing


def _balance(counts: np.ndarray, probabilities: Value, k: int) -> Value:
    """E * sum_e f_e P_e: f the share of the K * T assignments, P the mean probability over the T tokens."""
    tokens = int(counts.sum()) // k
    return (value(counts / (k * tokens)) * (probabilities / tokens)).sum() * len(counts)


def _micro_step(p: _Split, rows: list[dict[str, np.ndarray]], sizes: Sizes) -> tuple[Value, Value, Value, np.ndarray]:
    """Nats over all predicted tokens, the two routing losses (means over layers), and the load [layer, experts]."""
    done = [_row(p, row, sizes) for row in rows if (row["segments"] > 0).any()]
    k = sizes.experts_per_token
    balance, z, load = value(0), value(0), []
    for layer in range(p.layers):
        routing = [r[layer] for _, r in done]
        counts = np.sum([r.counts for r in routing], axis=0)
        if sizes.balance == "batch":
            one = _balance(counts, total_of(r.probabilities for r in routing), k)
        else:
            one = total_of(_balance(r.counts, r.probabilities, k) for r in routing) / len(routing)
        balance = balance + sizes.load_balance * one / p.layers
        z = z + sizes.z_loss * total_of(r.z for r in routing) / (int(counts.sum()) / k) / p.layers
        load.append(counts)
    return total_of(nats for nats, _ in done), balance, z, np.stack(load)


def differentiate(parameters: Parameters, batch: dict[str, np.ndarray], micro_steps: int, sizes: Sizes) -> Outcome:
    """One step of `batch` arrays [rows, seq], cut in `micro_steps` runs of rows.

    The objective is the cross-entropy a predicted token of the whole step plus the mean over micro-steps of the two
    routing losses.
    """
    rows = [{name: array[i] for name, array in batch.items()} for i in range(len(batch["tokens"]))]
    share = len(rows) // micro_steps
    p = _Split(parameters)
    cut = (rows[i * share : (i + 1) * share] for i in range(micro_steps))
    nats, balances, zs, loads = zip(*(_micro_step(p, some, sizes) for some in cut), strict=True)
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
            decay = self.weight_decay if name in MATRICES else 0
            new[name] = p - rate * (first / (np.sqrt(second) + self.epsilon) + decay * p)
        return new
