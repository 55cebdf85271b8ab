"""The tokens that are most specific to an expert."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from moezoo.tools.routing.tally import Tally


class SpecificToken(NamedTuple):
    """A token that an expert gets more often than the other experts do.

    Attributes:
        token: Its id.
        score: The z-score of its log-odds ratio (`log_odds`).
        chosen: How often it went to the expert.
        occurrences: How often it is in the text.
        place: The place of the first one that went to the expert, counted over all rows.
    """

    token: int
    score: float
    chosen: int
    occurrences: int
    place: int


def log_odds(
    chosen: Integer[np.ndarray, "experts counted"], occurrences: Integer[np.ndarray, " counted"]
) -> Float[np.ndarray, "experts counted"]:
    """Return how specific each token is to each expert of a layer: the z-score of its log-odds ratio.

    This is the weighted log-odds ratio with an informative Dirichlet prior of Monroe et al. (2008, "Fightin' Words",
    Political Analysis 16:372-403, equations 16, 20 and 22), of the assignments to one expert against those to all
    others. With y times of n for the expert, and likewise y' of n' for the others,

        delta = log((y + a) / (n + A - y - a)) - log((y' + a) / (n' + A - y' - a))
        score = delta / sqrt(1 / (y + a) + 1 / (y' + a))

    The prior a is the token's share of the text times A, the number of counted tokens, so it is 1 on average. A token
    that no other stands beside has score 0.
    """
    total = len(occurrences)
    prior = occurrences * (total / max(occurrences.sum(), 1))
    own = chosen + prior
    rest = chosen.sum(0) - chosen + prior

    def odds(part: np.ndarray) -> np.ndarray:
        return part / (part.sum(1, keepdims=True) - part)

    if total < 2:
        return np.zeros(chosen.shape)
    return np.log(odds(own) / odds(rest)) / np.sqrt(1 / own + 1 / rest)


def specific_tokens(tally: Tally, count: int) -> list[list[list[SpecificToken]]]:
    """Return for each layer and expert up to `count` tokens with the highest scores above 0, in this order."""
    found = []
    for chosen, first in zip(tally.chosen, tally.first, strict=True):
        scores = np.where(chosen > 0, log_odds(chosen, tally.occurrences), 0)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        found.append(
            [
                [
                    SpecificToken(
                        int(tally.token_ids[t]),
                        float(scores[e, t]),
                        int(chosen[e, t]),
                        int(tally.occurrences[t]),
                        int(first[e, t]),
                    )
                    for t in tokens
                    if scores[e, t] > 1e-9  # one expert's are 0 up to rounding
                ]
                for e, tokens in enumerate(best)
            ]
        )
    return found
