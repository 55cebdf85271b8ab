"""Attention and rotary positions by their definitions, in float64."""

import numpy as np


def attention(q, k, v, positions, segments, scale, window=None, stretch=None):
    """Return, query by query, the average of the values of the keys it sees; q [batch, seq, kv_heads, group, size]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    result = np.zeros((*q.shape[:-1], v.shape[-1]))
    for b, i, head, member in np.ndindex(q.shape[:4]):
        seen = [
            j
            for j in range(k.shape[1])
            if segments[b, i] == segments[b, j]
            and positions[b, j] <= positions[b, i]
            and (window is None or positions[b, i] - positions[b, j] < window)
            and (stretch is None or positions[b, i] // stretch == positions[b, j] // stretch)
        ]
        scores = [scale * (q[b, i, head, member] @ k[b, j, head]) for j in seen]
        weights = np.exp(np.asarray(scores) - max(scores))
        weights /= weights.sum()
        result[b, i, head, member] = sum(w * v[b, j, head] for w, j in zip(weights, seen, strict=True))
    return result


def complex_rotation(x, positions, base):
    """Rotate each pair (x[i], x[i + half]), as a complex number, by position * base ** (-2 i / size)."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] * base ** (-2 * np.arange(half) / x.shape[-1])
    turned = (np.asarray(x, np.float64)[..., :half] + 1j * np.asarray(x, np.float64)[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rms_norm(x, scale, epsilon):
    """Return x / sqrt(mean(x**2) + epsilon) * scale over the last dimension."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * np.asarray(scale, np.float64)
