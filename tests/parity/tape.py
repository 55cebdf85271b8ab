"""Reverse-mode differentiation of NumPy code in float64, with only the operations that the oracle needs.

Each operation returns a `Value` that keeps, for each operand, the function from its own gradient to the operand's.
`gradients` calls these functions from the last value to the first.

Why not JAX: the oracle must share no code with the step that it checks. It is also faster, because the oracle executes
tens of thousands of tiny operations one by one: about a second in NumPy, minutes in JAX.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_number = itertools.count()


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return `x` summed over the dimensions that broadcasting from `shape` added or repeated."""
    if x.shape == shape:
        return x
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] != 1), keepdims=True)


class Value:
    """A float64 array on the tape.

    `parents` has an entry for each operand: the operand, and the function from this value's gradient to the operand's.
    `number` counts values in the order in which they were made.
    """

    __array_ufunc__ = None  # makes NumPy call Value.__rmul__ for array * value

    def __init__(self, data: Any, parents: Sequence[tuple["Value", Callable[[np.ndarray], np.ndarray]]] = ()):
        self.data, self.parents, self.number = np.asarray(data, np.float64), parents, next(_number)

    def __add__(self, other: Any) -> "Value":
        other = as_value(other)
        pairs = [(v, lambda g, s=v.data.shape: _sum_to(g, s)) for v in (self, other)]
        return Value(self.data + other.data, pairs)

    def __mul__(self, other: Any) -> "Value":
        other = as_value(other)
        pairs = [(a, lambda g, a=a, b=b: _sum_to(g * b.data, a.data.shape)) for a, b in ((self, other), (other, self))]
        return Value(self.data * other.data, pairs)

    def __pow__(self, power: float) -> "Value":
        return Value(self.data**power, [(self, lambda g: g * power * self.data ** (power - 1))])

    def __matmul__(self, other: Any) -> "Value":
        """Return a vector or matrix times a matrix."""
        other = as_value(other)
        a, b = self.data, other.data
        back = [(self, lambda g: g @ b.T), (other, lambda g: np.atleast_2d(a).T @ np.atleast_2d(g))]
        return Value(a @ b, back)

    def __truediv__(self, other: Any) -> "Value":
        return self * as_value(other) ** -1

    def __rtruediv__(self, other: Any) -> "Value":
        return self**-1 * other

    def __neg__(self) -> "Value":
        return self * -1

    def __sub__(self, other: Any) -> "Value":
        return self + -as_value(other)

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
        """Return the sum over an axis, kept with size 1, or the sum over all axes."""
        keep = axis is not None
        return Value(self.data.sum(axis, keepdims=keep), [(self, lambda g: np.broadcast_to(g, self.data.shape))])


def as_value(x: Any) -> Value:
    """Return `x` if it is a value, else a constant value."""
    return x if isinstance(x, Value) else Value(x)


def exp(x: Value) -> Value:
    """Return the elementwise exponential."""
    result = np.exp(x.data)
    return Value(result, [(x, lambda g: g * result)])


def log(x: Value) -> Value:
    """Return the elementwise natural logarithm."""
    return Value(np.log(x.data), [(x, lambda g: g / x.data)])


def clamp(x: Value, low: float, high: float) -> Value:
    """Return `x` limited to [low, high] elementwise. The gradient is zero where `x` is outside."""
    inside = (low <= x.data) & (x.data <= high)
    return Value(np.clip(x.data, low, high), [(x, lambda g: g * inside)])


def stack(rows: Sequence[Value]) -> Value:
    """Return a matrix whose rows are these vectors."""
    return Value(np.stack([r.data for r in rows]), [(r, lambda g, i=i: g[i]) for i, r in enumerate(rows)])


def total(values: Iterable[Value]) -> Value:
    """Return the sum of the values."""
    return sum(values, start=as_value(0))


def gradients(result: Value, inputs: Sequence[Value]) -> list[np.ndarray]:
    """Return the gradient of a scalar for each input; zeros for an input that the scalar does not depend on."""
    sums = {result.number: np.ones_like(result.data)}
    found, pending = {result.number: result}, [result]
    while pending:
        for parent, _ in pending.pop().parents:
            if parent.number not in found:
                found[parent.number] = parent
                pending.append(parent)
    # Every value is made after its operands. In descending order of numbers, each gradient is complete when it is used.
    for number in sorted(found, reverse=True):
        for parent, back in found[number].parents:
            g = back(sums[number])
            sums[parent.number] = sums[parent.number] + g if parent.number in sums else g
    return [sums.get(x.number, np.zeros_like(x.data)) for x in inputs]
