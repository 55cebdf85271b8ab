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
    """A weight of 8-bit integers, each output channel of each matrix times a scale of its own.

    The scale is the channel's largest magnitude / 127, values are rounded to the nearest integer, ties to even; a
    channel of zeros has scale 1, and one with a number that is not finite stands for NaN in part. A value is off by at
    most half its scale. Scales have the stacked dimensions and the outputs of `values`.
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
        """Scales have no inputs."""
        return {
            "values": Axes(Role.PART, declared.stacked, declared.inputs, declared.outputs),
            "scale": Axes(Role.PART, declared.stacked, (), declared.outputs),
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return self.values.shape

    def whole(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Values times scales, in float32, rounded once to `dtype`."""
        first = self.scale.ndim - self.outputs
        inputs = tuple(range(first, self.values.ndim - self.outputs))
        return (self.values.astype(jnp.float32) * jnp.expand_dims(self.scale, inputs)).astype(dtype)


def store(
    module: Any, matches: Callable[[str], bool], container: Callable[[Float[Array, "..."], Axes], Stored] = Int8
) -> Any:
    """`module`, such as a model, with every weight whose path `matches` put into a container.

    `matches` says it of a path, such as ".stacks[0].blocks[0].feed_forward.experts.gate". `container(array, axes)`
    makes one. Raises
    `UserError` where nothing matches, or something that is no weight, or one that is in a container already, or a
    part of a stack. Of shapes: `jax.eval_shape(lambda m: store(m, matches), shapes)`.
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
            raise UserError(f"store: {name} is of kind {what}, expected a weight in an array; match weights alone")
        if leaf.ndim != len(axes.names):
            raise UserError(
                f"store: {name} has {leaf.ndim} dimensions and its axes are {' '.join(axes.names)}; a block of a stack "
                "has no meaning of its own, give the whole model"
            )
        return container(leaf, axes)

    return jax.tree_util.tree_map_with_path(put, module, is_leaf=is_stored)
