"""The oracle's rotary positions (Su et al., 2021), and YaRN, which extends them to longer texts (Peng et al., 2023)."""

import math
from dataclasses import dataclass

import numpy as np
from tape import Value


@dataclass(frozen=True)
class Rope:
    """The settings of rotary positions. YaRN applies where `factor` exceeds 1."""

    base: float
    interleaved: bool = False
    factor: float = 1.0
    length: int = 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all: float = 0.0
    truncate: bool = True
    share: float = 1.0  # the share of the pairs that rotate, the first ones

    def rotate(self, x: Value, positions: np.ndarray) -> Value:
        """Return x [tokens, size] with each pair of dimensions rotated by position * frequency, times the magnitude."""
        size = x.data.shape[1]
        angle, swap = np.zeros(x.data.shape), np.zeros((size, size))
        for (a, b), frequency in zip(self._pairs(size), self._frequencies(size), strict=True):
            angle[:, a] = angle[:, b] = positions * frequency
            swap[b, a], swap[a, b] = -1, 1  # x @ swap has (-b, a) where x has the pair (a, b)
        return self._magnitude * (x * np.cos(angle) + (x @ swap) * np.sin(angle))

    def attention_factor(self, mscale: float) -> float:
        """Return 1 + 0.1 * mscale * ln(factor), by which YaRN scales attention."""
        return 1 + 0.1 * mscale * math.log(self.factor)

    @property
    def _magnitude(self) -> float:
        """The factor on rotated queries and keys."""
        if self.mscale and self.mscale_all:
            return self.attention_factor(self.mscale) / self.attention_factor(self.mscale_all)
        return self.attention_factor(1.0)

    def _pairs(self, size: int) -> list[tuple[int, int]]:
        """Return the pairs of dimensions that rotate together."""
        half = size // 2
        return [(2 * i, 2 * i + 1) if self.interleaved else (i, i + half) for i in range(half)]

    def _frequencies(self, size: int) -> list[float]:
        """Return the frequency of each pair.

        Pair i makes length * base ** (-2 i / size) / (2 pi) turns within `length` tokens. YaRN keeps the frequencies of
        pairs that make more than `beta_fast` turns and divides by `factor` those of pairs that make less than
        `beta_slow`. In between the change is linear in the pair's index, from a whole index to one with `truncate`.
        """
        plain = [self.base ** (-2 * i / size) if i < self.share * size // 2 else 0.0 for i in range(size // 2)]
        if self.factor == 1:
            return plain

        def pair_with(turns: float) -> float:
            return size / 2 * math.log(self.length / (2 * math.pi * turns), self.base)

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(0, first), min(size - 1, last)
        result = []
        for i, frequency in enumerate(plain):
            extended = min(1.0, max(0.0, (i - first) / (last - first)))
            result.append((1 - extended) * frequency + extended * frequency / self.factor)
        return result
