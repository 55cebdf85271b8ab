"""`grouped_matmul` and `moe_layer`: one grouped product; one MoE layer.

Measures: rows [T*K, d] times weights [E, d, f] with uneven groups; an MoE block with router and permutations.
Against: two yardsticks (one product of all rows with one matrix; one batched product of E equal groups; for a layer
its three products), XLA's `ragged_dot`, a loop over experts, PyTorch's grouped product, transformers' Mixtral block.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import torch_peers
from benchmarks.results import Column, Panel, Report, Row, Table, log, points, split
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import WORK, Candidate, Timing, compile_passes, measure
from moezoo.errors import UserError
from moezoo.kernels.grouped_matmul import BACKENDS, chosen_backend, grouped_matmul
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.positions import Context
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels, Target, anywhere, device_target
from moezoo.parallel.mesh import start
from moezoo.parallel.mesh_execution import on_mesh

Routing = Literal["uniform", "zipf"]

# Names of the two yardsticks: one product of all rows with one matrix, and E products of T*K/E rows.
MATMUL, BATCHED = "matmul", "batched matmul"
# An implementation that copies each row once per expert is left out if the copies take more.
_MOST_BYTES = 4e9
_TOO_LARGE = "XLA would copy each row once per expert, in an array of more than 4 GB"

# An implementation's name, and a function that makes it; None if it is too large.
Named = tuple[str, Callable[[], Candidate] | None]


def run(part: str, keys: Any) -> Report:
    """Time all implementations by turns, for each shape, routing and pass."""
    on_cpu = start()[0].platform == "cpu"
    dtype = keys.dtype or ("float32" if on_cpu else "bfloat16")
    names = keys.shapes("laptop" if on_cpu else "accelerator")
    cases = ((name, routing) for name in names for routing in keys.routing)
    return report([row for name, routing in cases for row in rows_of(part, name, routing, dtype, keys)])


def rows_of(part: str, name: str, routing: Routing, dtype: Any, keys: Any) -> Iterator[Row]:
    """Yield what is measured of a shape and a routing: the implementations by turns, pass after pass."""
    shape, implementations = SHAPES[name], {"grouped_matmul": product, "moe_layer": layer}[part]
    named = list(implementations(shape, routing, dtype))
    yardsticks = [who for who, _ in named if who in (MATMUL, BATCHED)]
    chosen = [who for who, _ in named if who in yardsticks or any(word in who for word in keys.only or [who])]
    if chosen == yardsticks:
        raise UserError(f"only={' only='.join(keys.only)}: no implementation of {part} has this in its name")
    candidates: dict[str, Candidate] = {}
    for who, make in named:
        if who in chosen and make is None:
            log(f"{name} {routing}: {who} left out: {_TOO_LARGE}")
        elif who in chosen and make is not None:
            candidates[who] = make()
    flops = shape.product_flops if part == "grouped_matmul" else shape.layer_flops
    for passed in keys.passes:
        labels = {"pass": passed, "routing": routing, "dtype": dtype}
        calls = {who: candidate.calls[passed] for who, candidate in candidates.items()}
        timings, work = measure(calls, seconds=keys.seconds, samples=keys.samples), float(flops * WORK[passed])
        speeds = [work / timings[each].ms if each in timings else None for each in (MATMUL, BATCHED)]
        for who, timing in timings.items():
            log(f"{name} {routing} {passed} {who}: {timing.ms:.1f} ms")
            named_row = {"part": part, "shape": shape.letters, "implementation": who, **labels}
            yield measurement(named_row, timing, work, speeds, candidates[who].peak_bytes[passed])


def measurement(labels: Row, timing: Timing, flops: float, speeds: Sequence[float | None], peak: int | None) -> Row:
    """Return a row; `speeds` are those of one product and of the batched one, in FLOPs per millisecond."""
    speed = flops / timing.ms
    matmul, batched = (round(speed / each, 4) if each else None for each in speeds)
    return {
        **labels,
        "device": jax.devices()[0].device_kind,
        **timing.rounded(4),
        "tflops": round(speed / 1e9, 5),
        "share_of_matmul": matmul,
        "share_of_batched": batched,
        "peak_bytes": peak,
    }


def report(rows: Sequence[Row]) -> Report:
    """Return one table per shape, routing and pass; the picture has one panel per pass."""
    columns = (
        Column("implementation", "implementation"),
        Column("ms", "ms", ".4g"),
        Column("spread", "ms_spread", ".2g"),
        Column("TFLOP/s", "tflops", ".3f"),
        Column("of matmul", "share_of_matmul", ".0%"),
        Column("of batched", "share_of_batched", ".0%"),
        Column("peak MB", "peak_bytes", ".0f", 1e6),
    )

    def case(row: Row) -> str:
        sizes = " ".join(f"{letter}={size}" for letter, size in row["shape"].items())
        return f"{row['part']}, {sizes}, {row['routing']}, {row['dtype']}, {row['pass']}"

    def category(row: Row) -> str:
        sizes = row["shape"]
        return f"E={sizes['E']} K={sizes['K']} T={sizes['T']}\n{row['routing']}"

    tables = [Table(title, columns, some) for title, some in split(rows, case).items()]
    panels = [
        Panel(f"{name}, TFLOP/s", points(some, category, "implementation", "tflops"))
        for name, some in split(rows, "pass").items()
    ]
    return Report(rows, tables, [panels], f"{rows[0]['part']} on {rows[0]['device']}, {rows[0]['dtype']}")


def log_shares(routing: Routing, experts: int) -> np.ndarray:
    """Return log shares of first choices, [E] float32: equal ("uniform"), or of 1/rank in a random order ("zipf")."""
    ranks = np.random.default_rng(0).permutation(experts) + 1
    return (np.zeros(experts) if routing == "uniform" else -np.log(ranks)).astype(np.float32)


def group_sizes(shape: Shape, routing: Routing) -> np.ndarray:
    """Return rows per expert if each token draws K different experts by their shares; [E] int32, summing to T*K."""
    noise = np.random.default_rng(1).gumbel(size=(shape.tokens, shape.experts))
    chosen = np.argsort(-(log_shares(routing, shape.experts) + noise), axis=1)[:, : shape.k]
    return np.bincount(chosen.reshape(-1), minlength=shape.experts).astype(np.int32)


def _expands(shape: Shape, dtype: Any) -> bool:
    """Return whether XLA's grouped product makes too large an array; on a TPU it is a kernel and makes none."""
    size = shape.experts * shape.rows * max(shape.embed, shape.mlp) * np.dtype(dtype).itemsize
    return jax.default_backend() != "tpu" and size > _MOST_BYTES


def products_for(target: Target, dtype: Any = "bfloat16") -> list[str]:
    """Return the backend that is chosen for a target, and others that are made for it."""
    made = [name for name, one in BACKENDS.items() if one.runs_on is not anywhere and one.takes(target, dtype)]
    return list(dict.fromkeys((chosen_backend(target, (), dtype), *made)))


def product_operands(shape: Shape, routing: Routing, dtype: Any) -> tuple[tuple, tuple, jax.Array]:
    """Return rows [T*K, d], sorted by expert, and weights [E, d, f]; the rows per expert [E]; a cotangent [T*K, f]."""
    t, d, f, e, k = shape
    x, w, c = normal(0, dtype, (t * k, d), (e, d, f), (t * k, f))
    return (x, w), (jnp.asarray(group_sizes(shape, routing)),), c


def product(shape: Shape, routing: Routing, dtype: Any) -> Iterator[Named]:
    """Yield the implementations of a grouped product."""
    t, d, f, e, k = shape
    (x, w), (sizes,), c = product_operands(shape, routing, dtype)
    yield MATMUL, partial(compile_passes, jnp.matmul, (x, w[0]), (), c)
    if t * k % e == 0:
        yield BATCHED, partial(compile_passes, jnp.matmul, (x.reshape(e, -1, d), w), (), c.reshape(e, -1, f))
    own, *others = products_for(device_target(jax.devices()[0]), dtype)
    for backend in dict.fromkeys((own, *others, "blocked")):
        call = partial(grouped_matmul, implementation=None if backend == own else backend)
        yield f"moezoo {backend}", partial(compile_passes, call, (x, w), (sizes,), c)
    ragged = partial(compile_passes, lax.ragged_dot, (x, w), (sizes,), c)
    yield "xla ragged_dot", None if _expands(shape, dtype) else ragged

    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        parts = jnp.split(x, np.cumsum(group_sizes(shape, routing))[:-1].tolist())
        return jnp.concatenate([part @ w[i] for i, part in enumerate(parts)])

    if jax.default_backend() != "gpu":  # XLA tunes each product there, which takes minutes
        yield "loop over experts", partial(compile_passes, loop, (x, w), (), c)
    if importlib.util.find_spec("tokamax") is not None:
        yield "tokamax ragged_dot", partial(compile_passes, _tokamax_product, (x, w), (sizes,), c)
    yield from torch_peers.products(x, w, sizes, c)


def _tokamax_product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    import tokamax  # pyright: ignore[reportMissingImports] optional, with requirements of its own

    return tokamax.ragged_dot(x, w, group_sizes=sizes)


def layer_operands(shape: Shape, routing: Routing, dtype: Any) -> tuple[tuple, tuple, jax.Array]:
    """Return tokens [1, T, d] and an MoE block; the context, without padding; a cotangent [1, T, d]."""
    t, d, f, e, k = shape
    experts = Experts(e, d, f, out_std=1.0, dtype=jnp.dtype(dtype), key=jax.random.key(2))
    # The first number of every token is 1, and the router turns it into the experts' shares.
    router = Router(d, e, k, Choice(), dtype=jnp.dtype(dtype), key=jax.random.key(3))
    router = eqx.tree_at(lambda r: r.weight, router, router.weight.at[0].set(log_shares(routing, e).astype(dtype)))
    x, c = normal(4, dtype, (1, t, d), (1, t, d))
    at = Coordinates(*(jnp.ones((1, t), jnp.int32),) * 2)
    return (x.at[..., 0].set(1), MoE(router, experts)), (Context(at, at),), c


def run_layer(execution: Execution, x: jax.Array, block: MoE, context: Context) -> jax.Array:
    """Return the result of an MoE block."""
    return block(x, context, on_mesh(execution)).y


def layer(shape: Shape, routing: Routing, dtype: Any) -> Iterator[Named]:
    """Yield the implementations of an MoE block; the yardsticks are its three products alone, with sorted rows."""
    t, d, f, e, k = shape
    hidden, rows, back = normal(1, dtype, (t * k, f), (t * k, d), (t * k, d))
    (x, block), fixed, c = layer_operands(shape, routing, dtype)
    matrices = (block.experts.gate, block.experts.up, block.experts.down)

    def products(rows: jax.Array, hidden: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array):
        return rows @ gate, rows @ up, hidden @ down

    yield (
        MATMUL,
        partial(compile_passes, products, (rows, hidden, *(m[0] for m in matrices)), (), (hidden, hidden, back)),
    )
    if t * k % e == 0:
        rows, hidden, back = (x.reshape(e, -1, x.shape[1]) for x in (rows, hidden, back))
        yield BATCHED, partial(compile_passes, products, (rows, hidden, *matrices), (), (hidden, hidden, back))

    def with_backend(backend: str) -> Candidate:
        execution = Execution(dtype=dtype, remat="none", kernels=Kernels(grouped_matmul=(backend,)))
        return compile_passes(partial(run_layer, execution), (x, block), fixed, c)

    own, *others = products_for(device_target(jax.devices()[0]), dtype)
    for backend in dict.fromkeys((own, *others, "blocked")):
        yield f"moezoo {backend}", partial(with_backend, backend)
    if own != "ragged_dot":
        yield "moezoo ragged_dot", None if _expands(shape, dtype) else partial(with_backend, "ragged_dot")
    yield from torch_peers.layers(x, block, c)


def normal(seed: int, dtype: Any, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Return arrays of standard normal numbers."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]
