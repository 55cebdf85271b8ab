"""What a backend of `attend` is, and what it returns."""

from typing import NamedTuple, Protocol

from jaxtyping import Array, Float

from moezoo.parallel.context_parallel import Place as Place
from moezoo.parallel.kernels import RunsOn, anywhere

# The log-sum-exp of a query that sees no key: finite, so that no gradient is NaN.
NOTHING = -1e30


class Attended(NamedTuple):
    """`result`, in the dtype of the values; `logsumexp` of each query's scores, `NOTHING` where it sees no key."""

    result: Float[Array, "batch queries kv_heads group value_dim"]
    logsumexp: Float[Array, "batch queries kv_heads group"]


class Attend(Protocol):
    """`moezoo.kernels.attention.attend` without sinks; differentiable in q, k, v and `scale` by both results."""

    def __call__(
        self,
        q: Float[Array, "batch queries kv_heads group head_dim"],
        k: Float[Array, "batch keys kv_heads head_dim"],
        v: Float[Array, "batch keys kv_heads value_dim"],
        queries: Place,
        keys: Place,
        *,
        scale: float | Float[Array, ""],
        window: int | None,
    ) -> Attended: ...


class Backend(NamedTuple):
    """`runs_on`: where the backend can be traced and run."""

    attend: Attend
    runs_on: RunsOn = anywhere
