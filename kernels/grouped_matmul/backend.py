"""The contract of a backend of `grouped_matmul`: two products, from which the value and both gradients are made."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.parallel.dispatch import Plan
from moezoo.parallel.kernels import Keep, RunsOn, Target, anywhere, lacks

Activation = Callable[[Float[Array, "rows outputs"], Float[Array, "rows outputs"]], Float[Array, "rows outputs"]]


GroupMatrices = Float[Array, "groups inputs outputs"]
GroupSizes = Int[Array, " groups"]


class Multiply(Protocol):
    """Multiply each row by its group's matrix: sum over dimension `contract` of the weights. Other rows become zero.

    The sum is in float32; the result has the dtype of `rows`.
    """

    def __call__(
        self, rows: Float[Array, "rows a"], weights: GroupMatrices, group_sizes: GroupSizes, contract: Literal[1, 2]
    ) -> Float[Array, "rows b"]: ...


class Outer(Protocol):
    """Return rows.T @ others for the rows of each group, summed in float32 and rounded once to `dtype`."""

    def __call__(
        self,
        rows: Float[Array, "rows inputs"],
        others: Float[Array, "rows outputs"],
        group_sizes: GroupSizes,
        dtype: DTypeLike,
    ) -> GroupMatrices: ...


class Gated(Protocol):
    """Compute `moezoo.kernels.grouped_matmul.gated` in one kernel that is differentiable."""

    def __call__(
        self,
        rows: Float[Array, "rows inputs"],
        gate: GroupMatrices,
        up: GroupMatrices,
        group_sizes: GroupSizes,
        gate_bias: Float[Array, "groups outputs"] | None,
        up_bias: Float[Array, "groups outputs"] | None,
        *,
        activation: Activation,
        keep: Keep,
    ) -> Float[Array, "rows outputs"]: ...


class ExpertWeights(NamedTuple):
    """The matrices of gated MLPs, one per group, and their biases or None."""

    gate: GroupMatrices
    up: GroupMatrices
    down: Float[Array, "groups outputs inputs"]
    gate_bias: Float[Array, "groups outputs"] | None = None
    up_bias: Float[Array, "groups outputs"] | None = None


class RoutedMLP(Protocol):
    """Compute `moezoo.kernels.grouped_matmul.routed_mlp` in one kernel that is differentiable."""

    def __call__(
        self,
        tokens: Float[Array, "tokens embed"],
        gates: Float[Array, "tokens k"],
        plan: Plan,
        weights: ExpertWeights,
        *,
        activation: Activation,
        keep: Keep,
    ) -> Float[Array, "tokens embed"]: ...


class Backend(NamedTuple):
    """A backend.

    `group_sizes` is int32. All operands of a call vary over the same mesh axes, and the result must too. Rows beyond
    the last group may hold NaN.

    Attributes:
        multiply: The product for each row.
        outer: The product for each group.
        gated: A kernel for `gated`; None to compose it of products.
        runs_on: Whether the backend can be traced and run for a target.
        routed_mlp: A kernel for `routed_mlp`; None to compose it of permutations, `gated` and a product.
        dtypes: The names of the dtypes of operands that the backend takes; None for all.
        in_stack: Whether `multiply` takes `Matrices` too, and copies or makes only those that it uses.
        for_gpu: A function of the backend and a known GPU: the same backend with sizes of blocks for it. None if it has
            none to choose.
    """

    multiply: Multiply
    outer: Outer
    gated: Gated | None = None
    runs_on: RunsOn = anywhere
    routed_mlp: RoutedMLP | None = None
    dtypes: tuple[str, ...] | None = None
    in_stack: bool = False
    for_gpu: "Callable[[Backend, Target], Backend] | None" = None

    def takes(self, target: Target, dtype: DTypeLike) -> bool:
        """Return whether the backend runs on the target with operands of this dtype."""
        return lacks(self, target, dtype) is None
