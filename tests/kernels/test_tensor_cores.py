"""The kernels for Hopper and Blackwell, interpreted on a CPU, compared with loops over groups in float64.

Interpretation needs jax 0.12, so these tests run in CI's part on a newer Python. Interpreted kernels show that tasks,
masks and indices are right; that they run on a device, and how fast, they do not.
"""

import contextlib
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from test_grouped_matmul import (
    GROUPS,
    ROUNDING,
    check,
    compare_with_loop,
    operands,
    slices,
    value_and_gradients,
    with_nan,
)

from moezoo.kernels import blocks
from moezoo.kernels.grouped_matmul import api, gated, routed_mlp
from moezoo.kernels.permute import plan
from moezoo.nn.mlp import SWIGLU, ClampedSwiGLU
from moezoo.parallel.kernels import KernelOrder, Target, anywhere

pytestmark = pytest.mark.interpreted
# More than one block of rows, and widths that no tile divides: two tiles of columns in one direction.
ROWS, INPUTS, OUTPUTS = 300, 136, 72


CHIPS = ("hopper", "blackwell")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    mosaic_gpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    for chip in CHIPS:
        monkeypatch.setitem(api.BACKENDS, chip, api.BACKENDS[chip]._replace(runs_on=anywhere))
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        yield


@pytest.mark.parametrize("chip", CHIPS)
def test_a_product_and_its_gradients(chip):
    run = jax.jit(functools.partial(value_and_gradients, chip))
    examples = [
        (0, 0, ROWS, 0),
        (0, 128, 64, 0),  # whole blocks
        (1, 126, 1, 1),  # four groups in two blocks, and one row in the second
    ]
    compare_with_loop(run, examples, most=2, rows=ROWS, inputs=INPUTS, outputs=OUTPUTS)


@pytest.mark.parametrize(("chip", "capability"), [("hopper", "9.0"), ("blackwell", "10.0")])
def test_other_tiles(chip, capability):
    """Measured sizes of tiles change how a result is computed, not what it is."""
    tiles = {"rows": 64, "depth": 128, "columns": 64, "buffers": 3 * 2**15, "snake": 2}
    order, sizes = KernelOrder((chip,), Target("cuda", capability)), (70, 0, 131, 3)
    x, weights, cotangent = operands(ROWS, "bfloat16", 0, INPUTS, OUTPUTS)
    given_x, given_cotangent = with_nan(sizes, x, cotangent)
    arguments = given_x, weights, jnp.asarray(sizes, jnp.int32), given_cotangent
    usual, other = (jax.jit(lambda *operands: value_and_gradients(order, *operands)) for _ in range(2))
    traced = usual.trace(*arguments)
    with blocks.trying({capability: {chip: tiles}}):
        assert str(other.trace(*arguments).jaxpr) != str(traced.jaxpr)
        check(other(*arguments), x, weights, sizes, cotangent)


def gated_loop(sizes: Any, cotangent: Any, activation: Any, *parameters: Any) -> list[np.ndarray]:
    """Return what `gated` should, with its gradients; products are rounded to bfloat16 before the backward pass."""
    wide = [jnp.asarray(x, jnp.float32) for x in parameters]

    def value(rows: Any, gate: Any, up: Any, *biases: Any) -> Any:
        parts = []
        for group, mine in enumerate(slices(sizes)):
            products = [rows[mine] @ w[group] for w in (gate, up)]
            for i, bias in enumerate(biases):
                products[i] += bias[group][None]
            parts.append(activation(*products))
        rest = jnp.zeros((rows.shape[0] - sum(sizes), gate.shape[2]))
        return jnp.concatenate([*parts, rest])

    with jax.default_matmul_precision("highest"):
        result, pull = jax.vjp(value, *wide)
        return [np.asarray(x) for x in (result, *pull(jnp.asarray(cotangent, jnp.float32)))]


@pytest.mark.parametrize(
    ("activation", "keep", "biases"),
    [
        (SWIGLU, "products", False),
        pytest.param(SWIGLU, "inputs", False, marks=pytest.mark.weekly),
        (SWIGLU, "products", True),
        (ClampedSwiGLU(1.5, 30.0), "inputs", True),
        (lambda gate, up: jnp.tanh(gate) * (up + 1) + 0.5, "inputs", False),
    ],
    ids=["fused, products kept", "fused", "biases", "another activation", "not zero for zeros"],
)
def test_gated(activation, keep, biases):
    check_gated("hopper", activation, keep, biases, (70, 0, 131, 3))


def test_gated_on_blackwell():
    """Only accumulators differ, of which each kernel has one or two."""
    check_gated("blackwell", SWIGLU, "products", False, (70, 0, 131, 3))


def check_gated(
    chip: str, activation: Any, keep: Any, biases: bool, sizes: tuple[int, ...], gradients: bool = True
) -> None:
    """Compare values, and gradients if they are wanted, with those of a loop."""
    rng = np.random.default_rng(3)
    shapes = (ROWS, INPUTS), *((GROUPS, INPUTS, OUTPUTS),) * 2, *((GROUPS, OUTPUTS),) * 2 * biases, (ROWS, OUTPUTS)
    x, *parameters, cotangent = (jnp.asarray(rng.standard_normal(shape) / 4, jnp.bfloat16) for shape in shapes)

    @jax.jit
    def run(x: Any, cotangent: Any, *parameters: Any) -> Any:
        def product(x: Any, gate: Any, up: Any, gate_bias: Any = None, up_bias: Any = None) -> Any:
            options: Any = {"activation": activation, "keep": keep, "implementation": chip}
            sizes_ = jnp.asarray(sizes, jnp.int32)
            return gated(x, gate, up, sizes_, gate_bias=gate_bias, up_bias=up_bias, **options)

        if not gradients:
            return (product(x, *parameters),)
        value, pull = jax.vjp(product, x, *parameters)
        return value, *pull(cotangent)

    results = run(*with_nan(sizes, x, cotangent), *parameters)
    wanted = gated_loop(sizes, cotangent, activation, x, *parameters)
    for result, want in zip(results, wanted if gradients else wanted[:1], strict=True):
        # Products and their cotangents are rounded, then sums of them: five roundings in a row at most.
        error = np.abs(np.asarray(result, np.float32) - want)
        assert error.max() <= 5 * ROUNDING["bfloat16"] * np.abs(want).max()
    for result in results[:2]:
        assert not np.asarray(result, np.float32)[sum(sizes) :].any()


def routed_loop(ids: np.ndarray, cotangent: Any, activation: Any, *parameters: Any) -> list[np.ndarray]:
    """Return what `routed_mlp` should, with its gradients by tokens, gates, matrices and biases."""

    def value(tokens: Any, gates: Any, gate: Any, up: Any, down: Any, *biases: Any) -> Any:
        total = jnp.zeros_like(tokens)
        for choice, e in enumerate(ids.T):
            here, e = jnp.asarray(e < GROUPS, jnp.float32)[:, None], np.minimum(e, GROUPS - 1)
            both = [jnp.einsum("td,tdf->tf", tokens, w[e]) for w in (gate, up)]
            both = [x + bias[e] for x, bias in zip(both, biases, strict=True)] if biases else both
            result = jnp.einsum("tf,tfd->td", activation(*both), down[e])
            total += here * gates[:, choice, None] * result
        return total

    with jax.default_matmul_precision("highest"):
        result, pull = jax.vjp(jax.jit(value), *(jnp.asarray(x, jnp.float32) for x in parameters))
        return [np.asarray(x) for x in (result, *pull(jnp.asarray(cotangent, jnp.float32)))]


@pytest.mark.parametrize(
    ("chip", "keep", "biases"),
    [
        pytest.param("hopper", "products", False, marks=pytest.mark.weekly),
        ("hopper", "products", True),
        ("hopper", "inputs", False),
        ("blackwell", "inputs", False),
    ],
)
def test_experts(chip, keep, biases):
    """From tokens to sums: some choices go to experts elsewhere, and one expert has no token."""
    rng, tokens, k = np.random.default_rng(4), 70, 2
    ids = np.stack([rng.choice([0, 1, 3, GROUPS], k, replace=False) for _ in range(tokens)])
    shapes = (tokens, INPUTS), *((GROUPS, INPUTS, OUTPUTS),) * 2, (GROUPS, OUTPUTS, INPUTS)
    shapes += ((GROUPS, OUTPUTS),) * 2 * biases
    x, *weights = (jnp.asarray(rng.standard_normal(shape) / 4, jnp.bfloat16) for shape in shapes)
    cotangent, gates = (
        jnp.asarray(rng.standard_normal(x.shape), x.dtype),
        jnp.asarray(rng.random((tokens, k)), jnp.float32),
    )
    here = plan(jnp.asarray(ids, jnp.int32), 0, GROUPS)

    @jax.jit
    def run(x: Any, gates: Any, cotangent: Any, *weights: Any) -> Any:
        def experts(
            x: Any, gates: Any, gate: Any, up: Any, down: Any, gate_bias: Any = None, up_bias: Any = None
        ) -> Any:
            options: Any = {"activation": SWIGLU, "keep": keep, "implementation": chip}
            return routed_mlp(x, gates, here, gate, up, down, gate_bias=gate_bias, up_bias=up_bias, **options)

        value, pull = jax.vjp(experts, x, gates, *weights)
        return value, *pull(cotangent)

    results = run(x, gates, cotangent, *weights)
    for result, want in zip(results, routed_loop(ids, cotangent, SWIGLU, x, gates, *weights), strict=True):
        # Seven roundings in a row at most.
        error = np.abs(np.asarray(result, np.float32) - want)
        assert error.max() <= 7 * ROUNDING["bfloat16"] * np.abs(want).max()


def test_types_on_two_devices():
    """Rows differ by device, weights do not; their gradient is summed over devices.

    This is traced alone: interpreted kernels share the memory of one device, whose blocks two devices would mix up.
    """

    def local(x: Any, weights: Any, sizes: Any, cotangent: Any) -> Any:
        value, *gradients = value_and_gradients("hopper", x, weights, sizes[0], cotangent)
        assert [set(jax.typeof(y).mat.varying) for y in (value, *gradients)] == [{"a"}, {"a"}, set()]
        return value, *gradients

    split, whole = PartitionSpec("a"), PartitionSpec()
    specs = {"in_specs": (split, whole, split, split), "out_specs": (split, split, whole)}
    mapped = jax.shard_map(local, mesh=auto_mesh(a=2), **specs)
    x, weights, cotangent = operands(256, "bfloat16", 0, 64, 64)
    found = jax.eval_shape(mapped, x, weights, jnp.zeros((2, GROUPS), jnp.int32), cotangent)
    assert [y.shape for y in found] == [y.shape for y in (x, x, weights)]


BLACKWELL = "each product replaces the sum"


def plant(error: str, patch: pytest.MonkeyPatch) -> None:
    """Plant an error in the kernels."""
    from moezoo.kernels.grouped_matmul import chips, tensor_cores, tensor_cores_gated

    def change(**changes: Any) -> None:
        really = tensor_cores._tasks
        changed = lambda *a: (t := really(*a))._replace(**{k: f(t) for k, f in changes.items()})  # noqa: E731
        patch.setattr(tensor_cores, "_tasks", changed)

    if error == "the tail is the last group":
        change(group=lambda t: jnp.minimum(t.group, GROUPS - 1))
    elif error == "a group begins a row late":
        late = lambda t: (t.group == 1).astype(jnp.int32)  # noqa: E731
        change(first=lambda t: t.first + late(t), size=lambda t: t.size - late(t))
    elif error == "a task is dropped":
        change(size=lambda t: t.size.at[1].set(0))
    elif error == "rows are masked by multiplication":
        where = lambda mask, x, other: x * mask.astype(x.dtype) + other  # noqa: E731
        patch.setattr(tensor_cores, "jnp", type("numpy", (), {**vars(jnp), "where": staticmethod(where)}))
    elif error == "accumulators are exchanged":
        really = tensor_cores_gated.row_products
        patch.setattr(
            tensor_cores_gated, "row_products", lambda chip, rows, w, *rest: really(chip, rows, w[::-1], *rest)
        )
    else:
        assert error == BLACKWELL
        really = chips.plgpu.tcgen05_mma
        replace = lambda *refs, accumulate: really(*refs, accumulate=accumulate & False)  # noqa: E731
        patch.setattr(chips.plgpu, "tcgen05_mma", replace)


ERRORS = ("the tail is the last group", "a group begins a row late", "a task is dropped", "accumulators are exchanged")
OF_GRADIENTS = "rows are masked by multiplication"


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("error", "chip"),
    [(None, "hopper"), *((error, "hopper") for error in (*ERRORS, OF_GRADIENTS)), (BLACKWELL, "blackwell")],
)
def test_a_planted_error_is_seen(error, chip, monkeypatch):
    """The products alone show it, where they have it; without an error they are right."""
    if error is not None:
        plant(error, monkeypatch)
    with contextlib.nullcontext() if error is None else pytest.raises(AssertionError):
        check_gated(chip, SWIGLU, "inputs", False, (70, 60, 30, 3), gradients=error == OF_GRADIENTS)
