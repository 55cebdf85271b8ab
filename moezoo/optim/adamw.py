"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019)."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from jaxtyping import PyTree

from moezoo.optim.base import UpdateRule, decaying
from moezoo.optim.moments import MomentDType, check_decays, kept_in
from moezoo.typed import NotNegative, Positive, Range

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class AdamW(UpdateRule):
    """Adam with decoupled weight decay. Only weights decay; scales, biases and embeddings do not.

    Both moments are kept in `moment_dtype`; updates are computed in float32.
    """

    how: ClassVar[str] = "each number moves by its mean gradient, divided by its usual size"
    learning_rate: float = 2e-3
    beta1: Annotated[float, Range(at_least=0, below=1)] = 0.9
    beta2: Annotated[float, Range(at_least=0, below=1)] = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    moment_dtype: MomentDType = "float32"
    clip_norm: float | None = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_decays(self.moment_dtype, beta1=self.beta1, beta2=self.beta2)

    def transform(self, placements: PyTree) -> "optax.GradientTransformation":
        """Return Adam's transformation, followed by the decay."""
        import optax

        adam = optax.chain(
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            optax.add_decayed_weights(self.weight_decay, decaying(placements)),
        )
        return kept_in(self.moment_dtype, adam)
