"""Muon against plain loops over layers, experts and heads; its collectives; which part updates which parameter."""

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from cover import MESHES, Case, model, rules
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from traffic_oracle import step_traffic

import moezoo
from moezoo.optim import AdamW, Constant, Muon, Optimizer
from moezoo.optim.matrices import orthogonalise
from moezoo.parallel.axes import trainable_mask
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import collective_traffic

RATE, DECAY, UPDATES = 0.1, 0.3, 3
RULE = Muon(learning_rate=RATE, weight_decay=DECAY, clip_norm=None, epsilon=1e-2)


def gradients(tree: Any, number: int) -> Any:
    """Return random gradients; the experts that get no token have none."""
    rng = np.random.default_rng(number)

    def leaf(path: Any, x: Any) -> np.ndarray:
        # Small, so that another epsilon shows in the norm that it is added to.
        g = 1e-3 * rng.normal(size=x.shape).astype(np.float32)
        if "experts" in jax.tree_util.keystr(path):
            g[:, 1] = 0
        return g

    return jax.tree_util.tree_map_with_path(leaf, tree)


def direction(path: str, mix: np.ndarray, per_head: bool) -> np.ndarray:
    """Return the oracle's direction for an array of the model, in float64."""
    return oracle.muon_direction(path.rpartition(".")[2], mix.astype(np.float64), per_head)


def by_loops(parameters: Any, per_head: bool) -> dict[str, np.ndarray]:
    """Return the last of some updates of every array that Muon updates, relative to the rate."""
    values = {path: np.asarray(x, np.float64) for path, x in by_path(parameters).items() if muons(path)}
    last: dict[str, np.ndarray] = {}
    momentum = {path: np.zeros_like(x) for path, x in values.items()}
    for number in range(UPDATES):
        given = by_path(gradients(parameters, number))
        for path in values:
            momentum[path] = 0.95 * momentum[path] + given[path]
            last[path] = direction(path, given[path] + 0.95 * momentum[path], per_head) + DECAY * values[path]
            values[path] = values[path] - RATE * last[path]
    return last


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def muons(path: str) -> bool:
    """Return whether Muon updates a parameter: the matrices of attention, MLPs and experts."""
    inner = re.search(r"\.(attention|feed_forward)\.(?!router)", path) is not None
    return inner and not path.endswith((".scale", "_bias"))


class Updated:
    """The parameters after updates on a mesh, by the optimiser inside `shard_map`, and the traffic of one update."""

    def __init__(self, rule: Muon, family: str, mesh: str, layout: str):
        self.rule = rule
        execution = on_mesh(moezoo.Execution(moezoo.make_mesh(MESHES[mesh]), rules()[layout]))
        start = model(family)
        placements = execution.placements(start)
        self.parameters = eqx.filter(start, trainable_mask(start))
        kept = eqx.filter(placements, trainable_mask(start))
        optimizer = Optimizer(rule, Constant(), UPDATES, placements)
        specs = jax.tree.map(lambda p: p.spec, kept)
        states = jax.tree.map(lambda p: p.spec, optimizer.placements(self.parameters, kept))

        def update(parameters: Any, state: Any, gradient: Any) -> Any:
            return optimizer.update(gradient, state, parameters, jnp.float32(RATE), jnp.float32(1))[:2]

        mapped = jax.jit(
            jax.shard_map(update, mesh=execution.mesh, in_specs=(specs, states, specs), out_specs=(specs, states))
        )
        parameters, state = self.parameters, optimizer.init(self.parameters)
        self.traffic = collective_traffic(mapped.trace(parameters, state, parameters).jaxpr)
        for number in range(UPDATES):
            self.before = parameters
            parameters, state = mapped(parameters, state, gradients(self.parameters, number))
        self.after, self.state = parameters, state

    def check(self, per_head: bool) -> None:
        """Assert that the loops give the same last update of each matrix."""
        wanted, before, after = by_loops(self.parameters, per_head), by_path(self.before), by_path(self.after)
        assert wanted.keys() == {path for path in before if muons(path)}
        for path, update in wanted.items():
            found = (np.asarray(before[path], np.float64) - np.asarray(after[path], np.float64)) / RATE
            assert abs(found - update).max() < TOLERANCE * abs(update).max(), path


# Orthogonalising enlarges roundings by up to 3.4445^5 = 485 where singular values are small. A random matrix of at
# most 24 x 40 has them down to about 1/100 of its Frobenius norm, so roundings of 6e-8 grow to about 3e-6.
TOLERANCE = 1e-5
LAYOUTS = (
    ("mixtral", "single", "fsdp_ep"),
    ("mixtral", "fsdp8", "fsdp_ep"),
    pytest.param("deepseek", "fsdp2_ep4", "fsdp_ep", marks=pytest.mark.weekly),
    pytest.param("deepseek", "fsdp2_ep4", "shard_exp_on_fsdp", marks=pytest.mark.weekly),
    ("grouped", "fsdp2_ep2_context2", "cp_as_ep"),
    ("grouped_periodic", "ep8", "ep_as_cp"),
    ("deepseek", "ep2_context2_tensor2", "tensor"),
)


@pytest.mark.parametrize(("family", "mesh", "layout"), LAYOUTS)
def test_updates_are_those_of_loops_over_matrices(family, mesh, layout):
    per_head = family == "grouped"
    done = Updated(dataclasses.replace(RULE, per_head=per_head), family, mesh, layout)
    done.check(per_head)
    settings = Case("gather", mesh, layout, "full", 1, "batch", family, "muon").settings
    wanted = step_traffic(dataclasses.replace(settings, optimizer=done.rule), model(family)).items()
    assert done.traffic == {("orthogonalise", *row): t for (scope, *row), t in wanted if "orthogonalise" in scope}
    if layout == "shard_exp_on_fsdp":  # experts are whole, so nothing moves over fsdp alone
        assert all(set(row.axes) == {"fsdp", "expert"} for row in done.traffic)
    assert bool(done.traffic) == (mesh != "single")


def test_an_expert_without_tokens_moves_by_momentum_and_decay_alone():
    """Without any gradient, an expert's momentum stays zero and only decay moves it."""
    done = Updated(RULE, "mixtral", "fsdp8", "fsdp_ep")
    for tree in ("gate", "up", "down"):
        before, after = (
            np.asarray(getattr(t.stacks[0].blocks[0].feed_forward.experts, tree))[:, 1]
            for t in (done.before, done.after)
        )
        np.testing.assert_allclose(after, before * (1 - RATE * DECAY), rtol=2e-7)


def test_optax_is_a_second_witness():
    """optax averages momentum with a bias correction. Its first update has the same direction: both are those of g."""
    g = jnp.asarray(np.random.default_rng(0).normal(size=(16, 40)), jnp.float32)
    witness = optax.contrib.muon(1.0, ns_coeffs=(3.4445, -4.7750, 2.0315), consistent_rms=0.2, weight_decay=0.0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        update, _ = witness.update({"w": g}, witness.init({"w": g}), {"w": g})
    wanted, (found,) = direction(".gate", np.asarray(g), per_head=False), jax.tree.leaves(update)
    np.testing.assert_allclose(-found, wanted, atol=TOLERANCE * abs(wanted).max())


@given(st.integers(0, 1000), st.floats(-2.6, 0.0))
def test_singular_values_end_near_one(seed, smallest):
    """Values above 1/500 of the Frobenius norm come out between 0.5 and 1.3."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(n, 8)))[0] for n in (8, 24))
    values = np.geomspace(1, 10**smallest, 8)
    values = values / np.linalg.norm(values)
    x = (left * values) @ right.T
    done = np.linalg.svd(_compiled(jnp.asarray(x[None], jnp.float32))[0], compute_uv=False)
    wanted = values > 1 / 500
    assert (done[: wanted.sum()] > 0.5).all() or not wanted.any()
    assert done.max() < 1.3
    assert not np.asarray(_compiled(jnp.zeros((1, 8, 24)))).any()


_compiled = jax.jit(orthogonalise)


def test_bfloat16_orthogonalises_roughly():
    """bfloat16 rounds by 1/256, and five steps of three products each add up: about one part in ten of the largest."""
    x = np.random.default_rng(0).normal(size=(2, 8, 24)).astype(np.float32)
    exact = np.stack([oracle.orthogonalise(matrix) for matrix in x])
    found = np.asarray(orthogonalise(jnp.asarray(x, jnp.bfloat16)), np.float32)
    assert 0 < abs(found - exact).max() < 0.1 * abs(exact).max()


def _groups(rule: Muon, family: str = "deepseek") -> dict[str, str]:
    start = model(family)
    tree = rule.assign(on_mesh(moezoo.Execution()).placements(start))
    return {path: group.name for path, group in by_path(tree).items()}


def test_matrices_of_layers_are_muons_by_default():
    found = _groups(RULE)
    assert {path for path, name in found.items() if name == "muon"} == {path for path in found if muons(path)}


def test_the_other_part_has_every_setting_of_adamw():
    shared: Any = {"learning_rate": 0.5, "weight_decay": 0.25, "beta1": 0.7, "beta2": 0.8}
    shared |= {"epsilon": 0.01, "clip_norm": 3.0}
    found = Muon(**shared, moment_dtype="bfloat16").assign(on_mesh(moezoo.Execution()).placements(model("mixtral")))
    rules = {group.rule for group in jax.tree.leaves(found) if group.name == "adamw"}
    assert rules == {AdamW(**shared, moment_dtype="bfloat16")}
    assert {field.name for field in dataclasses.fields(AdamW)} == {*shared, "moment_dtype"}


def test_patterns_choose_the_other_part():
    found = _groups(dataclasses.replace(RULE, muon=("*.router.weight", ".unembedding.weight"), adamw=("*.kv_down",)))
    assert all(name == "muon" for path, name in found.items() if path.endswith(("router.weight", "unembedding.weight")))
    assert all(name == "adamw" for path, name in found.items() if path.endswith(".kv_down"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adamw": ("*.querry",)}, ["optimizer.adamw", "*.querry", "no whole path", "*.query"]),
        ({"muon": (".embedding.weight",)}, ["optimizer.muon", ".embedding.weight", "embedding"]),
        ({"muon": ("*.out",), "adamw": ("*.attention.out",)}, ["both", ".attention.out"]),
    ],
)
def test_refuses_patterns_that_choose_nothing_or_no_matrix(changes, words):
    with pytest.raises(moezoo.UserError) as caught:
        _groups(dataclasses.replace(RULE, **changes))
    assert all(word in str(caught.value) for word in words)


def test_matrices_are_orthogonalised_in_the_dtype_of_layers_unless_set():
    for words, dtype in (([], "float32"), (["model=mixtral_8x7b"], "bfloat16")):
        rule = moezoo.compose("optimizer=muon", *words).optimizer
        assert isinstance(rule, Muon)
        assert rule.orthogonal_dtype == dtype
    rule = moezoo.compose("optimizer=muon", "model=mixtral_8x7b", "optimizer.orthogonal_dtype=float32").optimizer
    assert isinstance(rule, Muon)
    assert rule.orthogonal_dtype == "float32"


@pytest.mark.parametrize(
    ("rule", "changes"), [(AdamW, {"beta2": 0.999}), (Muon, {"momentum": 0.995}), (Muon, {"beta1": 0.999})]
)
def test_moments_in_bfloat16_need_decays_that_they_can_follow(rule, changes):
    rule(**changes)
    ((key, value),) = changes.items()
    with refused(f"optimizer.{key}={value}", "bfloat16", "at most 0.99"):
        rule(moment_dtype="bfloat16", **changes)


@pytest.mark.parametrize("rule", [AdamW(moment_dtype="bfloat16"), Muon(moment_dtype="bfloat16")])
def test_moments_are_kept_in_bfloat16(rule):
    """The first update differs only by the rounding of moments, 1/256, times a rate of 0.1 and a few units."""
    parameters = {"w": jnp.ones((4, 6)), "b": jnp.ones(4)}
    axes = {"w": _placement("WEIGHT", ("embed",), ("mlp",)), "b": _placement("BIAS", ("embed",), ())}
    changed = {}
    for dtype in ("float32", "bfloat16"):
        optimizer = Optimizer(dataclasses.replace(rule, moment_dtype=dtype), Constant(), UPDATES, axes)
        state = optimizer.init(parameters)
        given = gradients(parameters, 0)
        changed[dtype], state, _ = jax.jit(optimizer.update)(given, state, parameters, jnp.float32(0.1), jnp.float32(1))
        kept = {x.dtype.name for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
        assert kept == {dtype}
    for one, other in zip(*map(jax.tree.leaves, changed.values()), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


def _placement(role: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    from moezoo.parallel.axes import Axes, Role
    from moezoo.parallel.placement import Placement

    none = ((),) * len(inputs + outputs)
    return Placement(Axes(Role[role], (), inputs, outputs), none, none, 1)
