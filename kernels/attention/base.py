"""The contract of a backend of `attend`, and what it returns."""

from typing import NamedTuple, Protocol

from jaxtyping import Array, Float

from moezoo.parallel.context_parallel import Place as Place
from moezoo.parallel.kernels import RunsOn, anywhere

# The log-sum-exp of a query that sees no key: finite, so that no gradient is NaN.
NOTHING = -1e30


class Attended(NamedTuple):
    """What `attend` returns.

    Attributes:
        result: The averages, in the dtype of the values.
        logsumexp: The log-sum-exp of each query's scores, float32; `NOTHING` for a query that sees no key.
    """

    result: Float[Array, "batch queries kv_heads group value_dim"]
    logsumexp: Float[Array, "batch queries kv_heads group"]


class Attend(Protocol):
    """Compute `moezoo.kernels.attention.attend` without sinks; differentiable in q, k, v and `scale` by both results.

    All arrays except `scale` vary over the same mesh axes. `attend` calls it only with at least one query and one key.
    """

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
    """A backend.

    Attributes:
        attend: The function.
        runs_on: Return whether the backend can be traced and run for a target.
    """

    attend: Attend
    runs_on: RunsOn = anywhere
