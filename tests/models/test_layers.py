"""The one loop over layers of a pattern, against the same blocks called one after the other."""

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patterned import KINDS, NUMBERS, Patterned, noisy

import moezoo
from moezoo.generation import generate as generation
from moezoo.hub import tensors as hub
from moezoo.models.layers import find_periods, layer_places
from moezoo.nn.positions import Context
from moezoo.parallel.context_parallel import Place

VOCAB, LENGTH, NEW = 40, 6, 8
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (4, LENGTH)).astype(np.int32)
WITH_EXPERTS = [i for i, kind in enumerate(KINDS) if kind.experts]


@functools.cache
def model() -> Any:
    """A model of the pattern, every array random."""
    return noisy(jax.jit(lambda: Patterned(jax.random.split(jax.random.key(0), len(KINDS))))())


def unstacked(model: Any) -> list[Any]:
    """The blocks in order: two periods of two kinds, then one layer."""
    first, last = model.stacks
    cut = lambda block, i: jax.tree.map(lambda x: x[i], block)  # noqa: E731
    return [cut(block, i) for i in range(2) for block in first.blocks] + [cut(last.blocks[0], 0)]


def naive(model: Any, tokens: Any) -> tuple[Any, Any]:
    """Logits, and assignments to each expert [layers with experts, experts]."""
    execution, loads = moezoo.Execution(), []
    at = Place(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones_like(tokens))
    x = model.embedding.weight[tokens]
    for block, numbers in zip(unstacked(model), NUMBERS, strict=True):
        x, sums, _ = block(x, Context(at, at, numbers), execution)
        if sums is not None:
            loads.append(sums.counts.sum(0))
    return model.unembedding(x), jnp.stack(loads)


def test_kinds_are_cut_into_periods():
    assert [(len(stack.blocks), stack.count) for stack in model().stacks] == [(2, 2), (1, 1)]
    assert find_periods("MMMM") == [(1, 4)]
    assert find_periods("DMMM") == [(1, 1), (1, 3)]
    assert find_periods("DMDMDM") == [(2, 3)]
    assert find_periods("AAABAAABAAAB") == [(4, 3)]
    assert find_periods("MMDMMMM") == [(1, 2), (1, 1), (1, 4)]
    assert find_periods("MDMDMMMM") == [(2, 2), (1, 4)]


@given(st.text(alphabet="AB", min_size=1, max_size=12))
def test_a_cut_gives_the_kinds_back(kinds):
    """Whatever the kinds; and no cut into single layers that repeat is shorter."""
    periods, found = find_periods(kinds), ""
    for period, count in periods:
        found += kinds[len(found) : len(found) + period] * count
    assert found == kinds
    changes = 1 + sum(a != b for a, b in itertools.pairwise(kinds))
    assert sum(period for period, _ in periods) <= changes


def test_places():
    places = layer_places(model().stacks)
    assert [(p.number, p.stack, p.kind, p.index) for p in places] == [
        *((2 * i + kind, 0, kind, i) for i in range(2) for kind in range(2)),
        (4, 1, 0, 0),
    ]
    assert [p.number for p in places if p.routing_row is not None] == WITH_EXPERTS
    assert [p.routing_row for p in places if p.routing_row is not None] == [0, 1, 2, 3]


@pytest.mark.parametrize("remat", ["offload", "none"])
def test_equals_the_blocks_one_after_the_other(remat):
    """Logits, loads and every gradient, with remat or without."""

    def loss(run: Any, model: Any) -> Any:
        logits, load = run(model)
        return (jax.nn.log_softmax(logits)[..., 0] ** 2).sum(), (logits, load)

    def ours(model: Any) -> Any:
        out = model(TOKENS, execution=moezoo.Execution(remat=remat))
        return out.logits, out.routing.load

    (_, (wanted, load)), gradients = jax.jit(
        jax.value_and_grad(functools.partial(loss, lambda m: naive(m, jnp.asarray(TOKENS))), has_aux=True)
    )(model())
    (_, (found, own_load)), own = jax.jit(jax.value_and_grad(functools.partial(loss, ours), has_aux=True))(model())
    np.testing.assert_array_equal(own_load, load)
    # Five layers of some hundred roundings each.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    for want, got in zip(jax.tree.leaves(gradients), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(np.abs(want).max(), 1e-3))


def test_each_kind_has_the_cache_it_needs():
    """A window's layers keep its tokens alone, the others all; and the next tokens are those of the whole text."""
    read = jax.jit(naive)
    padded = np.pad(TOKENS, ((0, 0), (0, NEW)))
    for at in range(LENGTH, LENGTH + NEW):
        logits = np.asarray(read(model(), jnp.asarray(padded))[0])[:, at - 1]
        top = np.sort(logits, axis=-1)
        assert (top[:, -1] - top[:, -2]).min() > 1e-4  # no near tie that rounding could turn
        padded[:, at] = logits.argmax(-1)
    np.testing.assert_array_equal(moezoo.generate(model(), TOKENS, max_new_tokens=NEW), padded)

    def prefill(model: Any) -> Any:
        at = Place(jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape), jnp.ones_like(jnp.asarray(TOKENS)))
        return generation.prefill(model, jnp.asarray(TOKENS), at, 14, moezoo.Execution()).cache

    cache = jax.eval_shape(prefill, model())
    slots = [[jax.tree.leaves(kept)[0].shape[:3] for kept in stack] for stack in cache.kept]
    assert slots == [[(2, 4, 3), (2, 4, 14)], [(1, 4, 14)]]
    assert sorted(cache.keys) == [3, 14]


def test_a_step_moves_the_choice_bias_of_the_layer_that_had_the_load():
    load = np.full((len(WITH_EXPERTS), 8), 4, np.int32)
    for row in range(len(load)):
        load[row, row] = 9  # above the mean, and so the others below
    moved = unstacked(model().after_step(jnp.asarray(load)))
    for row, layer in enumerate(WITH_EXPERTS):
        after, before = (blocks[layer].moe.router.choice_bias for blocks in (moved, unstacked(model())))
        np.testing.assert_allclose(after - before, np.where(np.arange(8) == row, -0.25, 0.25), atol=1e-6)
    for layer in set(range(len(KINDS))) - set(WITH_EXPERTS):
        assert moved[layer].moe is None


def test_names_count_layers_and_not_periods():
    layer_names = {
        "attention.query_bias": "layers.{layer}.q.bias",
        "feed_forward.router.weight": "layers.{layer}.gate",
    }
    rest = dict.fromkeys(("MODEL_TYPES", "find_unused", "config_from_hub", "config_to_hub"), print)
    names: Any = types.SimpleNamespace(NAMES={}, LAYER_NAMES=layer_names, **rest)
    tensors = {t.name: t for t in hub.tensors(model(), names)}
    assert set(tensors) == {f"layers.{i}.q.bias" for i in range(5)} | {f"layers.{i}.gate" for i in WITH_EXPERTS}
    assert tensors["layers.3.q.bias"].parts == (("stacks[0].blocks[1].attention.query_bias", (1,)),)
    assert tensors["layers.3.q.bias"].shape == (4 * 8,)
    assert tensors["layers.2.gate"].parts == (("stacks[0].blocks[0].feed_forward.router.weight", (1,)),)
    assert tensors["layers.4.q.bias"].parts == (("stacks[1].blocks[0].attention.query_bias", (0,)),)


@pytest.mark.parametrize("mesh", [{"fsdp": 1, "expert": 4}, {"fsdp": 2, "expert": 2, "context": 2}])
def test_a_mesh_changes_nothing(mesh):
    execution = moezoo.Execution(
        moezoo.make_mesh(moezoo.MeshShape(**mesh)), moezoo.compose().rules, moezoo.compose("dispatch=ragged").dispatch
    )
    found = jax.jit(lambda m: m(TOKENS, execution=execution))(moezoo.place(model(), execution))
    wanted = jax.jit(lambda m: m(TOKENS))(model())
    np.testing.assert_array_equal(found.routing.load, wanted.routing.load)
    np.testing.assert_allclose(found.logits, wanted.logits, rtol=0, atol=1e-5 * np.abs(wanted.logits).max())


def test_a_block_by_its_formula():
    """Each part behind its norm, normalised again, and added to the stream."""
    block, x = unstacked(model())[0], jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 16), np.float32))
    at = Place(jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.ones((2, 5), jnp.int32))
    context, execution = Context(at, at, NUMBERS[0]), moezoo.Execution()

    def normed(norm: Any, y: Any) -> Any:
        return y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 1e-3) * norm.scale[None, None]

    def formula(block: Any, x: Any) -> Any:
        y = block.attention(normed(block.attention_norm, x), context, execution).y
        x = x + normed(block.after_attention_norm, y)
        y = block.feed_forward(normed(block.feed_forward_norm, x), at.segment > 0, execution).y
        return x + normed(block.after_feed_forward_norm, y)

    found = jax.jit(lambda b, x: b(x, context, execution).x)(block, x)
    np.testing.assert_allclose(found, jax.jit(formula)(block, x), rtol=0, atol=1e-5)
