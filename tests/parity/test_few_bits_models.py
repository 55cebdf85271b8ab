"""Models with weights of few bits compute what the same models compute with the widened arrays, in every layout."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blueprints import as_blueprint
from cover import Case, batch, config
from running import CompiledStep, batch_shapes

import moezoo
from moezoo.models import build_model
from moezoo.nn.block_fp8 import BlockFP8
from moezoo.nn.containers import store
from moezoo.nn.few_bits import FewBits, cut_pieces
from moezoo.nn.int4 import PackedInt4
from moezoo.nn.mxfp4 import MXFP4
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.axes import Axes, is_stored
from moezoo.parallel.traces import equations
from moezoo.training.build import check_model
from moezoo.training.step import Step

# Ten embedding dimensions a device of eight: groups of 32 and blocks of 24 are cut. Widths of 24 on two devices, too.
_SIZES: dict[str, Any] = {"embed": 80, "expert_mlp": 48, "layers": 2, "dense_layers": 0}
TOLERANCE, GRADIENTS = 1e-6, 3e-6


def int4(weight: Any, axes: Axes) -> PackedInt4:
    """Return random integers with scales, in the shape of a weight [layer, expert, inputs, outputs]."""
    layers, experts, inputs, outputs = weight.shape
    codes = jax.random.bits(jax.random.key(7), (layers, experts, inputs // 2, outputs), jnp.uint8)
    scale = jax.random.uniform(jax.random.key(8), (layers, experts, inputs // 16, outputs), jnp.float32, 0.02, 0.1)
    scale = scale.astype(jnp.bfloat16)
    return PackedInt4(values=codes, scale=scale, outputs=len(axes.outputs), block=(1, 16), dtype=np.dtype(weight.dtype))


FP8 = functools.partial(BlockFP8.rounded, size=(20, 24))
CONTAINERS: dict[str, Any] = {
    "experts.gate": MXFP4.rounded,
    "experts.up": functools.partial(BlockFP8.rounded, size=(20, 24), scales="e8m0"),
    "experts.down": int4,
    "attention.query_up": FP8,
    "attention.query": FP8,
    "attention.key": MXFP4.rounded,
    "attention.kv_down": MXFP4.rounded,
    "attention.value_up": FP8,
    "attention.out": FP8,
    "attention.gate.weight": FP8,
    "attention.strength": MXFP4.rounded,
    "shared.down": MXFP4.rounded,
    "shared.gate": FP8,
}


def with_containers(model: Any) -> Any:
    for end, container in CONTAINERS.items():
        if any(path.endswith(end) for path in paths_of(model)):
            model = store(model, lambda path, end=end: path.endswith(end), container)
    return model


def paths_of(model: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_stored)]


@functools.cache
def stored_model(family: str = "deepseek") -> Any:
    """Return a tiny model, most of whose weights have few bits."""
    sizes: dict[str, Any] = (
        _SIZES if family == "deepseek" else {"embed": 80, "expert_mlp": 48, "layers": 2, "mlp_layers": ()}
    )
    if family == "qwen3_5":
        sizes = sizes | {"shared_mlp": 64}
    return jax.jit(with_containers)(build_model(config(family, **sizes), key=jax.random.key(3)))


@functools.cache
def widened_model(family: str = "deepseek") -> Any:
    """Return the same model with arrays."""
    widen = jax.jit(
        lambda model: jax.tree.map(lambda x: x.materialise(x.dtype) if is_stored(x) else x, model, is_leaf=is_stored)
    )
    return widen(stored_model(family))


def logits(model: Any, execution: Any) -> np.ndarray:
    forward = jax.jit(lambda m: m(batch(0)["tokens"], execution=execution).logits)
    return np.asarray(forward(moezoo.place(model, execution)))


@functools.cache
def wanted_logits(family: str) -> np.ndarray:
    """Return those of the arrays on one device."""
    return logits(widened_model(family), moezoo.Execution())


# A pairwise cover of rules, strategies and meshes. The tests of generation and of steps have `serve` and more.
LAYOUTS = [
    Case("gather", "single", "fsdp_ep", "full", 1, "batch", "deepseek"),
    Case("ragged", "ep8", "ep_as_cp", "full", 1, "batch", "deepseek"),
    Case("dense", "fsdp8", "pure_fsdp", "full", 1, "batch", "deepseek"),
    Case("capacity", "data2_fsdp2_ep2", "shard_exp_on_fsdp", "full", 1, "batch", "deepseek"),
    pytest.param(Case("ring", "fsdp2_tensor4", "tensor", "full", 1, "batch", "grouped"), marks=pytest.mark.weekly),
    pytest.param(
        Case("gather", "ep2_context2_tensor2", "tensor", "full", 1, "batch", "qwen3_5"), marks=pytest.mark.weekly
    ),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_logits(case):
    model, wanted = stored_model(case.family), wanted_logits(case.family)
    found = logits(cut_pieces(model, case.execution), case.execution)
    # A mesh sums in another order; with 80 dimensions that is some 1e-6 of the largest logit.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4 * TOLERANCE * abs(wanted).max())


STEPS = [
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", "deepseek"),
    Case("gather", "ep2_context2_tensor2", "tensor", "dots", 2, "batch", "deepseek"),
]


def arrays(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def trained(path: str) -> bool:
    """Return whether the model of arrays trains an array: those that are in containers in the other are frozen."""
    return not path.endswith((*CONTAINERS, "choice_bias"))


@functools.cache
def compiled(case: Case) -> CompiledStep:
    return CompiledStep(case, start=cut_pieces(stored_model(), case.execution))


@functools.cache
def wanted_step() -> Any:
    run = CompiledStep(STEPS[0], start=widened_model(), trained=trained)
    return run(0), arrays(run.gradients)


@pytest.mark.parametrize("case", [STEPS[0], pytest.param(STEPS[1], marks=pytest.mark.weekly)], ids=str)
def test_a_step(case):
    """Loss and gradients of what is trained are those of the arrays; what has few bits keeps every bit."""
    run = compiled(case)
    run.state = run.begin()
    before = arrays(run.state.model)
    metrics, gradients, after = run(0), arrays(run.gradients), arrays(run.state.model)
    their, wanted = wanted_step()
    assert set(gradients) == set(wanted)
    assert float(metrics.loss) == pytest.approx(float(their.loss), rel=TOLERANCE)
    assert float(metrics.gradient_norm) == pytest.approx(float(their.gradient_norm), rel=TOLERANCE)
    for path, w in wanted.items():
        assert abs(gradients[path] - w).max() <= 2 * GRADIENTS * abs(w).max(), path
    frozen = set(before) - set(gradients)
    assert len(frozen) == 2 * len([path for path in paths_of(stored_model()) if path.endswith(tuple(CONTAINERS))]) + 1
    for path in frozen:
        if "choice_bias" not in path:
            np.testing.assert_array_equal(after[path], before[path], strict=True)


def gathered_bytes(jaxpr: Any) -> dict[str, int]:
    """Return the bytes that a device receives in all-gathers, by dtype."""
    found: dict[str, int] = {}
    for equation, times, *_ in equations(jaxpr):
        if equation.primitive.name.startswith("all_gather"):
            given: Any = equation.invars[0].aval
            got: Any = equation.outvars[0].aval
            assert times is not None
            size = times * (got.size - given.size) * given.dtype.itemsize
            found[str(given.dtype)] = found.get(str(given.dtype), 0) + size
    return found


def test_what_travels_has_few_bits():
    """By hand, on fsdp 2 x expert 4: each device receives half of its experts, twice with `remat=full`."""
    case = replace(STEPS[0], microbatches=1)
    only = {"experts.gate": 1 / 2, "experts.up": 1.0, "experts.down": 1 / 2}  # bytes per number

    def make() -> Any:
        model = build_model(config("deepseek", **_SIZES), key=jax.random.key(3))
        for end in only:
            model = store(model, lambda path, end=end: path.endswith(end), CONTAINERS[end])
        return cut_pieces(model, case.execution)

    found = gathered_bytes(trace(case, jax.eval_shape(make)).jaxpr)
    experts = 2 * 16 * 80 * 48 // 4  # numbers of one matrix of all layers, on one of four devices
    numbers = sum(int(bytes_ * experts) for bytes_ in only.values())
    # Codes of gate: groups of 32 of 80 inputs, cut at 40, in pieces of 8. Of up: pieces of 8 inputs and 4 outputs.
    codes = experts // 8 + experts // (8 * 4)
    assert found["uint8"] == 2 * (numbers + codes) // 2
    assert found["bfloat16"] == 2 * (experts // 16 * 2) // 2  # scales of down are not cut: groups of 16 inputs


def trace(case: Case, model: Any) -> Any:
    """Return the traced step of a case for a model."""
    optimizer = Optimizer(SGD(0.1), Constant(), 3, case.execution.placements(model))
    return Step(as_blueprint(model), optimizer, case.execution, batch_shapes(case.microbatches)).traced


@pytest.mark.parametrize(("remat", "strategy"), [("full", "ring"), ("none", "gather")])
def test_no_stack_of_experts_is_widened(remat, strategy):
    """No array of floating-point numbers is as large as a matrix of all experts of a device, one of its gradient
    included. The model of arrays has such arrays."""
    case = replace(STEPS[0], remat=remat, strategy=strategy, microbatches=1)
    groups = 16 if strategy == "gather" else 4

    def stacks(model: Any) -> set[tuple[int, ...]]:
        shapes = set()
        for equation, *_ in equations(trace(case, model).jaxpr):
            results: Any = [v.aval for v in equation.outvars]
            for x in results:
                is_float = jnp.issubdtype(getattr(x, "dtype", jnp.int32), jnp.floating)
                if is_float and {48, 80} <= set(x.shape) and x.size >= groups * 48 * 80:
                    shapes.add(x.shape)
        return shapes

    assert stacks(cut_pieces(stored_model(), case.execution)) == set()
    assert stacks(widened_model())


def test_bytes_at_rest():
    """On fsdp 2 x expert 4 each device has an eighth of the numbers and of the scales."""
    execution = STEPS[0].execution
    placed = moezoo.place(cut_pieces(stored_model(), execution), execution)
    experts = placed.stacks[0].blocks[0].feed_forward.experts
    numbers = 2 * 16 * 80 * 48

    def bytes_(x: Any) -> int:
        return x.addressable_shards[0].data.nbytes

    assert [bytes_(w.values) for w in (experts.gate, experts.up, experts.down)] == [
        numbers // 2 // 8,
        numbers // 8,
        numbers // 2 // 8,
    ]
    assert bytes_(experts.gate.scale) == numbers // 8 // 8


def test_a_layout_that_cuts_a_piece_is_refused():
    """One line names the array, the cut, the degrees that work and the remedy."""
    execution = Case("gather", "fsdp8", "pure_fsdp", "full", 1, "batch", "deepseek").execution
    message = r"mesh.fsdp=8 splits 'q_lora' 8 ways but .*query_up.scale has 1 entries along it; .*cut_pieces"
    with pytest.raises(moezoo.UserError, match=message) as e:
        moezoo.place(stored_model(), execution)
    assert "\n" not in str(e.value)
    cut: Any = cut_pieces(stored_model(), execution)
    with pytest.raises(moezoo.UserError, match=r"has parts of shapes .* in the model, .* in the step; make both with"):
        check_model(stored_model(), cut)

    @jax.jit
    def widened(model: Any) -> list[Any]:
        leaves = jax.tree.leaves(model, is_leaf=is_stored)
        return [x.materialise(jnp.float32) for x in leaves if isinstance(x, FewBits)]

    for one, other in zip(*map(widened, (stored_model(), cut)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.weekly
def test_generation():
    """Greedy tokens are those of the arrays, where no weight is gathered."""
    ids = np.random.default_rng(0).integers(1, 40, (4, 5))
    wanted = moezoo.generate(widened_model("grouped"), ids, max_new_tokens=4)
    case = Case("gather", "fsdp2_tensor4", "serve", "full", 1, "batch", "grouped")
    model = cut_pieces(stored_model("grouped"), case.execution)
    np.testing.assert_array_equal(moezoo.generate(model, ids, max_new_tokens=4, execution=case.execution), wanted)
