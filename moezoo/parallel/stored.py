"""The contract of a container: a weight that is not stored as an array, but stands for one."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.parallel.collectives import unsaved
from moezoo.parallel.roles import Axes


class Stored(eqx.Module):
    """The base class of containers. A field declared `Weight` may hold one in place of an array.

    A subclass declares arrays, or further containers, as fields. Each array is laid out by its own axes, gathered in
    its own dtype (`WeightMover.gather`), and trained only where a filter selects it. Its leading dimensions are
    the stacked axes of the declaration, with `layer` inside a `Stack`.

    Layers pass a container only to `project`, `contract` and `grouped_matmul`, so they do not depend on how weights are
    stored.

    Attributes:
        dtype: The dtype of the array that the container stands for.
    """

    dtype: eqx.AbstractVar[np.dtype]

    @abc.abstractmethod
    def axes(self, declared: Axes) -> Mapping[str, Axes]:
        """Return field name -> the axes of what the field holds, an array or a container.

        Args:
            declared: The axes that the field holding this container declares. Give arrays the role `Role.PART`, or
                `Role.FROZEN` in a `Frozen`.
        """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that the container stands for."""

    @property
    def ndim(self) -> int:
        """The number of dimensions of that array."""
        return len(self.shape)

    @abc.abstractmethod
    def materialise(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the array that the container stands for, in `dtype`.

        Called inside `shard_map` on gathered parts; the result must vary as they do and be differentiable in the parts
        that may be trained. Callers use the function `materialise`, whose result rematerialisation never saves.
        """

    def product(self, x: Float[Array, "..."], inputs: int, dtype: DTypeLike) -> Float[Array, "..."]:
        """Contract the last `inputs` dimensions of `x` with the first `inputs` dimensions of the matrix, in `dtype`.

        The default multiplies by the materialised array. Override it where the product is cheaper without, as for a
        low-rank sum. Only `multiply` calls this, with a container of one matrix.

        Args:
            x: The left operand, in the dtype that the layer computes in.
            inputs: The number of dimensions to contract.
            dtype: The dtype of the result.
        """
        return jnp.tensordot(x, materialise(self, x.dtype), inputs, preferred_element_type=dtype)

    def contraction(self, equation: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the `jnp.einsum` of `x` and the matrix, by default of the materialised array."""
        return jnp.einsum(equation, x, materialise(self, x.dtype))

    def operand(self, dtype: DTypeLike) -> Any:
        """Return stacked matrices as kernels read them one by one, in `dtype`: an array, `Matrices` or `Composed`."""
        return materialise(self, dtype)


# (x, matrix, dimension of x, dimension of the matrix) -> the product over these dimensions, in float32
Dot = Callable[[Array, Any, int, int], Array]


class Composed(Stored):
    """The base class of containers whose products are sums of products with other operands.

    Kernels call these methods for stacked matrices and never make the array. The three methods with a `dot` get a
    container of one group's matrices, which `operand` and `matrix_of` have made of its parts.
    """

    @abc.abstractmethod
    def group_product(
        self, rows: Float[Array, "rows inputs"], multiply: Callable[[Array, Any], Array]
    ) -> Float[Array, "rows outputs"]:
        """Multiply each row by the matrix of its group.

        Args:
            rows: The rows of all groups.
            multiply: A function that multiplies rows by stacked matrices, an array or another container, in the dtype
                of the rows.
        """

    @abc.abstractmethod
    def forward(self, x: Float[Array, "rows inputs"], dot: Dot) -> Float[Array, "rows outputs"]:
        """Return `x` times the matrix, in float32."""

    @abc.abstractmethod
    def backward(self, y: Float[Array, "rows outputs"], dot: Dot) -> Float[Array, "rows inputs"]:
        """Return `y` times the transposed matrix, in float32."""

    @abc.abstractmethod
    def outer(self, x: Float[Array, "rows inputs"], y: Float[Array, "rows outputs"], dot: Dot) -> Any:
        """Return the container with the gradient of each part in float32, given inputs and cotangents; None if frozen.

        The parts that have gradients are those of `trained_parts`.
        """

    @abc.abstractmethod
    def trained_parts(self) -> Any:
        """Return the container with None in place of what is frozen."""


class Matrices(Stored):
    """The base class of containers of stacked matrices that kernels read one by one, made after arrays are laid out."""

    def axes(self, declared: Axes) -> Mapping[str, Axes]:
        """Return nothing: there is no layout left to declare."""
        del declared
        return {}

    @abc.abstractmethod
    def matrix(self, group: Int[Array, ""]) -> Float[Array, "inputs outputs"]:
        """Return the matrix of a group, in `dtype`."""

    def operand(self, dtype: DTypeLike) -> "Matrices":
        """Return it as it is."""
        del dtype
        return self


class Frozen(Stored):
    """The base class of containers whose arrays are never trained: all have the role `Role.FROZEN`.

    Kernels read a stack of them matrix by matrix, so the whole stack is never made.
    """

    def matrix(self, group: Int[Array, ""], dtype: DTypeLike) -> Float[Array, "inputs outputs"]:
        """Return one matrix of a stack [groups, inputs, outputs]."""
        return _at(self, group).materialise(dtype)

    def operand(self, dtype: DTypeLike) -> Matrices:
        """Return matrices that are made when they are read."""
        return Widened(stored=self, dtype=np.dtype(dtype))


class FrozenInStack(Frozen):
    """What layer `layer` of stacked layers has in a `Frozen`. A matrix of it is read where all layers are."""

    stack: Frozen
    layer: Int[Array, ""]
    dtype: np.dtype = eqx.field(static=True)

    def axes(self, declared: Axes) -> Mapping[str, Axes]:
        """Return nothing: there is no layout left to declare."""
        del declared
        return {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one layer."""
        return self.stack.shape[1:]

    def materialise(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the array of the layer."""
        return _at(self.stack, self.layer).materialise(dtype)

    def matrix(self, group: Int[Array, ""], dtype: DTypeLike) -> Float[Array, "inputs outputs"]:
        """Return one matrix of the layer."""
        return _at(self.stack, self.layer, group).materialise(dtype)


class Widened(Matrices):
    """A stack [groups, inputs, outputs] in a `Frozen`, of which each matrix is made when it is read."""

    stored: Frozen
    dtype: np.dtype = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """[groups, inputs, outputs]."""
        return self.stored.shape

    def materialise(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the stack."""
        return self.stored.materialise(dtype)

    def matrix(self, group: Int[Array, ""]) -> Float[Array, "inputs outputs"]:
        """Return the matrix of a group."""
        return self.stored.matrix(group, self.dtype)


def _at(stored: Frozen, *index: Int[Array, ""]) -> Frozen:
    """Return the container of one entry of the first dimensions, in one slice of each array."""

    def one(x: Array) -> Array:
        start = (*index, *(0,) * (x.ndim - len(index)))
        part = lax.dynamic_slice(x, start, (1,) * len(index) + x.shape[len(index) :], allow_negative_indices=False)
        return part.reshape(x.shape[len(index) :])

    return jax.tree.map(one, stored)


def is_matrices(x: Any) -> bool:
    """Return whether `x` is a `Matrices`."""
    return isinstance(x, Matrices)


def by_matrix(weights: Float[Array, "groups inputs outputs"] | Stored, dtype: DTypeLike) -> Any:
    """Return what kernels read matrix by matrix: the array itself, or the `operand` of a container."""
    return weights.operand(dtype) if isinstance(weights, Stored) else weights


def matrix_of(stack: Array | Matrices, group: Int[Array, ""]) -> Float[Array, "..."]:
    """Return the matrix (or the bias) of a group."""
    if isinstance(stack, Matrices):
        return stack.matrix(group)
    return lax.dynamic_index_in_dim(stack, group, keepdims=False, allow_negative_indices=False)


def materialise(weight: Float[Array, "..."] | Stored, dtype: DTypeLike) -> Float[Array, "..."]:
    """Return a weight as an array: `weight` itself, or the array that a container stands for, in `dtype`.

    Rematerialisation never saves the array of a container. An array is returned as it is, whatever `dtype` is.
    """
    return unsaved(lambda stored: stored.materialise(dtype), weight) if isinstance(weight, Stored) else weight


def multiply(
    x: Float[Array, "..."], weight: Float[Array, "..."] | Stored, inputs: int, dtype: DTypeLike | None
) -> Float[Array, "..."]:
    """Contract the last `inputs` dimensions of `x` with the first `inputs` dimensions of a weight, in `dtype`.

    None is the dtype of `x`.
    """
    if isinstance(weight, Stored):
        return weight.product(x, inputs, x.dtype if dtype is None else dtype)
    return jnp.tensordot(x, weight, inputs, preferred_element_type=dtype)


def contract(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."] | Stored) -> Float[Array, "..."]:
    """Return the `jnp.einsum` of `x` and a weight."""
    return weight.contraction(equation, x) if isinstance(weight, Stored) else jnp.einsum(equation, x, weight)
