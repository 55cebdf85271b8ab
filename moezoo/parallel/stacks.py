"""Stacks of matrices that products read where they lie: gathered matrices, and one layer in the stack of all layers.

`Gathered` has its matrices in the order in which an all-gather writes them: the blocks of the devices one after the
other. Along any dimension except the first, XLA gathers into another order and then copies the whole array into the
order that the program asks for; the gradient is copied back before it is reduce-scattered. Experts are read matrix by
matrix, and a program copies each matrix out of the stack anyway, so they can be read in any order.

`InStack` and `ReadInStack` are the weights of one layer in the stack of all layers. A forward pass without gradients,
such as one more token of generation, reads each weight once. XLA copies a slice of a stack before a matrix product, so
a loop over layers would copy every layer first, experts that no token uses included. In training experts are read so,
matrix by matrix, and their gradients are those of the layer's slice.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from moezoo.parallel.collectives import vary_like
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


# With more rows, copying the matrix and multiplying it once takes less time on a CPU than reading it for each row.
FEW_ROWS = 4
# The products that are summed in one pass over a matrix.
TERMS = 16


class InStack(Matrices):
    """The weights of layer `layer` in an array [layers, ...], in `dtype`. Forward passes only."""

    stack: Float[Array, "layers ..."]
    layer: Int[Array, ""]
    dtype: np.dtype = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one layer."""
        return self.stack.shape[1:]

    def materialise(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return a copy of the layer."""
        return lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False).astype(self.dtype).astype(dtype)

    def matrix(self, group: Int[Array, ""]) -> Float[Array, "inputs outputs"]:
        """Return a copy of one of the layer's matrices."""
        sizes = (1, 1, *self.shape[1:])
        return lax.dynamic_slice(self.stack, (self.layer, group, 0, 0), sizes)[0, 0].astype(self.dtype)

    def product(self, x: Float[Array, "..."], inputs: int, dtype: DTypeLike) -> Float[Array, "..."]:
        """See `Stored.product`. Each of a few rows reads the stack itself where programs run on a CPU."""
        outputs, size = self.shape[inputs:], int(np.prod(self.shape[:inputs]))
        rows = x.reshape(-1, size)
        matrices = self.stack.reshape(self.stack.shape[0], size, -1)

        def many(rows: Array, matrices: Array, layer: Array) -> Array:
            matrix = lax.dynamic_index_in_dim(matrices, layer, keepdims=False).astype(self.dtype)
            return jnp.matmul(rows, matrix, preferred_element_type=dtype)

        def few(rows: Array, matrices: Array, layer: Array) -> Array:
            return jnp.stack([times_matrix(row, matrices, (layer,), self.dtype) for row in rows]).astype(dtype)

        operands = (rows, matrices, self.layer)
        is_few = rows.shape[0] <= FEW_ROWS and size % TERMS == 0
        y = on_cpu(few, many, *operands) if is_few else many(*operands)
        return y.reshape(*x.shape[: x.ndim - inputs], *outputs)


class ReadInStack(Matrices):
    """The matrices of layer `layer` in an array [layers, groups, inputs, outputs], with the gradient of `part`.

    `part` is the layer's slice of `stack`. A loop over groups reads each matrix out of `stack`, so XLA never makes the
    slice; `stack` is a constant of the scan over layers, and the gradients of `part` are stacked by that scan.
    """

    part: Float[Array, "groups inputs outputs"]
    stack: Float[Array, "layers groups inputs outputs"]
    layer: Int[Array, ""]
    dtype: np.dtype = eqx.field(static=True)  # that of `part`; the stack may have another

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one layer."""
        return self.part.shape

    def materialise(self, dtype: DTypeLike) -> Float[Array, "groups inputs outputs"]:
        """Return the layer."""
        return self.part.astype(dtype)

    def matrix(self, group: Int[Array, ""]) -> Float[Array, "inputs outputs"]:
        """Return one matrix."""
        sizes = (1, 1, *self.shape[1:])
        found = lax.dynamic_slice(self.stack, (self.layer, group, 0, 0), sizes, allow_negative_indices=False)
        return found[0, 0].astype(self.dtype)

    def with_gradient(self, gradient: Float[Array, "groups inputs outputs"]) -> "ReadInStack":
        """Return the cotangent of this container."""
        return eqx.tree_at(lambda x: (x.part, x.stack, x.layer), self, (gradient, None, None))


def on_cpu(function: Any, otherwise: Any, *operands: PyTree) -> Any:
    """Call `function` in programs for a CPU and `otherwise` in others; both return the same."""
    arrays = jax.tree.leaves(operands)
    return lax.platform_dependent(
        *jax.tree.map(lambda x: vary_like(x, *arrays), operands), cpu=function, default=otherwise
    )


def turned(x: Float[Array, "... a b"]) -> Float[Array, "... a b"]:
    """Return `x`, which programs for a CPU keep with its last two dimensions exchanged in memory.

    XLA:CPU multiplies a transposed matrix, on the left, faster if it finds it so, what transposing it takes included.
    """
    return on_cpu(lambda x: lax.optimization_barrier(x.mT).mT, lambda x: x, x)


def times_matrix(
    row: Float[Array, " inputs"],
    stack: Float[Array, "... inputs outputs"],
    at: tuple[Int[Array, ""], ...],
    dtype: DTypeLike,
) -> Float[Array, " outputs"]:
    """Return the product of a vector and the matrix `at` these indices of a stack, in float32, without a copy.

    The number of inputs is divisible by 16. The rows of the matrix are cut into 16 parts of equal size. Each part is
    multiplied by its inputs and added to the others, number by number. XLA:CPU fuses such elementwise work with the
    slices that it reads, uses all cores for it, and so reads the matrix once, at the speed of memory. What remains is a
    sum over the rows of one part. It is a product with ones, because XLA would fuse a sum with the slices and run all
    of it slowly.
    """
    inputs, outputs = stack.shape[-2:]
    part = inputs // TERMS
    wide, total = row.astype(jnp.float32), jnp.zeros((), jnp.float32)
    for first in range(0, inputs, part):
        sizes = (1,) * len(at) + (part, outputs)
        matrix = lax.dynamic_slice(stack, (*at, first, 0), sizes).reshape(part, outputs)
        term = wide[first : first + part, None] * matrix.astype(dtype).astype(jnp.float32)
        total = term if first == 0 else total + term
    return jnp.ones((part,), jnp.float32) @ total
