"""Plain gradient descent."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import PyTree

from moezoo.optim.base import UpdateRule

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class SGD(UpdateRule):
    """Gradient descent without momentum, decay or state. Its updates are gradients times a rate, so tests use it."""

    tuning_rate: ClassVar[float] = 1e-3
    learning_rate: float = 0.1
    clip_norm: float | None = None

    def transform(self, placements: PyTree) -> "optax.GradientTransformation":
        """Return the identity: updates are the gradients."""
        import optax

        del placements
        return optax.identity()
