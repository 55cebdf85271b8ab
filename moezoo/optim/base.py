"""The contracts of the configuration groups `optimizer` and `schedule`, and the state that an update rule keeps.

Each entry of these groups is a frozen dataclass.
"""

import abc
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from moezoo.errors import UserError
from moezoo.parallel.axes import Role, pattern_of
from moezoo.parallel.collectives import MeshAxes
from moezoo.typed import Count, Positive, check_fields

if TYPE_CHECKING:
    import optax

# (new arrays, old arrays) -> those that stay: the new ones, or the old ones if the step is skipped.
Choose = Callable[[PyTree, PyTree], PyTree]


def newest(new: PyTree, old: PyTree) -> PyTree:
    """Choose the new arrays."""
    del old
    return new


class Transformation(NamedTuple):
    """A transformation like those of optax that computes its updates from the state that stays.

    Of moments that stay, each update is a function of these and not of the old ones. Then nothing reads the old moments
    after the new ones are written, and XLA writes them in place. Otherwise XLA computes updates from the old moments
    once more, in a pass of its own, and copies every moment first.

    Attributes:
        init: A function of the parameters that returns the first state.
        update: A function of gradients, state, parameters and `choose`, by default `newest`. It returns the updates at
            rate 1 and the state that stays, which is `choose(new state, state)`.
    """

    init: Callable[[PyTree], Any]
    update: Callable[..., tuple[PyTree, Any]]


def choosing(transformation: "optax.GradientTransformation") -> Transformation:
    """Return optax's transformation as one that takes `choose`; XLA may copy its state (`Transformation`)."""

    def update(gradients: PyTree, state: Any, parameters: PyTree, choose: Choose = newest) -> tuple[PyTree, Any]:
        updates, new = transformation.update(gradients, state, parameters)
        return updates, choose(new, state)

    return Transformation(transformation.init, update)


class UpdateRule(abc.ABC):
    """How gradients become updates.

    Attributes:
        learning_rate: The peak rate.
        tuning_rate: The peak rate of a run that starts from weights, unless another is set.
        clip_norm: Gradients with a larger global norm are scaled down to this norm; None for no limit.
        how: What it does to a gradient, in words, for the summary of a run in which several rules update a model.
    """

    learning_rate: Positive
    tuning_rate: ClassVar[float] = 2e-5
    clip_norm: Positive | None
    how: ClassVar[str] = ""

    def __post_init__(self):
        check_fields("optimizer", self)

    @abc.abstractmethod
    def transform(self, placements: PyTree) -> "Transformation | optax.GradientTransformation":
        """Return the transformation from gradients to updates at rate 1: one of optax, or a `Transformation`.

        It runs inside the `shard_map` of the step, on each device's part of every array. Where it is not elementwise it
        needs the other parts: `placements` tell how each array is split.

        Args:
            placements: The `Placement` of each array, in the tree of the parameters.
        """

    def assign(self, placements: PyTree) -> PyTree:
        """Return the `Group` of each leaf of `placements`. By default this rule updates all of them."""
        group = Group("all", self)
        return jax.tree.map(lambda _: group, placements)

    def flops(self, placements: PyTree, parameters: PyTree, ways: Callable[[MeshAxes], int]) -> int:
        """Return the FLOPs of the matrix products of one update on each device. By default there are none.

        Args:
            placements: As in `transform`.
            parameters: The arrays or their shapes, whole.
            ways: A function that returns the number of devices along mesh axes.
        """
        del placements, parameters, ways
        return 0


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that `rule` updates; `name` is their key in the state."""

    name: str
    rule: UpdateRule


@dataclasses.dataclass(frozen=True)
class Work:
    """What a group's part of an update is.

    Attributes:
        group: The group.
        paths: Its parameters.
        flops: The FLOPs of its matrix products on each device.
    """

    group: Group
    paths: tuple[str, ...]
    flops: int


def short_names(paths: Iterable[str]) -> str:
    """Return the paths without the numbers of stacks and blocks, and each beginning once: "attention.{query, out}"."""
    ends: dict[str, dict[str, None]] = {}
    for path in paths:
        name = pattern_of(path).lstrip("*.")
        start, dot, end = re.sub(r"\.(weight|scale)$", "", name).rpartition(".")
        ends.setdefault(start + dot, {})[end] = None
    return ", ".join(
        start + (f"{{{', '.join(found)}}}" if start and len(found) > 1 else ", ".join(found))
        for start, found in ends.items()
    )


def decaying(placements: PyTree) -> PyTree:
    """Return which arrays weight decay applies to: weights, but no scales, biases or embeddings."""
    return jax.tree.map(lambda placement: placement.axes.role is Role.WEIGHT, placements)


class Schedule(abc.ABC):
    """The learning rate over time: a linear warm-up from zero, then the shape that `after_warmup` gives it.

    Attributes:
        warmup_steps: The number of updates until the rate reaches its peak; None for a tenth of the run.
    """

    warmup_steps: Count | None

    def __post_init__(self):
        check_fields("schedule", self)

    def count_warmup(self, steps: int) -> int:
        """Return the number of updates until the peak. Raises `UserError` if a run of `steps` would end before it."""
        if self.warmup_steps is None:
            return steps // 10
        if self.warmup_steps > steps > 0:
            raise UserError(
                f"schedule.warmup_steps={self.warmup_steps} exceeds steps={steps}, so the learning rate would never "
                f"reach its peak; set schedule.warmup_steps to at most {steps}"
            )
        return self.warmup_steps

    def rate(
        self,
        peak: float | np.floating | Float[Array, ""],
        step: Int[Array, ""],
        steps: int | np.integer | Int[Array, ""],
    ) -> Float[Array, ""]:
        """Return the rate of update number `step` (from 0) of `steps`, float32."""
        steps = jnp.asarray(steps, jnp.int32)
        warmup = steps // 10 if self.warmup_steps is None else jnp.int32(self.warmup_steps)
        since = (step - warmup).astype(jnp.float32)
        warm = jnp.minimum(1.0, (step + 1).astype(jnp.float32) / jnp.maximum(1, warmup).astype(jnp.float32))
        return self.after_warmup(jnp.float32(peak) * warm, since, (steps - warmup).astype(jnp.float32))

    @abc.abstractmethod
    def after_warmup(self, rate: Float[Array, ""], since: Float[Array, ""], left: Float[Array, ""]) -> Float[Array, ""]:
        """Return the rate `since` updates after the warm-up, given the `rate` that the warm-up reached.

        `since` is negative during the warm-up; `left` is the number of updates from its end to the end of the run.
        """


class Pace(NamedTuple):
    """What a step reads of its run: the peak of the learning rate, and the number of updates.

    They are arguments of the step, so that a run of another length or rate compiles nothing again.
    """

    peak: Float[Array, ""]
    steps: Int[Array, ""]


MomentDType = Literal["float32", "bfloat16"]
# Each step a moment forgets 1 - decay of itself. Where that is near half the last of bfloat16's 8 bits, 1/512, rounding
# undoes it: at 0.99 a moment stops at up to 1.4 times its value, and at 0.997 it never forgets.
_LONGEST = 0.99


def check_decays(dtype: MomentDType, **decays: float) -> None:
    """Raise `UserError` for a decay that is so near 1 that moments in bfloat16 would not follow the gradients."""
    for name, decay in decays.items():
        if dtype == "bfloat16" and decay > _LONGEST:
            raise UserError(
                f"optimizer.{name}={decay:g} with optimizer.moment_dtype=bfloat16: each step forgets {1 - decay:.2g} "
                f"of a moment, which rounding to bfloat16 undoes; choose at most {_LONGEST}, or float32"
            )


def kept_in(
    dtype: DTypeLike,
    init: Callable[[PyTree], Any],
    remember: Callable[[PyTree, Any], Any],
    direct: Callable[[Any, PyTree], PyTree],
) -> Transformation:
    """Return an elementwise transformation that computes in float32, and keeps the floats of its state in `dtype`.

    Gradients and parameters may have any dtype. Updates are float32, and computed from moments as they are kept.

    Args:
        dtype: The dtype of the floats of the state.
        init: A function of the parameters that returns the first state.
        remember: A function of gradients and state that returns the new state.
        direct: A function of the state that stays and the parameters that returns the updates.
    """

    def update(gradients: PyTree, state: Any, parameters: PyTree, choose: Choose = newest) -> tuple[PyTree, Any]:
        new = remember(*(_cast(x, jnp.float32) for x in (gradients, state)))
        state = as_kept(choose(_cast(new, dtype), state), dtype)
        return direct(*(_cast(x, jnp.float32) for x in (state, parameters))), state

    return Transformation(lambda parameters: _cast(init(parameters), dtype), update)


def as_kept(state: PyTree, dtype: DTypeLike) -> PyTree:
    """Return the state that stays; what is computed from it is computed from its values in `dtype`.

    XLA computes in float32 and would leave out a rounding to bfloat16 that is undone at once. Then updates would be
    computed from the old moments, and these copied (`Transformation`).
    """
    is_wide = jnp.dtype(dtype) == jnp.float32
    return state if is_wide else jax.tree.map(lax.optimization_barrier, state)  # leaf by leaf: each keeps its axes


def _cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
