"""Counts of the experts that tokens of a text went to, and the figures that follow from them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32, Int64, Integer

from moezoo.moe.routing import Balance, balance_of

# Counts of tokens by layer and expert: so many numbers, of 12 bytes each, are in memory at most.
_MOST_COUNTS = 2**24


@dataclasses.dataclass(frozen=True)
class Tally:
    """Counts over the tokens of a text, padding apart. `layer` are the layers with experts.

    Attributes:
        tokens: How many tokens were read.
        k: The experts per token.
        load: Assignments per expert, as `moezoo.moe.routing.Routing.load`.
        pairs: How many tokens went to both of two experts; on the diagonal the load.
        token_ids: The tokens of the vocabulary that are counted, the most frequent first.
        occurrences: How often each of them is in the text.
        chosen: How often each of them went to each expert.
        first: The place of the first such token, counted over all rows, padding included; -1 if there is none.
    """

    tokens: int
    k: int
    load: Int64[np.ndarray, "layer experts"]
    pairs: Int64[np.ndarray, "layer experts experts"]
    token_ids: Int64[np.ndarray, " counted"]
    occurrences: Int64[np.ndarray, " counted"]
    chosen: Int32[np.ndarray, "layer experts counted"]
    first: Int64[np.ndarray, "layer experts counted"]

    @property
    def balance(self) -> Balance:
        """How evenly all layers use their experts, as a training step logs it (`moezoo.moe.routing.Balance`)."""
        return _balance(self.load)

    @functools.cached_property
    def balance_by_layer(self) -> list[Balance]:
        """The same of each layer alone."""
        return [_balance(self.load[layer : layer + 1]) for layer in range(len(self.load))]

    @property
    def dead(self) -> Bool[np.ndarray, "layer experts"]:
        """Which experts no token of the text went to."""
        return self.load == 0

    @functools.cached_property
    def co_activation(self) -> Float[np.ndarray, "layer experts experts"]:
        """How often two experts are chosen together, relative to independent choices.

        It is P(i and j) / (P(i) P(j)), divided by what a choice of k different experts at random has,
        (k - 1) E / (k (E - 1)); so 1 is independent, 0 never together. P is the share of tokens. Muennighoff et al.
        (2024, arXiv:2409.02060, section 5.2) count the same pairs, relative to the load of one of the two. It is NaN on
        the diagonal, for an expert without tokens, and with one expert per token.
        """
        load, experts = self.load.astype(float), self.load.shape[1]
        independent = (self.k - 1) * experts / (self.k * max(experts - 1, 1))
        expected = load[:, :, None] * load[:, None, :] * independent / max(self.tokens, 1)
        expected[:, range(experts), range(experts)] = 0
        return np.where(expected > 0, self.pairs / np.where(expected > 0, expected, 1), np.nan)


def _balance(load: np.ndarray) -> Balance:
    # float32 also counts texts whose assignments exceed int32.
    return jax.device_get(_jitted(jnp.asarray(load, jnp.float32)))


_jitted = jax.jit(balance_of)


class Counter:
    """Adds up a `Tally` of batches in order."""

    def __init__(self, layers: int, experts: int, k: int, occurrences: Integer[np.ndarray, " vocab"]):
        """Begin with nothing; `occurrences` says how often each token of the vocabulary is in the text.

        Tokens of the vocabulary are counted by layer and expert as far as memory is bounded: the most frequent ones.
        """
        order = np.argsort(-occurrences, kind="stable")[: (occurrences > 0).sum()]
        counted = order[: max(_MOST_COUNTS // (layers * experts), 1)]
        self._column = np.full(len(occurrences), -1)
        self._column[counted] = np.arange(len(counted))
        shape = layers, experts, len(counted)
        self.tally = Tally(
            tokens=int(occurrences.sum()),
            k=k,
            load=np.zeros(shape[:2], np.int64),
            pairs=np.zeros((layers, experts, experts), np.int64),
            token_ids=counted,
            occurrences=occurrences[counted].astype(np.int64),
            chosen=np.zeros(shape, np.int32),
            first=np.full(shape, -1, np.int64),
        )
        self._read = 0

    def add(
        self,
        tokens: Integer[np.ndarray, "batch seq"],
        valid: Bool[np.ndarray, "batch seq"],
        expert_ids: Integer[np.ndarray, "layer batch seq k"],
    ) -> None:
        """Add a batch; only tokens where `valid` count."""
        places = self._read + np.flatnonzero(valid)
        self._read += valid.size
        columns, tally = self._column[tokens[valid]], self.tally
        experts, counted = tally.chosen.shape[1:]
        for layer, ids in enumerate(expert_ids[:, valid].astype(np.int64)):  # [tokens, k]
            pairs = np.bincount((ids[:, :, None] * experts + ids[:, None, :]).ravel(), minlength=experts**2)
            tally.pairs[layer] += pairs.reshape(experts, experts)
            flat = (ids * counted + columns[:, None])[columns >= 0].ravel()
            where = np.repeat(places[columns >= 0], ids.shape[1])
            cells, at, number = np.unique(flat, return_index=True, return_counts=True)
            chosen, first = tally.chosen[layer].reshape(-1), tally.first[layer].reshape(-1)
            chosen[cells] += number.astype(np.int32)
            first[cells] = np.where(first[cells] < 0, where[at], first[cells])
            tally.load[layer] += np.bincount(ids.ravel(), minlength=experts)


def count_shared(
    one: Integer[np.ndarray, "*dims k"], other: Integer[np.ndarray, "*dims k"]
) -> Integer[np.ndarray, "*dims"]:
    """Return how many experts of each token are in both choices, in any order."""
    return functools.reduce(np.add, ((one[..., k : k + 1] == other).sum(-1) for k in range(one.shape[-1])))
