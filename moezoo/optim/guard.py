"""Skip a step whose loss or gradient norm is not finite, or is far above its running mean."""

import dataclasses
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from moezoo.parallel.collectives import vary_like
from moezoo.typed import Range, Size, check_fields

# A running mean keeps half of its weight for 34 steps. No step is skipped as a spike before 20 were accepted.
_DECAY, _SEEN = 0.98, 20


@dataclasses.dataclass(frozen=True)
class GuardSettings:
    """Which steps are skipped: parameters, moments and the choice bias do not change, and the next batch follows.

    A step is skipped if its loss or gradient norm is not finite, or, after 20 accepted steps, if one of them is more
    than `loss` or `gradient_norm` times its running mean over accepted steps. None sets no limit. After `patience`
    skipped steps in a row the run ends.
    """

    loss: Annotated[float, Range(above=1)] | None = 3.0
    gradient_norm: Annotated[float, Range(above=1)] | None = 10.0
    patience: Size = 10

    def __post_init__(self):
        check_fields("guard", self)


class Guard(NamedTuple):
    """Running means over accepted steps, and counts; the same on every device.

    - `loss`, `norm`: running means of the loss and the gradient norm;
    - `accepted`, `skipped`: the number of such steps in the run;
    - `in_a_row`: the number of steps skipped since the last accepted one.
    """

    loss: Float[Array, ""]
    norm: Float[Array, ""]
    accepted: Int[Array, ""]
    skipped: Int[Array, ""]
    in_a_row: Int[Array, ""]

    @classmethod
    def fresh(cls) -> "Guard":
        """Return the guard before the first step."""
        zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
        return cls(zero, zero, none, none, none)

    def accepts(self, loss: Float[Array, ""], norm: Float[Array, ""], settings: GuardSettings) -> Bool[Array, ""]:
        """Return whether both are finite, and neither exceeds its running mean times the factor in `settings`."""
        fine = jnp.isfinite(loss) & jnp.isfinite(norm)
        young = self.accepted < _SEEN
        for value, mean, factor in ((loss, self.loss, settings.loss), (norm, self.norm, settings.gradient_norm)):
            if factor is not None:
                fine &= young | (value <= factor * mean)
        return fine

    def after(self, accepted: Bool[Array, ""], loss: Float[Array, ""], norm: Float[Array, ""]) -> "Guard":
        """Return the guard after one more step."""
        # The plain mean of the first steps, later an exponential running mean.
        decay = jnp.minimum(_DECAY, self.accepted.astype(jnp.float32) / (self.accepted + 1).astype(jnp.float32))

        def mean(old: Array, new: Array) -> Array:
            return jnp.where(accepted, decay * old + (1 - decay) * new, old)

        one = accepted.astype(jnp.int32)
        return Guard(
            mean(self.loss, loss),
            mean(self.norm, norm),
            self.accepted + one,
            self.skipped + 1 - one,
            jnp.where(accepted, 0, self.in_a_row + 1),
        )


@jax.named_scope("optimizer")
def select(accepted: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """Return `new` if the step is accepted, otherwise `old` unchanged to the bit."""
    return jax.tree.map(lambda a, b: lax.select(vary_like(accepted, a, b), vary_like(a, b), vary_like(b, a)), new, old)
