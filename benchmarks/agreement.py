"""Whether kernels and whole models on this device agree with definitions on the host: part `parity` of `accelerator`.

- Grouped products and attention: every backend that runs here, with its gradients, and loops in NumPy in float64. The
  error is the largest difference in roundings of the dtype, relative to the largest number of a result.
- Models: loss and gradients of laptop-sized presets here and on the host's CPU, in float32, by the learned router; and,
  where this device has kernels for bfloat16, in that dtype by these kernels and by `blocked` on the same routes. The
  error is that of the loss, or of all gradients together as a share of their length, in roundings.

On a CPU models are compared with themselves.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import Row, log
from moezoo.config.compose import compose
from moezoo.kernels.attention import BACKENDS as ATTENTION
from moezoo.kernels.attention import attend
from moezoo.kernels.attention.base import Coordinates, Operands
from moezoo.kernels.attention.intervals import intervals
from moezoo.kernels.grouped_matmul import BACKENDS as PRODUCTS
from moezoo.kernels.grouped_matmul import chosen_backend, grouped_matmul
from moezoo.models import build_model
from moezoo.parallel.execution import Execution, place
from moezoo.parallel.kernels import Kernels, device_target
from moezoo.parallel.mesh import MeshShape, mesh_of

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
# The most roundings that count as agreement. Sums are in float32, so a kernel in bfloat16 rounds results and, in
# attention and its gradients, weights; a sum in float32 has up to some hundred terms. Gradients of whole models by two
# backends of a CPU differ by up to 14 and 2.7; products in TF32 differ by thousands.
_KERNEL = {"float32": 512.0, "bfloat16": 4.0}
_MODEL = {"float32": 512.0, "bfloat16": 8.0}
PRESETS = ("mixtral", "deepseek", "gpt_oss", "qwen3_moe")
# Rows of each group: none, one, more than a tile, and room behind them.
_SIZES, _ROWS, _INPUTS, _OUTPUTS = (70, 0, 1, 200, 9), 300, 136, 72


def rows(presets: tuple[str, ...] = PRESETS) -> Iterator[Row]:
    """Yield one row per backend, dtype and result."""
    target = device_target(jax.devices()[0])
    for dtype in ROUNDING:
        for name, backend in PRODUCTS.items():
            if backend.takes(target, dtype):
                yield from _compare(f"grouped_matmul {name}", dtype, _KERNEL, *_product(name, dtype))
        for name, backend in ATTENTION.items():
            if backend.takes(target, dtype, is_sorted=True):
                yield from _compare(f"attention {name}", dtype, _KERNEL, *_attend(name, dtype))
    for preset in presets:
        log(f"{preset} here and on the host")
        yield from _models(preset)


def _compare(name: str, dtype: str, bounds: dict[str, float], found: Any, wanted: Any) -> Iterator[Row]:
    for result, (mine, theirs) in zip(wanted, zip(found, wanted.values(), strict=True), strict=True):
        mine, theirs = (np.asarray(x, np.float64) for x in (mine, theirs))
        scale = np.abs(theirs).max() or 1.0
        yield _row(name, result, dtype, np.abs(mine - theirs).max() / scale, bounds)


def _row(name: str, result: str, dtype: str, error: float, bounds: dict[str, float]) -> Row:
    roundings = float(error) / ROUNDING[dtype]
    return {
        "part": "parity",
        "implementation": name,
        "result": result,
        "dtype": dtype,
        "roundings": round(roundings, 3),
        "bound": bounds[dtype],
        "agrees": bool(roundings <= bounds[dtype]),
    }


def _drawn(dtype: str, *shapes: tuple[int, ...]) -> list[jax.Array]:
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw(shape, np.float32), dtype) for shape in shapes]


def _wide(*arrays: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in arrays]


@partial(jax.jit, static_argnums=0)
def _gradients(function: Callable[..., Any], operands: tuple, cotangent: Any) -> tuple[Any, Any]:
    value, pull = jax.vjp(function, *operands)
    return value, pull(cotangent)


def _product(name: str, dtype: str) -> tuple[list[Any], dict[str, np.ndarray]]:
    shapes = (_ROWS, _INPUTS), (len(_SIZES), _INPUTS, _OUTPUTS), (_ROWS, _OUTPUTS)
    x, w, back = _drawn(dtype, *shapes)
    # What lies beyond the last group is not read.
    beyond = jnp.arange(_ROWS)[:, None] >= sum(_SIZES)
    given, given_back = (jnp.where(beyond, jnp.nan, each) for each in (x, back))
    call = partial(grouped_matmul, group_sizes=jnp.asarray(_SIZES), implementation=name)
    with jax.default_matmul_precision("highest"):
        value, gradients = _gradients(call, (given, w), given_back)
    x, w, back = _wide(x, w, back)
    wanted = {"value": np.zeros((_ROWS, _OUTPUTS)), "by rows": np.zeros_like(x), "by weights": np.zeros_like(w)}
    ends = np.cumsum(_SIZES)
    for group, (end, size) in enumerate(zip(ends, _SIZES, strict=True)):
        mine = slice(end - size, end)
        wanted["value"][mine] = x[mine] @ w[group]
        wanted["by rows"][mine] = back[mine] @ w[group].T
        wanted["by weights"][group] = x[mine].T @ back[mine]
    return [value, *gradients], wanted


def _attend(name: str, dtype: str) -> tuple[list[Any], dict[str, np.ndarray]]:
    tokens, heads, group, dim, window = 200, 2, 2, 64, 90
    shapes = (1, tokens, heads, group, dim), *((1, tokens, heads, dim),) * 2, (1, tokens, heads, group, dim)
    q, k, v, back = _drawn(dtype, *shapes)
    position = np.concatenate([np.arange(130), np.arange(tokens - 130)])[None].astype(np.int32)
    at = Coordinates(jnp.asarray(position), jnp.asarray((np.arange(tokens) >= 130)[None] + 1, jnp.int32))

    def call(q: Any, k: Any, v: Any) -> Any:
        operands = Operands(q, k, v, at, at, window, intervals(at, at, window))
        return attend(operands, dim**-0.5, implementation=name).result

    with jax.default_matmul_precision("highest"):
        value, gradients = _gradients(call, (q, k, v), back)
    q, k, v, back = _wide(q, k, v, back)
    apart = position[0][:, None] - position[0]
    same = (np.arange(tokens)[:, None] >= 130) == (np.arange(tokens) >= 130)
    scores = np.einsum("bqkgh,bskh->bkgqs", q, k) * dim**-0.5
    scores = np.where(same & (apart >= 0) & (apart < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    by_weights = np.einsum("bqkgh,bskh->bkgqs", back, v)
    by_scores = weights * (by_weights - (weights * by_weights).sum(-1, keepdims=True)) * dim**-0.5
    wanted = {
        "value": np.einsum("bkgqs,bskh->bqkgh", weights, v),
        "by queries": np.einsum("bkgqs,bskh->bqkgh", by_scores, k),
        "by keys": np.einsum("bkgqs,bqkgh->bskh", by_scores, q),
        "by values": np.einsum("bkgqs,bqkgh->bskh", weights, back),
    }
    return [value, *gradients], wanted


def _models(preset: str) -> Iterator[Row]:
    config = compose(f"model={preset}").model
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
    yield _row(name, "loss", dtype, abs(found[0] - wanted[0]) / abs(wanted[0]), _MODEL)
    yield _row(name, "gradients", dtype, length(apart) / length(wanted[1]), _MODEL)
