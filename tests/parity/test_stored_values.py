"""A model whose weights are containers is the model of the arrays that they stand for, wherever and however it runs.

The oracle has these arrays as plain weights, and the same leaves frozen.
"""

import functools
import importlib.metadata
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import LAYERS, MESHES, Case, batch, config, cover, model
from jaxtyping import Array
from running import RATE, STEPS, Running, shapes

import moezoo
from moezoo.analysis.cost import communication
from moezoo.models import model_shapes
from moezoo.nn.containers import Int8, store
from moezoo.nn.linear import project
from moezoo.optim import SGD, AdamW, Constant, Optimizer
from moezoo.parallel.axes import Axes, Role, axes_of, is_stored, parameter_table, trainable_mask
from moezoo.parallel.stored import Stored, plain
from moezoo.parallel.traces import collective_traffic, count_collectives, equations
from moezoo.training.checkpoint import Checkpoints, read_about, restore
from moezoo.training.step import State, Step

# Of attention, experts, shared experts, router and head; others of each kind stay arrays and are trained.
WEIGHTS = ("attention.query_up", "attention.kv_down", "attention.key_up", "attention.value_up", "attention.out")
WEIGHTS += ("experts.gate", "experts.up", "shared.gate", "shared.down", "router.weight", "unembedding.weight")

CASES = [
    Case("gather", "single", "fsdp_ep", "none", 2, "batch", "deepseek"),
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", "deepseek"),
    Case("gather", "fsdp2_ep2_context2", "cp_as_ep", "dots", 2, "batch", "deepseek"),
    Case("ragged", "ep8", "replicated", "none", 2, "batch", "deepseek"),
    Case("capacity", "fsdp2_ep4", "shard_exp_on_fsdp", "dots", 2, "batch", "deepseek", 2),
    Case("dense", "data2_fsdp2_ep2", "router_on_data", "none", 2, "batch", "deepseek"),
]

# On the same mesh both models compute the same float32 numbers. Gradients of arrays alone differ by up to 2e-6 of their
# largest value between these meshes.
TOLERANCE, GRADIENTS = 1e-6, 3e-6
pytestmark = pytest.mark.xdist_group("containers")  # one process: the tests share compiled steps


def chosen(path: str) -> bool:
    """What is put into containers."""
    return path.endswith(WEIGHTS)


def frozen_alike(path: str) -> bool:
    """What is trained of the model of arrays."""
    return not chosen(path) and not path.endswith("choice_bias")


@functools.cache
def stored() -> Any:
    return jax.jit(lambda m: store(m, chosen))(model("deepseek"))


@functools.cache
def arrays() -> Any:
    return jax.tree.map(lambda x: x.whole(x.dtype) if is_stored(x) else x, stored(), is_leaf=is_stored)


def shapes_of(case: Case, matches: Any = chosen) -> Any:
    return jax.eval_shape(lambda m: store(m, matches), model_shapes(config(case.family, case.balance)))


@functools.cache
def running(case: Case) -> Running:
    return Running(case, start=stored())


def by_path(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def steps_of(run: Running) -> list[tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Metrics, gradients and parameters of each step."""
    run.state = run.begin()
    return [(run(i), by_path(run.state.optimizer), by_path(run.state.model)) for i in range(STEPS)]


@functools.cache
def oracle() -> Any:
    return steps_of(Running(CASES[1], start=arrays(), trained=frozen_alike))


def worst(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    return max(float(abs(found[path] - w).max() / (abs(w).max() or 1)) for path, w in wanted.items())


@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_steps(case):
    begun = by_path(stored())
    for (metrics, gradients, after), (their, wanted, parameters) in zip(steps_of(running(case)), oracle(), strict=True):
        assert set(gradients) == set(wanted)
        np.testing.assert_array_equal(metrics.load, their.load)
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm"):
            assert float(getattr(metrics, name)) == pytest.approx(float(getattr(their, name)), rel=TOLERANCE)
        assert worst(gradients, wanted) < (TOLERANCE if case is CASES[1] else GRADIENTS)
        assert worst(after, {path: p for path, p in parameters.items() if frozen_alike(path)}) < TOLERANCE
        for path in set(begun) - set(parameters):  # what containers hold
            np.testing.assert_array_equal(after[path], begun[path], strict=True)


@functools.cache
def whole_cover(family: Any, balance: Any) -> tuple[Any, Any]:
    """Of any family: attention's output, experts and, where there are some, shared experts in containers; as arrays."""
    ends = ("attention.out", "experts.gate", "experts.down", "shared.up")
    inside = jax.jit(lambda m: store(m, lambda path: path.endswith(ends)))(model(family, balance))
    return inside, jax.tree.map(lambda x: x.whole(x.dtype) if is_stored(x) else x, inside, is_leaf=is_stored)


@pytest.mark.full
@pytest.mark.parametrize("case", cover(), ids=str)
def test_on_the_cover(case):
    """Every case of the cover: logits, figures and gradients of the rest are those of arrays on the same mesh.

    Each batch meets the parameters of the start, so that what differs is one step's and not what steps add up to.
    """
    inside, outside = whole_cover(case.family, case.balance)
    parts = {path for path, axes in axes_by_path(inside).items() if axes.role is Role.PART}
    fields = {path.rpartition(".")[0] for path in parts}
    learns = lambda path: path not in fields and "choice_bias" not in path  # noqa: E731
    forward = jax.jit(lambda m: m(batch(0)["tokens"], execution=case.execution).logits)
    found, wanted = (np.asarray(forward(moezoo.place(m, case.execution))) for m in (inside, outside))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * abs(wanted).max())
    ours, theirs = Running(case, start=inside), Running(case, start=outside, trained=learns)
    for step in range(STEPS):
        (metrics, gradients), (their, expected) = (first_step(run, step) for run in (ours, theirs))
        assert set(gradients) == set(expected)
        np.testing.assert_array_equal(metrics.load, their.load)
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm"):
            assert float(getattr(metrics, name)) == pytest.approx(float(getattr(their, name)), rel=TOLERANCE)
        assert worst(gradients, expected) < TOLERANCE


def first_step(run: Running, number: int) -> tuple[Any, dict[str, np.ndarray]]:
    """Metrics and gradients of a batch at the parameters of the start."""
    run.state = run.begin()
    return run(number), by_path(run.state.optimizer)


def axes_by_path(tree: Any) -> dict[str, Axes]:
    """Of every array, parts of containers included."""
    found = jax.tree_util.tree_leaves_with_path(axes_of(tree), is_leaf=lambda x: isinstance(x, Axes))
    return {jax.tree_util.keystr(path): axes for path, axes in found}


def logits(model_: Any) -> np.ndarray:
    """On one device."""
    return np.asarray(jax.jit(lambda m: m(batch(0)["tokens"]).logits)(model_))


def test_logits():
    """On one device and on eight. The rounding to 8 bits shows, so the model is not one that nothing was done to."""
    wanted, exact, execution = logits(arrays()), logits(model("deepseek")), CASES[1].execution
    on_mesh = jax.jit(lambda m: m(batch(0)["tokens"], execution=execution).logits)(moezoo.place(stored(), execution))
    for found in (logits(stored()), np.asarray(on_mesh)):
        assert abs(found - wanted).max() < 1e-6 * abs(wanted).max()
    assert abs(exact - wanted).max() > 1e-3 * abs(wanted).max()


def step_of(case: Case, shapes_: Any, trained: Any = None, optimizer: Any = None) -> Step:
    optimizer = Optimizer(optimizer or SGD(RATE), Constant(), STEPS, case.execution.placements(shapes_))
    return Step(shapes_, optimizer, case.execution, shapes(case.microbatches), trained=trained)


class LowRank(Stored):
    """A frozen base, itself a container, and a trained pair of thin matrices: what others may write."""

    base: Array | Stored
    down: Array
    up: Array
    dtype: np.dtype = eqx.field(static=True)

    def __init__(self, weight: Array, axes: Axes):
        first, last = len(axes.stacked), len(axes.stacked + axes.inputs)
        self.base, self.dtype = Int8(weight, axes), weight.dtype
        self.down = 0.1 * jax.random.normal(jax.random.key(0), (*weight.shape[:last], 2))
        self.up = 0.1 * jax.random.normal(jax.random.key(1), (*weight.shape[:first], 2, *weight.shape[last:]))

    def axes(self, declared: Axes) -> dict[str, Axes]:
        down = Axes(Role.WEIGHT, declared.stacked, declared.inputs, ("rank",))
        return {"base": declared, "down": down, "up": Axes(Role.WEIGHT, declared.stacked, ("rank",), declared.outputs)}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def whole(self, dtype: Any) -> Array:
        return plain(self.base, dtype) + jnp.tensordot(self.down, self.up, 1)

    def product(self, x: Array, inputs: int, dtype: Any) -> Array:
        return project(x, self.base, inputs, dtype=dtype) + project(project(x, self.down, inputs), self.up, dtype=dtype)


def test_a_container_of_containers():
    """A pair beside integers: its product is that of the merged matrix, only the pair is trained, on any mesh alike."""
    pair: Any = jax.jit(lambda m: store(m, lambda path: path.endswith(("query_up", "attention.out")), LowRank))(
        model("deepseek")
    )
    one = jax.tree.map(lambda x: x[1], pair.stacks[1].blocks[0].attention.out)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, *one.shape[:2])), jnp.float32)
    np.testing.assert_allclose(project(x, one, 2), jnp.tensordot(x, one.whole(jnp.float32), 2), atol=1e-5)

    only = lambda path: path.endswith((".down", ".up")) and "attention" in path  # noqa: E731
    found, wanted = (Running(case, start=pair, trained=only) for case in (replace(CASES[1], remat="none"), CASES[0]))
    (metrics, gradients, _), (their, expected, _) = steps_of(found)[0], steps_of(wanted)[0]
    assert len(gradients) == 2 * 2 * 2  # of two matrices in each of two stacks
    assert min(abs(g).max() for g in expected.values()) > 1e-4
    assert worst(gradients, expected) < GRADIENTS
    assert float(metrics.gradient_norm) == pytest.approx(float(their.gradient_norm), rel=TOLERANCE)
    default = {path for path, one in by_path(trainable_mask(pair)).items() if one and "query_up" in path}
    assert {path.rpartition(".")[2] for path in default} == {"down", "up"}
    predicted = communication(replace(CASES[1], remat="none").settings, model=pair, trained=only)
    assert collective_traffic(found.step.traced.jaxpr).outline(2) == predicted


def test_optimizer_has_nothing_of_what_is_frozen():
    def moments(step: Step) -> set[str]:
        return {path.partition("mu")[2] for path in by_path_of_shapes(step.arguments[0].optimizer) if "mu" in path}

    def by_path_of_shapes(tree: Any) -> list[str]:
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

    case = CASES[1]
    everything = {path for path, axes, _ in parameter_table(shapes_of(case)) if axes.role is not Role.BUFFER}
    assert moments(step_of(case, shapes_of(case), optimizer=AdamW())) == {p for p in everything if not chosen(p)}
    only = step_of(case, shapes_of(case), lambda path: path.endswith("norm.scale"), AdamW())
    assert moments(only) == {p for p in everything if p.endswith("norm.scale")}


FILTERS = {
    "default": None,
    "norms": lambda path: path.endswith("norm.scale"),
    "head": lambda path: path == ".unembedding.norm.scale",
    "last stack": lambda path: "stacks[1]" in path and path.endswith(("experts.down", "query_down")),
    "scales": lambda path: path.endswith(("experts.gate.scale", "out.scale", "unembedding.weight.scale")),
}


# Every filter meets one case.
TRAFFIC = list(zip(CASES[1:], FILTERS, strict=True))


@pytest.mark.parametrize(("case", "trained"), TRAFFIC, ids=str)
def test_traffic_is_that_of_the_formula(case, trained):
    """To the byte, with containers and with what is not trained."""
    case = replace(case, chunks=1, remat="full" if case.remat == "dots" else case.remat)
    step = step_of(case, shapes_of(case), FILTERS[trained])
    predicted = communication(case.settings, model=step.arguments[0].model, trained=FILTERS[trained])
    assert collective_traffic(step.traced.jaxpr).outline(2) == predicted


def test_formula_is_a_bound_where_products_are_kept():
    """What frozen weights were multiplied with is not brought again, and only that differs."""
    case = CASES[2]
    step = step_of(case, shapes_of(case))
    traced = collective_traffic(step.traced.jaxpr).outline(2)
    predicted = communication(case.settings, model=step.arguments[0].model)
    different = {row for row in predicted if traced.get(row) != predicted[row]}
    assert {(row.collective, row.axes, row.phase) for row in different} == {("all_gather", ("context",), "recomputed")}
    assert set(traced) <= set(predicted)
    assert traced.bytes < predicted.bytes


def test_bytes_of_gathers_by_hand():
    """On fsdp 2 x expert 4 with `ring`: integers as bytes, scales as float32, each forward and backward."""
    case = replace(CASES[1], microbatches=1)
    gathers: dict[str, int] = {}
    for equation, times, *_ in equations(step_of(case, shapes_of(case)).traced.jaxpr):
        if equation.primitive.name.startswith("all_gather"):
            given, got = equation.invars[0].aval, equation.outvars[0].aval
            kind = str(given.dtype)  # type: ignore[attr-defined]
            assert times is not None
            gathers[kind] = gathers.get(kind, 0) + times * (got.size - given.size)  # type: ignore[attr-defined]
    c: Any = config("deepseek")
    attention = c.q_lora * c.heads * (c.nope_dim + c.rope_dim) + c.embed * (c.kv_lora + c.rope_dim)
    attention += c.heads * c.value_dim * c.embed + c.kv_lora * c.heads * (c.nope_dim + c.value_dim)
    shared, router = 2 * c.embed * 2 * c.expert_mlp, c.embed * c.experts
    dense = c.layers * attention + 2 * (shared + router) + c.embed * c.vocab  # over all eight devices
    experts = 2 * 2 * c.experts * c.embed * c.expert_mlp  # a fourth of them, halves of each joined
    assert gathers["uint8"] == 2 * (dense * 7 // 8 + experts // 4 // 2)
    assert "int8" not in gathers


def test_bytes_at_rest_by_hand():
    case, c = CASES[1], config("deepseek")
    placed = moezoo.place(stored(), case.execution).stacks[1].blocks[0]

    def at_rest(container: Any) -> tuple[int, int]:
        return tuple(x.addressable_shards[0].data.nbytes for x in (container.values, container.scale))  # type: ignore

    assert isinstance(c, moezoo.models.DeepSeekConfig)
    experts = 2 * c.experts * c.embed * c.expert_mlp
    # Values over expert 4 x fsdp 2, scales [layer, expert, expert_mlp] over expert 4.
    assert at_rest(placed.feed_forward.experts.gate) == (experts // 8, 2 * c.experts * c.expert_mlp * 4 // 4)
    # `embed` is the output: values and scales over all eight devices.
    out = 2 * c.heads * c.value_dim * c.embed
    assert at_rest(placed.attention.out) == (out // 8, 2 * c.embed * 4 // 8)
    # `embed` is the input: every device has all scales.
    down = c.kv_lora + c.rope_dim
    assert at_rest(placed.attention.kv_down) == (2 * c.embed * down // 8, 2 * down * 4)


def test_frozen_arrays_scatter_no_gradient():
    """Where weights move, nothing but their gradients is scattered; sums are of norms' gradients and of figures."""
    case = Case("gather", "fsdp2_ep4", "fsdp_ep", "full", 1, "batch", "deepseek")
    plain = model_shapes(config("deepseek"))
    counts = count_collectives(step_of(case, plain, FILTERS["norms"]).traced.jaxpr)
    assert {kind for kind, _ in counts} == {"all_gather", "psum"}
    # Four norms in each of two stacks and the last one; tokens, the loss, five statistics of routing, the global norm.
    assert counts["psum", ("expert", "fsdp")] == 2 * 4 + 1 + 1 + 1 + 5 + 1


# No activation has the shape of a weight: tokens are 16 or 128 on a device.
_SIZES: dict[str, Any] = {
    "embed": 40,
    "q_lora": 32,
    "kv_lora": 72,
    "nope_dim": 11,
    "value_dim": 13,
    "expert_mlp": 36,
    "experts": 24,
}
POLICIES = [
    (s, m, r, "default") for s, m in (("gather", "single"), ("ring", "fsdp2_ep4")) for r in ("full", "dots", "none")
]
POLICIES += [("gather", "single", "none", "scales"), ("gather", "ep8", "none", "scales")]


@pytest.mark.parametrize(("strategy", "mesh", "remat", "trained"), POLICIES)
def test_no_policy_keeps_what_a_container_stands_for(strategy, mesh, remat, trained):
    """What the scan over layers returns, stacked, for the backward pass: nothing of a weight's shape."""
    case = Case(strategy, mesh, "fsdp_ep", remat, 1, "batch", "deepseek")
    plain = model_shapes(config("deepseek", **_SIZES))
    weights = {path: s for path, axes, s in parameter_table(plain) if axes.role is Role.WEIGHT and "stacks" in path}
    step = step_of(case, jax.eval_shape(lambda m: store(m, weights.__contains__), plain), FILTERS[trained])
    ways = MESHES[mesh].expert
    one = [tuple(shape[1:]) for shape in weights.values()]
    one += [(shape[1] // ways, *shape[2:]) for path, shape in weights.items() if "experts." in path]
    forbidden = {tuple(sorted(shape)) for shape in one}
    kept = []
    for equation, *_ in equations(step.traced.jaxpr):
        if equation.primitive.name == "scan" and equation.params["length"] == LAYERS:
            body = equation.params["jaxpr"]
            results: Any = zip(equation.outvars, getattr(body, "jaxpr", body).outvars, strict=True)
            kept += [inner.aval.shape for outer, inner in results if outer.aval.shape != inner.aval.shape]
    assert kept
    assert not [shape for shape in kept if tuple(sorted(shape)) in forbidden]


def save(run: Running, folder: Any, step: int) -> None:
    about = {"versions": {"moezoo": importlib.metadata.version("moezoo")}, "config": {}, "loader": {}}
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save(step, {"model": run.state.model, "training": run.state[1:]}, about)
    checkpoints.close()


def load(run: Running, folder: Any, step: int) -> None:
    target: Any = run.step.arguments[0]
    saved = restore(folder, step, read_about(folder, step), model=target.model, training=target[1:])
    run.state = State(saved["model"], *saved["training"])


def test_checkpoint(tmp_path):
    """Stopped after a step and resumed: to the bit on the same mesh, and the same numbers from there on on another."""
    run, other = running(CASES[1]), running(CASES[3])
    run.state = run.begin()
    run(0)
    save(run, tmp_path / "checkpoints", 1)
    saved = by_path(run.state)
    for number in range(1, STEPS):
        run(number)
    wanted = by_path(run.state)

    load(run, tmp_path / "checkpoints", 1)
    kept = by_path(run.state)
    assert [path for path, x in kept.items() if x.dtype == np.int8] == [p for p in wanted if p.endswith(".values")]
    for number in range(1, STEPS):
        run(number)
    for path, x in by_path(run.state).items():
        np.testing.assert_array_equal(x, wanted[path], strict=True)

    load(other, tmp_path / "checkpoints", 1)
    for path, x in by_path(other.state).items():
        np.testing.assert_array_equal(x, saved[path], strict=True)
        np.testing.assert_array_equal(x, kept[path], strict=True)
    for number in range(1, STEPS):
        other(number)
    found = by_path(other.state.model)
    assert worst(found, {path: wanted[f".model{path}"] for path in found}) < 1e-5


def test_checkpoint_of_arrays_is_refused(tmp_path):
    """A container is not read from what was saved of an array."""
    run = running(CASES[1])
    run.state = run.begin()
    save(run, tmp_path / "checkpoints", 1)
    target = step_of(CASES[1], model_shapes(config("deepseek"))).arguments[0].model
    with pytest.raises(moezoo.UserError, match=r"array .* exists only in"):
        restore(tmp_path / "checkpoints", 1, read_about(tmp_path / "checkpoints", 1), model=target)


def test_folders_have_plain_arrays(tmp_path):
    moezoo.save_pretrained(moezoo.place(stored(), CASES[1].execution), tmp_path / "hub")
    loaded = by_path(moezoo.from_pretrained(tmp_path / "hub"))
    for path, x in by_path(arrays()).items():
        np.testing.assert_array_equal(loaded[path], x, strict=True)


@pytest.mark.parametrize("mesh", [None, "fsdp2_ep4"])
def test_generation(mesh):
    """Greedy tokens, of prompts read at once and of tokens that attend to latents."""
    ids = np.random.default_rng(0).integers(1, 40, (8, 5))
    execution = None if mesh is None else CASES[1].execution
    found = moezoo.generate(stored(), ids, max_new_tokens=6, execution=execution)
    np.testing.assert_array_equal(found, moezoo.generate(arrays(), ids, max_new_tokens=6))


def test_only_what_travels_as_bytes_is_cast_to_them():
    """FP8 too, and back to the same numbers."""
    from moezoo.parallel.collectives import gather_weight

    execution = CASES[1].execution
    x = jnp.arange(-32, 32, dtype=jnp.float32).astype(jnp.float8_e4m3fn).reshape(8, 8)
    spec: Any = jax.sharding.PartitionSpec(("fsdp", "expert"))

    def whole(x: Any) -> Any:
        return gather_weight(x, (("fsdp", "expert"), ()), (), x.dtype, jnp.float32)

    function = jax.shard_map(whole, mesh=execution.mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    y = jax.jit(function)(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(y).view(np.uint8), np.asarray(x).view(np.uint8))
    sent = [
        e.equation.invars[0].aval
        for e in equations(jax.make_jaxpr(function)(x))
        if e.equation.primitive.name.startswith("all_gather")
    ]
    assert [str(a.dtype) for a in sent] == ["uint8"]  # type: ignore[attr-defined]


def test_default_filter_of_a_plain_model():
    """Is what was trained before there were filters."""
    shapes_ = model_shapes(config("deepseek"))
    mask = by_path(trainable_mask(shapes_))
    assert [path for path, one in mask.items() if not one] == [".stacks[1].blocks[0].feed_forward.router.choice_bias"]
