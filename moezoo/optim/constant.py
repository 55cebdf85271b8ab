"""A learning rate that stays at its peak."""

import dataclasses

from jaxtyping import Array, Float

from moezoo.optim.base import Schedule


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Linear warm-up from zero, then the peak to the end."""

    warmup_steps: int = 0

    def after_warmup(self, rate: Float[Array, ""], since: Float[Array, ""], left: Float[Array, ""]) -> Float[Array, ""]:
        """Return `rate` unchanged."""
        del since, left
        return rate
