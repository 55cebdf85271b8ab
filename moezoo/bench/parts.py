"""The two parts within a layer: one grouped product, and a whole MoE layer, each with what it is compared to."""

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
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels, device_target

Routing = Literal["uniform", "zipf"]

# Names of the two yardsticks: one product of all rows with one matrix, and E products of R/E rows.
MATMUL, BATCHED = "matmul", "batched matmul"
# An expansion of every row to every expert beyond this is not waited for.
_MOST_BYTES = 4e9
_TOO_LARGE = "XLA would make an array of more than 4 GB, every row for every expert"


# An implementation's name, and how to make it or why it is left out.
Named = tuple[str, Callable[[], Candidate] | str]


def log_shares(routing: Routing, experts: int) -> np.ndarray:
    """The logarithm of each expert's share of first choices: all alike, or 1/rank in a random order; [E] float32."""
    ranks = np.random.default_rng(0).permutation(experts) + 1
    return (np.zeros(experts) if routing == "uniform" else -np.log(ranks)).astype(np.float32)


def group_sizes(shape: Shape, routing: Routing) -> np.ndarray:
    """Rows of each expert when every token draws K different experts by their shares; [E] int32, summing to T*K."""
    noise = np.random.default_rng(1).gumbel(size=(shape.tokens, shape.experts))
    chosen = np.argsort(-(log_shares(routing, shape.experts) + noise), axis=1)[:, : shape.k]
    return np.bincount(chosen.reshape(-1), minlength=shape.experts).astype(np.int32)


def _expands(shape: Shape, dtype: Any) -> bool:
    """Whether XLA's grouped product, where it is no kernel, makes an array too large here."""
    size = shape.experts * shape.rows * max(shape.embed, shape.mlp) * np.dtype(dtype).itemsize
    return jax.default_backend() != "tpu" and size > _MOST_BYTES


def product(shape: Shape, routing: Routing, dtype: Any) -> Iterator[Named]:
    """[T*K, d] rows times [E, d, f], the rows of each expert together."""
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
    """An MoE block, router and permutations included; the yardsticks are its three products alone, rows in order."""
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

    # A number that all tokens have in common, and a router that turns it into each expert's share.
    router = Router(d, e, k, Choice(), dtype=jnp.dtype(dtype), key=jax.random.key(3))
    router = eqx.tree_at(lambda r: r.weight, router, router.weight.at[0].set(log_shares(routing, e).astype(dtype)))
    x, c = normal(4, dtype, (1, t, d), (1, t, d))
    x = x.at[..., 0].set(1)
    block, valid = MoE(router, experts), jnp.ones((1, t), bool)

    def with_backend(backend: str) -> Candidate:
        execution = Execution(dtype=dtype, kernels=Kernels(grouped_matmul=(backend,)))
        return compile_passes(lambda x, block, valid: block(x, valid, execution)[0], (x, block), (valid,), c)

    own = chosen_backend(device_target(jax.devices()[0]))
    yield f"moezoo {own}", partial(with_backend, own)
    if own != "ragged_dot":
        yield "moezoo ragged_dot", _TOO_LARGE if _expands(shape, dtype) else partial(with_backend, "ragged_dot")
    yield from torch_peers.layers(x, block, c)


def normal(seed: int, dtype: Any, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Random arrays."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]
