"""Benchmarks of one grouped product (`grouped_matmul`) and of one MoE layer (`moe_layer`).

Measures: `product`, rows [T*K, d] times weights [E, d, f] with uneven groups; `layer`, an MoE block with router and
permutations.
Against: two yardsticks (one product of all rows with one matrix; one batched product of E equal groups; for a layer
its three products), XLA's `ragged_dot`, a loop over experts, PyTorch's grouped product, transformers' Mixtral block.
Columns: see `moezoo.bench.results`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moezoo.bench import torch_peers
from moezoo.bench.candidates import Candidate, compile_passes
from moezoo.bench.shapes import Shape
from moezoo.kernels.grouped_matmul import chosen_backend, grouped_matmul
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.positions import Context
from moezoo.parallel.context_parallel import Place
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels, device_target

Routing = Literal["uniform", "zipf"]

# Names of the two yardsticks: one product of all rows with one matrix, and E products of T*K/E rows.
MATMUL, BATCHED = "matmul", "batched matmul"
# An implementation that copies each row once per expert is left out if the copies take more.
_MOST_BYTES = 4e9
_TOO_LARGE = "XLA would copy each row once per expert, in an array of more than 4 GB"


# An implementation's name, and a function that makes it or the reason why it is left out.
Named = tuple[str, Callable[[], Candidate] | str]


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


def product(shape: Shape, routing: Routing, dtype: Any) -> Iterator[Named]:
    """Yield the implementations of a grouped product: rows [T*K, d], sorted by expert, times weights [E, d, f]."""
    t, d, f, e, k = shape
    x, w, c = normal(0, dtype, (t * k, d), (e, d, f), (t * k, f))
    sizes = group_sizes(shape, routing)
    yield MATMUL, partial(compile_passes, jnp.matmul, (x, w[0]), (), c)
    if t * k % e == 0:
        yield BATCHED, partial(compile_passes, jnp.matmul, (x.reshape(e, -1, d), w), (), c.reshape(e, -1, f))
    on_device = jnp.asarray(sizes)
    own = chosen_backend(device_target(jax.devices()[0]))
    yield f"moezoo {own}", partial(compile_passes, grouped_matmul, (x, w), (on_device,), c)
    ragged = partial(compile_passes, lax.ragged_dot, (x, w), (on_device,), c)
    yield "xla ragged_dot", _TOO_LARGE if _expands(shape, dtype) else ragged

    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        parts = jnp.split(x, np.cumsum(sizes)[:-1].tolist())
        return jnp.concatenate([part @ w[i] for i, part in enumerate(parts)])

    yield "loop over experts", partial(compile_passes, loop, (x, w), (), c)
    yield from torch_peers.products(x, w, on_device, c)


def layer(shape: Shape, routing: Routing, dtype: Any) -> Iterator[Named]:
    """Yield the implementations of an MoE block; the yardsticks are its three products alone, with sorted rows."""
    t, d, f, e, k = shape
    hidden, rows, back = normal(1, dtype, (t * k, f), (t * k, d), (t * k, d))
    experts = Experts(e, d, f, out_std=1.0, dtype=jnp.dtype(dtype), key=jax.random.key(2))
    matrices = (experts.gate, experts.up, experts.down)

    def products(rows: jax.Array, hidden: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array):
        return rows @ gate, rows @ up, hidden @ down

    yield (
        MATMUL,
        partial(compile_passes, products, (rows, hidden, *(m[0] for m in matrices)), (), (hidden, hidden, back)),
    )
    if t * k % e == 0:
        rows, hidden, back = (x.reshape(e, -1, x.shape[1]) for x in (rows, hidden, back))
        yield BATCHED, partial(compile_passes, products, (rows, hidden, *matrices), (), (hidden, hidden, back))

    # The first number of every token is 1, and the router turns it into the experts' shares.
    router = Router(d, e, k, Choice(), dtype=jnp.dtype(dtype), key=jax.random.key(3))
    router = eqx.tree_at(lambda r: r.weight, router, router.weight.at[0].set(log_shares(routing, e).astype(dtype)))
    x, c = normal(4, dtype, (1, t, d), (1, t, d))
    x = x.at[..., 0].set(1)
    block, place = MoE(router, experts), Place(*(jnp.ones((1, t), jnp.int32),) * 2)
    context = Context(place, place)

    def with_backend(backend: str) -> Candidate:
        execution = Execution(dtype=dtype, remat="none", kernels=Kernels(grouped_matmul=(backend,)))
        return compile_passes(lambda x, block, context: block(x, context, execution)[0], (x, block), (context,), c)

    own = chosen_backend(device_target(jax.devices()[0]))
    yield f"moezoo {own}", partial(with_backend, own)
    if own != "ragged_dot":
        yield "moezoo ragged_dot", _TOO_LARGE if _expands(shape, dtype) else partial(with_backend, "ragged_dot")
    yield from torch_peers.layers(x, block, c)


def normal(seed: int, dtype: Any, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Return arrays of standard normal numbers."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]
