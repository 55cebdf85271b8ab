"""The contract of a backend of attention, and what it returns."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from moezoo.parallel.context_parallel import Coordinates as Coordinates
from moezoo.parallel.context_parallel import Interval as Interval
from moezoo.parallel.context_parallel import Reach as Reach
from moezoo.parallel.context_parallel import first_seen
from moezoo.parallel.kernels import RunsOn, Target, anywhere, lacks

# The log-sum-exp of a query that sees no key: finite, so that no gradient is NaN.
NOTHING = -1e30
# The largest score of a query that sees no key: below every score and above `NOTHING`, the score of unseen keys. So
# exp(score - highest) is 0 for unseen keys.
FLOOR = NOTHING / 2

Queries = Float[Array, "batch queries kv_heads group head_dim"]
Keys = Float[Array, "batch keys kv_heads head_dim"]
Values = Float[Array, "batch keys kv_heads value_dim"]
Results = Float[Array, "batch queries kv_heads group value_dim"]
PerQuery = Float[Array, "batch queries kv_heads group"]
# The factor of scores q . k: a number, or a float32 scalar.
Scale = float | Float[Array, ""]


class Operands(eqx.Module):
    """What attention reads: queries, and the keys and values of which each query sees some.

    A query sees a key of its own document (equal segments) at its own position or up to `window` - 1 positions before,
    or as far back as its stretch begins. The order of tokens in the arrays means nothing.

    Attributes:
        q: The queries, in the dtype that layers compute in; `group` query heads share a key head.
        k: The keys, in the dtype of `q`. Those that a query does not see must still be finite, and so must their
            products with it.
        v: The values, in the dtype of `q` and as finite as keys; `value_dim` may differ from `head_dim`.
        queries: The coordinates of queries, int32 [batch, queries] each.
        keys: The coordinates of keys, int32 [batch, keys] each.
        window: The number of positions that a query sees, its own included; `Stretches`; None for all up to its own. A
            part of the tree's structure, not a leaf.
        seen: The keys that each query sees, if keys are sorted by segment, then position; they follow from the
            coordinates and the window (`moezoo.kernels.attention.intervals`). None if nothing is known of their order.
    """

    q: Queries
    k: Keys
    v: Values
    queries: Coordinates
    keys: Coordinates
    window: Reach = eqx.field(static=True)
    seen: Interval | None = None


class Attended(NamedTuple):
    """What `attend` returns.

    Attributes:
        result: The averages, in the dtype of the values.
        logsumexp: The log-sum-exp of each query's scores, float32; `NOTHING` for a query that sees no key.
    """

    result: Results
    logsumexp: PerQuery


class Attend(Protocol):
    """Compute `moezoo.kernels.attention.attend` without sinks; differentiable in q, k, v and `scale` by both results.

    All operands vary over the same mesh axes. `attend` calls it only with at least one query and one key.
    """

    def __call__(self, operands: Operands, scale: Scale) -> Attended: ...


class Softmax(NamedTuple):
    """What attention over some keys gives for each query, from which results over more keys follow.

    Attributes:
        result: The averages over these keys, float32 or the dtype of the values; 0 for a query that sees none.
        highest: The largest score, float32; `FLOOR` for a query that sees no key.
        total: The sum of exp(score - `highest`), float32; any number above 0 for a query that sees no key.
    """

    result: Results
    highest: PerQuery
    total: PerQuery


class AttendPart(Protocol):
    """Attend to a part of the keys, without a gradient of its own. The queries have been scaled."""

    def __call__(self, operands: Operands) -> Softmax: ...


class PartGradients(Protocol):
    """Return the gradients by q, k and v that go through a part of the keys, in their dtypes.

    `whole` is the softmax over all keys, and `back` the gradient by its result, in the dtype of the values.
    """

    def __call__(self, operands: Operands, whole: Softmax, back: Results) -> tuple[Array, Array, Array]: ...


class Backend(NamedTuple):
    """A backend.

    Attributes:
        attend: The function.
        part: Attention over a part of the keys; None if the backend has none, and then no ring takes it.
        part_gradients: Its gradients.
        runs_on: Whether the backend can be traced and run for a target.
        dtypes: The names of the dtypes of operands that the backend takes; None for all.
        sorted_keys: Whether the backend needs `Operands.seen`.
        widest: The largest head that the backend takes, of keys and of values; None for any.
        for_gpu: A function of the backend and a known GPU: the same backend with sizes of blocks for it. None if it has
            none to choose.
    """

    attend: Attend
    part: AttendPart | None = None
    part_gradients: PartGradients | None = None
    runs_on: RunsOn = anywhere
    dtypes: tuple[str, ...] | None = None
    sorted_keys: bool = False
    widest: int | None = None
    for_gpu: "Callable[[Backend, Target], Backend] | None" = None

    def takes(self, target: Target, dtype: DTypeLike, is_sorted: bool, width: int) -> bool:
        """Return whether the backend runs on the target with operands of this dtype, keys in a known order, and heads.

        `width` is the larger size of a head's keys and values.
        """
        fits = self.widest is None or width <= self.widest
        return lacks(self, target, dtype) is None and (is_sorted or not self.sorted_keys) and fits


def sees(queries: Coordinates, keys: Coordinates, window: Reach) -> Bool[Array, "*batch queries keys"]:
    """Return which queries see which keys."""
    at, key_at = queries.position[..., :, None], keys.position[..., None, :]
    seen = (queries.segment[..., :, None] == keys.segment[..., None, :]) & (key_at <= at)
    return seen if window is None else seen & (key_at >= first_seen(at, window))
