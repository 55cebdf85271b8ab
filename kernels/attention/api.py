"""`attend`: the contract that every backend keeps, and the choice of one."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
from jaxtyping import Array, Float

from moezoo.kernels.attention import chunked, reference
from moezoo.kernels.attention.base import Attended, Backend, Place
from moezoo.kernels.attention.partial import add_sinks
from moezoo.parallel.collectives import vary_like
from moezoo.parallel.kernels import Choice, KernelOrder, Target, choose, run

Implementation = Literal["reference", "chunked"]
_BACKENDS: dict[str, Backend] = {"reference": Backend(reference.attend), "chunked": Backend(chunked.attend)}
_RUNS_ON = {name: backend.runs_on for name, backend in _BACKENDS.items()}
assert set(_BACKENDS) == set(get_args(Implementation))


def _own_order(target: Target, queries: int, keys: int) -> Sequence[str]:
    # On accelerators its loops over small blocks have not been timed.
    return ("chunked",) if target.platform == "cpu" and chunked.suits(queries, keys) else ("reference",)


def chosen_backend(target: Target, queries: int, keys: int, names: tuple[str, ...] = ()) -> str:
    """The backend that runs so many queries and keys on `target`: the first of `names`, or of the kernel's own order.

    Raises `UserError` for a name that is no backend, and where none of them runs there.
    """
    return _choose(KernelOrder(names, target), queries, keys)[0][1]


def _choose(implementation: str | KernelOrder | None, queries: int, keys: int) -> Choice:
    return choose("attention", _RUNS_ON, implementation, lambda target: _own_order(target, queries, keys))


def attend(
    q: Float[Array, "batch queries kv_heads group head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    *,
    queries: Place,
    keys: Place,
    scale: float | Float[Array, ""],
    window: int | None,
    sinks: Float[Array, "kv_heads group"] | None = None,
    implementation: str | KernelOrder | None = None,
) -> Attended:
    """Each query's average of values in its own document, at its own position or up to `window` - 1 before.

    Weights are the softmax of `scale` q . k, in float32. The order of tokens does not matter: a query sees a key where
    their segments are equal and their positions say so. `sinks`: scores that every query of a head has besides, of
    values of zero; the log-sum-exp includes them. A query that sees no key gets zero and, without sinks, log-sum-exp
    -1e30. Keys and values that a query does not see must be finite, and so must their products with it.

    Differentiable, in reverse mode and first order, by both results. To join partial results over different keys with
    `join`, leave `sinks` out and give them to the whole.

    `implementation` names a backend, or is the order that `Execution.kernel` gives. Raises `UserError` for a backend
    that does not exist or run here.
    """
    choice = _choose(implementation, q.shape[1], k.shape[1])

    def backend(name: str) -> Callable[..., Attended]:
        return lambda *operands: _BACKENDS[name].attend(*operands, scale=scale, window=window)

    # Backends must agree on what varies; the transpose of the cast sums the gradients of a replicated operand.
    operands = (q, k, v, queries, keys)
    alike = jax.tree.leaves(operands)
    attended = run(choice, backend, *jax.tree.map(lambda x: vary_like(x, *alike), operands))
    return attended if sinks is None else add_sinks(attended, sinks)
