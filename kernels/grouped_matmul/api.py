"""`grouped_matmul`: the contract that every backend keeps."""

from typing import Literal, get_args

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moezoo.collectives import GROUPED_MATMUL, vary_like
from moezoo.errors import UserError, nearest
from moezoo.kernels.grouped_matmul.blocked import blocked
from moezoo.kernels.grouped_matmul.reference import reference

Implementation = Literal["reference", "blocked"]
_BACKENDS = {"reference": reference, "blocked": blocked}
assert set(_BACKENDS) == set(get_args(Implementation))


def grouped_matmul(
    rows: Float[Array, "rows inputs"],
    weights: Float[Array, "groups inputs outputs"],
    group_sizes: Int[Array, " groups"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "rows outputs"]:
    """Multiply each run of rows by its group's matrix.

    Rows lie group after group; `group_sizes` (int32) says how many each has, none included, and sums to at most the
    number of rows. Rows beyond that sum come out exactly zero, whatever they hold, and take no part in any gradient; a
    group without rows has a gradient of exactly zero. Products are accumulated in float32; the result has the dtype of
    `rows`. Inside `shard_map` the result varies wherever an operand does.

    `implementation` names a backend: `reference` (every group on every row: naive, to compare with) or `blocked`
    (portable; stops at the sum of the group sizes). None takes `blocked`, which serves every platform.

    Raises `UserError` for a backend that does not exist.
    """
    name = implementation or "blocked"
    if name not in _BACKENDS:
        raise UserError(f"grouped_matmul: no implementation '{name}'; {nearest(name, _BACKENDS)}")
    # Backends have custom gradients, which must vary exactly as their operands: make all three vary alike first, and
    # the transpose of that cast is the sum over devices that a replicated operand needs.
    result = _BACKENDS[name](
        vary_like(rows, weights, group_sizes),
        vary_like(weights, rows, group_sizes),
        vary_like(group_sizes, rows, weights),
    )
    # Rematerialisation never saves what a loop returns, unless it has a name.
    return checkpoint_name(result, GROUPED_MATMUL)
