"""The contracts of the configuration groups `optimizer` and `schedule`; each entry is a frozen dataclass."""

import abc
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from moezoo.convert import Count, Positive, check_fields
from moezoo.errors import UserError

if TYPE_CHECKING:
    import optax


class UpdateRule(abc.ABC):
    """How gradients become updates.

    Attributes:
        learning_rate: the peak rate.
        clip_norm: gradients with a larger global norm are scaled down to this norm; None for no limit.
    """

    learning_rate: Positive
    clip_norm: Positive | None

    def __post_init__(self):
        check_fields("optimizer", self)

    @abc.abstractmethod
    def transform(self, decays: PyTree) -> "optax.GradientTransformation":
        """Return the optax transformation from gradients to updates at rate 1.

        It must be elementwise, because each device updates its own shards. `decays` is true at leaves that may decay.
        """


class Schedule(abc.ABC):
    """The learning rate over time: a linear warm-up from zero, then the shape that `after_warmup` gives it.

    Attributes:
        warmup_steps: the number of updates until the rate reaches its peak; None for a tenth of the run.
    """

    warmup_steps: Count | None

    def __post_init__(self):
        check_fields("schedule", self)

    def count_warmup(self, steps: int) -> int:
        """Return the number of updates until the peak. Raises `UserError` if a run of `steps` would end before it."""
        if self.warmup_steps is None:
            return steps // 10
        if self.warmup_steps > steps:
            raise UserError(
                f"schedule.warmup_steps={self.warmup_steps} exceeds steps={steps}, so the learning rate would never "
                f"reach its peak; set schedule.warmup_steps to at most {steps}"
            )
        return self.warmup_steps

    def rate(self, peak: float, step: Int[Array, ""], steps: int) -> Float[Array, ""]:
        """Return the rate of update number `step` (from 0) of `steps`, float32."""
        warmup = self.count_warmup(steps)
        at = step.astype(jnp.float32)
        warm = jnp.minimum(1.0, (at + 1) / max(1, warmup))
        return self.after_warmup(jnp.float32(peak) * warm, at - warmup, steps - warmup)

    @abc.abstractmethod
    def after_warmup(self, rate: Float[Array, ""], since: Float[Array, ""], left: int) -> Float[Array, ""]:
        """Return the rate `since` updates after the warm-up, given the `rate` that the warm-up reached.

        `since` is negative during the warm-up; `left` is the number of updates from its end to the end of the run.
        """
