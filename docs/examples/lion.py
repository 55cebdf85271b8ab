# In moezoo: moezoo/optim/lion.py
import dataclasses
from typing import Annotated

from moezoo.optim.base import UpdateRule, decaying
from moezoo.typed import NotNegative, Range


@dataclasses.dataclass(frozen=True)
class Lion(UpdateRule):
    """Signs of momenta with decoupled weight decay of matrices."""

    learning_rate: float = 3e-4
    beta1: Annotated[float, Range(at_least=0, below=1)] = 0.9
    beta2: Annotated[float, Range(at_least=0, below=1)] = 0.99
    weight_decay: NotNegative = 0.1
    clip_norm: float | None = 1.0

    def transform(self, placements):
        """The sign, then the decay."""
        import optax

        lion = optax.scale_by_lion(self.beta1, self.beta2)
        return optax.chain(lion, optax.add_decayed_weights(self.weight_decay, decaying(placements)))
