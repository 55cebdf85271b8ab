"""What a backend of `grouped_matmul` is: two products, from which the value and both gradients are made."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.parallel.kernels import RunsOn, anywhere

Activation = Callable[[Float[Array, "rows outputs"], Float[Array, "rows outputs"]], Float[Array, "rows outputs"]]


class Multiply(Protocol):
    """Each row times its group's matrix, summed over dimension `contract` of the weights; other rows are zero."""

    def __call__(
        self,
        rows: Float[Array, "rows a"],
        weights: Float[Array, "groups inputs outputs"],
        group_sizes: Int[Array, " groups"],
        contract: Literal[1, 2],
    ) -> Float[Array, "rows b"]: ...


class Outer(Protocol):
    """For each group rows.T @ others over its rows, summed in float32 and rounded once to `dtype`."""

    def __call__(
        self,
        rows: Float[Array, "rows inputs"],
        others: Float[Array, "rows outputs"],
        group_sizes: Int[Array, " groups"],
        dtype: DTypeLike,
    ) -> Float[Array, "groups inputs outputs"]: ...


class Gated(Protocol):
    """`moezoo.kernels.grouped_matmul.gated` in one kernel, with gradients of its own."""

    def __call__(
        self,
        rows: Float[Array, "rows inputs"],
        gate: Float[Array, "groups inputs outputs"],
        up: Float[Array, "groups inputs outputs"],
        group_sizes: Int[Array, " groups"],
        gate_bias: Float[Array, "groups outputs"] | None,
        up_bias: Float[Array, "groups outputs"] | None,
        *,
        activation: Activation,
    ) -> Float[Array, "rows outputs"]: ...


class Backend(NamedTuple):
    """Groups of rows lie one after the other, and all operands vary alike over mesh axes.

    `gated` is optional: without one it is composed of products. `runs_on`: where the backend can be traced and run.
    """

    multiply: Multiply
    outer: Outer
    gated: Gated | None = None
    runs_on: RunsOn = anywhere
