"""The contracts of the configuration groups `optimizer` and `schedule`; each entry is a frozen dataclass."""

import abc
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from moezoo.errors import UserError

if TYPE_CHECKING:
    import optax


class UpdateRule(abc.ABC):
    """How gradients become updates.

    `learning_rate` is the peak rate. Gradients are first scaled down to a global norm of `clip_norm`; None: no limit.
    """

    learning_rate: float
    clip_norm: float | None

    @abc.abstractmethod
    def transform(self, decays: PyTree) -> "optax.GradientTransformation":
        """The optax transformation from gradients to updates of rate 1; `decays` is true at leaves that may decay."""


class Schedule(abc.ABC):
    """The learning rate over time: a linear warm-up from zero, then what `after_warmup` says.

    `warmup_steps`: updates until the rate is at its peak; None for a tenth of the run.
    """

    warmup_steps: int | None

    def count_warmup(self, steps: int) -> int:
        """Updates until the rate is at its peak. Raises `UserError` when a run of `steps` would end before."""
        if self.warmup_steps is None:
            return steps // 10
        if self.warmup_steps > steps:
            raise UserError(
                f"schedule.warmup_steps={self.warmup_steps} but steps={steps}, so the learning rate would never reach "
                f"its peak; set it to at most {steps}"
            )
        return self.warmup_steps

    def rate(self, peak: float, step: Int[Array, ""], steps: int) -> Float[Array, ""]:
        """The rate of update number `step` (from 0) of `steps`, float32."""
        warmup = self.count_warmup(steps)
        at = step.astype(jnp.float32)
        warm = jnp.minimum(1.0, (at + 1) / max(1, warmup))
        return self.after_warmup(jnp.float32(peak) * warm, at - warmup, steps - warmup)

    @abc.abstractmethod
    def after_warmup(self, rate: Float[Array, ""], since: Float[Array, ""], left: int) -> Float[Array, ""]:
        """`rate` as it is `since` updates after a warm-up that left `left` updates; `since` is negative before."""
