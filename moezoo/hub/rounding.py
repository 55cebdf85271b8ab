"""Arrays that are rounded to few bits while they are written. `docs/numbers.md` defines the rounding."""

import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.formats.base import FewBitTensor, Format, ScaleTensor, ValuesTensor
from moezoo.hub.holdings import are_finite
from moezoo.hub.tensors import Tensor
from moezoo.hub.values import Values
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.axes import Axes, Role


class RoundedValues(Values):
    """The numbers of a model, with a format for tensors of few bits that the model has in arrays.

    A weight is read once for its numbers and once for its scales, which are apart in a file.
    """

    def __init__(self, values: Values, rounds_to: Format):
        self._values, self._format, self.rounds_to = values, rounds_to, rounds_to

    def _rounds(self, tensor: Tensor) -> TypeGuard[ValuesTensor | ScaleTensor]:
        return isinstance(tensor, ValuesTensor | ScaleTensor) and not self._values.has(tensor)

    def has(self, tensor: Tensor) -> bool:
        return self._values.has(tensor)

    def dtype(self, tensor: Tensor) -> np.dtype:
        if not self._rounds(tensor):
            return self._values.dtype(tensor)
        return self._format.SCALE_DTYPE if isinstance(tensor, ScaleTensor) else np.dtype(np.uint8)

    def stored_dtype(self, tensor: Tensor) -> np.dtype:
        return self._values.stored_dtype(tensor)

    def key(self, tensor: Tensor) -> tuple[Any, ...]:
        return self._values.key(tensor.few.plain if self._rounds(tensor) else tensor)

    def read(self, tensor: Tensor, process: int) -> np.ndarray | None:
        if not self._rounds(tensor):
            return self._values.read(tensor, process)
        few: FewBitTensor = tensor.few
        weight = self._values.read(few.plain, process)
        if weight is None:
            return None
        if not are_finite(weight):
            raise UserError(
                f"format={self._format.NAME}: {few.plain.name} has NaN or infinities, which have no rounding; leave "
                "format out"
            )
        whole = weight if few.plain.layout == "alternating" else weight.swapaxes(-1, -2)
        axes = Axes(Role.WEIGHT, ("expert",) * len(few.lead), ("input",), ("output",))
        stored = _rounded(few.format.CONTAINER, jnp.asarray(whole), axes)
        if isinstance(tensor, ValuesTensor):
            return np.ascontiguousarray(np.asarray(stored.values).swapaxes(-1, -2))
        return _of_blocks(stored, few)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _rounded(container: Any, weight: jax.Array, axes: Axes) -> FewBits:
    return container.rounded(weight, axes)


def _of_blocks(stored: FewBits, few: FewBitTensor) -> np.ndarray:
    """Return the scales of blocks [..., outputs, inputs] from those of the pieces [..., inputs, outputs]."""
    scale = np.asarray(stored.scale).swapaxes(-1, -2)
    at = []
    for numbers, pieces, size in zip(few.matrix, scale.shape[-2:], few.block, strict=True):
        at.append(np.arange(0, numbers, size) * pieces // numbers)
    return np.ascontiguousarray(scale[..., at[0][:, None], at[1]])
