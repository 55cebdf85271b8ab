"""Apply update rules and a schedule to one model's parameters, each device to its own shards."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from moezoo.errors import UserError
from moezoo.optim.base import Choose, Group, Pace, Schedule, Transformation, UpdateRule, Work, choosing, newest
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.placement import EVERYWHERE


class Optimizer:
    """Transformations for one model. Each device updates its own part of every array.

    The state maps each group's name to the state of its transformation, which has no entries for other leaves.
    """

    def __init__(self, rule: UpdateRule, schedule: Schedule, steps: int, placements: PyTree):
        """Assign leaves to groups.

        Args:
            rule: Its peak rate and clip norm hold for all groups. The norm is taken over all leaves.
            schedule: The learning rate over time.
            steps: The number of updates in the run.
            placements: One `Placement` per leaf.

        Raises:
            UserError: A run of `steps` would end before the schedule's warm-up; a schedule computes with numbers of
                Python; or as `rule.assign` raises.
            ValueError: Two different groups have the same name.
        """
        self.rule, self.schedule, self.steps = rule, schedule, steps
        schedule.count_warmup(steps)  # raise here rather than while tracing
        numbers: Any = np.float32(rule.learning_rate), np.int32(steps)
        self.pace = Pace(*numbers)
        try:
            jax.eval_shape(self.rate, np.int32(0), self.pace)
        except jax.errors.ConcretizationTypeError:
            name = type(schedule).__name__
            raise UserError(
                f"schedule={name}: after_warmup uses an argument as a number of Python, and all are arrays; write "
                "jnp.maximum(1, left) for max(1, left), and jnp.where for if"
            ) from None
        self._placements = placements
        self._groups = rule.assign(placements)
        groups = dict.fromkeys(jax.tree.leaves(self._groups))
        if len({group.name for group in groups}) < len(groups):
            raise ValueError(f"different groups have the same name: {', '.join(map(str, groups))}")
        self._transforms: dict[Group, Transformation] = {}
        for group in groups:
            transform = group.rule.transform(self._part(group, placements))
            self._transforms[group] = transform if isinstance(transform, Transformation) else choosing(transform)

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
                transform.init,
                lambda _, placement: placement,
                state[group.name],
                self._part(group, placements),
                transform_non_params=lambda _: EVERYWHERE,
            )
            for group, transform in self._transforms.items()
        }

    def work(self, parameters: PyTree, ways: Callable[[MeshAxes], int]) -> tuple[Work, ...]:
        """Return what each group with parameters does in an update; arguments as `UpdateRule.flops`."""
        found = []
        for group in self._transforms:
            part = self._part(group, parameters)
            if paths := [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(part)]:
                flops = group.rule.flops(self._part(group, self._placements), part, ways)
                found.append(Work(group, tuple(paths), flops))
        return tuple(found)

    def rate(self, step: Int[Array, ""], pace: Pace) -> Float[Array, ""]:
        """Return the learning rate of update number `step` (from 0) at a pace, such as `self.pace`."""
        return self.schedule.rate(pace.peak, step, pace.steps)

    def update(
        self,
        gradients: PyTree,
        state: Any,
        parameters: PyTree,
        rate: Float[Array, ""],
        norm: Float[Array, ""],
        choose: Choose = newest,
    ) -> tuple[PyTree, Any, PyTree]:
        """Return the parameters and the state that stay, as `choose` says, and what was subtracted, in float32.

        `norm` is the global norm of `gradients`, by which they are clipped.
        """
        if (clip := self.rule.clip_norm) is not None:
            scale = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        updates, new_state = [], {}
        for group, transform in self._transforms.items():
            # optax's bias correction mixes float and int32, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                update, new_state[group.name] = transform.update(
                    self._part(group, gradients), state[group.name], self._part(group, parameters), choose
                )
            updates.append(jax.tree.map(lambda u: rate * u.astype(jnp.float32), update))
        changes = eqx.combine(*updates)
        new = jax.tree.map(lambda p, u: (p.astype(jnp.float32) - u).astype(p.dtype), parameters, changes)
        return choose(new, parameters), new_state, changes
