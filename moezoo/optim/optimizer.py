"""An update rule and a schedule, applied to one model's parameters where they lie."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from moezoo.optim.base import Schedule, UpdateRule
from moezoo.parallel.axes import Role
from moezoo.parallel.placement import EVERYWHERE


class Optimizer:
    """An optax transformation for one model; every update is elementwise, so shards are updated where they lie."""

    def __init__(self, rule: UpdateRule, schedule: Schedule, steps: int, placements: PyTree):
        """`placements` of a model say by their axes what decays: matrices only.

        Raises `UserError` where a run of `steps` would end before the schedule's warm-up.
        """
        self.rule, self.schedule, self.steps = rule, schedule, steps
        schedule.count_warmup(steps)  # refused here, not in the middle of a trace
        self._transform = rule.transform(jax.tree.map(lambda placement: placement.axes.role is Role.WEIGHT, placements))

    def init(self, parameters: PyTree) -> Any:
        """Fresh state for `parameters`."""
        return self._transform.init(parameters)

    def placements(self, parameters: PyTree, placements: PyTree) -> Any:
        """Where the state lies: moments as their parameters, counters on every device."""
        import optax

        state = jax.eval_shape(self.init, parameters)
        return optax.tree.map_params(
            self._transform,
            lambda _, placement: placement,
            state,
            placements,
            transform_non_params=lambda _: EVERYWHERE,
        )

    def rate(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The learning rate of update number `step`."""
        return self.schedule.rate(self.rule.learning_rate, step, self.steps)

    def update(
        self, gradients: PyTree, state: Any, parameters: PyTree, rate: Float[Array, ""], norm: Float[Array, ""]
    ) -> tuple[PyTree, Any]:
        """New parameters and state. `norm` is the global norm of `gradients`, which are scaled down to `clip_norm`."""
        if (clip := self.rule.clip_norm) is not None:
            scale = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        # optax mixes float and int32 in its bias correction, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = self._transform.update(gradients, state, parameters)
        parameters = jax.tree.map(lambda p, u: p - (rate * u.astype(jnp.float32)).astype(p.dtype), parameters, updates)
        return parameters, state
