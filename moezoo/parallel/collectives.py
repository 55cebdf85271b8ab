"""Collectives for code inside `jax.shard_map(check_vma=True)`.

JAX's types record the mesh axes that a value *varies* over. A value varies over an axis if devices along that axis may
hold different values; otherwise all devices along it hold the same value. Each function states what its result varies
over, because the transposes that JAX makes for gradients depend on it.

Arguments `axes` name only mesh axes of more than one device, or none (`moezoo.parallel.rules.live`). Then every
collective in the code is one that runs.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

MeshAxes = tuple[str, ...]

# Checkpoint names. No policy saves gathered weights. Policies may save gathered tokens and results of kernels, and
# offload a layer's input to the host's memory.
GATHERED_WEIGHT = "gathered_weight"
GATHERED_TOKENS = "gathered_tokens"
GROUPED_MATMUL = "grouped_matmul"
EXPERT_BIAS = "expert_bias"
ATTENTION = "attention"
LAYER_INPUT = "layer_input"


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes that `x` varies over."""
    return jax.typeof(x).mat.varying


def vary(x: Array, axes: Sequence[str]) -> Array:
    """Cast `x` to vary over `axes` too; axes that it varies over already are allowed. No collective runs.

    The transpose of the cast is a psum over the new axes.
    """
    new = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, new, to="varying") if new else x


def vary_like(x: Array, *others: Array) -> Array:
    """Cast `x` to vary over every axis that one of `others` varies over, as the initial carry of a scan must."""
    return vary(x, sorted(frozenset().union(*(varying_axes(o) for o in others))))


def psum(tree: PyTree, axes: MeshAxes) -> PyTree:
    """Sum every array of `tree` over the devices along `axes`, each in its own dtype, so that integers are exact.

    One psum per array; compilers for TPU and GPU combine them. Differentiable in arrays of floats. The results do not
    vary over `axes`. An array need not vary either: a value that is the same on all n devices counts n times.
    """
    return lax.psum(jax.tree.map(lambda x: vary(x, axes), tree), axes) if axes else tree


def split_by_tokens(axes: MeshAxes, tokens: MeshAxes) -> list[tuple[bool, MeshAxes]]:
    """Split `axes` into runs that all split tokens or all do not; return each run with whether it splits tokens."""
    return [(split, tuple(part)) for split, part in itertools.groupby(axes, key=lambda axis: axis in tokens)]


def gather(x: Array, axes: MeshAxes, dim: int, *, tokens: MeshAxes) -> Array:
    """Concatenate the blocks of `x` on the devices along `axes` in dimension `dim`, the first axis outermost.

    The collectives are one all-gather per run of axes that split tokens, or do not (`split_by_tokens`): usually one in
    all. The last run is gathered first.

    | axes | the result | the transpose |
    |---|---|---|
    | split tokens | varies over them: devices use it on different tokens | reduce-scatter |
    | do not split tokens | does not vary: all devices compute the same from it | slice |

    Args:
        x: The local block. It varies over `axes`.
        axes: The mesh axes that dimension `dim` is split over.
        dim: The dimension to concatenate in.
        tokens: The mesh axes that split tokens.
    """
    for split, part in reversed(split_by_tokens(axes, tokens)):
        x = lax.all_gather(x, part, axis=dim, tiled=True, to="varying" if split else "invarying")
    return x


def own_block(x: Array, axes: MeshAxes, dim: int, blocks: int | None = None) -> Array:
    """Return this device's block of a whole `x` that is cut over the devices along `axes` in dimension `dim`.

    With fewer `blocks` than devices, a divisor of their number, devices next to each other have the same block.
    """
    start, size = _own_span(x.shape[dim], axes, blocks)
    return lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def _own_span(length: int, axes: MeshAxes, blocks: int | None) -> tuple[Array, int]:
    """Return where this device's block of a dimension starts, and its size."""
    devices = lax.axis_size(axes)
    blocks = devices if blocks is None else blocks
    size = length // blocks
    return lax.axis_index(axes) // (devices // blocks) * size, size


def _scatter(cotangent: Array, axes: MeshAxes, dim: int, tokens: MeshAxes) -> Array:
    """Apply the transpose of `gather`."""
    for split, part in split_by_tokens(axes, tokens):
        if split:
            cotangent = lax.psum_scatter(cotangent, part, scatter_dimension=dim, tiled=True)
        else:
            cotangent = own_block(cotangent, part, dim)
    return cotangent


def gather_tokens(x: Array, axes: MeshAxes, dim: int, *, tokens: MeshAxes) -> Array:
    """Call `gather` on data of tokens; the result has the checkpoint name `GATHERED_TOKENS`: a policy may save it."""
    return checkpoint_name(gather(x, axes, dim, tokens=tokens), GATHERED_TOKENS) if axes else x


class InnerGroup(NamedTuple):
    """The devices that share an inner dimension of a layer: heads, the width of an MLP, or the vocabulary.

    Each has the same tokens and its part of the weights. Activations outside of the layer's inner part are typed as the
    same on all of them.

    Attributes:
        axes: The mesh axes that the dimension stays split over; empty for one device.
        size: The number of devices along `axes`.
        reduce_dtype: What gradients of parameters are summed in.
    """

    axes: MeshAxes = ()
    size: int = 1
    reduce_dtype: DTypeLike = jnp.float32

    @property
    def index(self) -> Array | int:
        """This device's number in the group."""
        return lax.axis_index(self.axes) if self.axes else 0

    def enter(self, tree: PyTree) -> PyTree:
        """Cast activations to vary over the group, before they meet split weights. The transpose is one psum each."""
        return jax.tree.map(lambda x: vary(x, self.axes), tree)

    def enter_parameters(self, tree: PyTree) -> PyTree:
        """Cast parameters that are whole to vary over the group; their gradients are summed in `reduce_dtype`."""

        def leaf(x: Any) -> Any:
            if not eqx.is_inexact_array(x) or set(self.axes) <= varying_axes(x):
                return x
            return vary(x.astype(self.reduce_dtype), self.axes).astype(x.dtype)

        return jax.tree.map(leaf, tree)

    def leave(self, partial: Array) -> Array:
        """Sum partial results over the group, with one psum. The result does not vary over it."""
        return psum(partial, self.axes)

    def largest(self, x: Array) -> Array:
        """Return the largest values on the devices of the group: one pmax, unless `x` does not vary over it.

        The result does not vary over it. It has no gradient.
        """
        return lax.pmax(x, self.axes) if varying_axes(x) & set(self.axes) else x


ALONE = InnerGroup()


@jax.named_scope("weights")
def gather_weight(
    x: Array,
    dims: tuple[MeshAxes, ...],
    tokens: MeshAxes,
    dtype: DTypeLike,
    reduce_dtype: DTypeLike,
    taken: tuple[MeshAxes, ...] = (),
) -> Array:
    """Gather a stored weight: dimension i over `dims[i]`, the last dimension first, each as `gather` does.

    Before, take this device's one of the n parts of a dimension of size n, for the devices along `taken[i]`.

    The backward pass runs the transposes: one reduce-scatter per all-gather over axes that split tokens, and one psum
    over `taken[i]` of what all devices store. Weights of 8 bits travel as `uint8`, because XLA's CPU backend would
    gather FP8 as FP16. The result has the checkpoint name `GATHERED_WEIGHT`; no policy of rematerialisation saves it.

    Args:
        x: This device's block. It varies over the axes in `dims`.
        dims: The mesh axes that each dimension is gathered over.
        tokens: The mesh axes over which devices use the weight on different tokens.
        dtype: The dtype of the result. The weight is cast to it before it is gathered, or after that if it is wider.
        reduce_dtype: The gradient is cast to this dtype before it is summed, and then to the dtype of `x`.
        taken: For each dimension, mesh axes that `x` does not vary over and the result does; by default none.
    """
    if not any(dims + taken):
        return x.astype(dtype)
    whole = _gather_weight(dims, taken, tokens, jnp.dtype(dtype), jnp.dtype(reduce_dtype), x)
    return checkpoint_name(whole, GATHERED_WEIGHT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _gather_weight(dims, taken, tokens, dtype, reduce_dtype, x):
    del reduce_dtype
    for dim, axes in enumerate(taken):
        x = own_block(vary(x, axes), axes, dim, x.shape[dim]) if axes else x
    travels = x.dtype if x.dtype.itemsize < dtype.itemsize else dtype
    x = x.astype(travels)
    if travels.itemsize == 1:
        x = lax.bitcast_convert_type(x, jnp.uint8)
    for dim, axes in reversed(list(enumerate(dims))):
        x = gather(x, axes, dim, tokens=tokens)
    return (lax.bitcast_convert_type(x, travels) if travels.itemsize == 1 else x).astype(dtype)


def _gather_weight_forward(dims, taken, tokens, dtype, reduce_dtype, x):
    # The backward pass needs only the dtype and the shape of the input; an empty array carries them.
    return _gather_weight(dims, taken, tokens, dtype, reduce_dtype, x), jnp.zeros((0, *x.shape), x.dtype)


def _gather_weight_backward(dims, taken, tokens, dtype, reduce_dtype, like, cotangent):
    del dtype
    cotangent = cotangent.astype(reduce_dtype)
    for dim, axes in enumerate(dims):
        cotangent = _scatter(cotangent, axes, dim, tokens)
    for dim, axes in enumerate(taken):
        if axes:
            length = like.shape[1 + dim]
            start, _ = _own_span(length, axes, length)
            shape = (*cotangent.shape[:dim], length, *cotangent.shape[dim + 1 :])
            zeros = vary_like(jnp.zeros(shape, cotangent.dtype), cotangent)
            cotangent = psum(lax.dynamic_update_slice_in_dim(zeros, cotangent, start, dim), axes)
    return (cotangent.astype(like.dtype),)


_gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)


def unsaved(function: Callable[..., Array], *operands: PyTree) -> Array:
    """Return `function(*operands)`, which rematerialisation never saves: where it is needed again, it is recomputed.

    A checkpoint name alone does not suffice: a policy could still save the unnamed value that the name is attached to.
    """
    return checkpoint_name(_unsaved(function, *operands), GATHERED_WEIGHT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unsaved(function, *operands):
    return function(*operands)


def _unsaved_forward(function, *operands):
    return _unsaved(function, *operands), operands


def _unsaved_backward(function, operands, cotangent):
    return jax.vjp(function, *operands)[1](cotangent)


_unsaved.defvjp(_unsaved_forward, _unsaved_backward)
