"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019)."""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.optim.base import MomentDType, Transformation, UpdateRule, check_decays, decaying, kept_in
from moezoo.typed import NotNegative, Positive, Range


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

    def transform(self, placements: PyTree) -> Transformation:
        """Return Adam's transformation, followed by the decay."""
        import optax

        adam = optax.scale_by_adam(self.beta1, self.beta2)  # for its moments; updates are made of those that stay
        decay = optax.add_decayed_weights(self.weight_decay, decaying(placements))

        def remember(gradients: PyTree, state: Any) -> Any:
            _, new = adam.update(gradients, *state)
            return (new,)

        def direct(state: Any, parameters: PyTree) -> PyTree:
            (moments,) = state
            mean = optax.tree.bias_correction(moments.mu, self.beta1, moments.count)
            square = optax.tree.bias_correction(moments.nu, self.beta2, moments.count)
            steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + self.epsilon), mean, square)
            return decay.update(steps, decay.init(parameters), parameters)[0]

        # The state is a tuple with one entry, as checkpoints have it.
        return kept_in(self.moment_dtype, lambda parameters: (adam.init(parameters),), remember, direct)
