"""What `combine` needs of `dispatch` in the strategies that sort assignments by expert and do nothing else."""

from typing import NamedTuple

from jaxtyping import Array, Float

from moezoo.kernels.permute import Plan


class SortState(NamedTuple):
    """The order of the rows, and the gates of the tokens that `plan` was made of."""

    plan: Plan
    gates: Float[Array, "tokens k"]
