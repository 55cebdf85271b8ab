"""The state between `dispatch` and `combine` of the strategies that only sort assignments by expert."""

from typing import NamedTuple

from jaxtyping import Array, Float

from moezoo.kernels.permute import Plan


class SortState(NamedTuple):
    """The order of the rows, and the gates of the sorted tokens."""

    plan: Plan
    gates: Float[Array, "tokens k"]
