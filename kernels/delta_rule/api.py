"""`delta_rule`: its contract, and the choice of a backend."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.kernels.delta_rule import chunked, reference
from moezoo.kernels.delta_rule.base import Backend, Operands, Recalled, Rule, SpanMap, Start
from moezoo.parallel.collectives import vary_like
from moezoo.parallel.kernels import Chosen, ChosenBackends, KernelOrder, Target, add_backend, choose, passed_over, run

# A new backend is a file, and a name here.
BACKENDS: dict[str, Backend] = {"reference": Backend(reference.rule), "chunked": Backend(chunked.rule)}
# Up to so many tokens are read one by one.
_FEW = 8


def register(name: str, backend: Backend) -> None:
    """Add a backend for this process: `implementation` and `moezoo.Kernels(delta_rule=...)` then take its name.

    Raises `UserError` for what is no backend, and for a name that another backend has.
    """
    add_backend("delta_rule", BACKENDS, name, backend, Backend)


def _own_order(target: Target, tokens: int) -> Sequence[str]:
    del target
    return ("reference",) if tokens <= _FEW else ("chunked",)


def delta_rule(
    operands: Operands, start: Start | None = None, implementation: str | KernelOrder | None = None
) -> Recalled:
    """Answer each query from a state to which every token of the document up to the query's writes its value.

    For each value head, with a state S [key_dim, value_dim] that is zero before the first token of a document:

        S <- exp(decay) S;  S <- S + k (strength (v - S^T k))^T;  o = S^T q

    (Yang et al., 2024, arXiv:2412.06464), in float32. Without strengths the second step is S <- S + k v^T, as in state
    space duality (Dao and Gu, 2024, arXiv:2405.21060), whose B, Delta x and C are k, v and q here.

    Differentiable by both results, in reverse mode and first order, in all floats. Inside `shard_map` both results vary
    wherever an operand does, and no collective runs.

    | backend | how | what its gradient keeps | the default |
    |---|---|---|---|
    | `reference` | token by token; naive | a state per token | up to 8 tokens, as in decoding |
    | `chunked` | products within chunks of 64 tokens | a state per 512 tokens | otherwise |

    Args:
        operands: Queries, keys, values, decays, strengths and documents.
        start: What was read before; None for nothing.
        implementation: A backend's name, or the order that `MeshExecution.kernel` gives; None for the default.

    Raises:
        UserError: The backend does not exist or does not run here.
    """
    q, v = operands.q, operands.v
    if start is None:
        zeros = jnp.zeros((*v.shape[:1], *v.shape[2:4], q.shape[3], v.shape[4]), jnp.float32)
        start = Start(jnp.full(v.shape[:1], -1, jnp.int32), zeros)
    alike = jax.tree.leaves((operands, start))
    operands = jax.tree.map(lambda x: vary_like(x, *alike), operands)
    start = Start(*(vary_like(x, *alike) for x in start))
    if 0 in v.shape[:2]:
        return Recalled(operands.v, start.state)
    chosen = _choose(implementation, v.shape[1], q.dtype)

    def backend(one: Chosen) -> Rule:
        return BACKENDS[one.name].rule

    return run(chosen, backend, operands, start)


def chosen_backend(target: Target, tokens: int, names: tuple[str, ...] = (), dtype: DTypeLike = jnp.float32) -> str:
    """Return the name of the backend for `tokens` per row on `target`, with queries of `dtype`.

    It is the first of `names`, or of the kernel's own order.

    Raises:
        UserError: A name is not a backend, or none of them runs there.
    """
    return _choose(KernelOrder(names, target), tokens, dtype)[0][1].name


def reasons(
    chosen: str, target: Target, tokens: int, names: tuple[str, ...], dtype: DTypeLike = jnp.float32
) -> list[str]:
    """Return why backends before the one that `chosen_backend` returns are passed over."""
    return passed_over(chosen, names, _own_order(target, tokens), BACKENDS, target, dtype)


def _choose(implementation: str | KernelOrder | None, tokens: int, dtype: DTypeLike) -> ChosenBackends:
    runs_on = {name: functools.partial(backend.takes, dtype=dtype) for name, backend in BACKENDS.items()}
    own = functools.partial(_own_order, tokens=tokens)
    return choose("delta_rule", runs_on, implementation, own, f" with {jnp.dtype(dtype).name}")


def span_map(
    operands: Operands, segment: Int[Array, " batch"], implementation: str | KernelOrder | None = None
) -> SpanMap:
    """Return the map from the states before these tokens to those after them, for devices that share a sequence.

    It is what the rule makes of the unit matrix and of zeros side by side, with values of zero for the former. Without
    strengths it is what the rule makes of zeros, and the decay over all tokens.
    `segment` is that of `Start`; other arguments are those of `delta_rule`.
    """
    o = operands
    if o.strength is None:
        decay = o.decay if o.per_channel else o.decay[..., None]
        goes_on = (o.segment[:, -1] == segment)[:, None, None, None, None]
        factor = jnp.where(goes_on, jnp.exp(decay.astype(jnp.float32).sum(1))[..., None], 0)
        return SpanMap(factor, delta_rule(o, None, implementation).state)
    batch, _, heads, group, value_dim = o.v.shape
    key_dim = o.k.shape[3]
    unit = jnp.broadcast_to(jnp.eye(key_dim, key_dim + value_dim), (batch, heads, group, key_dim, key_dim + value_dim))
    wide = jnp.pad(o.v, ((0, 0),) * 4 + ((key_dim, 0),))
    state = delta_rule(dataclasses.replace(o, v=wide), Start(segment, unit), implementation).state
    return SpanMap(state[..., :key_dim], state[..., key_dim:])


def then(first: SpanMap, second: SpanMap) -> SpanMap:
    """Return the map of two spans of tokens, one behind the other."""
    return SpanMap(times(second.factor, first.factor), times(second.factor, first.term) + second.term)


def times(factor: Float[Array, "*dims rows columns"], state: Float[Array, "*dims key_dim width"]) -> Array:
    """Return the product of a `SpanMap`'s factor and a state, or another factor."""
    if factor.shape[-1] == 1:
        return factor * state
    return jnp.einsum("...ij,...jk->...ik", factor, state, precision=jax.lax.Precision.HIGHEST)
