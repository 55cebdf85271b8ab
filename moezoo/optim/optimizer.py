"""Apply update rules and a schedule to one model's parameters, each device to its own shards."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from moezoo.optim.base import Schedule, UpdateRule
from moezoo.parallel.axes import Role
from moezoo.parallel.placement import EVERYWHERE, Placement


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that `rule` updates at `rate_factor` times the scheduled rate; `name` is their key in the state."""

    name: str
    rule: UpdateRule
    rate_factor: float = 1.0


class Optimizer:
    """Optax transformations for one model. Every update is elementwise, so each device updates its own shards.

    The state maps each group's name to the state of its transformation, which has no entries for other leaves.
    """

    def __init__(
        self,
        rule: UpdateRule,
        schedule: Schedule,
        steps: int,
        placements: PyTree,
        group_of: Callable[[str, Placement], Group] | None = None,
    ):
        """Assign leaves to groups.

        Args:
            rule: its peak rate and clip norm hold for all groups. The norm is taken over all leaves.
            schedule: the learning rate over time.
            steps: the number of updates in the run.
            placements: one `Placement` per leaf; leaves of role weight may decay.
            group_of: returns the group of a leaf, given its path, such as ".embedding.weight", and its placement. By
                default one group has all leaves, updated by `rule`.

        Raises:
            UserError: A run of `steps` would end before the schedule's warm-up.
            ValueError: Two different groups have the same name.
        """
        self.rule, self.schedule, self.steps = rule, schedule, steps
        schedule.count_warmup(steps)  # raise here rather than while tracing
        assign = group_of or (lambda path, placement: Group("all", rule))
        self._groups = jax.tree_util.tree_map_with_path(
            lambda path, p: assign(jax.tree_util.keystr(path), p), placements
        )
        groups = dict.fromkeys(jax.tree.leaves(self._groups))
        if len({group.name for group in groups}) < len(groups):
            raise ValueError(f"different groups have the same name: {', '.join(map(str, groups))}")
        decays = jax.tree.map(lambda placement: placement.axes.role is Role.WEIGHT, placements)
        self._transforms = {group: group.rule.transform(self._part(group, decays)) for group in groups}

    def _part(self, group: Group, tree: PyTree) -> PyTree:
        """Return `tree` with None for leaves of other groups."""
        return jax.tree.map(lambda its_group, leaf: leaf if its_group == group else None, self._groups, tree)

    def init(self, parameters: PyTree) -> Any:
        """Return a fresh state for `parameters`."""
        return {group.name: rule.init(self._part(group, parameters)) for group, rule in self._transforms.items()}

    def placements(self, parameters: PyTree, placements: PyTree) -> Any:
        """Return the placements of the state: moments as their parameters, counters on every device."""
        import optax

        state = jax.eval_shape(self.init, parameters)
        return {
            group.name: optax.tree.map_params(
                transform,
                lambda _, placement: placement,
                state[group.name],
                self._part(group, placements),
                transform_non_params=lambda _: EVERYWHERE,
            )
            for group, transform in self._transforms.items()
        }

    def rate(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the learning rate of update number `step` (from 0)."""
        return self.schedule.rate(self.rule.learning_rate, step, self.steps)

    def update(
        self, gradients: PyTree, state: Any, parameters: PyTree, rate: Float[Array, ""], norm: Float[Array, ""]
    ) -> tuple[PyTree, Any]:
        """Return new parameters and state. `norm` is the global norm of `gradients`, by which they are clipped."""
        if (clip := self.rule.clip_norm) is not None:
            scale = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        updates, new_state = [], {}
        for group, transform in self._transforms.items():
            # optax's bias correction mixes float and int32, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                update, new_state[group.name] = transform.update(
                    self._part(group, gradients), state[group.name], self._part(group, parameters)
                )
            group_rate = rate * group.rate_factor
            updates.append(jax.tree.map(lambda u, r=group_rate: r * u.astype(jnp.float32), update))
        parameters = jax.tree.map(lambda p, u: p - u.astype(p.dtype), parameters, eqx.combine(*updates))
        return parameters, new_state
