"""What moves weights: the only place where they are gathered; and gathered weights that many micro-batches use.

The gradient of an array has the array's dtype, so that of a weight gathered in bfloat16 would be summed in bfloat16
over all micro-batches. `hold` puts the sum into another array, of zeros, which no program computes with.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from moezoo.parallel.axes import Axes, Role, axes_of, is_stored
from moezoo.parallel.collectives import InnerGroup, gather_weight, vary, vary_like
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.placement import Placement
from moezoo.parallel.stacks import Gathered, InStack, ReadInStack
from moezoo.parallel.stored import Composed, Frozen, FrozenInStack, is_matrices


@dataclasses.dataclass(frozen=True)
class WeightMover:
    """Moves the weights of an execution to the devices where layers compute with them, inside `shard_map`.

    Attributes:
        execution: How the model runs, on its mesh.
    """

    execution: MeshExecution

    def gather(self, module: PyTree, stack: PyTree = None, layer: jax.Array | None = None) -> PyTree:
        """Return a layer's weights, in `dtype` and gathered as the rules require. Called just before a layer runs.

        This is the only place where weights are gathered; see `collectives.gather_weight` for the collectives. A buffer
        is not gathered and keeps at least float32. A container stays a container: its arrays are gathered one by one,
        in their own dtypes. Experts that are cut along a dimension of their matrices become a `Gathered`. With the
        `stack` that the module is layer number `layer` of, experts that are not gathered become a `ReadInStack`.
        """
        arrays, rest = eqx.partition(module, eqx.is_array)
        gathered = jax.tree.map(self._gather_weight, arrays, axes_of(arrays))
        if stack is not None:
            where = functools.partial(self._read_in_stack, layer)
            gathered = jax.tree.map(where, gathered, axes_of(arrays), arrays, stack, is_leaf=is_stored)
        return eqx.combine(gathered, rest, is_leaf=is_matrices)

    def _read_in_stack(self, layer: Any, whole: Any, axes: Any, own: Any, stack: Any) -> Any:
        if is_stored(whole) or axes.role is not Role.WEIGHT or axes.stacked != ("expert",):
            return whole
        placement = self.execution.placement_of_part(axes, own)
        if any(placement.gathered + placement.taken) or placement.entered:
            return whole
        return ReadInStack(part=whole, stack=stack, layer=layer, dtype=whole.dtype)

    def _gather_weight(self, x: jax.Array, axes: Axes) -> jax.Array | Gathered:
        placement = self.execution.placement_of_part(axes, x)
        dtype = x.dtype if axes.role in (Role.PART, Role.FROZEN) else self.execution.dtype
        if axes.role is Role.BUFFER:
            dtype = jnp.promote_types(x.dtype, jnp.float32)
        with jax.named_scope("weights"):
            x = InnerGroup(placement.entered, reduce_dtype=self.execution.reduce_dtype).enter_parameters(x)
        dims, first = placement.gathered, placement.gathered_first
        if first is not None:
            x, dims = jnp.moveaxis(x, first, 0), (dims[first], *dims[:first], *dims[first + 1 :])
        whole = gather_weight(x, dims, self.summed_axes(placement), dtype, self.execution.reduce_dtype, placement.taken)
        return whole if first is None else Gathered(values=whole, dim=first, dtype=whole.dtype)

    def layer(self, blocks: PyTree, index: jax.Array) -> PyTree:
        """Return layer `index` of stacked blocks, for a forward pass without gradients.

        Each array is as `gather` returns it, except that a weight that is not gathered is an `InStack`, or a
        `FrozenInStack`. The arrays of other containers are sliced, since their methods expect arrays.
        """

        def stays(x: jax.Array, axes: Axes) -> bool:
            placement = self.execution.placement_of_part(axes, x)
            return not any(placement.gathered + placement.taken)

        def field(x: Any, axes: Any) -> Any:
            if isinstance(axes, Axes) and axes.is_matrix and stays(x, axes):
                return InStack(stack=x, layer=index, dtype=jnp.dtype(self.execution.dtype))
            if isinstance(x, Composed):
                return jax.tree.map(field, x, axes, is_leaf=lambda part: part is not x and is_stored(part))
            if isinstance(x, Frozen) and all(jax.tree.leaves(jax.tree.map(stays, x, axes))):
                return FrozenInStack(stack=x, layer=index, dtype=x.dtype)
            sliced = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), x)
            return jax.tree.map(self._gather_weight, sliced, axes)

        return jax.tree.map(field, blocks, axes_of(blocks), is_leaf=is_stored)

    def vary(self, module: PyTree) -> PyTree:
        """Cast parameters to vary over all axes that split tokens. Call it once, before layers are scanned.

        Otherwise JAX sums the gradient of a replicated parameter over devices inside the backward loop, once per layer
        and micro-step.
        """
        return jax.tree.map(lambda x: vary(x, self.execution.token_axes) if eqx.is_array(x) else x, module)

    def summed_axes(self, placement: Placement) -> tuple[str, ...]:
        """Return the mesh axes that the gradient of a gathered parameter is summed over.

        These are the axes along which devices use the parameter on different tokens: those that split tokens and, for
        experts whose weights move, those that split experts. A strategy gives each of the latter's devices different
        tokens, even where tokens are the same on all.
        """
        extra = self.execution.expert_axes if self.execution.moves_weights and "expert" in placement.axes.names else ()
        return self.execution.token_axes + tuple(axis for axis in extra if axis not in self.execution.token_axes)


class Held(NamedTuple):
    """A gathered weight, and the zeros whose gradient is the weight's."""

    value: Float[Array, "..."]
    total: Float[Array, "..."]


def hold(weights: PyTree, dtype: DTypeLike) -> PyTree:
    """Return gathered weights with `Held` in place of each array of floats.

    Their gradients are summed in `dtype`, or in that of the weights if it is wider.
    """

    def leaf(x: Array) -> Array | Held:
        if not eqx.is_inexact_array(x):
            return x
        wider = max(jnp.dtype(dtype), x.dtype, key=lambda each: each.itemsize)
        return _hold(x, vary_like(jnp.zeros(x.shape, wider), x))

    return jax.tree.map(leaf, weights)


def use(held: PyTree) -> PyTree:
    """Return the weights that `hold` got."""
    return jax.tree.map(lambda x: _use(*x) if isinstance(x, Held) else x, held, is_leaf=lambda x: isinstance(x, Held))


@jax.custom_vjp
def _hold(x: Array, zeros: Array) -> Held:
    return Held(x, zeros)


def _hold_forward(x: Array, zeros: Array) -> tuple[Held, None]:
    return Held(x, zeros), None


def _hold_backward(_: None, cotangents: Held) -> tuple[Array, None]:
    return cotangents.total.astype(cotangents.value.dtype), None


@jax.custom_vjp
def _use(x: Array, total: Array) -> Array:
    return x


def _use_forward(x: Array, total: Array) -> tuple[Array, Array]:
    return x, jnp.zeros((0,), total.dtype)


def _use_backward(like: Array, cotangent: Array) -> tuple[None, Array]:
    return None, cotangent.astype(like.dtype)


_hold.defvjp(_hold_forward, _hold_backward)
_use.defvjp(_use_forward, _use_backward)
