"""Rotary positions for the oracle (Su et al., 2021), with YaRN, which extends them (Peng et al., 2023)."""

import math
from dataclasses import dataclass

import numpy as np
from tape import Value


@dataclass(frozen=True)
class Rope:
    """Frequencies of rotary positions, extended by YaRN where `factor` exceeds 1."""

    base: float
    interleaved: bool = False
    factor: float = 1.0
    length: int = 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all: float = 0.0

    def rotate(self, x: Value, positions: np.ndarray) -> Value:
        """x [tokens, size]: each pair of dimensions turned by position * its frequency, all times the magnitude."""
        size = x.data.shape[1]
        angle, turned = np.zeros(x.data.shape), np.zeros((size, size))
        for (a, b), frequency in zip(self._pairs(size), self._frequencies(size), strict=True):
            angle[:, a] = angle[:, b] = positions * frequency
            turned[b, a], turned[a, b] = -1, 1  # x @ turned: the pair (a, b) becomes (-b, a)
        return self._magnitude * (x * np.cos(angle) + (x @ turned) * np.sin(angle))

    def attention_factor(self, mscale: float) -> float:
        """YaRN's growth of attention with the factor's logarithm."""
        return 1 + 0.1 * mscale * math.log(self.factor)

    @property
    def _magnitude(self) -> float:
        """Of what is rotated."""
        if self.mscale and self.mscale_all:
            return self.attention_factor(self.mscale) / self.attention_factor(self.mscale_all)
        return self.attention_factor(1.0)

    def _pairs(self, size: int) -> list[tuple[int, int]]:
        """Dimensions that turn together."""
        half = size // 2
        return [(2 * i, 2 * i + 1) if self.interleaved else (i, i + half) for i in range(half)]

    def _frequencies(self, size: int) -> list[float]:
        """Of each pair.

        Pair i turns length * base ** (-2 i / size) / (2 pi) times within `length`. From the last pair that turns
        `beta_fast` times, to the first that turns less than `beta_slow` times, frequencies go over from what they are
        to a `factor`-th, in equal parts a pair.
        """
        plain = [self.base ** (-2 * i / size) for i in range(size // 2)]
        if self.factor == 1:
            return plain

        def pair(turns: float) -> float:
            return size / 2 * math.log(self.length / (2 * math.pi * turns), self.base)

        first, last = max(0, math.floor(pair(self.beta_fast))), min(size - 1, math.ceil(pair(self.beta_slow)))
        result = []
        for i, frequency in enumerate(plain):
            extended = min(1.0, max(0.0, (i - first) / (last - first)))
            result.append((1 - extended) * frequency + extended * frequency / self.factor)
        return result
