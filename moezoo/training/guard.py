"""Steps that are not taken: a loss or gradient that is not finite, or far above what it was."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from moezoo.config.settings import GuardSettings

# A running mean forgets half of what it was in 34 steps; before it has seen some, nothing is called a spike.
_DECAY, _SEEN = 0.98, 20


class Guard(NamedTuple):
    """Running means of loss and gradient norm over accepted steps, and counts, the same on every device.

    `accepted` and `skipped` steps of the run; `in_a_row`: steps skipped since the last accepted one.
    """

    loss: Float[Array, ""]
    norm: Float[Array, ""]
    accepted: Int[Array, ""]
    skipped: Int[Array, ""]
    in_a_row: Int[Array, ""]

    @classmethod
    def fresh(cls) -> "Guard":
        """Before the first step."""
        zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
        return cls(zero, zero, none, none, none)

    def accepts(self, loss: Float[Array, ""], norm: Float[Array, ""], settings: GuardSettings) -> Bool[Array, ""]:
        """Whether the step is taken: both are finite, and neither exceeds its mean by the factor of `settings`."""
        fine = jnp.isfinite(loss) & jnp.isfinite(norm)
        young = self.accepted < _SEEN
        for value, mean, factor in ((loss, self.loss, settings.loss), (norm, self.norm, settings.gradient_norm)):
            if factor is not None:
                fine &= young | (value <= factor * mean)
        return fine

    def after(self, accepted: Bool[Array, ""], loss: Float[Array, ""], norm: Float[Array, ""]) -> "Guard":
        """With one more step."""
        # At first the mean of all, later the running one.
        keep = jnp.minimum(_DECAY, self.accepted.astype(jnp.float32) / (self.accepted + 1).astype(jnp.float32))

        def mean(old: Array, new: Array) -> Array:
            return jnp.where(accepted, keep * old + (1 - keep) * new, old)

        one = accepted.astype(jnp.int32)
        return Guard(
            mean(self.loss, loss),
            mean(self.norm, norm),
            self.accepted + one,
            self.skipped + 1 - one,
            jnp.where(accepted, 0, self.in_a_row + 1),
        )


def select(accepted: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """`new` where the step is accepted, else `old` to the bit."""
    return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, old)
