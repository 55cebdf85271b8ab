"""`attend`: its contract, and the choice of a backend."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.kernels import blocks
from moezoo.kernels.attention import by_intervals, chunked, one_query, reference
from moezoo.kernels.attention.base import (
    NOTHING,
    Attended,
    Backend,
    Operands,
    Results,
    Scale,
    Softmax,
)
from moezoo.kernels.attention.partial import add_sinks
from moezoo.parallel.collectives import vary_like
from moezoo.parallel.kernels import (
    Chosen,
    ChosenBackends,
    KernelOrder,
    RunsOn,
    Target,
    add_backend,
    choose,
    passed_over,
    run,
    runs_on_hopper,
    runs_on_tpu,
)


def _with_blocks(backend: Backend, gpu: Target) -> Backend:
    sizes = {"blocks": blocks.measured(chunked.ON_GPUS, "chunked", gpu)}
    names = ("attend", "part", "part_gradients")
    return backend._replace(**{name: functools.partial(getattr(chunked, name), **sizes) for name in names})


def _by_intervals(kernels: str, runs_on: RunsOn, dtypes: tuple[str, ...], widest: int | None = None) -> Backend:
    names = ("attend", "part", "part_gradients")
    attend, part, gradients = (functools.partial(getattr(by_intervals, name), kernels) for name in names)
    return Backend(attend, part, gradients, runs_on, dtypes, sorted_keys=True, widest=widest)


# A new backend is a file, and a name here.
BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference.attend, reference.part, reference.part_gradients),
    "chunked": Backend(chunked.attend, chunked.part, chunked.part_gradients, for_gpu=_with_blocks),
    "one_query": Backend(one_query.attend),
    # Tiles of larger heads do not fit into the shared memory.
    "hopper": _by_intervals("hopper", runs_on_hopper, ("bfloat16",), widest=256),
    "splash": _by_intervals("splash", runs_on_tpu, ("bfloat16", "float32")),
}

# Names that are no backends, and why.
REFUSED = {
    "cudnn": "cuDNN's attention drops the gradient by the log-sum-exp silently, knows no documents as intervals of "
    "keys, refuses in JAX values narrower than keys, and cannot be interpreted, so nothing is proven of it without the "
    "chip; take hopper or chunked",
    "tokamax": "tokamax's attention for Hopper has no gradient by the log-sum-exp, and its backward pass skips blocks "
    "of keys by causality only, not by documents or windows; take hopper or chunked",
}


def _backend(chosen: Chosen) -> Backend:
    one = BACKENDS[chosen.name]
    return one if chosen.gpu is None or one.for_gpu is None else one.for_gpu(one, chosen.gpu)


def register(name: str, backend: Backend) -> None:
    """Add a backend for this process: `execution.attention` and `implementation` then take its name.

    Raises `UserError` for what is no backend, and for a name that another backend has.
    """
    add_backend("attention", BACKENDS, name, backend, Backend)


# Up to so many keys an accelerator may hold all scores of 512 queries.
_FEW_KEYS = 1024
# A program of `hopper` has so many queries, and a block of `splash` at least so many queries and keys.
_MANY = 128


def _own_order(target: Target, queries: int, keys: int) -> Sequence[str]:
    if queries == 1:
        return "one_query", "reference"
    if target.platform == "cpu":
        return ("chunked",) if chunked.suits(queries, keys) else ("reference",)
    # None of these has been timed.
    own = ("hopper",) if queries >= _MANY else ()
    if target.platform == "tpu":
        own = ("splash",) if min(queries, keys) >= _MANY else ()
    return (*own, "chunked" if keys > _FEW_KEYS and chunked.suits(queries, keys) else "reference")


def chosen_backend(
    target: Target,
    queries: int,
    keys: int,
    names: tuple[str, ...] = (),
    *,
    dtype: DTypeLike = jnp.bfloat16,
    is_sorted: bool = True,
    in_parts: bool = False,
    width: int = 1,
) -> str:
    """Return the name of the backend for these numbers of queries and keys per row on `target`.

    It is the first of `names`, or of the kernel's own order, that runs there with operands of `dtype`, with keys in a
    known order (`is_sorted`) or not, for `attend_part` and `part_gradients` with parts of keys (`in_parts`), and with
    heads of at most `width` numbers per key and value.

    Raises:
        UserError: A name is not a backend, or none of them runs there.
    """
    return _choose(KernelOrder(names, target), queries, keys, dtype, is_sorted, in_parts, width)[0][1].name


def reasons(
    chosen: str, target: Target, names: tuple[str, ...], dtype: DTypeLike, in_parts: bool = False, width: int = 1
) -> list[str]:
    """Return why backends before the one that `chosen_backend` returns, for keys in a known order, are passed over."""
    few = f"is for {_MANY} queries{' and keys' * (target.platform == 'tpu')} or more"

    def otherwise(name: str) -> str:
        widest = BACKENDS[name].widest
        if widest is not None and width > widest:
            return f"takes heads of at most {widest}, not {width}"
        return "has no parts of keys" if in_parts and BACKENDS[name].part is None else few

    return passed_over(chosen, names, _own_order(target, _MANY, _MANY), BACKENDS, target, dtype, otherwise)


def _choose_for(operands: Operands, implementation: str | KernelOrder | None, in_parts: bool = False) -> ChosenBackends:
    q = operands.q
    # An execution names backends for training, prefill and decoding together. Keys of a cache have no order.
    if q.shape[1] == 1 and isinstance(implementation, KernelOrder):
        named = [BACKENDS[name] for name in implementation.names if name in BACKENDS]
        if len(named) == len(implementation.names) and all(one.sorted_keys for one in named):
            implementation = implementation._replace(names=())
    is_sorted, width = operands.seen is not None, max(q.shape[-1], operands.v.shape[-1])
    return _choose(implementation, q.shape[1], operands.k.shape[1], q.dtype, is_sorted, in_parts, width)


def _choose(
    implementation: str | KernelOrder | None,
    queries: int,
    keys: int,
    dtype: DTypeLike,
    is_sorted: bool,
    in_parts: bool,
    width: int,
) -> ChosenBackends:
    def takes(backend: Backend, target: Target) -> bool:
        return backend.takes(target, dtype, is_sorted, width) and not (in_parts and backend.part is None)

    runs_on = {name: functools.partial(takes, backend) for name, backend in BACKENDS.items()}
    own = functools.partial(_own_order, queries=queries, keys=keys)
    operands = f" with {jnp.dtype(dtype).name}" + " and keys in an unknown order" * (not is_sorted)
    operands += " and parts of keys" * in_parts
    narrow = [one.widest for one in BACKENDS.values() if one.widest is not None and one.widest < width]
    operands += f" and heads of {width}" * bool(narrow)
    return choose("attention", runs_on, implementation, own, operands, REFUSED)


def attend(
    operands: Operands,
    scale: Scale,
    *,
    sinks: Float[Array, "kv_heads group"] | None = None,
    implementation: str | KernelOrder | None = None,
) -> Attended:
    """Average values by the softmax of scores, for each query over the keys that it sees.

    Scores `scale` q . k and their softmax are float32; all backends but `reference` and `one_query` round `scale` q to
    the dtype of queries before. Differentiable by both results, in reverse mode and first order,
    in q, k, v, `scale` and `sinks`. To combine results over different keys, call `join`; give sinks to one of them at
    most. Inside `shard_map` both results vary wherever an operand does, and no collective runs in the forward pass; the
    gradient of an operand that does not vary over an axis is summed over it (psum).

    | backend | how | memory for scores | the default |
    |---|---|---|---|
    | `reference` | all keys of up to 512 queries; naive | queries x keys | for small work |
    | `one_query` | one product per key head, over all keys | queries x keys | for one query |
    | `chunked` | an online softmax over blocks | one pair of blocks | on CPUs; elsewhere above 1,024 keys |
    | `hopper` | the same, in kernels | on the chip | on NVIDIA GPUs of compute capability 9.0 |
    | `splash` | the same, in kernels of JAX | on the chip | on TPUs from 128 queries and keys |

    `hopper` takes operands in bfloat16 and heads of at most 256, `splash` operands in bfloat16 and float32; both take
    keys whose order is known (`Operands.seen`). Where an execution names only such backends, one query, as in decoding,
    takes the default.

    Args:
        operands: Queries, keys, values, their coordinates, and the window.
        scale: The factor of scores.
        sinks: An extra score per query head, for a value of zero. The log-sum-exp includes it.
        implementation: A backend's name, or the order that `MeshExecution.kernel` gives; None for the default.

    Returns:
        The result and the log-sum-exp of scores. A query that sees no key has result 0 and, without sinks, log-sum-exp
        -1e30.

    Raises:
        UserError: The backend does not exist or does not run here.
    """
    chosen = _choose_for(operands, implementation)

    def backend(one: Chosen) -> Callable[[Operands], Attended]:
        return lambda operands: _backend(one).attend(operands, scale)

    per_query, v = operands.q.shape[:4], operands.v
    alike = jax.tree.leaves(operands)
    if 0 in (*per_query, v.shape[1]):
        empty = jnp.zeros((*per_query, v.shape[3]), v.dtype), jnp.full(per_query, NOTHING, jnp.float32)
        attended = Attended(*(vary_like(x, *alike) for x in empty))
    else:
        # Backends must vary alike. The transpose of the cast sums the gradients of a replicated operand.
        attended = run(chosen, backend, jax.tree.map(lambda x: vary_like(x, *alike), operands))
    return attended if sinks is None else add_sinks(attended, sinks)


def attend_part(operands: Operands, implementation: str | KernelOrder | None = None) -> Softmax:
    """Attend to a part of the keys, for a caller that has a gradient rule of its own and joins the parts.

    Scores are q . k: the caller has scaled the queries. All arrays vary over the same mesh axes, and no dimension is
    empty. `moezoo.kernels.attention.partial.join_softmax` joins parts; the arguments are those of `attend`.
    """
    return _run_part(lambda b: b.part, implementation, operands)


def part_gradients(
    operands: Operands, whole: Softmax, back: Results, implementation: str | KernelOrder | None = None
) -> tuple[Array, Array, Array]:
    """Return the gradients by q, k and v that go through a part of the keys, in the dtypes of q, k and v.

    `whole` is the softmax over all parts, and `back` the gradient by its result, in the dtype of the values; other
    arguments are those of `attend_part`.
    """
    return _run_part(lambda b: b.part_gradients, implementation, operands, whole, back)


def _run_part(
    function_of: Callable[[Backend], Any], implementation: str | KernelOrder | None, operands: Operands, *others: Any
) -> Any:
    chosen = _choose_for(operands, implementation, in_parts=True)
    return run(chosen, lambda one: function_of(_backend(one)), operands, *others)
