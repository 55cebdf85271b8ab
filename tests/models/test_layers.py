"""Layers that repeat a pattern, run by one loop, against the same blocks called one after the other."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blueprints import as_blueprint
from cover import Case
from hypothesis import given
from hypothesis import strategies as st
from patterned import KINDS, make_model
from running import batch_shapes
from traffic_oracle import step_traffic

import moezoo
from moezoo.generation import generate as generation
from moezoo.hub import tensors as hub
from moezoo.models.hub import Hub, ModelType
from moezoo.models.layers import find_periods, layer_addresses
from moezoo.models.names import rows
from moezoo.nn.positions import Context
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.collectives import ALONE
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import collective_traffic
from moezoo.training.step import Step

VOCAB, LENGTH, NEW = 40, 6, 8
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (4, LENGTH + NEW)).astype(np.int32)
WITH_EXPERTS = [i for i, kind in enumerate(KINDS) if kind.experts]


model = functools.cache(make_model)


def unstacked(model: Any) -> list[Any]:
    """Return the blocks in order: two periods of two kinds, then one layer."""
    first, last = model.stacks
    cut = lambda block, i: jax.tree.map(lambda x: x[i], block)  # noqa: E731
    return [cut(block, i) for i in range(2) for block in first.blocks] + [cut(last.blocks[0], 0)]


def one_after_the_other(model: Any, tokens: Any) -> tuple[Any, Any]:
    """Return logits, and assignments to each expert [layers with experts, experts], from a loop over blocks."""
    execution, loads = on_mesh(moezoo.Execution()), []
    at = Coordinates(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones_like(tokens))
    x = model.embedding.weight[tokens]
    for block in unstacked(model):
        x, sums, _ = block(x, Context(at, at), execution)
        if sums is not None:
            loads.append(sums.counts.sum(0))
    return model.unembedding(x), jnp.stack(loads)


def value_and_gradients(run: Any) -> Any:
    """Return the program of `run(model, tokens)` -> logits, loads: (loss, (logits, loads)) and gradients."""

    def loss(model: Any, tokens: Any) -> Any:
        logits, load = run(model, tokens)
        return (jax.nn.log_softmax(logits)[..., 0] ** 2).sum(), (logits, load)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


# The only compiled program of the loop: all tests that need its logits or gradients use it.
by_blocks = value_and_gradients(one_after_the_other)


def test_kinds_are_cut_into_periods():
    assert [(len(stack.blocks), stack.count) for stack in model().stacks] == [(2, 2), (1, 1)]
    assert find_periods("MMMM") == [(1, 4)]
    assert find_periods("DMMM") == [(1, 1), (1, 3)]
    assert find_periods("DMDMDM") == [(2, 3)]
    assert find_periods("AAABAAABAAAB") == [(4, 3)]
    assert find_periods("MMDMMMM") == [(1, 2), (1, 1), (1, 4)]
    assert find_periods("MDMDMMMM") == [(2, 2), (1, 4)]
    assert find_periods("WAWAW") == [(1, 1), (2, 2)]
    assert find_periods("WAW") == [(1, 1)] * 3
    assert find_periods("DDDMMMMM") == [(1, 3), (1, 5)]
    assert find_periods("DWAWAWAX") == [(1, 1), (2, 3), (1, 1)]
    assert find_periods("M") == [(1, 1)]
    # Two equal halves, for two pipeline stages; with more or fewer layers the cut is the one without them.
    assert find_periods("LLLGLLLG") == [(4, 2)]
    assert find_periods("LLLGLLLGL") == [(1, 3), (1, 1), (1, 3), (1, 1), (1, 1)]
    assert find_periods("LLLLLG" * 2) == [(1, 5), (1, 1)] * 2
    assert find_periods("LLLLLG" * 3) == [(1, 5), (1, 1)] * 3
    # As many layers as a model may have, in less than a second.
    assert find_periods("M" * 10_000) == [(1, 10_000)]
    assert find_periods("LLLLLG" * 1666 + "LLLL") == [(1, 4), (6, 1666)]


def count_runs(kinds):
    """Return the number of runs of equal layers."""
    return len([*itertools.groupby(kinds)])


def blocks_and_layers(kinds):
    """Return the number of blocks that a model of these kinds compiles, and the kinds as its cut gives them back."""
    periods, found = find_periods(kinds), ""
    for period, count in periods:
        found += kinds[len(found) : len(found) + period] * count
    return sum(period for period, _ in periods), found


@given(st.text(alphabet="ABC", min_size=1, max_size=12))
def test_a_cut_gives_the_kinds_back(kinds):
    """For any kinds; and no cut into equal layers, one pattern and equal layers has fewer blocks."""
    blocks, found = blocks_and_layers(kinds)
    assert found == kinds
    fewest = count_runs(kinds)
    for first, period, count in itertools.product(range(12), range(1, 7), range(2, 13)):
        pattern, end = kinds[first : first + period], first + period * count
        if kinds[first:end] == pattern * count and len(pattern) == period:
            fewest = min(fewest, count_runs(kinds[:first]) + period + count_runs(kinds[end:]))
    assert blocks == fewest


@given(*(st.text(alphabet="AB", min_size=1, max_size=4),) * 2, st.integers(2, 9), st.text(alphabet="AB", max_size=3))
def test_a_pattern_is_found(leading, pattern, count, remaining):
    """Layers that repeat a pattern, between others, compile its blocks once."""
    blocks, found = blocks_and_layers(leading + pattern * count + remaining)
    assert found == leading + pattern * count + remaining
    assert blocks <= len(leading) + len(pattern) + len(remaining)


def test_addresses():
    addresses = layer_addresses(model().stacks)
    assert [(p.number, p.stack, p.kind, p.index) for p in addresses] == [
        *((2 * i + kind, 0, kind, i) for i in range(2) for kind in range(2)),
        (4, 1, 0, 0),
    ]
    assert [p.number for p in addresses if p.routing_row is not None] == WITH_EXPERTS
    assert [p.routing_row for p in addresses if p.routing_row is not None] == [0, 1, 2, 3]


def test_equals_the_blocks_one_after_the_other():
    """Logits, loads and every gradient, rematerialised; the whole suite of parity has the other policies."""

    def ours(model: Any, tokens: Any) -> Any:
        out = model(tokens, execution=moezoo.Execution(remat="offload"))
        return out.logits, out.routing.load

    (_, (wanted, load)), gradients = by_blocks(model(), TOKENS)
    (_, (found, own_load)), own = value_and_gradients(ours)(model(), TOKENS)
    np.testing.assert_array_equal(own_load, load)
    # Five layers of some hundred roundings each.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    for want, got in zip(jax.tree.leaves(gradients), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(np.abs(want).max(), 1e-3))


@pytest.mark.weekly
def test_each_kind_has_the_cache_it_needs():
    """Layers with a window keep its tokens, the others keep all; the next tokens are those of the whole text."""
    prompt = TOKENS[:, :LENGTH]
    padded = np.pad(prompt, ((0, 0), (0, NEW)))
    for at in range(LENGTH, LENGTH + NEW):
        logits = np.asarray(by_blocks(model(), padded)[0][1][0])[:, at - 1]
        top = np.sort(logits, axis=-1)
        assert (top[:, -1] - top[:, -2]).min() > 1e-4  # no near tie that rounding could turn
        padded[:, at] = logits.argmax(-1)
    np.testing.assert_array_equal(moezoo.generate(model(), prompt, max_new_tokens=NEW), padded)

    def prefill(model: Any) -> Any:
        at = Coordinates(jnp.broadcast_to(jnp.arange(LENGTH), prompt.shape), jnp.ones_like(jnp.asarray(prompt)))
        return generation.prefill(model, jnp.asarray(prompt), at, 14, on_mesh(moezoo.Execution())).cache

    cache = jax.eval_shape(prefill, model())
    keys = [[jax.tree.leaves(kept)[0].shape for kept in stack] for stack in cache.states]
    slots = [[(*shape[:2], shape[-2]) for shape in stack] for stack in keys]
    assert slots == [[(2, 4, 3), (2, 4, 14)], [(1, 4, 14)]]
    assert sorted(cache.coordinates) == [3, 14]


def test_a_step_moves_the_choice_bias_of_the_layer_that_had_the_load():
    load = np.full((len(WITH_EXPERTS), 8), 4, np.int32)
    for row in range(len(load)):
        load[row, row] = 9  # above the mean, so the others are below
    moved = unstacked(model().after_step(jnp.asarray(load)))
    for row, layer in enumerate(WITH_EXPERTS):
        after, before = (blocks[layer].moe.router.choice_bias for blocks in (moved, unstacked(model())))
        np.testing.assert_allclose(after - before, np.where(np.arange(8) == row, -0.25, 0.25), atol=1e-6)
    for layer in set(range(len(KINDS))) - set(WITH_EXPERTS):
        assert moved[layer].moe is None


def test_names_count_layers_and_not_periods():
    named = rows("", "layers.{layer}.", "attention.query_bias=q.bias feed_forward.router.weight=gate")
    kind = ModelType("Patterned", {}, {}, named)
    tensors = {t.name: t for t in hub.tensors(model(), Hub({}, {"patterned": kind}, lambda config: "patterned"))}
    assert set(tensors) == {f"layers.{i}.q.bias" for i in range(5)} | {f"layers.{i}.gate" for i in WITH_EXPERTS}
    assert tensors["layers.3.q.bias"].parts == (("stacks[0].blocks[1].attention.query_bias", (1,)),)
    assert tensors["layers.3.q.bias"].shape == (4 * 8,)
    assert tensors["layers.2.gate"].parts == (("stacks[0].blocks[0].feed_forward.router.weight", (1,)),)
    assert tensors["layers.4.q.bias"].parts == (("stacks[1].blocks[0].attention.query_bias", (0,)),)


@pytest.mark.parametrize(("rules", "axis"), [("fsdp_ep", "context"), ("tensor", "tensor")])
def test_a_mesh_changes_nothing(rules, axis):
    """With tokens and experts split over batch, sequence and expert axes, and with heads, widths and logits split."""
    cfg = moezoo.compose("dispatch=ragged", f"rules={rules}", "mesh.fsdp=2", "mesh.expert=2", f"mesh.{axis}=2")
    execution = on_mesh(moezoo.Execution(moezoo.make_mesh(cfg.mesh), cfg.rules, cfg.dispatch))
    found = jax.jit(lambda m: m(TOKENS, execution=execution))(moezoo.place(model(), execution))
    wanted, load = by_blocks(model(), TOKENS)[0][1]
    np.testing.assert_array_equal(found.routing.load, load)
    np.testing.assert_allclose(found.logits, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_traffic_of_layers_with_norms_after_each_part():
    """Sums over devices that such a norm reads are needed again for its gradient."""
    case = Case("ragged", "ep2_context2_tensor2", "tensor", "full", 1, "batch")
    optimizer = Optimizer(SGD(), Constant(), 1, case.execution.placements(model()))
    step = Step(as_blueprint(model()), optimizer, case.execution, batch_shapes(1))
    assert collective_traffic(step.traced.jaxpr).outline(2) == step_traffic(case.settings, model())


def test_a_block_by_its_formula():
    """Each part reads the normalised stream; its result is normalised and added."""
    block, x = unstacked(model())[0], jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 16), np.float32))
    at = Coordinates(jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.ones((2, 5), jnp.int32))
    context, execution = Context(at, at), on_mesh(moezoo.Execution())

    def normed(norm: Any, y: Any) -> Any:
        return y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 1e-3) * norm.scale[None, None]

    def formula(block: Any, x: Any) -> Any:
        y = block.attention(normed(block.attention_norm, x), context, execution).leave(ALONE)
        x = x + normed(block.after_attention_norm, y)
        y = block.feed_forward(normed(block.feed_forward_norm, x), context, execution).y
        return x + normed(block.after_feed_forward_norm, y)

    found = jax.jit(lambda b, x: b(x, context, execution).x)(block, x)
    np.testing.assert_allclose(found, jax.jit(formula)(block, x), rtol=0, atol=1e-5)
