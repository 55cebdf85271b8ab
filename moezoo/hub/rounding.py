"""Arrays that are rounded to few bits while they are written. `docs/numbers.md` defines the rounding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.formats.base import FewBitTensor
from moezoo.hub.holdings import are_finite
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.axes import Axes, Role


def rounded_values(few: FewBitTensor, weight: np.ndarray) -> np.ndarray:
    """Return the numbers of a weight in few bits, as bytes, from the weight as a file has it in numbers.

    Raises `UserError` for a weight that is not finite.
    """
    return np.ascontiguousarray(np.asarray(_round(few, weight).values).swapaxes(-1, -2))


def rounded_scale(few: FewBitTensor, weight: np.ndarray) -> np.ndarray:
    """Return its scales of blocks [..., outputs, inputs], which are apart from the numbers in a file.

    Raises `UserError` for a weight that is not finite.
    """
    # From those of the pieces [..., inputs, outputs].
    scale = np.asarray(_round(few, weight).scale).swapaxes(-1, -2)
    at = []
    for numbers, pieces, size in zip(few.matrix, scale.shape[-2:], few.block, strict=True):
        at.append(np.arange(0, numbers, size) * pieces // numbers)
    return np.ascontiguousarray(scale[..., at[0][:, None], at[1]])


def _round(few: FewBitTensor, weight: np.ndarray) -> FewBits:
    if not are_finite(weight):
        raise UserError(
            f"format={few.format.NAME}: {few.plain.name} has NaN or infinities, which have no rounding; leave "
            "format out"
        )
    whole = weight if few.plain.layout == "alternating" else weight.swapaxes(-1, -2)
    axes = Axes(Role.WEIGHT, ("expert",) * len(few.lead), ("input",), ("output",))
    return _rounded(few.format.CONTAINER, jnp.asarray(whole), axes)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _rounded(container: Any, weight: jax.Array, axes: Axes) -> FewBits:
    return container.rounded(weight, axes)
