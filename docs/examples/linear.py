# In moezoo: moezoo/optim/linear.py
import dataclasses

import jax.numpy as jnp

from moezoo.optim.base import Schedule


@dataclasses.dataclass(frozen=True)
class Linear(Schedule):
    """Warm-up, then a straight line down to `final_ratio` of the peak at the last step."""

    warmup_steps: int | None = None
    final_ratio: float = 0.0

    def after_warmup(self, rate, since, left):
        """The part of `rate` that the line leaves."""
        progress = jnp.clip(since / jnp.maximum(1, left - 1), 0, 1)
        return rate * (1 - (1 - self.final_ratio) * progress)
