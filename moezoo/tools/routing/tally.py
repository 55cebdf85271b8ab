"""Counts of the experts that tokens of a text went to, and the figures that follow from them."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int64, Integer

from moezoo.moe.routing import Balance, balance_of

# Counts of tokens by layer and expert: so many numbers, of 12 bytes each, are in memory at most.
_MOST_COUNTS = 2**24

_balance_of = jax.jit(balance_of)


class SpecificToken(NamedTuple):
    """A token of which an expert gets more than the other experts do.

    `score` is the z-score of its log-odds ratio (`log_odds`). Of its `occurrences` in the text, `chosen` went to the
    expert; `place` is that of the first of these, counted over all rows.
    """

    token: int
    score: float
    chosen: int
    occurrences: int
    place: int


class Tally:
    """Counts over the tokens of a text, padding apart. `layer` are the layers with experts.

    Attributes:
        tokens: How many tokens the text has, and `k` to how many experts each goes.
        pairs: How many tokens went to both of two experts, int64 [layer, experts, experts]; on the diagonal the load.
        token_ids: The tokens of the vocabulary that are counted, [counted], the most frequent first.
        occurrences: How often each of them is in the text, int64 [counted].
        chosen: How often each of them went to each expert, int32 [layer, experts, counted].
        first: The place of the first such token, counted over all rows, padding included; 2^63 - 1 if there is none.
    """

    def __init__(self, layers: int, experts: int, k: int, occurrences: Integer[np.ndarray, " vocab"]):
        """Begin with nothing; `occurrences` says how often each token of the vocabulary is in the text."""
        order = np.argsort(-occurrences, kind="stable")
        self.token_ids = order[: min(max(_MOST_COUNTS // (layers * experts), 1), np.count_nonzero(occurrences))]
        self.occurrences = occurrences[self.token_ids]
        self.tokens, self.k, self._read = int(occurrences.sum()), k, 0
        self._column = np.argsort(order)
        self.pairs = np.zeros((layers, experts, experts), np.int64)
        self.chosen = np.zeros((layers, experts, len(self.token_ids)), np.int32)
        self.first = np.full(self.chosen.shape, np.iinfo(np.int64).max)

    def add(self, tokens: np.ndarray, valid: np.ndarray, expert_ids: Integer[np.ndarray, "layer batch seq k"]) -> None:
        """Add the next batch of `tokens` [batch, seq]; only those where `valid` [batch, seq] count."""
        places = self._read + np.flatnonzero(valid)
        self._read += valid.size
        columns = self._column[tokens[valid]]
        experts, counted = self.chosen.shape[1:]
        kept = columns < counted
        for layer, ids in enumerate(expert_ids[:, valid].astype(np.int64)):  # [tokens, k]
            pairs = np.bincount((ids[:, :, None] * experts + ids[:, None, :]).ravel(), minlength=experts**2)
            self.pairs[layer] += pairs.reshape(experts, experts)
            cells = (ids * counted + columns[:, None])[kept].ravel()
            np.add.at(self.chosen[layer].reshape(-1), cells, 1)
            np.minimum.at(self.first[layer].reshape(-1), cells, np.repeat(places[kept], self.k))

    @property
    def load(self) -> Int64[np.ndarray, "layer experts"]:
        """Assignments per expert, as `moezoo.moe.routing.Routing.load`."""
        return self.pairs.diagonal(axis1=1, axis2=2)

    @property
    def dead(self) -> Bool[np.ndarray, "layer experts"]:
        """Which experts no token of the text went to."""
        return self.load == 0

    @property
    def balance(self) -> Balance:
        """How evenly all layers use their experts, as a training step logs it (`moezoo.moe.routing.Balance`)."""
        return _balance(self.load)

    @property
    def balance_by_layer(self) -> list[Balance]:
        """The same of each layer alone."""
        return [_balance(load[None]) for load in self.load]

    @property
    def co_activation(self) -> Float[np.ndarray, "layer experts experts"]:
        """How often two experts are chosen together, relative to independent choices.

        docs/routing.md has the formula. It is NaN on the diagonal, for an expert without tokens, and with one expert
        per token. Muennighoff et al. (2024, arXiv:2409.02060, section 5.2) divide by the load of one of the two alone.
        """
        load, experts = self.load.astype(float), self.load.shape[1]
        independent = (self.k - 1) * experts / (self.k * max(experts - 1, 1))
        expected = load[:, :, None] * load[:, None, :] * independent / max(self.tokens, 1)
        expected[:, range(experts), range(experts)] = 0
        return np.divide(self.pairs, expected, out=np.full_like(expected, np.nan), where=expected > 0)


def _balance(load: np.ndarray) -> Balance:
    # float32 also counts texts whose assignments exceed int32.
    return jax.device_get(_balance_of(load.astype(np.float32)))


def log_odds(
    chosen: Integer[np.ndarray, "experts counted"], occurrences: Integer[np.ndarray, " counted"]
) -> Float[np.ndarray, "experts counted"]:
    """Return how specific each token is to each expert of a layer: the z-score of its log-odds ratio.

    It is that of Monroe et al. (2008, "Fightin' Words", Political Analysis 16:372-403, equations 16, 20 and 22). With y
    of the n assignments to the expert, and y' of the n' to all others,

        delta = log((y + a) / (n + A - y - a)) - log((y' + a) / (n' + A - y' - a))
        score = delta / sqrt(1 / (y + a) + 1 / (y' + a))

    The prior a is the token's share of the text times A, the number of counted tokens; with one token scores are 0.
    """
    if (total := len(occurrences)) < 2:
        return np.zeros(chosen.shape)
    prior = occurrences * (total / max(occurrences.sum(), 1))
    own, rest = chosen + prior, chosen.sum(0) - chosen + prior
    odds = [part / (part.sum(1, keepdims=True) - part) for part in (own, rest)]
    return np.log(odds[0] / odds[1]) / np.sqrt(1 / own + 1 / rest)
