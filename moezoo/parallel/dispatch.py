"""The contract of a dispatch strategy; the strategies are in `moezoo.moe.dispatch`.

Letters: T tokens on this device, K experts a token, E experts, P devices along the expert axes, d model width.
The experts run between two calls:

    there = strategy.dispatch(tokens, assignment, group)   # rows grouped by expert
    back = strategy.combine(experts(there.rows, there.group_sizes), there.state, group)

`moves` says which experts those are: where tokens move a device's own, E/P; where weights move all E, which
`Execution.whole` has gathered with the layer's other weights.

Exact means: `back` is the sum of what every token's K experts return, each times its gate, whatever P is.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.errors import UserError
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.traffic import Move, Moves


class Assignment(NamedTuple):
    """Which experts each token goes to, and how much each counts.

    `expert_ids` [T, K] int32, E where a token goes nowhere; `gates` [T, K] float32.
    """

    expert_ids: Int[Array, "tokens k"]
    gates: Float[Array, "tokens k"]


class Dispatched(NamedTuple):
    """Rows where their experts are.

    `rows` [R, d], those of one expert together and experts in order; `group_sizes` [local experts] int32; `dropped`
    int32, this device's assignments that found no room; `state`, what the strategy's `combine` needs.
    """

    rows: Float[Array, "rows embed"]
    group_sizes: Int[Array, " local_experts"]
    dropped: Int[Array, ""]
    state: Any


class Sizes(NamedTuple):
    """What passes through a strategy: T `tokens` of this device, of width `embed` and `dtype`, K experts each."""

    tokens: int
    k: int
    embed: int
    dtype: DTypeLike


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """The P = `size` devices along mesh `axes` that share E = `num_experts` experts, E/P each, in index order."""

    axes: MeshAxes
    size: int
    num_experts: int

    @property
    def num_local(self) -> int:
        """Experts per device."""
        return self.num_experts // self.size

    def room(self, tokens: int, k: int, factor: float | None) -> int:
        """Rows that one device's experts can need of all the group's tokens, each of which goes to one at most once.

        With a `factor` no more than that many times a device's own assignments.
        """
        most = self.size * tokens * min(k, self.num_local)
        return most if factor is None else min(most, math.ceil(factor * tokens * k))

    def move(self, collective: str, numbers: int, dtype: DTypeLike) -> Move:
        """A collective over the group."""
        return Move(collective, self.axes, self.size, numbers, dtype)

    def index(self) -> Int[Array, ""] | int:
        """This device's number in the group."""
        return lax.axis_index(self.axes) if self.axes else 0


@dataclasses.dataclass(frozen=True)
class Dispatch(abc.ABC):
    """A strategy: a frozen dataclass whose fields are its options. Tokens differ on each device of the group.

    `chunks`: parts of a device's tokens that go through the two calls one after the other, so that one part travels
    while experts work on another. What bounds room does so in each part.

    Raises `UserError` for a bound that is none, or for less than one chunk.
    """

    chunks: int = dataclasses.field(default=1, kw_only=True)

    moves: ClassVar[Literal["tokens", "weights"]]
    bound: ClassVar[str | None] = None  # the option that makes room for less than all assignments, where there is one

    def __post_init__(self):
        if self.chunks < 1:
            raise UserError(f"dispatch.chunks={self.chunks} must be at least 1")
        factor = getattr(self, self.bound) if self.bound else None
        if factor is not None and not 0 < factor < math.inf:
            raise UserError(f"dispatch.{self.bound}={factor} must be greater than 0, or null for no bound")

    @property
    def exact(self) -> "Dispatch":
        """The same with room for all assignments: for evaluation and generation."""
        return dataclasses.replace(self, **{self.bound: None}) if self.bound else self

    def can_drop(self, tokens: int, k: int, group: ExpertGroup) -> bool:
        """Whether the bound leaves less room than can be needed."""
        return self.rows(tokens, k, group) < self.exact.rows(tokens, k, group)

    @abc.abstractmethod
    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """R: room for rows on each device, used or not, when each has so many tokens of K experts."""

    @abc.abstractmethod
    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """The collectives of the two calls on one chunk, for a group of more than one device."""

    @abc.abstractmethod
    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Bring tokens to the experts that this device runs."""

    @abc.abstractmethod
    def combine(self, rows: Float[Array, "rows embed"], state: Any, group: ExpertGroup) -> Float[Array, "tokens embed"]:
        """Bring the experts' results back: each token's sum over its experts times their gates, in fixed order."""
