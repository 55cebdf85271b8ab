"""Plain gradient descent."""

import dataclasses
from typing import TYPE_CHECKING

from jaxtyping import PyTree

from moezoo.optim.base import UpdateRule

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class SGD(UpdateRule):
    """Gradient descent without momentum or decay, for proofs: it keeps no state and hides nothing."""

    learning_rate: float = 0.1
    clip_norm: float | None = None

    def transform(self, decays: PyTree) -> "optax.GradientTransformation":
        """The gradients themselves."""
        import optax

        del decays
        return optax.identity()
