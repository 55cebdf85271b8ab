"""Weights that are not arrays: the contract of a container that stands for one."""

import abc
from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.parallel.collectives import unsaved
from moezoo.parallel.roles import Axes


class Stored(eqx.Module):
    """What a field declared `Weight` may hold in place of an array: a container that stands for one.

    Its arrays lead with the stacked dimensions of the declaration, inside a `Stack` with `layer` too. Each is laid out
    by its own axes, gathered by itself in its own dtype, and trained only where a filter says so. A layer hands it to
    `project`, `contract` and `grouped_matmul` alone, so it does not know how its weights are stored.

    `dtype`: of the array that it stands for.
    """

    dtype: eqx.AbstractVar[np.dtype]

    @abc.abstractmethod
    def axes(self, declared: Axes) -> Mapping[str, Axes]:
        """By field, the axes of what lies there, which may be a container again; `declared` are those of the whole."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array that it stands for."""
        return len(self.shape)

    @abc.abstractmethod
    def whole(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The array that it stands for, in `dtype`. Layers call `plain`, whose result is not saved."""

    def product(self, x: Float[Array, "..."], inputs: int, dtype: DTypeLike) -> Float[Array, "..."]:
        """The last `inputs` dimensions of `x` contracted with the first of one matrix, in `dtype`."""
        return jnp.tensordot(x, plain(self, x.dtype), inputs, preferred_element_type=dtype)


def plain(weight: Float[Array, "..."] | Stored, dtype: DTypeLike) -> Float[Array, "..."]:
    """A weight as an array: itself, or what a container stands for, in `dtype` and never saved by rematerialisation."""
    return unsaved(lambda stored: stored.whole(dtype), weight) if isinstance(weight, Stored) else weight
