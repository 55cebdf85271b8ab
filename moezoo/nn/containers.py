"""Containers that stand for weights (`moezoo.parallel.stored.Stored`), and the function that puts them into a model."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32
from jaxtyping import Int8 as Int8Array

from moezoo.errors import UserError
from moezoo.parallel.axes import is_stored, parameter_table
from moezoo.parallel.roles import Axes, Role
from moezoo.parallel.stored import Stored


class Int8(Stored):
    """A weight of 8-bit integers with one scale per output channel of each matrix.

    weight[..., o] is about values[..., o] * scale[o] with scale = max |weight[..., o]| / 127, or 1 for a channel of
    zeros. Values are rounded to the nearest integer, ties to even, so the error is at most half the scale. A channel
    with a number that is not finite has NaN in its result. `scale` has the stacked and output dimensions of `values`.
    """

    values: Int8Array[Array, "..."]
    scale: Float32[Array, "..."]
    outputs: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    def __init__(self, weight: Float[Array, "..."], axes: Axes):
        first = len(axes.stacked)
        inputs = tuple(range(first, first + len(axes.inputs)))
        wide = weight.astype(jnp.float32)
        scale = jnp.abs(wide).max(inputs, keepdims=True) / 127
        scale = jnp.where(scale == 0, 1, scale)
        self.values = jnp.clip(jnp.round(wide / scale), -127, 127).astype(jnp.int8)
        self.scale = scale.squeeze(inputs)
        self.outputs, self.dtype = len(axes.outputs), np.dtype(weight.dtype)

    def axes(self, declared: Axes) -> Mapping[str, Axes]:
        """Return the declared axes for values, and for scales the same without inputs."""
        return {
            "values": Axes(Role.PART, declared.stacked, declared.inputs, declared.outputs),
            "scale": Axes(Role.PART, declared.stacked, (), declared.outputs),
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    def materialise(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return values times scales, computed in float32 and rounded once to `dtype`."""
        first = self.scale.ndim - self.outputs
        inputs = tuple(range(first, self.values.ndim - self.outputs))
        return (self.values.astype(jnp.float32) * jnp.expand_dims(self.scale, inputs)).astype(dtype)


def as_arrays(module: Any) -> Any:
    """Return `module` with each container as the array that it stands for, in the container's dtype."""
    widen = jax.jit(lambda stored: stored.materialise(stored.dtype))
    return jax.tree.map(lambda x: widen(x) if is_stored(x) else x, module, is_leaf=is_stored)


def store(
    module: Any, matches: Callable[[str], bool], container: Callable[[Float[Array, "..."], Axes], Stored] = Int8
) -> Any:
    """Return `module` with each weight whose path `matches` in a container.

    For shapes instead of arrays, use `jax.eval_shape(lambda m: store(m, matches), shapes)`.

    Args:
        module: A whole model or another module, but not a block of a stack.
        matches: Whether to store the weight at a path, such as ".stacks[0].blocks[0].feed_forward.experts.gate".
        container: `container(array, axes)` returns the container of a weight.

    Raises:
        UserError: Nothing matches, or a match is not a weight, is in a container already, or is in a block of a stack.
    """
    chosen = {path: axes for path, axes, _ in parameter_table(module) if matches(path)}
    if not chosen:
        some = next((path for path, axes, _ in parameter_table(module) if axes.role is Role.WEIGHT), None)
        hint = f"paths look like {some}" if some else f"{type(module).__name__} has no weight"
        raise UserError(f"store: no parameter matches; {hint}")

    def put(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if (axes := chosen.get(name)) is None:
            return leaf
        if axes.role is not Role.WEIGHT or is_stored(leaf):
            what = type(leaf).__name__ if is_stored(leaf) else axes.role.value
            raise UserError(f"store: {name} is of kind {what}, expected a weight in an array; match only weights")
        if leaf.ndim != len(axes.names):
            raise UserError(
                f"store: {name} has {leaf.ndim} dimensions but the axes {' '.join(axes.names)}: it is in a block of "
                "a stack; give the whole model"
            )
        return container(leaf, axes)

    return jax.tree_util.tree_map_with_path(put, module, is_leaf=is_stored)
