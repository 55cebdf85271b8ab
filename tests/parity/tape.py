"""Reverse-mode differentiation of NumPy code, as small as the oracle's needs: an operation remembers how to go back.

The oracle executes tens of thousands of tiny operations one by one; NumPy does in a second what JAX, made for few large
ones, takes minutes for. It also leaves nothing that the oracle shares with what it judges.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_number = itertools.count()


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The transpose of broadcasting from `shape`."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] != 1), keepdims=True)


class Value:
    """An array, and for each value it was computed from the function from its own gradient to that one's."""

    __array_ufunc__ = None  # so that array * value asks the value

    def __init__(self, data: Any, parents: Sequence[tuple["Value", Callable[[np.ndarray], np.ndarray]]] = ()):
        self.data, self.parents, self.number = np.asarray(data, np.float64), parents, next(_number)

    def __add__(self, other: Any) -> "Value":
        other = value(other)
        pairs = [(v, lambda g, s=v.data.shape: _sum_to(g, s)) for v in (self, other)]
        return Value(self.data + other.data, pairs)

    def __mul__(self, other: Any) -> "Value":
        other = value(other)
        pairs = [(a, lambda g, a=a, b=b: _sum_to(g * b.data, a.data.shape)) for a, b in ((self, other), (other, self))]
        return Value(self.data * other.data, pairs)

    def __pow__(self, power: float) -> "Value":
        return Value(self.data**power, [(self, lambda g: g * power * self.data ** (power - 1))])

    def __matmul__(self, other: Any) -> "Value":
        """Vector or matrix times matrix."""
        other = value(other)
        a, b = self.data, other.data
        back = [(self, lambda g: g @ b.T), (other, lambda g: np.atleast_2d(a).T @ np.atleast_2d(g))]
        return Value(a @ b, back)

    def __truediv__(self, other: Any) -> "Value":
        return self * value(other) ** -1

    def __rtruediv__(self, other: Any) -> "Value":
        return self**-1 * other

    def __neg__(self) -> "Value":
        return self * -1

    def __sub__(self, other: Any) -> "Value":
        return self + -value(other)

    __radd__, __rmul__ = __add__, __mul__

    def __getitem__(self, index: Any) -> "Value":
        def back(g: np.ndarray) -> np.ndarray:
            whole = np.zeros_like(self.data)
            whole[index] = g
            return whole

        return Value(self.data[index], [(self, back)])

    @property
    def T(self) -> "Value":  # noqa: N802
        """The transpose of a matrix."""
        return Value(self.data.T, [(self, lambda g: g.T)])

    def sum(self, axis: int | None = None) -> "Value":
        """Over an axis, which stays as one of size 1, or over all."""
        keep = axis is not None
        return Value(self.data.sum(axis, keepdims=keep), [(self, lambda g: np.broadcast_to(g, self.data.shape))])


def value(x: Any) -> Value:
    """`x`, or a constant."""
    return x if isinstance(x, Value) else Value(x)


def exp(x: Value) -> Value:
    """Elementwise."""
    result = np.exp(x.data)
    return Value(result, [(x, lambda g: g * result)])


def log(x: Value) -> Value:
    """Elementwise."""
    return Value(np.log(x.data), [(x, lambda g: g / x.data)])


def clamp(x: Value, bound: float) -> Value:
    """Elementwise, to between -bound and bound; a gradient comes through where nothing was cut off."""
    inside = abs(x.data) <= bound
    return Value(np.clip(x.data, -bound, bound), [(x, lambda g: g * inside)])


def stack(rows: Sequence[Value]) -> Value:
    """Vectors to a matrix."""
    return Value(np.stack([r.data for r in rows]), [(r, lambda g, i=i: g[i]) for i, r in enumerate(rows)])


def total_of(values: Iterable[Value]) -> Value:
    """Their sum."""
    return sum(values, start=value(0))


def gradients(result: Value, inputs: Sequence[Value]) -> list[np.ndarray]:
    """The derivative of a scalar with respect to each input; zero for one it does not depend on."""
    total = {result.number: np.ones_like(result.data)}
    found, pending = {result.number: result}, [result]
    while pending:
        for parent, _ in pending.pop().parents:
            if parent.number not in found:
                found[parent.number] = parent
                pending.append(parent)
    # A value is made after all that it is made of, so going down in number visits a value when its gradient is whole.
    for number in sorted(found, reverse=True):
        for parent, back in found[number].parents:
            g = back(total[number])
            total[parent.number] = total[parent.number] + g if parent.number in total else g
    return [total.get(x.number, np.zeros_like(x.data)) for x in inputs]
