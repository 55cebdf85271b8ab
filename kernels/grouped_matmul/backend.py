"""What a backend of `grouped_matmul` is: two products, from which the value and both gradients are made."""

from typing import Literal, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


class Backend(Protocol):
    """A module with these two functions; groups of rows lie one after the other, and all operands vary alike."""

    def multiply(
        self,
        rows: Float[Array, "rows a"],
        weights: Float[Array, "groups inputs outputs"],
        group_sizes: Int[Array, " groups"],
        contract: Literal[1, 2],
    ) -> Float[Array, "rows b"]:
        """Each row times its group's matrix, summed over dimension `contract` of the weights; other rows are zero."""
        ...

    def outer(
        self,
        rows: Float[Array, "rows inputs"],
        others: Float[Array, "rows outputs"],
        group_sizes: Int[Array, " groups"],
        dtype: DTypeLike,
    ) -> Float[Array, "groups inputs outputs"]:
        """For each group rows.T @ others over its rows, summed in float32 and rounded once to `dtype`."""
        ...
