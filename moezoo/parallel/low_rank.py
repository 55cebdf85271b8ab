"""A frozen weight with a trained low-rank pair beside it (LoRA; Hu et al., 2021, arXiv:2106.09685)."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.errors import UserError
from moezoo.parallel.axes import Axes, Role, axes_of, is_stored
from moezoo.parallel.dropout import Dropout
from moezoo.parallel.stored import Composed, Dot, Stored, by_matrix, contract, materialise, multiply

# The logical axis between the two matrices of a pair.
RANK = "rank"


class LowRank(Composed):
    """A weight `base + scale * (a b)`, of which `a` and `b` are trained, and `base` never is.

    Products with it are two thin products beside that of the base, so their sum is made only where an array of the
    weight is asked for. `base` is an array or another container. For stacked matrices each has its own pair.

    Attributes:
        base: [*stacked, *inputs, *outputs], an array or another container.
        a: [*stacked, *inputs, rank].
        b: [*stacked, rank, *outputs].
        scale: The factor of the product of both.
        inputs: The number of input dimensions.
        dtype: The dtype of the base.
        dropout: What is dropped of what `a` reads; None for nothing, as outside of training. It is no parameter, and
            only gathered weights have it.
    """

    # Arrays or containers of them. In kernels they are operands, and in trees like a model also shapes or None.
    base: Any
    a: Any
    b: Any
    scale: float = eqx.field(static=True)
    inputs: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    dropout: Dropout | None = None

    def axes(self, declared: Axes) -> Mapping[str, Axes]:
        """Return the declared axes for the base, and for the pair the same with the rank for outputs, or inputs."""
        base = declared if isinstance(self.base, Stored) else dataclasses.replace(declared, role=Role.BASE)
        return {
            "base": base,
            "a": Axes(Role.WEIGHT, declared.stacked, declared.inputs, (RANK,)),
            "b": Axes(Role.WEIGHT, declared.stacked, (RANK,), declared.outputs),
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base."""
        return tuple(self.base.shape)

    @property
    def rank(self) -> int:
        """The number of columns of `a`."""
        return self.a.shape[-1]

    def materialise(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the sum, computed in float32 and rounded once to `dtype`."""
        base, a, b = (materialise(part, jnp.float32).astype(jnp.float32) for part in (self.base, self.a, self.b))
        first = a.ndim - 1 - self.inputs
        a, b = a.reshape(*a.shape[:first], -1, self.rank), b.reshape(*b.shape[: first + 1], -1)
        # In full precision on every platform, as a folder is written with this sum.
        pair = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return (base + self.scale * pair.reshape(base.shape)).astype(dtype)

    def product(self, x: Float[Array, "..."], inputs: int, dtype: DTypeLike) -> Float[Array, "..."]:
        """See `Stored.product`."""
        dropped = x if self.dropout is None else self.dropout(x)
        thin = self._scaled(multiply(dropped, self.a, inputs, jnp.float32), x.dtype)
        return multiply(x, self.base, inputs, dtype) + multiply(thin, self.b, 1, dtype)

    def contraction(self, equation: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """See `Stored.contraction`. The pair is contracted one matrix after the other."""
        if self.dropout is not None:
            raise UserError("adapter.dropout drops inputs of `project` only, and a layer calls `contract`; set it to 0")
        operands, result = equation.split("->")
        of_x, of_weight = operands.split(",")
        rank = next(letter for letter in "rzyw" if letter not in equation)
        # As always, the weight is one matrix: all dimensions of `a` but the last are inputs.
        of_a, of_b = of_weight[: self.inputs] + rank, rank + of_weight[self.inputs :]
        parts = [materialise(part, x.dtype) for part in (self.a, self.b)]
        thin = jnp.einsum(f"{of_x},{of_a},{of_b}->{result}", x, *parts)
        return contract(equation, x, self.base) + self._scaled(thin, x.dtype)

    def group_product(
        self, rows: Float[Array, "rows inputs"], multiply: Callable[[Array, Any], Array]
    ) -> Float[Array, "rows outputs"]:
        """See `Composed.group_product`."""
        thin = self._scaled(multiply(rows, self.a), rows.dtype)
        return multiply(rows, self.base) + multiply(thin, self.b)

    def operand(self, dtype: DTypeLike) -> "LowRank":
        """See `Stored.operand`: the same of the base and of both matrices."""
        base, a, b = (by_matrix(part, dtype) for part in (self.base, self.a, self.b))
        return dataclasses.replace(self, base=base, a=a, b=b)

    def forward(self, x: Float[Array, "rows inputs"], dot: Dot) -> Float[Array, "rows outputs"]:
        """See `Composed.forward`."""
        return dot(x, self.base, 1, 0) + dot(self._scaled(dot(x, self.a, 1, 0), x.dtype), self.b, 1, 0)

    def backward(self, y: Float[Array, "rows outputs"], dot: Dot) -> Float[Array, "rows inputs"]:
        """See `Composed.backward`."""
        return dot(y, self.base, 1, 1) + dot(self._scaled(dot(y, self.b, 1, 1), y.dtype), self.a, 1, 1)

    def outer(self, x: Float[Array, "rows inputs"], y: Float[Array, "rows outputs"], dot: Dot) -> "LowRank":
        """See `Composed.outer`."""
        a = dot(x, self._scaled(dot(y, self.b, 1, 1), y.dtype), 0, 0)
        b = dot(self._scaled(dot(x, self.a, 1, 0), x.dtype), y, 0, 0)
        return dataclasses.replace(self, base=None, a=a, b=b)

    def trained_parts(self) -> "LowRank":
        """See `Composed.trained_parts`."""
        return dataclasses.replace(self, base=None)

    def _scaled(self, x: Array, dtype: DTypeLike) -> Array:
        scale = self.scale if self.dropout is None else self.scale / self.dropout.kept
        return (x.astype(jnp.float32) * scale).astype(dtype)


def drops(axes: Axes) -> bool:
    """Return whether dropout is for the pair of a weight with these axes: it is not for those of experts.

    Their rows are copies of tokens on other devices, which would have to bring the numbers of their tokens along.
    """
    return {*axes.stacked} <= {"layer"}


def with_dropout(gathered: Any, module: Any, dropout: Dropout | None, first: Callable[[str, int], Array | int]) -> Any:
    """Return the weights of a layer with `dropout` of what each pair reads that drops.

    Args:
        gathered: The weights, gathered.
        module: The same before they were gathered.
        dropout: The dropout of the layer; None for none.
        first: A function of a logical axis and a number of inputs on this device that returns the number of the first.
    """
    if dropout is None:
        return gathered
    inputs = {path: pair.a.inputs for path, pair in pairs_by_path(axes_of(module)) if drops(pair.a)}

    def put(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if name not in inputs:
            return x
        own = dropout.of(zlib.crc32(name.encode()))
        size = math.prod(x.a.shape[-1 - x.inputs : -1])
        return dataclasses.replace(x, dropout=Dropout(own.rate, own.key, own.token, first(inputs[name][0], size)))

    return jax.tree_util.tree_map_with_path(put, gathered, is_leaf=is_stored)


def is_low_rank(x: Any) -> bool:
    """Return whether `x` is a `LowRank`."""
    return isinstance(x, LowRank)


def pairs_by_path(tree: Any) -> list[tuple[str, LowRank]]:
    """List the path and the value of every `LowRank` of a model."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_low_rank)
    return [(jax.tree_util.keystr(path), x) for path, x in leaves if is_low_rank(x)]


def without_pairs(tree: Any) -> Any:
    """Return a model, or a tree like one, with the base in place of each `LowRank`."""
    return jax.tree.map(lambda x: x.base if is_low_rank(x) else x, tree, is_leaf=is_low_rank)


def only_pairs(tree: Any) -> Any:
    """Return a model, or a tree like one, with None in place of everything but pairs."""
    is_part = lambda x: dataclasses.replace(x, base=None) if is_low_rank(x) else None  # noqa: E731
    return jax.tree.map(is_part, tree, is_leaf=is_low_rank)


def with_bases(tree: Any, bases: Any) -> Any:
    """Return a tree like a model with its bases, and everything without pairs, from `bases`; the pairs stay."""

    def put(x: Any, base: Any) -> Any:
        return dataclasses.replace(x, base=base) if is_low_rank(x) else base

    return jax.tree.map(put, tree, bases, is_leaf=lambda x: x is None or is_low_rank(x))
