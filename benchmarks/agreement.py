"""Whether kernels and whole models on this device agree with definitions on the host: parts `right` and `models` of
`device`.

- Each kernel of every backend that `products` and `attention` time, with loops in NumPy in float64; those of the delta
  rule with `reference` on the host's CPU, token by token in float32. The error is the largest difference in roundings
  of the dtype, relative to the largest number of a result. Rows beyond the last group
  hold NaN and must give exact zeros, and every repetition must give the same bits: a race between two loads or
  products shows as bits that change.
- Models: loss and gradients of laptop-sized presets here and on the host's CPU, in float32, by the learned router; and,
  where this device has kernels for bfloat16, in that dtype by these kernels and by `blocked` on the same routes. The
  error is that of the loss, or of all gradients together as a share of their length, in roundings. On a CPU models are
  compared with themselves.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import Row
from moezoo.config.compose import compose
from moezoo.kernels.attention import BACKENDS as ATTENTION
from moezoo.kernels.attention import attend
from moezoo.kernels.attention.base import Coordinates, Operands
from moezoo.kernels.attention.intervals import intervals
from moezoo.kernels.delta_rule import BACKENDS as DELTA_RULE
from moezoo.kernels.delta_rule import Operands as Recalling
from moezoo.kernels.delta_rule import delta_rule
from moezoo.kernels.grouped_matmul import BACKENDS as PRODUCTS
from moezoo.kernels.grouped_matmul import Backend, chosen_backend, gated
from moezoo.models import build_model
from moezoo.nn.mlp import SWIGLU
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import KernelOrder, Kernels, Target, anywhere, device_target
from moezoo.parallel.mesh import MeshShape, mesh_of
from moezoo.parallel.mesh_execution import place

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
# The most roundings that count as agreement. Sums are in float32, so a kernel in bfloat16 rounds its results; of two
# kernels one after the other, and in attention, also what the second reads. A sum in float32 has up to some hundred
# terms. Gradients of whole models by two backends of a CPU differ by up to 14 and 2.7; products in TF32 differ by
# thousands.
_ONE = {"float32": 512.0, "bfloat16": 4.0}
_SEVERAL = {"float32": 512.0, "bfloat16": 8.0}
PRESETS = ("mixtral", "deepseek", "gpt_oss", "qwen3_moe")


class Problem(NamedTuple):
    """Sizes of a product: the rows of each group, and inputs and outputs of its matrix. Other rows are in no group."""

    sizes: tuple[int, ...]
    rows: int
    inputs: int
    outputs: int


# None, one and more rows than a tile in a group, and widths that no tile divides; whole tiles; and many programs.
PROBLEMS = {
    "tiny": Problem((70, 0, 1, 200, 9), 300, 136, 72),
    "whole tiles": Problem((128, 256, 0, 128), 512, 256, 256),
    "large": Problem(tuple(np.random.default_rng(7).multinomial(8900, [1 / 48] * 48).tolist()), 9000, 1024, 640),
}


class Scores(NamedTuple):
    """Sizes of attention to two documents."""

    tokens: int
    heads: int
    group: int
    dim: int
    value_dim: int
    window: int


SCORES = {
    "tiny": Scores(200, 2, 2, 64, 64, 90),
    "wide": Scores(640, 2, 4, 128, 128, 300),
    "latent": Scores(320, 1, 2, 192, 128, 200),
}


class Recurrence(NamedTuple):
    """Sizes of the delta rule over two documents."""

    tokens: int
    heads: int
    group: int
    key_dim: int
    value_dim: int


# Lengths that fill no chunk, one and several pieces.
RECURRENCES = {"tiny": Recurrence(200, 2, 2, 64, 48), "wide": Recurrence(1100, 2, 2, 128, 128)}
# For a rehearsal, whose kernels are interpreted.
TOYS = (
    {"toy": Problem((70, 0, 1, 40, 9), 130, 40, 72)},
    {"toy": Scores(140, 1, 1, 64, 64, 90)},
    {"toy": Recurrence(70, 1, 1, 8, 8)},
)


@partial(jax.jit, static_argnums=(1, 2))
def _draw(seed: Any, dtype: str, shape: tuple[int, ...], used: Any) -> jax.Array:
    """Return standard normal numbers, and NaN behind so many of the first dimension. Compiled once for each shape."""
    x = jax.random.normal(jax.random.key(seed), shape).astype(dtype)
    first = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return jnp.where(first < used, x, jnp.asarray(jnp.nan, dtype))


def drawn(dtype: str, *shapes: tuple[int, ...], used: int | None = None) -> tuple[jax.Array, ...]:
    """Return standard normal numbers, made on the device; of matrices, rows behind the first `used` are NaN."""
    ends = (shape[0] if used is None or len(shape) != 2 else used for shape in shapes)
    return tuple(_draw(number, dtype, shape, end) for number, (shape, end) in enumerate(zip(shapes, ends, strict=True)))


class Kernel(NamedTuple):
    """A kernel on operands of some sizes.

    Attributes:
        name: What is broken if it is not right: kernel, backend and role.
        run: The kernel, a function of operands.
        make: A function that draws them.
        products: The multiplications of rows with matrices in it.
    """

    name: str
    run: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    products: int = 1


# Backends that are programs of XLA.
PORTABLE = ("blocked", "ragged_dot", "chunked", "one_query", "reference")
# The kernels of a backend of products, and of attention.
ROLES = ("multiply", "transposed", "outer", "gated", "gated gradients")
PASSES = ("forward", "gradients")
DECAYS = ("per head", "per channel")


def backends_of(kernel: str, target: Target, dtype: str = "bfloat16", *more: str) -> list[str]:
    """Return the backends that are made for a target, the portable one beside them, and those of `more`.

    The lists are the library's own, so a backend that is registered joins them.
    """
    if kernel == "attention":
        width = max(sizes.dim for sizes in SCORES.values())
        own, takes = (
            ("chunked", *more),
            {n: one for n, one in ATTENTION.items() if one.takes(target, dtype, True, width)},
        )
    elif kernel == "delta_rule":
        own, takes = ("chunked", *more), {n: one for n, one in DELTA_RULE.items() if one.takes(target, dtype)}
    else:
        own = ("blocked", "ragged_dot", *more) if target.platform == "tpu" else ("blocked", *more)
        takes = {n: one for n, one in PRODUCTS.items() if one.takes(target, dtype)}
    return [name for name, one in takes.items() if one.runs_on is not anywhere or name in own]


def owners(name: str) -> dict[str, str]:
    """Return, by role, the backend whose kernel a backend of products runs; without those that it composes."""
    backend, found = PRODUCTS[name], dict.fromkeys(ROLES, name)
    found["outer"] = next(other for other, each in PRODUCTS.items() if each.outer is backend.outer)
    return {role: owner for role, owner in found.items() if backend.gated or not role.startswith("gated")}


def roles_of(name: str) -> list[str]:
    """Return the roles for which a backend of products has a kernel of its own."""
    return [role for role, owner in owners(name).items() if owner == name]


def product(name: str, role: str, target: Target, problem: Problem, dtype: str = "bfloat16") -> Kernel:
    """Return a kernel of a backend of products; its last operand is the rows of each group."""
    backend: Backend = PRODUCTS[name]
    if backend.for_gpu is not None and target.capability is not None:
        backend = backend.for_gpu(backend, target)
    x, y = (problem.rows, problem.inputs), (problem.rows, problem.outputs)
    w = (len(problem.sizes), problem.inputs, problem.outputs)
    both = partial(gated, activation=SWIGLU, implementation=KernelOrder((name,), target))

    def gradients(x: Any, gate: Any, up: Any, back: Any, sizes: Any) -> Any:
        return jax.vjp(lambda x, gate, up: both(x, gate, up, sizes), x, gate, up)[1](back)

    run, shapes, products = {
        "multiply": (lambda x, w, sizes: backend.multiply(x, w, sizes, 1), (x, w), 1),
        "transposed": (lambda y, w, sizes: backend.multiply(y, w, sizes, 2), (y, w), 1),
        "outer": (lambda x, y, sizes: backend.outer(x, y, sizes, x.dtype), (x, y), 1),
        "gated": (both, (x, w, w), 2),
        "gated gradients": (gradients, (x, w, w, y), 6),  # the forward pass is a part of it
    }[role]

    def make() -> tuple[Any, ...]:
        return *drawn(dtype, *shapes, used=sum(problem.sizes)), jnp.asarray(problem.sizes, jnp.int32)

    return Kernel(f"grouped_matmul {name} {role}", run, make, products)


def loop(role: str, sizes: Sequence[int], *operands: np.ndarray) -> list[np.ndarray]:
    """Return what `product` should, in float64: a loop over groups."""
    first, second, *more, _ = operands  # the last are the sizes again
    ends = np.cumsum(sizes)
    groups = [(group, slice(end - size, end)) for group, (end, size) in enumerate(zip(ends, sizes, strict=True))]
    if role == "outer":
        return [np.stack([first[mine].T @ second[mine] for _, mine in groups])]
    rows = first.shape[0]
    if role in ("multiply", "transposed"):
        turned = second if role == "multiply" else second.swapaxes(1, 2)
        found = np.zeros((rows, turned.shape[2]))
        for group, mine in groups:
            found[mine] = first[mine] @ turned[group]
        return [found]
    up, back = more[0], more[1] if len(more) > 1 else None
    value, by_rows, by_gate, by_up = (np.zeros(s) for s in ((rows, up.shape[2]), first.shape, up.shape, up.shape))
    for group, mine in groups:
        x, a, b = first[mine], first[mine] @ second[group], first[mine] @ up[group]
        share = 1 / (1 + np.exp(-a))
        value[mine] = a * share * b
        if back is not None:
            by_a, by_b = back[mine] * b * (share + a * share * (1 - share)), back[mine] * a * share
            by_rows[mine] = by_a @ second[group].T + by_b @ up[group].T
            by_gate[group], by_up[group] = x.T @ by_a, x.T @ by_b
    return [value] if back is None else [by_rows, by_gate, by_up]


def attention(name: str, passed: str, target: Target, scores: Scores, dtype: str, first: int | None = None) -> Kernel:
    """Return a kernel of a backend of attention, of queries, keys, values and the cotangent of the result.

    The first document has `first` tokens, by default two thirds.
    """
    tokens, heads, group, dim, value_dim, window = scores
    wide = (1, tokens, heads, group)
    shapes = (*wide, dim), (1, tokens, heads, dim), (1, tokens, heads, value_dim), (*wide, value_dim)
    end = tokens * 2 // 3 if first is None else first

    def value(q: Any, k: Any, v: Any) -> Any:
        number = jnp.arange(tokens, dtype=jnp.int32)[None]
        second = number >= end
        at = Coordinates(jnp.where(second, number - end, number), second.astype(jnp.int32) + 1)
        operands = Operands(q, k, v, at, at, window, intervals(at, at, window))
        return attend(operands, dim**-0.5, implementation=KernelOrder((name,), target)).result

    def run(q: Any, k: Any, v: Any, back: Any) -> Any:
        return value(q, k, v) if passed == "forward" else jax.vjp(value, q, k, v)[1](back)

    return Kernel(f"attention {name} {passed}", run, partial(drawn, dtype, *shapes))


def attention_loop(passed: str, scores: Scores, *operands: np.ndarray) -> list[np.ndarray]:
    """Return what `attention` should, in float64, from all scores."""
    (q, k, v, back), number = operands, np.arange(scores.tokens)
    apart, second = number[:, None] - number, number >= scores.tokens * 2 // 3
    seen = (second[:, None] == second) & (apart >= 0) & (apart < scores.window)
    products = np.where(seen, np.einsum("bqkgh,bskh->bkgqs", q, k) * scores.dim**-0.5, -np.inf)
    weights = np.exp(products - products.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if passed == "forward":
        return [np.einsum("bkgqs,bskh->bqkgh", weights, v)]
    by_weights = np.einsum("bqkgh,bskh->bkgqs", back, v)
    by_scores = weights * (by_weights - (weights * by_weights).sum(-1, keepdims=True)) * scores.dim**-0.5
    by_q, by_k = np.einsum("bkgqs,bskh->bqkgh", by_scores, k), np.einsum("bkgqs,bqkgh->bskh", by_scores, q)
    return [by_q, by_k, np.einsum("bkgqs,bqkgh->bskh", weights, back)]


def recurrence(
    name: str, passed: str, decays: str, target: Target, sizes: Recurrence, dtype: str, first: int | None = None
) -> Kernel:
    """Return a kernel of a backend of the delta rule, of its float operands and the cotangent of the result.

    The first document has `first` tokens, by default two thirds.
    """
    tokens, heads, group, key_dim, value_dim = sizes
    rows = (1, tokens, heads)
    key, value, faded = (*rows, key_dim), (*rows, group, value_dim), (*rows, group, *(key_dim,) * (decays == DECAYS[1]))
    segment = (np.arange(tokens, dtype=np.int32) >= (tokens * 2 // 3 if first is None else first))[None].astype(
        np.int32
    )

    def read(q: Any, k: Any, v: Any, decay: Any, strength: Any) -> Any:
        operands = Recalling(q, k, v, decay, strength, jnp.asarray(segment))
        return delta_rule(operands, implementation=KernelOrder((name,), target)).result

    def run(*operands: Any) -> Any:
        *floats, back = operands
        return read(*floats) if passed == PASSES[0] else jax.vjp(read, *floats)[1](back)

    def make() -> tuple[Any, ...]:
        q, k, v, back = drawn(dtype, key, key, value, value)
        decay, strength = drawn("float32", faded, (*rows, group))
        wide = (x.astype(jnp.float32) for x in (q, k))
        q, k = ((x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype) for x in wide)
        return q, k, v, -jnp.exp(decay), jax.nn.sigmoid(strength), back

    return Kernel(f"delta_rule {name} {passed} {decays}", run, make)


def recurrence_on_host(kernel: Kernel, dtype: str, *operands: np.ndarray) -> list[np.ndarray]:
    """Return what a kernel of `reference` makes of operands on the host's CPU."""
    narrow = (dtype, dtype, dtype, "float32", "float32", dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        found = jax.jit(kernel.run)(*(jnp.asarray(x, name) for x, name in zip(operands, narrow, strict=True)))
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(found)]


class Check(NamedTuple):
    """A kernel, the sizes' name, and a function of its operands in float64, without NaN, that returns what it should.

    `beyond` is the number of rows after which results of as many rows as the first operand must be zero.
    """

    kernel: Kernel
    sizes: str
    dtype: str
    wanted: Callable[..., list[np.ndarray]]
    bounds: dict[str, float]
    beyond: int | None = None


def checks(
    target: Target,
    problems: Mapping[str, Problem] = PROBLEMS,
    scores: Mapping[str, Scores] = SCORES,
    recurrences: Mapping[str, Recurrence] = RECURRENCES,
) -> Iterator[Check]:
    """Yield the kernels that are checked on a target, the smallest sizes first."""
    for sizes in dict.fromkeys((*problems, *scores, *recurrences)):
        for dtype in ("bfloat16", "float32") if sizes == "tiny" else ("bfloat16",):  # in float32 other kernels run
            if problem := problems.get(sizes):
                backends = backends_of("grouped_matmul", target, dtype)
                for name, role in ((each, role) for each in backends for role in roles_of(each)):
                    wanted, bounds = partial(loop, role, problem.sizes), _SEVERAL if "gated" in role else _ONE
                    kernel = product(name, role, target, problem, dtype)
                    yield Check(_exact(kernel, dtype), sizes, dtype, wanted, bounds, sum(problem.sizes))
            if score := scores.get(sizes):
                for name, passed in itertools.product(backends_of("attention", target, dtype, "one_query"), PASSES):
                    wanted = partial(attention_loop, passed, score)
                    kernel = attention(name, passed, target, score, dtype)
                    yield Check(_exact(kernel, dtype), sizes, dtype, wanted, _SEVERAL)
            if some := recurrences.get(sizes):
                backends = backends_of("delta_rule", target, dtype, "reference")
                for name, passed, decays in itertools.product(backends, PASSES, DECAYS):
                    naive = recurrence("reference", passed, decays, Target("cpu"), some, dtype)
                    kernel = recurrence(name, passed, decays, target, some, dtype)
                    wanted = partial(recurrence_on_host, naive, dtype)
                    yield Check(_exact(kernel, dtype), sizes, dtype, wanted, _SEVERAL)


def _exact(kernel: Kernel, dtype: str) -> Kernel:
    """Return a kernel that multiplies float32 as it is: TF32 or bfloat16 in its place is a caller's choice."""
    if dtype != "float32":
        return kernel

    def run(*operands: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return kernel.run(*operands)

    return kernel._replace(run=run)


@jax.jit
def _differs(found: Any, again: Any) -> jax.Array:
    """Return whether any bit of two trees differs."""
    bits = lambda x: jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")  # noqa: E731
    apart = jax.tree.map(lambda x, y: (bits(x) != bits(y)).any(), found, again)
    return jnp.stack(jax.tree.leaves(apart)).any()


def compare(check: Check, program: Callable[..., Any], operands: Sequence[Any], repeats: int) -> Row:
    """Run a program of the check's kernel `repeats` times more than once, and compare the results with the loop."""
    found = program(*operands)
    differing = sum(bool(each) for each in [_differs(found, program(*operands)) for _ in range(repeats)])
    results = jax.tree.leaves(found)
    wanted = check.wanted(*(np.nan_to_num(np.asarray(x, np.float64)) for x in operands))
    error, is_zero = 0.0, True
    for mine, theirs in zip(results, wanted, strict=True):
        mine = np.asarray(mine, np.float64)
        error = np.maximum(error, np.abs(mine - theirs).max() / (np.abs(theirs).max() or 1.0))  # NaN stays NaN
        if check.beyond is not None and mine.shape[0] == operands[0].shape[0]:
            is_zero &= not mine[check.beyond :].any()
    _, backend, role = check.kernel.name.split(" ", 2)
    row = _row(f"moezoo {backend}", role, check.dtype, float(error), check.bounds)
    row |= {"sizes": check.sizes, "differing": differing, "repeats": repeats, "tail_is_zero": is_zero}
    return row | {"agrees": row["agrees"] and is_zero and not differing}


def _row(name: str, result: str, dtype: str, error: float, bounds: dict[str, float]) -> Row:
    roundings = float(error) / ROUNDING[dtype]  # may be NaN, which is no JSON
    return {
        "implementation": name,
        "result": result,
        "dtype": dtype,
        "roundings": round(roundings, 3) if np.isfinite(roundings) else None,
        "bound": bounds[dtype],
        "agrees": bool(roundings <= bounds[dtype]),
    }


def models(preset: str) -> Iterator[Row]:
    """Yield how far loss and gradients of a preset here are from those on the host, and from those by `blocked`."""
    config = compose(*f"model={preset}".split()).model
    model = build_model(config, key=jax.random.key(0))
    here, host = jax.devices()[0], jax.devices("cpu")[0]
    yield from _differences(preset, "float32", _loss(model, host), _loss(model, here))
    target = device_target(here)
    if (own := chosen_backend(target)) != chosen_backend(target, (), "float32"):
        ways = [
            _loss(model, here, dtype="bfloat16", routing="random", kernels=Kernels(grouped_matmul=(name,)))
            for name in ("blocked", own)
        ]
        yield from _differences(f"{preset} {own}", "bfloat16", *ways)


def _loss(model: Any, device: Any, **options: Any) -> tuple[Any, Any]:
    """Return the loss in nats per token and its gradients, on the host."""
    execution = Execution(mesh_of(MeshShape(), [device]), **options)
    tokens = np.random.default_rng(0).integers(0, model.vocab, (2, 65)).astype(np.int32)

    def loss(model: Any) -> Any:
        logits = model(tokens[:, :-1], execution=execution).logits.astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=2)
        return -chosen.mean()

    with jax.default_matmul_precision("highest"):
        return jax.device_get(eqx.filter_jit(eqx.filter_value_and_grad(loss))(place(model, execution)))


def _differences(name: str, dtype: str, wanted: tuple[Any, Any], found: tuple[Any, Any]) -> Iterator[Row]:
    length = lambda tree: np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in jax.tree.leaves(tree)))  # noqa: E731
    apart = jax.tree.map(np.subtract, found[1], wanted[1])
    yield _row(name, "loss", dtype, abs(found[0] - wanted[0]) / abs(wanted[0]), _SEVERAL)
    yield _row(name, "gradients", dtype, length(apart) / length(wanted[1]), _SEVERAL)
