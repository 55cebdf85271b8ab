"""What `moezoo routing` prints, and its numbers as JSON."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moezoo.moe.routing import Balance
from moezoo.tools.routing.counted import Context, RoutingAgreement, TextRouting
from moezoo.tools.routing.specific import SpecificToken

_PAIRS = 16  # the pairs of experts per layer that JSON lists


class Found(NamedTuple):
    """Everything that the command has found.

    Attributes:
        model: The folder of the model.
        step: The step of its checkpoint; None for a Hugging Face folder.
        documents: The documents that were read, and `source` their data.
        routing: The routing of the text.
        agreements: What was compared -> how far it routes alike.
        older: The steps of older checkpoints; `agreements` has each as "step STEP".
        top: The number of specific tokens per expert.
    """

    model: str
    step: int | None
    documents: str
    source: Any
    routing: TextRouting
    agreements: Mapping[str, RoutingAgreement]
    older: list[int]
    top: int

    @property
    def loads_by_step(self) -> dict[int, np.ndarray]:
        """The load of each expert on the same text, by the step of the checkpoint."""
        loads = {step: self.agreements[f"step {step}"].load for step in self.older}
        return loads if self.step is None else {**loads, self.step: self.routing.tally.load}


def shown_tokens(found: Found) -> list[list[list[tuple[SpecificToken, Context]]]]:
    """Return the specific tokens of each layer and expert, each with its first context."""
    return [
        [[(token, found.routing.context(token.place)) for token in expert] for expert in layer]
        for layer in found.routing.specific_tokens(found.top)
    ]


def title(found: Found) -> list[tuple[str, str]]:
    """Return what was read, as names and texts."""
    tally = found.routing.tally
    step = "" if found.step is None else f", step {found.step:,}"
    experts = tally.load.shape[1]
    return [
        (
            "model",
            f"{found.model}{step}: {len(found.routing.layers)} layers with {experts} experts, {tally.k} per token",
        ),
        ("text", f"data={found.source.name}, {found.documents} documents: {tally.tokens:,} {found.routing.rows.unit}s"),
    ]


def describe(balance: Balance) -> tuple[str, str]:
    """Return the entropy and violation of one layer."""
    return f"{balance.mean_entropy:.3f}", f"{balance.mean_violation:.2f}"


def lines(found: Found) -> list[str]:
    """Return the lines that the command prints."""
    tally, rows = found.routing.tally, title(found)
    for layer, balance, dead in zip(found.routing.layers, tally.balance_by_layer, tally.dead.sum(1), strict=True):
        entropy, violation = describe(balance)
        rows.append(
            (f"layer {layer}", f"entropy {entropy}  violation {violation}  dead {dead} of {tally.dead.shape[1]}")
        )
    for name, other in found.agreements.items():
        share = 1 - other.agreement
        rows.append(
            ("differ", f"{share.mean():.3%} of choices (layers {share.min():.3%} to {share.max():.3%}): {name}")
        )
    return [f"{name:<11} {text}" for name, text in rows]


def as_json(found: Found, tokens: list[list[list[tuple[SpecificToken, Context]]]]) -> str:
    """Return all numbers as JSON; what is not defined is null."""
    tally = found.routing.tally
    layers = []
    for row, layer in enumerate(found.routing.layers):
        balance = tally.balance_by_layer[row]
        layers.append(
            {
                "layer": layer,
                "load": tally.load[row].tolist(),
                "entropy": float(balance.mean_entropy),
                "violation": float(balance.mean_violation),
                "dead": np.flatnonzero(tally.dead[row]).tolist(),
                "pairs": strongest_pairs(tally.co_activation[row], tally.pairs[row]),
                "tokens": [[token._asdict() | context._asdict() for token, context in each] for each in tokens[row]],
                "agreement": {name: float(each.agreement[row]) for name, each in found.agreements.items()},
                "load_by_step": {step: load[row].tolist() for step, load in found.loads_by_step.items()},
            }
        )
    about = {**dict(title(found)), "tokens": tally.tokens, "experts_per_token": tally.k}
    about["balance"] = {name: float(value) for name, value in tally.balance._asdict().items()}
    return json.dumps({**about, "layers": layers}, indent=1)


def strongest_pairs(co_activation: np.ndarray, pairs: np.ndarray) -> list[dict[str, Any]]:
    """Return the pairs of experts of a layer that are chosen together most often, relative to independence."""
    upper = np.triu(np.nan_to_num(co_activation, nan=-1.0), 1)
    order = np.argsort(-upper, axis=None, kind="stable")[:_PAIRS]
    places = [divmod(int(at), len(upper)) for at in order]
    return [
        {"experts": [a, b], "together": int(pairs[a, b]), "relative": float(co_activation[a, b])}
        for a, b in places
        if upper[a, b] > 0
    ]
