"""Stacks of matrices in the order in which an all-gather writes them.

An all-gather writes the blocks of the devices one after the other. Along any dimension except the first, XLA gathers
into another order and then copies the whole array into the order that the program asks for; the gradient is copied back
before it is reduce-scattered. Experts are read matrix by matrix, and a program copies each matrix out of the stack
anyway, so they can be read in any order.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.parallel.stored import Matrices, matrix_of


class Gathered(Matrices):
    """A stack [groups, inputs, outputs] whose dimension `dim`, 1 or 2, comes first in memory.

    `values` is [inputs, groups, outputs] for 1, and [outputs, groups, inputs] for 2.
    """

    values: Float[Array, "first groups last"]
    dim: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """[groups, inputs, outputs]."""
        first, groups, last = self.values.shape
        return (groups, first, last) if self.dim == 1 else (groups, last, first)

    def materialise(self, dtype: DTypeLike) -> Float[Array, "groups inputs outputs"]:
        """Return the stack."""
        return jnp.moveaxis(self.values, 0, self.dim).astype(dtype)

    def matrix(self, group: Int[Array, ""]) -> Float[Array, "inputs outputs"]:
        """Return the matrix of a group. XLA makes its transposition a part of the product that reads it."""
        return self._turned(self._stored(group))

    def put(self, group: Int[Array, ""], part: Float[Array, "inputs outputs"], add: bool) -> "Gathered":
        """Return the stack with `part` written over the matrix of a group, or added to it."""
        part = self._turned(part)
        if add:
            part = self._stored(group) + part
        values = lax.dynamic_update_index_in_dim(self.values, part, group, 1, allow_negative_indices=False)
        return Gathered(values=values, dim=self.dim, dtype=self.dtype)

    def _stored(self, group: Int[Array, ""]) -> Array:
        return lax.dynamic_index_in_dim(self.values, group, 1, keepdims=False, allow_negative_indices=False)

    def _turned(self, matrix: Array) -> Array:
        return matrix if self.dim == 1 else matrix.T


def put_matrix(stack: Array | Gathered, group: Int[Array, ""], part: Array, add: bool) -> Array | Gathered:
    """Return the stack with `part` written over the matrix (or the bias) of a group, or added to it."""
    if isinstance(stack, Gathered):
        return stack.put(group, part, add)
    part = matrix_of(stack, group) + part if add else part
    return lax.dynamic_update_index_in_dim(stack, part, group, 0, allow_negative_indices=False)
