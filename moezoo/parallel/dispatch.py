"""The contract of a dispatch strategy: how tokens meet experts on other devices.

Letters: T tokens per device, K experts per token, E experts, P devices along the expert axes, d model width, R rows.

A layer runs its experts between two calls:

    there = strategy.dispatch(tokens, assignment, group)   # rows grouped by expert
    back = strategy.combine(experts(there.tokens, there.gates, there.plan), there.state, group)

`Dispatch.moves` decides which experts run on a device. Where tokens move, they are the device's own E/P experts. Where
weights move, they are all E experts, which `WeightMover.gather` has gathered with the layer's other weights.

A strategy is exact if `back` is, for each token, the sum of the results of its K experts times their gates, for every
P. The strategies are in `moezoo.moe.dispatch`.

An execution holds a strategy, or a `DispatchChoice` that chooses one from the sizes of a call
(`moezoo.models.choice`) before weights are gathered.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from jax import lax
from jaxtyping import Array, Float, Int

from moezoo.errors import UserError
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.kernels import Target
from moezoo.typed import Size, check_fields

_Choice = TypeVar("_Choice", bound="DispatchChoice")


class Assignment(NamedTuple):
    """Which experts each token goes to, and how much each expert counts.

    Attributes:
        expert_ids: int32, from 0 to E - 1, all different for one token; E for a choice that goes to no expert.
        gates: float32, the factor of each expert's result.
    """

    expert_ids: Int[Array, "tokens k"]
    gates: Float[Array, "tokens k"]


class Plan(NamedTuple):
    """Which token each row of the experts holds, and which row each assignment went to; all int32.

    Rows of one expert are contiguous, and experts are in order. An *assignment* is a pair (token, choice), numbered
    token * K + choice.

    Attributes:
        assignment: The assignment that each row holds; N * K for an unused row.
        row: The row that holds each assignment; R if none does.
        group_sizes: The rows of each expert that runs here, in order: E/P of them where tokens move, E where weights
            move. Rows after their sum are unused.
        dropped: The number of assignments to local experts that found no row.
    """

    assignment: Int[Array, " rows"]
    row: Int[Array, "tokens k"]
    group_sizes: Int[Array, " local_experts"]
    dropped: Int[Array, ""]


class Dispatched(NamedTuple):
    """What this device's experts run on: N tokens, their own or others', of which each row holds one.

    Rows are not gathered here: experts read the tokens of a block of rows when they run on it.

    Attributes:
        tokens: [N, d].
        gates: float32, the factor of the result of each assignment.
        plan: The rows, and where their results go.
        dropped: int32, a number of assignments that found no room. Summed over the devices that split tokens, it counts
            each dropped assignment once.
        state: What `combine` of the same strategy needs: any pytree.
    """

    tokens: Float[Array, "tokens embed"]
    gates: Float[Array, "tokens k"]
    plan: Plan
    dropped: Int[Array, ""]
    state: Any


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """The devices that share one set of experts. Each runs E/P of them, in the order of devices.

    Attributes:
        axes: The mesh axes that experts are split over; empty for one device.
        size: P, the number of devices along `axes`.
        num_experts: E.
        replicated: Whether all devices of the group have the same tokens.
        target: What programs for them are compiled for; None if unknown.
    """

    axes: MeshAxes
    size: int
    num_experts: int
    replicated: bool = False
    target: Target | None = None

    @property
    def num_local(self) -> int:
        """E/P, the experts per device."""
        return self.num_experts // self.size

    def room(self, tokens: int, k: int, factor: float | None) -> int:
        """Return the largest number of rows that one device's experts can need for the tokens of the whole group.

        A token goes to an expert at most once, so the bound is P T min(K, E/P).

        Args:
            tokens: T, the tokens per device.
            k: K, the experts per token.
            factor: If given, the result is at most `factor` times T K, a device's own assignments.
        """
        most = self.size * tokens * min(k, self.num_local)
        return most if factor is None else min(most, math.ceil(factor * tokens * k))

    def index(self) -> Int[Array, ""] | int:
        """Return this device's number in the group."""
        return lax.axis_index(self.axes) if self.axes else 0


@dataclasses.dataclass(frozen=True)
class DispatchChoice(abc.ABC):
    """The base class of what an execution may hold: a strategy, or a choice between strategies.

    Attributes:
        chunks: The number of parts that a device's tokens are cut into. The parts pass through the two calls one after
            the other, so one part can travel while experts work on another. Bounds on room apply to each part.
        bound: The name of the option that limits room to less than all assignments can need; None if there is none. The
            option's value None means no limit.

    Raises:
        UserError: An option has a wrong type, `chunks` is less than 1, or the bounding option is not above 0.
    """

    chunks: Size = dataclasses.field(default=1, kw_only=True)

    bound: ClassVar[str | None] = None

    def __post_init__(self):
        check_fields("dispatch", self)
        factor = getattr(self, self.bound) if self.bound else None
        if factor is not None and factor <= 0:
            raise UserError(f"dispatch.{self.bound}={factor} must be above 0, or null for no bound")

    def chunk_sizes(self, tokens: int) -> list[int]:
        """Return the sizes of at most `chunks` parts of `tokens`: as even as possible, none empty."""
        count = max(1, min(self.chunks, tokens))
        return [tokens * (i + 1) // count - tokens * i // count for i in range(count)]

    @property
    def exact(self: _Choice) -> _Choice:
        """The same with room for all assignments. Evaluation and generation use it."""
        return dataclasses.replace(self, **{self.bound: None}) if self.bound else self

    def refusal(self, group: ExpertGroup) -> str | None:
        """Return why this process must not run it on the devices of `group`, and what to do; None if it may."""
        del group
        return None

    @abc.abstractmethod
    def candidates(self, group: ExpertGroup) -> "tuple[Dispatch, ...]":
        """Return the strategies that `resolve` compares. Of equal ones it takes the first."""

    def resolve(self, received: "Callable[[Dispatch], int]", group: ExpertGroup) -> "Dispatch":
        """Return the strategy for the layers of a call: the candidate with the fewest bytes.

        Args:
            received: A function of a candidate that returns the bytes that a device receives per layer with it. Each
                call may trace a layer.
            group: The devices that share experts.
        """
        first, *others = self.candidates(group)
        return min((first, *others), key=received) if others else first


@dataclasses.dataclass(frozen=True)
class Dispatch(DispatchChoice):
    """The base class of strategies. A strategy is a frozen dataclass whose fields are its options.

    `dispatch` and `combine` run inside `jax.shard_map(check_vma=True)`, or without a mesh, and must be differentiable.
    Tokens differ on each device of the group, so tokens and assignment vary over `group.axes`, and so must the result
    of `combine`. On a group of one device no collective may run. Tokens that are the same on all devices are handled by
    one wrapper, `moezoo.moe.dispatch.replicated`.

    Attributes:
        moves: "tokens" or "weights": what travels to meet the other.
    """

    moves: ClassVar[Literal["tokens", "weights"]]

    def candidates(self, group: ExpertGroup) -> "tuple[Dispatch, ...]":
        """Return the strategy itself: there is nothing to compare."""
        del group
        return (self,)

    @property
    def uses_results(self) -> bool:
        """Whether the gradient of `combine` needs the experts' results, so that rematerialisation computes them again.

        It does where gates do not travel with the tokens.
        """
        return False

    @abc.abstractmethod
    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Return R, the rows that each device has room for, used or not.

        Args:
            tokens: T, the tokens per device.
            k: K, the experts per token.
            group: The devices that share experts.
        """

    @abc.abstractmethod
    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Bring tokens to the experts that this device runs.

        Args:
            tokens: [T, d], this device's tokens.
            assignment: Their experts and gates.
            group: The devices that share experts.
        """

    def combine(
        self, sums: Float[Array, "there embed"], state: Any, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Bring the experts' results back and sum them per token. By default, return `sums`, for weights that move.

        Args:
            sums: [N, d]: for each of `Dispatched.tokens`, the sum of its rows' results times their gates.
            state: `Dispatched.state` of the matching call of `dispatch`.
            group: The devices that share experts.

        Returns:
            [T, d]: each token's sum over its experts of result times gate, in a fixed order of summation.
        """
        del state, group
        return sums
