"""The learning-rate schedules. The contract is `moezoo.optim.base.Schedule`."""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.optim.base import Schedule
from moezoo.typed import Range


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Linear warm-up from zero, then the peak to the end."""

    warmup_steps: int = 0

    def after_warmup(self, rate: Float[Array, ""], since: Float[Array, ""], left: Float[Array, ""]) -> Float[Array, ""]:
        """Return `rate` unchanged."""
        del since, left
        return rate


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """Linear warm-up from zero, then a half cosine down to `final_ratio` of the peak at the last step."""

    warmup_steps: int | None = None
    final_ratio: Annotated[float, Range(at_least=0, at_most=1)] = 0.1

    def after_warmup(self, rate: Float[Array, ""], since: Float[Array, ""], left: Float[Array, ""]) -> Float[Array, ""]:
        """Return `rate` times a cosine that falls from 1 to `final_ratio`."""
        share = jnp.clip(since / jnp.maximum(1, left - 1), 0, 1)
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * share))
        return rate * (self.final_ratio + (1 - self.final_ratio) * cosine)
