"""The optimiser: optax, wrapped here alone, and the learning rate over time."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from moezoo.axes import Role, axes_of
from moezoo.errors import UserError
from moezoo.settings import SGD, AdamW, Constant, Cosine


def warmup_steps(schedule: Cosine | Constant, steps: int) -> int:
    """Updates until the rate is at its peak. Raises `UserError` when a run of `steps` would end before."""
    if schedule.warmup_steps is None:
        return steps // 10
    if schedule.warmup_steps > steps:
        raise UserError(
            f"schedule.warmup_steps={schedule.warmup_steps} but steps={steps}, so the learning rate would never reach "
            f"its peak; set it to at most {steps}"
        )
    return schedule.warmup_steps


def learning_rate(
    optimizer: AdamW | SGD, schedule: Cosine | Constant, steps: int, step: Int[Array, ""]
) -> Float[Array, ""]:
    """The rate of the update number `step` (from 0) of `steps`: float32."""
    warmup = warmup_steps(schedule, steps)
    at = step.astype(jnp.float32)
    rate = jnp.float32(optimizer.learning_rate)
    warm = jnp.minimum(1.0, (at + 1) / max(1, warmup))
    if isinstance(schedule, Constant):
        return rate * warm
    left = max(1, steps - warmup - 1)
    progress = jnp.clip((at - warmup) / left, 0, 1)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return rate * warm * (schedule.final_ratio + (1 - schedule.final_ratio) * cosine)


class Optimizer:
    """An optax transformation for one model; every update is elementwise, so shards are updated where they lie."""

    def __init__(self, settings: AdamW | SGD, schedule: Cosine | Constant, steps: int, model: PyTree):
        """`model` (or its shapes) says by its annotations what decays: matrices only."""
        self.settings, self.schedule, self.steps = settings, schedule, steps
        warmup_steps(schedule, steps)  # refused here, not in the middle of a trace
        decays = jax.tree.map(lambda axes: axes.role is Role.WEIGHT, axes_of(model))
        if isinstance(settings, AdamW):
            self._transform = optax.chain(
                optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon),
                optax.add_decayed_weights(settings.weight_decay, decays),
            )
        else:
            self._transform = optax.identity()

    def init(self, parameters: PyTree) -> Any:
        """Fresh state for `parameters`."""
        return self._transform.init(parameters)

    def specs(self, parameters: PyTree, specs: PyTree) -> Any:
        """The layout of the state: moments as their parameters, counters replicated."""
        state = jax.eval_shape(self.init, parameters)
        return optax.tree.map_params(
            self._transform, lambda _, spec: spec, state, specs, transform_non_params=lambda _: PartitionSpec()
        )

    def rate(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The learning rate of update number `step`."""
        return learning_rate(self.settings, self.schedule, self.steps, step)

    def update(
        self, gradients: PyTree, state: Any, parameters: PyTree, rate: Float[Array, ""], norm: Float[Array, ""]
    ) -> tuple[PyTree, Any]:
        """New parameters and state. `norm` is the global norm of `gradients`, which are scaled down to `clip_norm`."""
        if (clip := self.settings.clip_norm) is not None:
            scale = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        # optax mixes float and int32 in its bias correction, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = self._transform.update(gradients, state, parameters)
        parameters = jax.tree.map(lambda p, u: p - (rate * u.astype(jnp.float32)).astype(p.dtype), parameters, updates)
        return parameters, state
