"""Collectives inside `jax.shard_map(check_vma=True)`, typed by the mesh axes that values vary over.

"Varies over an axis" is JAX's term: each device along it may hold another value. A value that does not vary over an
axis is the same on all its devices, and a type says so. Every function takes axes of more than one device only (or
none), so that each collective written here is one that runs.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

MeshAxes = tuple[str, ...]

# Names for rematerialisation: gathered weights are never saved; gathered tokens and what kernels return may be.
GATHERED_WEIGHT = "gathered_weight"
GATHERED_TOKENS = "gathered_tokens"
GROUPED_MATMUL = "grouped_matmul"
ATTENTION = "attention"


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes that `x` varies over."""
    return jax.typeof(x).mat.varying


def vary(x: Array, axes: Sequence[str]) -> Array:
    """`x`, typed as varying over `axes` too (a cast of an axis that already varies would be an error)."""
    new = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, new, to="varying") if new else x


def vary_like(x: Array, *others: Array) -> Array:
    """`x`, typed as varying wherever one of `others` does: for the initial carry of a scan."""
    return vary(x, sorted(frozenset().union(*(varying_axes(o) for o in others))))


def psum(x: Array, axes: MeshAxes) -> Array:
    """Sum over devices along `axes`."""
    return lax.psum(vary(x, axes), axes) if axes else x


def psum_tree(tree: PyTree, axes: MeshAxes) -> PyTree:
    """Sum every array of `tree` over devices along `axes`, in its own dtype: integers are exact.

    One collective an array, which compilers for TPU and GPU join. Differentiable in the floats.
    """
    return lax.psum(jax.tree.map(lambda x: vary(x, axes), tree), axes) if axes else tree


def split_by_tokens(axes: MeshAxes, tokens: MeshAxes) -> list[tuple[bool, MeshAxes]]:
    """`axes` cut where they change between splitting tokens and not, each part with whether it splits tokens."""
    return [(split, tuple(part)) for split, part in itertools.groupby(axes, key=lambda axis: axis in tokens)]


def gather(x: Array, axes: MeshAxes, dim: int, *, tokens: MeshAxes) -> Array:
    """Join the blocks of `x` along `axes`, major to minor, in dimension `dim`.

    Over axes that split `tokens` the result varies, as what is computed from it will differ; its transpose is a
    reduce-scatter. Over other axes every device goes on with the same values: the result does not vary, and the
    transpose is a slice. One all-gather, except where the two kinds mix: then one a kind, minor axes first.
    """
    for split, part in reversed(split_by_tokens(axes, tokens)):
        x = lax.all_gather(x, part, axis=dim, tiled=True, to="varying" if split else "invarying")
    return x


def _scatter(cotangent: Array, axes: MeshAxes, dim: int, tokens: MeshAxes) -> Array:
    """The transpose of `gather`."""
    for split, part in split_by_tokens(axes, tokens):
        if split:
            cotangent = lax.psum_scatter(cotangent, part, scatter_dimension=dim, tiled=True)
        else:
            size = cotangent.shape[dim] // lax.axis_size(part)
            cotangent = lax.dynamic_slice_in_dim(cotangent, lax.axis_index(part) * size, size, axis=dim)
    return cotangent


def gather_tokens(x: Array, axes: MeshAxes, dim: int, *, tokens: MeshAxes) -> Array:
    """`gather` of what belongs to tokens; the result carries a checkpoint name, so that a policy may save it."""
    return checkpoint_name(gather(x, axes, dim, tokens=tokens), GATHERED_TOKENS) if axes else x


def gather_weight(
    x: Array, dims: tuple[MeshAxes, ...], tokens: MeshAxes, dtype: DTypeLike, reduce_dtype: DTypeLike
) -> Array:
    """A stored weight made whole: dimension i is gathered over `dims[i]`, the last dimension first.

    The weight is cast to `dtype` before it travels; its gradient is cast to `reduce_dtype` before it is summed. The
    result carries a checkpoint name, and rematerialisation never saves it.
    """
    if not any(dims):
        return x.astype(dtype)
    whole = _gather_weight(dims, tokens, jnp.dtype(dtype), jnp.dtype(reduce_dtype), x)
    return checkpoint_name(whole, GATHERED_WEIGHT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather_weight(dims, tokens, dtype, reduce_dtype, x):
    del reduce_dtype
    x = x.astype(dtype)
    for dim, axes in reversed(list(enumerate(dims))):
        x = gather(x, axes, dim, tokens=tokens)
    return x


def _gather_weight_forward(dims, tokens, dtype, reduce_dtype, x):
    # The backward pass needs nothing of the input but its dtype, which an empty array carries.
    return _gather_weight(dims, tokens, dtype, reduce_dtype, x), jnp.zeros((0,), x.dtype)


def _gather_weight_backward(dims, tokens, dtype, reduce_dtype, like, cotangent):
    del dtype
    cotangent = cotangent.astype(reduce_dtype)
    for dim, axes in enumerate(dims):
        cotangent = _scatter(cotangent, axes, dim, tokens)
    return (cotangent.astype(like.dtype),)


_gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)
