"""A model with weights in containers computes the same numbers as the plain model, which has the arrays themselves.

Most tests put some weights of a tiny DeepSeek into `Int8` containers, and compare logits, losses, gradients and
parameters with those of the plain model, in which the same arrays are not trained. Both run the tested code in
float32; `test_step_parity` compares plain models with the oracle.
"""

import functools
import importlib.metadata
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blueprints import as_blueprint
from cover import LAYERS, MESHES, Case, batch, config, cover, model
from programs import count_collectives
from running import RATE, STEPS, CompiledStep, batch_shapes
from traffic_oracle import step_traffic

import moezoo
from moezoo.models.blueprint import Blueprint
from moezoo.nn.containers import store
from moezoo.optim import SGD, AdamW, Constant, Optimizer
from moezoo.parallel.axes import Axes, Role, axes_of, is_stored, parameter_table, trainable_mask
from moezoo.parallel.traces import collective_traffic, equations
from moezoo.training.checkpoint import Checkpoints, read_about, restore
from moezoo.training.step import State, Step

# What is put into containers: some weights of attention, experts and shared experts, the router and the head. The other
# weights stay arrays and are trained.
WEIGHTS = ("attention.query_up", "attention.kv_down", "attention.key_up", "attention.value_up", "attention.out")
WEIGHTS += ("experts.gate", "experts.up", "shared.gate", "shared.down", "router.weight", "unembedding.weight")

CASES = [
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", "deepseek"),
    Case("gather", "fsdp2_ep2_context2", "cp_as_ep", "dots", 2, "batch", "deepseek", context_parallel="ring"),
    Case("ragged", "ep8", "replicated", "none", 2, "batch", "deepseek"),
    Case("capacity", "fsdp2_ep4", "shard_exp_on_fsdp", "dots", 2, "batch", "deepseek", chunks=2),
    Case("dense", "data2_fsdp2_ep2", "router_on_data", "none", 2, "batch", "deepseek"),
    Case("ring", "ep2_context2_tensor2", "tensor", "full", 2, "batch", "deepseek"),
]
# The steps that run: tokens or weights move to experts, keys and values are gathered or go round; weights are split
# over axes of rows, sequences and heads. `ragged` is in the test of generation, other `remat` in `test_adapted_steps`.
RUN = [
    CASES[0],
    Case("gather", "ep2_context2_tensor2", "tensor", "dots", 2, "batch", "deepseek", context_parallel="ring"),
]

# On one mesh both models do the same float32 operations on the same numbers; 1e-6 allows for another order of sums.
# Between these meshes, gradients of the plain model itself differ by up to 2e-6 of their largest value.
TOLERANCE, GRADIENTS = 1e-6, 3e-6


def in_container(path: str) -> bool:
    """Return whether the weight at a path is put into a container."""
    return path.endswith(WEIGHTS)


def trained_plain(path: str) -> bool:
    """Return whether the plain model trains an array: not those that are in containers in the other model."""
    return not in_container(path) and not path.endswith("choice_bias")


def as_plain(model_: Any) -> Any:
    """Return the model with the array that each container stands for in its place."""
    return jax.tree.map(lambda x: x.materialise(x.dtype) if is_stored(x) else x, model_, is_leaf=is_stored)


@functools.cache
def stored_model() -> Any:
    """Return the tiny DeepSeek with containers."""
    return jax.jit(lambda m: store(m, in_container))(model("deepseek"))


@functools.cache
def plain_model() -> Any:
    """Return the tiny DeepSeek with the arrays that the containers stand for."""
    return as_plain(stored_model())


def shapes_of(case: Case, matches: Any = in_container) -> Any:
    """Return the shapes of a case's model with containers."""
    return jax.eval_shape(lambda m: store(m, matches), Blueprint(config(case.family, case.balance)).shapes)


@functools.cache
def compiled(case: Case) -> CompiledStep:
    """Return the compiled step of the model with containers."""
    return CompiledStep(case, start=stored_model())


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by path; `.values` and `.scale` are the parts of an `Int8` container."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def steps_of(run: CompiledStep) -> list[tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Return metrics, gradients and parameters of each step."""
    run.state = run.begin()
    return [(run(i), by_path(run.gradients), by_path(run.state.model)) for i in range(STEPS)]


@functools.cache
def plain_steps() -> Any:
    """Return the steps of the plain model on fsdp 2 x expert 4, which the others are compared with."""
    return steps_of(CompiledStep(CASES[0], start=plain_model(), trained=trained_plain))


def worst_error(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Return the largest difference in any array, relative to its largest absolute value; 0 equals 0."""
    return max(float(abs(found[path] - w).max() / (abs(w).max() or 1)) for path, w in wanted.items())


@pytest.mark.parametrize("case", [RUN[0], pytest.param(RUN[1], marks=pytest.mark.weekly)], ids=str)
def test_steps_equal_those_of_the_plain_model(case):
    initial = by_path(stored_model())
    steps = zip(steps_of(compiled(case)), plain_steps(), strict=True)
    for (metrics, gradients, after), (their, wanted, parameters) in steps:
        assert set(gradients) == set(wanted)
        np.testing.assert_array_equal(metrics.load, their.load)
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm"):
            assert float(getattr(metrics, name)) == pytest.approx(float(getattr(their, name)), rel=TOLERANCE)
        assert worst_error(gradients, wanted) < (TOLERANCE if case is CASES[0] else GRADIENTS)
        trained = {path: p for path, p in parameters.items() if trained_plain(path)}
        assert worst_error(after, trained) < TOLERANCE
        for path in set(initial) - set(parameters):  # the parts of containers
            np.testing.assert_array_equal(after[path], initial[path], strict=True)


@functools.cache
def stored_and_plain(family: Any, balance: Any) -> tuple[Any, Any]:
    """Return a tiny model of any family with containers in attention, experts and shared experts; and the plain one."""
    ends = ("attention.out", "experts.gate", "experts.down", "shared.up")
    with_containers = jax.jit(lambda m: store(m, lambda path: path.endswith(ends)))(model(family, balance))
    return with_containers, as_plain(with_containers)


@pytest.mark.full
@pytest.mark.parametrize("case", cover(), ids=str)
def test_on_the_cover(case):
    """In every case of the cover, logits, losses and gradients equal those of the plain model on the same mesh.

    Each batch runs from the initial parameters, so that the rounding of one step does not add to that of the next.
    """
    with_containers, as_arrays = stored_and_plain(case.family, case.balance)
    parts = {path for path, axes in axes_by_path(with_containers).items() if axes.role is Role.PART}
    containers = {path.rpartition(".")[0] for path in parts}
    trained = lambda path: path not in containers and "choice_bias" not in path  # noqa: E731
    forward = jax.jit(lambda m: m(batch(0)["tokens"], execution=case.execution).logits)
    found, wanted = (np.asarray(forward(moezoo.place(m, case.execution))) for m in (with_containers, as_arrays))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * abs(wanted).max())
    ours, theirs = CompiledStep(case, start=with_containers), CompiledStep(case, start=as_arrays, trained=trained)
    for step in range(STEPS):
        (metrics, gradients), (their, expected) = (step_from_start(run, step) for run in (ours, theirs))
        assert set(gradients) == set(expected)
        np.testing.assert_array_equal(metrics.load, their.load)
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm"):
            assert float(getattr(metrics, name)) == pytest.approx(float(getattr(their, name)), rel=TOLERANCE)
        assert worst_error(gradients, expected) < TOLERANCE


def step_from_start(run: CompiledStep, number: int) -> tuple[Any, dict[str, np.ndarray]]:
    """Return metrics and gradients of batch `number` at the initial parameters."""
    run.state = run.begin()
    return run(number), by_path(run.gradients)


def axes_by_path(tree: Any) -> dict[str, Axes]:
    """Return the axes of every array by path, also of the parts of containers."""
    found = jax.tree_util.tree_leaves_with_path(axes_of(tree), is_leaf=lambda x: isinstance(x, Axes))
    return {jax.tree_util.keystr(path): axes for path, axes in found}


def test_logits():
    """Logits on one device equal the plain model's, and show the rounding to 8 bits; on a mesh the steps compare."""
    logits = jax.jit(lambda m: m(batch(0)["tokens"]).logits)
    found, wanted, exact = (np.asarray(logits(m)) for m in (stored_model(), plain_model(), model("deepseek")))
    assert abs(found - wanted).max() < 1e-6 * abs(wanted).max()
    assert abs(exact - wanted).max() > 1e-3 * abs(wanted).max()


def step_of(case: Case, shapes_: Any, trained: Any = None, optimizer: Any = None) -> Step:
    """Return a step that is not compiled, for a model given by its shapes."""
    optimizer = Optimizer(optimizer or SGD(RATE), Constant(), STEPS, case.execution.placements(shapes_))
    return Step(as_blueprint(shapes_, trained), optimizer, case.execution, batch_shapes(case.microbatches))


def test_optimizer_has_moments_of_trained_arrays_only():
    def moments(step: Step) -> set[str]:
        return {path.partition("mu")[2] for path in paths_of(step.arguments[0].optimizer) if "mu" in path}

    def paths_of(tree: Any) -> list[str]:
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

    case = CASES[0]
    everything = {path for path, axes, _ in parameter_table(shapes_of(case)) if axes.role is not Role.BUFFER}
    assert moments(step_of(case, shapes_of(case), optimizer=AdamW())) == {p for p in everything if not in_container(p)}
    only = step_of(case, shapes_of(case), lambda path: path.endswith("norm.scale"), AdamW())
    assert moments(only) == {p for p in everything if p.endswith("norm.scale")}


FILTERS = {
    "default": None,
    "norms": lambda path: path.endswith("norm.scale"),
    "head": lambda path: path == ".unembedding.norm.scale",
    "last stack": lambda path: "stacks[1]" in path and path.endswith(("experts.down", "query_down")),
    "scales": lambda path: path.endswith(("experts.gate.scale", "out.scale", "unembedding.weight.scale")),
    "scales of inputs": lambda path: path.endswith(("shared.down.scale", "attention.out.scale", "key_up.scale")),
}


# Each filter is combined with one case, two of them with `dots`. With it latents are gathered again only for gradients
# of what expands them: not by default, where it is in containers; for the scales of one.
TRAFFIC = list(zip(CASES, FILTERS, strict=True))
TRAFFIC += [(replace(CASES[1], context_parallel="gather"), name) for name in ("default", "scales of inputs")]


@pytest.mark.parametrize(("case", "trained"), TRAFFIC, ids=str)
def test_traffic_equals_the_oracle(case, trained):
    """Counts and bytes are equal with containers and with arrays that are not trained."""
    if case is not CASES[0]:  # that of the step that runs, which has micro-steps
        case = replace(case, chunks=1, microbatches=1)
    step = compiled(case).step if case is CASES[0] else step_of(case, shapes_of(case), FILTERS[trained])
    wanted = step_traffic(case.settings, step.arguments[0].model, trained=FILTERS[trained])
    assert collective_traffic(step.traced.jaxpr).outline(2) == wanted


def test_bytes_of_gathers_by_hand():
    """On fsdp 2 x expert 4 with `ring`: 8-bit values travel as bytes, those of layers in the repeated pass too."""
    gathers: dict[str, int] = {}
    for equation, times, *_ in equations(compiled(CASES[0]).step.traced.jaxpr):
        if equation.primitive.name.startswith("all_gather"):
            given, got = equation.invars[0].aval, equation.outvars[0].aval
            kind = str(given.dtype)  # type: ignore[attr-defined]
            assert times is not None
            gathers[kind] = gathers.get(kind, 0) + times * (got.size - given.size)  # type: ignore[attr-defined]
    c: Any = config("deepseek")
    attention = c.q_lora * c.heads * (c.nope_dim + c.rope_dim) + c.embed * (c.kv_lora + c.rope_dim)
    attention += c.heads * c.value_dim * c.embed + c.kv_lora * c.heads * (c.nope_dim + c.value_dim)
    shared, router = 2 * c.embed * 2 * c.expert_mlp, c.embed * c.experts
    layers, head = c.layers * attention + 2 * (shared + router), c.embed * c.vocab  # a device receives seven eighths
    experts = 2 * 2 * c.experts * c.embed * c.expert_mlp  # a device has a fourth of them and receives half of each
    assert gathers["uint8"] == CASES[0].microbatches * (2 * (layers * 7 // 8 + experts // 4 // 2) + head * 7 // 8)
    assert "int8" not in gathers


def test_stored_bytes_by_hand():
    case, c = CASES[0], config("deepseek")
    placed = moezoo.place(stored_model(), case.execution).stacks[1].blocks[0]

    def bytes_per_device(container: Any) -> tuple[int, int]:
        return tuple(x.addressable_shards[0].data.nbytes for x in (container.values, container.scale))  # type: ignore

    assert isinstance(c, moezoo.models.DeepSeekConfig)
    experts = 2 * c.experts * c.embed * c.expert_mlp
    # Values are split over expert 4 x fsdp 2, scales [layer, expert, expert_mlp] over expert 4.
    assert bytes_per_device(placed.feed_forward.experts.gate) == (experts // 8, 2 * c.experts * c.expert_mlp * 4 // 4)
    # `embed` is the output dimension: values and scales are split over all eight devices.
    out = 2 * c.heads * c.value_dim * c.embed
    assert bytes_per_device(placed.attention.out) == (out // 8, 2 * c.embed * 4 // 8)
    # `embed` is the input dimension: values are split over all eight devices, and every device has all scales.
    down = c.kv_lora + c.rope_dim
    assert bytes_per_device(placed.attention.kv_down) == (2 * c.embed * down // 8, 2 * down * 4)


def test_frozen_arrays_have_no_gradient_traffic():
    """With `gather`, a reduce-scatter is always of a weight's gradient; if only norms are trained there is none."""
    case = Case("gather", "fsdp2_ep4", "fsdp_ep", "full", 1, "batch", "deepseek")
    plain = Blueprint(config("deepseek")).shapes
    counts = count_collectives(step_of(case, plain, FILTERS["norms"]).traced.jaxpr)
    assert {kind for kind, _ in counts} == {"all_gather", "psum"}
    # The gradients of four norms in each of two stacks and of the final norm; the number of tokens; the loss; five
    # statistics of routing; the global norm.
    assert counts["psum", ("expert", "fsdp")] == 2 * 4 + 1 + 1 + 1 + 5 + 1


# With these sizes no activation has the shape of a weight: a device has 16 or 128 tokens.
_SIZES: dict[str, Any] = {
    "embed": 40,
    "q_lora": 32,
    "kv_lora": 72,
    "nope_dim": 11,
    "value_dim": 13,
    "expert_mlp": 36,
    "experts": 24,
}
# Every policy where weights are gathered. `dots` and `none` also where none is; with scales that are trained, the
# backward pass reads the values too.
POLICIES = [("ring", "fsdp2_ep4", remat, "default") for remat in ("full", "dots", "none")]
POLICIES += [("gather", "single", "dots", "default"), ("gather", "single", "none", "scales")]
POLICIES += [("gather", "ep8", "none", "scales")]


@pytest.mark.parametrize(("strategy", "mesh", "remat", "trained"), POLICIES)
def test_no_remat_policy_saves_the_array_of_a_container(strategy, mesh, remat, trained):
    """The scan over layers returns what it saves for the backward pass; no array has the shape of a weight."""
    case = Case(strategy, mesh, "fsdp_ep", remat, 1, "batch", "deepseek")
    plain = Blueprint(config("deepseek", **_SIZES, layers=LAYERS, dense_layers=0)).shapes
    weights = {path: s for path, axes, s in parameter_table(plain) if axes.role is Role.WEIGHT and "stacks" in path}
    step = step_of(case, jax.eval_shape(lambda m: store(m, weights.__contains__), plain), FILTERS[trained])
    shards = MESHES[mesh].expert
    of_layer = [tuple(shape[1:]) for shape in weights.values()]
    of_layer += [(shape[1] // shards, *shape[2:]) for path, shape in weights.items() if "experts." in path]
    forbidden = {tuple(sorted(shape)) for shape in of_layer}
    kept = []
    for equation, *_ in equations(step.traced.jaxpr):
        if equation.primitive.name == "scan" and equation.params["length"] == LAYERS:
            body = equation.params["jaxpr"]
            results: Any = zip(equation.outvars, getattr(body, "jaxpr", body).outvars, strict=True)
            kept += [inner.aval.shape for outer, inner in results if outer.aval.shape != inner.aval.shape]
    assert kept
    assert not [shape for shape in kept if tuple(sorted(shape)) in forbidden]


def save(run: CompiledStep, folder: Any, step: int) -> None:
    """Write a checkpoint of the state."""
    about = {"versions": {"moezoo": importlib.metadata.version("moezoo")}, "config": {}, "loader": {}}
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder, count=2, size=0)
    checkpoints.save(step, {"model": run.state.model, "training": run.state[1:]}, about)
    checkpoints.close()


def load(run: CompiledStep, folder: Any, step: int) -> None:
    """Replace the state by that of a checkpoint."""
    target: Any = run.step.arguments[0]
    saved = restore(folder, step, read_about(folder, step), model=target.model, training=target[1:])
    run.state = State(saved["model"], *saved["training"])


def test_checkpoint(tmp_path):
    """A run resumed after its first step is equal to the bit on the same mesh, and within 1e-5 on another."""
    run, other = compiled(CASES[0]), compiled(RUN[1])
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
    assert worst_error(found, {path: wanted[f".model{path}"] for path in found}) < 1e-5


def test_checkpoint_with_containers_is_refused_by_a_plain_model(tmp_path):
    run = compiled(CASES[0])
    run.state = run.begin()
    save(run, tmp_path / "checkpoints", 1)
    target = step_of(CASES[0], Blueprint(config("deepseek")).shapes).arguments[0].model
    with pytest.raises(moezoo.UserError, match=r"array .* only in"):
        restore(tmp_path / "checkpoints", 1, read_about(tmp_path / "checkpoints", 1), model=target)


@pytest.mark.filterwarnings("ignore:.*transformers has no key for")
def test_hub_folders_have_plain_arrays(tmp_path):
    moezoo.save_pretrained(moezoo.place(stored_model(), CASES[0].execution), tmp_path / "hub")
    loaded = by_path(moezoo.from_pretrained(tmp_path / "hub"))
    for path, x in by_path(plain_model()).items():
        np.testing.assert_array_equal(loaded[path], x, strict=True)


@pytest.mark.weekly
def test_generation():
    """Greedy tokens on a mesh equal the plain model's on one device."""
    ids = np.random.default_rng(0).integers(1, 40, (8, 5))
    execution = replace(CASES[0], strategy="ragged").execution
    found = moezoo.generate(stored_model(), ids, max_new_tokens=6, execution=execution)
    np.testing.assert_array_equal(found, moezoo.generate(plain_model(), ids, max_new_tokens=6))


def test_fp8_weights_are_gathered_as_bytes():
    """An FP8 weight travels as `uint8` and arrives with the same bits."""
    from moezoo.parallel.collectives import gather_weight

    execution = CASES[0].execution
    x = jnp.arange(-32, 32, dtype=jnp.float32).astype(jnp.float8_e4m3fn).reshape(8, 8)
    spec: Any = jax.sharding.PartitionSpec(("fsdp", "expert"))

    def gather(x: Any) -> Any:
        return gather_weight(x, (("fsdp", "expert"), ()), (), x.dtype, jnp.float32)

    function = jax.shard_map(gather, mesh=execution.mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    y = jax.jit(function)(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(y).view(np.uint8), np.asarray(x).view(np.uint8))
    sent = [
        e.equation.invars[0].aval
        for e in equations(jax.make_jaxpr(function)(x))
        if e.equation.primitive.name.startswith("all_gather")
    ]
    assert [str(a.dtype) for a in sent] == ["uint8"]  # type: ignore[attr-defined]


def test_default_filter_trains_all_arrays_except_the_choice_bias():
    mask = by_path(trainable_mask(Blueprint(config("deepseek")).shapes))
    assert [path for path, trained in mask.items() if not trained] == [
        ".stacks[1].blocks[0].feed_forward.router.choice_bias"
    ]
