"""The dtype in which an optimiser keeps its state."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moezoo.errors import UserError
from moezoo.optim.base import Choose, Transformation, newest

MomentDType = Literal["float32", "bfloat16"]


# Each step a moment forgets 1 - decay of itself. Where that is near half the last of bfloat16's 8 bits, 1/512, rounding
# undoes it: at 0.99 a moment stops at up to 1.4 times its value, and at 0.997 it never forgets.
_LONGEST = 0.99


def check_decays(dtype: MomentDType, **decays: float) -> None:
    """Raise `UserError` for a decay that is so near 1 that moments in bfloat16 would not follow the gradients."""
    for name, decay in decays.items():
        if dtype == "bfloat16" and decay > _LONGEST:
            raise UserError(
                f"optimizer.{name}={decay:g} with optimizer.moment_dtype=bfloat16: each step forgets {1 - decay:.2g} "
                f"of a moment, which rounding to bfloat16 undoes; choose at most {_LONGEST}, or float32"
            )


def kept_in(
    dtype: DTypeLike,
    init: Callable[[PyTree], Any],
    remember: Callable[[PyTree, Any], Any],
    direct: Callable[[Any, PyTree], PyTree],
) -> Transformation:
    """Return an elementwise transformation that computes in float32, and keeps the floats of its state in `dtype`.

    Gradients and parameters may have any dtype. Updates are float32, and computed from moments as they are kept.

    Args:
        dtype: The dtype of the floats of the state.
        init: A function of the parameters that returns the first state.
        remember: A function of gradients and state that returns the new state.
        direct: A function of the state that stays and the parameters that returns the updates.
    """

    def update(gradients: PyTree, state: Any, parameters: PyTree, choose: Choose = newest) -> tuple[PyTree, Any]:
        new = remember(*(_cast(x, jnp.float32) for x in (gradients, state)))
        state = as_kept(choose(_cast(new, dtype), state), dtype)
        return direct(*(_cast(x, jnp.float32) for x in (state, parameters))), state

    return Transformation(lambda parameters: _cast(init(parameters), dtype), update)


def as_kept(state: PyTree, dtype: DTypeLike) -> PyTree:
    """Return the state that stays; what is computed from it is computed from its values in `dtype`.

    XLA computes in float32 and would leave out a rounding to bfloat16 that is undone at once. Then updates would be
    computed from the old moments, and these copied (`moezoo.optim.base.Transformation`).
    """
    is_wide = jnp.dtype(dtype) == jnp.float32
    return state if is_wide else jax.tree.map(lax.optimization_barrier, state)  # leaf by leaf: each keeps its axes


def _cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
