"""The dtype in which an optimiser keeps its state."""

from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

if TYPE_CHECKING:
    import optax

MomentDType = Literal["float32", "bfloat16"]


def kept_in(dtype: DTypeLike, transformation: "optax.GradientTransformation") -> "optax.GradientTransformation":
    """Return an elementwise transformation that computes in float32, and keeps the floats of its state in `dtype`.

    Gradients and parameters may have any dtype. Updates are float32.
    """
    import optax

    def init(parameters: PyTree) -> Any:
        return _cast(transformation.init(parameters), dtype)

    def update(gradients: PyTree, state: Any, parameters: PyTree | None = None) -> tuple[PyTree, Any]:
        updates, state = transformation.update(*(_cast(x, jnp.float32) for x in (gradients, state, parameters)))
        return updates, _cast(state, dtype)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  (optax's protocol names them otherwise)


def _cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
