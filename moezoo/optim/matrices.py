"""The matrices of a model's arrays, how each becomes whole on a device that orthogonalises it, and how that is done.

Annotations state the matrices: axes before the comma number them, and the arrow separates inputs from outputs. A matrix
whose rows and columns are not split is whole already. Otherwise the matrices of one layer (one period of a pattern)
that have equal shapes and equal splits go together, one split dimension after the other, over its n devices:

| matrices on a device | collectives | matrices that a device orthogonalises |
|---|---|---|
| 1 | an all-gather; afterwards each device keeps its block | 1, the same on all n devices |
| m > 1 | an all-to-all that gives each device whole matrices, and one back | m / n, rounded up |

With m > 1 an all-gather would make every device repeat all m products. With m = 1 an all-to-all would spare no time,
since one device would compute while the others wait, and it would move more.

Orthogonalising is Newton-Schulz iteration, which finds the nearest matrix with orthonormal rows, approximately, by
matrix products alone.

Five steps of an odd polynomial drive every singular value of X towards 1:

    X <- X / (|X| + 1e-7)                          |X| is the Frobenius norm
    X <- a X + (b A + c A A) X,  A = X X^T         five times, (a, b, c) = (3.4445, -4.7750, 2.0315)

Source: Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks". Singular values above 1/500 of
the Frobenius norm come out between 0.5 and 1.3; smaller ones are enlarged by up to a^5 = 485.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from moezoo.parallel.axes import Axes, Stack
from moezoo.parallel.collectives import MeshAxes, gather, own_block
from moezoo.parallel.placement import Placement

STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7


def orthogonalise(x: Float[Array, "matrices rows columns"]) -> Float[Array, "matrices rows columns"]:
    """Return the orthogonalised matrices, in the dtype of `x`; a matrix of zeros stays zero.

    Products are computed in this dtype, norms in float32. With fewer rows than columns it is faster than
    with their transpose: A is rows x rows.
    """
    # On a TPU the default precision of float32 products is that of bfloat16.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def times(x: Array, y: Array) -> Array:
        return jnp.matmul(x, y, precision=precision)

    def step(_: Any, x: Array) -> Array:
        a, b, c = _COEFFICIENTS
        square = times(x, x.mT)
        return a * x + times(b * square + c * times(square, square), x)

    norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum((1, 2), keepdims=True))
    return lax.fori_loop(0, STEPS, step, (x.astype(jnp.float32) / (norm + _EPSILON)).astype(x.dtype))


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of the products for one matrix."""
    return STEPS * (4 * rows**2 * columns + 2 * rows**3)


Ways = Callable[[MeshAxes], int]
_HEADS = ("heads", "kv_heads", "key_heads", "value_heads", "state_groups", "state_heads")
_LATENTS = ("q_lora", "kv_lora")


class Kind(NamedTuple):
    """What matrices must have in common to be orthogonalised by one batched product.

    Attributes:
        rows: The number of rows of the whole matrix; it does not exceed `columns`.
        columns: The number of its columns.
        row_axes: The mesh axes that the rows are split over.
        column_axes: The mesh axes that the columns are split over.
        spread: All mesh axes along which devices store different parts of the array.
    """

    rows: int
    columns: int
    row_axes: MeshAxes
    column_axes: MeshAxes
    spread: frozenset[str]


class View(NamedTuple):
    """One layer's part of an array as matrices [matrices, rows, columns].

    Attributes:
        order: The array's dimensions in the order matrices, rows, columns.
        shape: The shape of the matrices on this device: their number, then rows and columns before `turned`.
        turned: Whether inputs are columns, so that rows do not outnumber columns.
        kind: What they have in common with others.
    """

    order: tuple[int, ...]
    shape: tuple[int, int, int]
    turned: bool
    kind: Kind

    def matrices(self, x: Array) -> Float[Array, "matrices rows columns"]:
        """Return the array `x` as matrices."""
        matrices = x.transpose(self.order).reshape(self.shape)
        return matrices.mT if self.turned else matrices

    def array(self, matrices: Float[Array, "matrices rows columns"], like: Array) -> Array:
        """Return matrices as an array with the dimensions of `like`."""
        matrices = matrices.mT if self.turned else matrices
        ordered = matrices.reshape([like.shape[dim] for dim in self.order])
        return ordered.transpose([self.order.index(dim) for dim in range(like.ndim)])


class Exchange(NamedTuple):
    """One split dimension of a batch of matrices becomes whole.

    Attributes:
        collective: As in the table above.
        axes: The mesh axes that the dimension is split over.
        ways: The number of devices along them.
        dim: The dimension: 1 for rows, 2 for columns.
        matrices: How many matrices each device gives; in an all-to-all, zeros fill them up to a multiple of `ways`.
    """

    collective: Literal["all_gather", "all_to_all"]
    axes: MeshAxes
    ways: int
    dim: int
    matrices: int


def view(placement: Placement, shape: Sequence[int], per_head: bool, ways: Ways) -> View:
    """Return how one layer's array is read as matrices.

    Up-projections of latents have one matrix per head. Other weights to heads have one per head if `per_head` is set.

    Args:
        placement: The placement of the weight; its first dimension may be `layer`, which `shape` does not have.
        shape: The shape of this device's part.
        per_head: As above.
        ways: A function that returns the number of devices along mesh axes.
    """
    axes, stored = placement.axes, placement.stored
    if "layer" in axes.stacked:
        axes, stored = Axes(axes.role, axes.stacked[1:], axes.inputs, axes.outputs), stored[1:]
    names, first = axes.names, len(axes.stacked)
    dims = range(len(names))
    heads = [dim for dim in dims[first + len(axes.inputs) :] if names[dim] in _HEADS]
    if not (per_head or set(axes.inputs) <= set(_LATENTS)) or len(heads) == len(axes.outputs):
        heads = []
    stacked = [*dims[:first], *heads]
    inputs = [*dims[first : first + len(axes.inputs)]]
    outputs = [dim for dim in dims if dim not in (*stacked, *inputs)]

    def size(group: list[int]) -> int:
        return math.prod(shape[dim] for dim in group)

    def over(group: list[int]) -> MeshAxes:
        # Where a dimension other than the first is split, gathered rows are in another order than the array's. The
        # orthogonalised matrix then has its rows in that order too, and each device gets its own back.
        return tuple(axis for dim in group for axis in stored[dim])

    sides = [(size(group) * ways(over(group)), over(group)) for group in (inputs, outputs)]
    # Rows are the shorter side. Of sides of equal length they are the split one, if only one is split.
    lengths_then_whole = [(length, not axes) for length, axes in sides]
    turned = lengths_then_whole[0] > lengths_then_whole[1]
    (rows, row_axes), (columns, column_axes) = reversed(sides) if turned else sides
    kind = Kind(rows, columns, row_axes, column_axes, frozenset(placement.mesh_axes))
    return View((*stacked, *inputs, *outputs), (size(stacked), size(inputs), size(outputs)), turned, kind)


def exchanges(kind: Kind, count: int, ways: Ways) -> tuple[list[Exchange], int]:
    """Return how `count` matrices of a kind become whole, and how many of them a device then has, zeros included."""
    found: list[Exchange] = []
    for dim, axes in ((1, kind.row_axes), (2, kind.column_axes)):
        if axes:
            gathers = count == 1
            found.append(Exchange("all_gather" if gathers else "all_to_all", axes, ways(axes), dim, count))
            count = 1 if gathers else -(-count // ways(axes))
    return found, count


def _orthogonalise(batch: Float[Array, "matrices rows columns"], route: list[Exchange]) -> Array:
    """Return the device's parts of the orthogonalised matrices, given its parts of the matrices."""
    if not route:
        return orthogonalise(batch)
    (collective, axes, ways, dim, count), *later = route
    if collective == "all_gather":
        return own_block(_orthogonalise(gather(batch, axes, dim, tokens=()), later), axes, dim)
    # Without the barrier XLA's CPU backend gives turned matrices another memory layout than the rest of the exchange
    # and then refuses it (jax 0.10).
    filled = lax.optimization_barrier(jnp.pad(batch, ((0, -count % ways), (0, 0), (0, 0))))
    mine = _orthogonalise(lax.all_to_all(filled, axes, 0, dim, tiled=True), later)
    return lax.all_to_all(mine, axes, dim, 0, tiled=True)[:count]


def _by_kind(views: Mapping[Any, View]) -> dict[Kind, list[Any]]:
    """Return the keys of the views of each kind."""
    found: dict[Kind, list[Any]] = {}
    for key, each in views.items():
        found.setdefault(each.kind, []).append(key)
    return found


@jax.named_scope("orthogonalise")
def orthogonalised(
    placements: PyTree, make: Callable[..., Array], trees: tuple[PyTree, ...], dtype: DTypeLike, per_head: bool
) -> PyTree:
    """Return the orthogonalised matrices of a model, float32, laid out as the parameters.

    They are scaled to a root mean square of about 0.2. A stack runs as one scan over its layers.

    Args:
        placements: The `Placement` of each array.
        make: A function of one layer's array of each of `trees` that returns the array to orthogonalise.
        trees: Trees like `placements`, of this device's parts; an array that is None in them is left out.
        dtype: What matrices travel and are multiplied in.
        per_head: As in `view`.
    """

    def layer(placements: PyTree, trees: tuple[PyTree, ...]) -> PyTree:
        leaves, structure = jax.tree.flatten(placements)
        columns = [structure.flatten_up_to(tree) for tree in trees]
        results: list[Array | None] = [None] * len(leaves)
        chosen = [i for i, x in enumerate(columns[0]) if x is not None]
        made = {i: make(*(column[i] for column in columns)).astype(dtype) for i in chosen}
        views = {i: view(leaves[i], made[i].shape, per_head, _axis_size) for i in chosen}
        for kind, members in _by_kind(views).items():
            batch = jnp.concatenate([views[i].matrices(made[i]) for i in members])
            route, _ = exchanges(kind, len(batch), _axis_size)
            done = _orthogonalise(batch, route).astype(jnp.float32) * (0.2 * math.sqrt(kind.columns))
            for i in members:
                part, done = done[: views[i].shape[0]], done[views[i].shape[0] :]
                results[i] = views[i].array(part, made[i])
        return jax.tree.unflatten(structure, results)

    def part(placements: PyTree, *trees: PyTree) -> PyTree:
        if not _is_stack(placements) or not jax.tree.leaves(trees):
            return layer(placements, trees)
        _, done = lax.scan(lambda _, layers: (None, layer(placements, layers)), None, trees)
        return done

    return jax.tree.map(part, placements, *trees, is_leaf=_is_stack)


def _axis_size(axes: MeshAxes) -> int:
    return lax.axis_size(axes) if axes else 1


def orthogonal_flops(placements: PyTree, parameters: PyTree, per_head: bool, ways: Ways) -> Iterator[int]:
    """Return the FLOPs of `orthogonalised` on each device, kind by kind, for whole arrays or their shapes."""
    parts, structure = jax.tree.flatten(placements, is_leaf=_is_stack)
    for part, arrays in zip(parts, structure.flatten_up_to(parameters), strict=True):
        leaves, inside = jax.tree.flatten(part)
        views: dict[int, View] = {}
        for number, (placement, x) in enumerate(zip(leaves, inside.flatten_up_to(arrays), strict=True)):
            if x is not None:
                local = [size // ways(over) for size, over in zip(x.shape, placement.stored, strict=True)]
                views[number] = view(placement, local[1:] if _is_stack(part) else local, per_head, ways)
        for kind, members in _by_kind(views).items():
            _, count = exchanges(kind, sum(views[each].shape[0] for each in members), ways)
            times = part.count if _is_stack(part) else 1
            yield times * count * newton_schulz_flops(kind.rows, kind.columns)


def _is_stack(x: Any) -> bool:
    return isinstance(x, Stack)
