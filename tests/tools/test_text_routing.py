"""The routing of a text against plain loops over tokens, on one device and a mesh; its text, and mistakes."""

import collections
import dataclasses
import itertools
import math
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from cover import FAMILIES
from cover import model as tiny_model
from hypothesis import given
from hypothesis import strategies as st
from patterned import make_model
from refusals import refused

import moezoo
from moezoo.data import Batch, load, validation_batches
from moezoo.tools.recording import make_expert_ids, record_model
from moezoo.tools.routing.counted import TextRouting, rows_of_source
from moezoo.tools.routing.tally import Tally, log_odds

ROWS, LENGTH = 8, 16
PADDED = (0, 12)  # row 0 has padding from token 12 on; row 3 has nothing else


def make_batch(vocab: int, *, packed: bool) -> Batch:
    """Random tokens: two documents per row and padding, or one document per row."""
    tokens = np.random.default_rng(1).integers(0, vocab, (ROWS, LENGTH)).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    segments = np.ones_like(tokens)
    if packed:
        segments[:, 6:], positions[:, 6:] = 2, positions[:, :10]
        segments[PADDED[0], PADDED[1] :] = segments[3] = 0
        positions[3] = np.arange(LENGTH)
    return Batch(tokens, np.full_like(tokens, -1), segments, positions)


@pytest.fixture(scope="module")
def model():
    """Layers of two kinds that alternate, and a dense one."""
    return make_model()


@pytest.fixture(scope="module")
def expert_ids(model):
    """The compiled program on one device."""
    return make_expert_ids(model, moezoo.Execution(), (ROWS, LENGTH))


def test_ids_are_those_of_each_router(model, expert_ids):
    """The oracle records each router's gates; layers of one kind are not adjacent in the model."""
    batch = make_batch(40, packed=False)
    found, records = expert_ids(batch), record_model(model, batch.tokens)
    assert found.shape == (4, ROWS, LENGTH, 2)
    for row, layer in enumerate((0, 1, 2, 3)):
        (gates,) = (
            one.output for (path, number), one in records.items() if number == layer and path.endswith(".router")
        )
        for ids, chosen in zip(found[row].reshape(-1, 2), gates, strict=True):
            assert set(ids) == set(np.flatnonzero(chosen))


def test_any_mesh_and_order_of_tokens(model, expert_ids):
    """Documents in one row, padding, and a sequence that devices share in balanced order: the same ids, in place."""
    cfg = moezoo.compose(
        *("mesh.context=2", "mesh.expert=2", "mesh.fsdp=2", "execution.sequence_order=balanced", "dispatch=ring"),
        *(f"seq_len={LENGTH}", f"batch_size={ROWS}"),
    )
    batch = make_batch(40, packed=True)
    ids = expert_ids(batch)
    np.testing.assert_array_equal(make_expert_ids(model, moezoo.execution(cfg), (ROWS, LENGTH))(batch), ids)
    assert (ids[:, *PADDED] == 8).all()
    assert (ids[:, batch.segments > 0] < 8).all()


def test_counts_of_a_text_and_the_models_own_routing(model):
    """`load` is that of a call of the model; padding is not counted. A context stays in its document."""
    batch = make_batch(40, packed=True)
    found = moezoo.analysis.routing(model, batch)
    own = jax.jit(lambda m: m(batch.tokens, segments=batch.segments, positions=batch.positions).routing)(model)
    np.testing.assert_array_equal(found.tally.load, own.load)
    assert found.layers == (0, 1, 2, 3)
    assert found.tally.tokens == (batch.segments > 0).sum() == ROWS * LENGTH - LENGTH - 4
    layer = found.tally.balance_by_layer[1]
    assert layer.max_violation == pytest.approx(own.max_violation[1])
    assert layer.mean_entropy == pytest.approx(own.entropy[1] / math.log(8))
    for row, at, start, end in ((0, 11, 6, 12), (1, 3, 0, 6), (2, 6, 6, 16)):
        texts = [batch.tokens[row, part] for part in (slice(start, at), slice(at, at + 1), slice(at + 1, end))]
        assert found.context(row * LENGTH + at) == tuple(" ".join(map(str, ids)) for ids in texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families(family):
    """Also layers whose experts are grouped, biased or shared."""
    tiny = tiny_model(family)
    batch = make_batch(tiny.vocab, packed=True)
    found = moezoo.analysis.routing(tiny, batch)
    own = jax.jit(lambda m: m(batch.tokens, segments=batch.segments, positions=batch.positions).routing.load)(tiny)
    np.testing.assert_array_equal(found.tally.load, own)


def test_agreement_of_two_models(model, expert_ids):
    """Each token with the same token; the router of one layer has its experts in another order."""
    batch = make_batch(40, packed=True)
    weight = model.stacks[0].blocks[1].feed_forward.router.weight  # of layers 1 and 3
    other = eqx.tree_at(
        lambda m: m.stacks[0].blocks[1].feed_forward.router.weight, model, weight.at[0].set(weight[0, :, ::-1])
    )
    found = moezoo.analysis.compare_routing(model, other, batch)
    one, two = expert_ids(batch), make_expert_ids(other, moezoo.Execution(), (ROWS, LENGTH))(batch)
    for layer in range(4):
        shared = [len({*one[layer, row, at]} & {*two[layer, row, at]}) for row, at in np.argwhere(batch.segments > 0)]
        assert found.agreement[layer] == pytest.approx(np.mean(shared) / 2)
    assert found.agreement[0] == 1
    assert 0 < found.agreement[1] < 1
    np.testing.assert_array_equal(found.load.sum(1), 2 * (batch.segments > 0).sum())


def test_another_dtype(model):
    """bfloat16 flips some choices of this text, and few."""
    how = dataclasses.replace(moezoo.Execution(), dtype="bfloat16")
    found = moezoo.analysis.compare_routing(model, model, make_batch(40, packed=True), other_execution=how)
    assert 0.9 < found.agreement.min() < 1


@st.composite
def choices(draw):
    """Batches of tokens, which of them are valid, and their distinct experts in each layer."""
    layers, experts = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    k = draw(st.integers(1, experts))
    each = st.permutations(range(experts)).map(lambda order: order[:k])
    if draw(st.booleans()):
        each = st.just([*range(k)])  # all tokens to the same experts
    row = st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.lists(each, min_size=layers, max_size=layers)),
        min_size=3,
        max_size=3,
    )
    return layers, experts, k, draw(st.lists(row, min_size=0, max_size=4))


@given(choices())
def test_counts_equal_loops_over_tokens(case):
    """Also without tokens, with one expert, and with all tokens at one."""
    layers, experts, k, rows = case
    read = [(place, *token) for place, token in enumerate(itertools.chain.from_iterable(rows))]
    read = [(place, token, ids) for place, token, valid, ids in read if valid]
    occurrences = np.bincount(np.array([token for _, token, _ in read], int), minlength=5)
    tally = Tally(layers, experts, k, occurrences)
    for row in rows:
        tokens, valid, ids = (np.array(each)[None] for each in zip(*row, strict=True))  # ids [1, seq, layer, k]
        tally.add(tokens, valid, ids.transpose(2, 0, 1, 3))
    load, pairs, chosen, first = collections.Counter(), collections.Counter(), collections.Counter(), {}
    for place, token, ids in read:
        for layer in range(layers):
            for e in ids[layer]:
                load[layer, e] += 1
                chosen[layer, e, token] += 1
                first.setdefault((layer, e, token), place)
                for f in ids[layer]:
                    pairs[layer, e, f] += 1
    assert tally.tokens == len(read)
    assert (tally.occurrences == occurrences[tally.token_ids]).all()
    assert sorted(tally.token_ids) == sorted({token for _, token, _ in read})
    for layer, e in itertools.product(range(layers), range(experts)):
        assert tally.load[layer, e] == load[layer, e]
        assert tally.dead[layer, e] == (load[layer, e] == 0)
        for at, token in enumerate(tally.token_ids):
            assert tally.chosen[layer, e, at] == chosen[layer, e, token]
            assert tally.first[layer, e, at] == first.get((layer, e, token), 2**63 - 1)
        for f in range(experts):
            assert tally.pairs[layer, e, f] == pairs[layer, e, f]
            together = tally.co_activation[layer, e, f]
            if e == f or k == 1 or not load[layer, e] * load[layer, f]:
                assert np.isnan(together)
                continue
            both, one, two = (count / len(read) for count in (pairs[layer, e, f], load[layer, e], load[layer, f]))
            assert together == pytest.approx(both / (one * two) * k * (experts - 1) / ((k - 1) * experts))
    assert tally.balance.experts_in_use == pytest.approx(len(load) / (layers * experts))
    no_rows: Any = None
    for layer, of_layer in enumerate(TextRouting((*range(layers),), tally, no_rows).specific_tokens(2)):
        for e, found in enumerate(of_layer):
            assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
            assert all(each.chosen == chosen[layer, e, each.token] > 0 for each in found)
            assert not found or experts > k


def test_independent_choices_have_co_activation_one():
    """All pairs of four experts, equally often."""
    tally = Tally(1, 4, 2, np.array([6]))
    tally.add(
        np.zeros((1, 6), int), np.ones((1, 6), bool), np.array([*itertools.combinations(range(4), 2)])[None, None]
    )
    found = tally.co_activation[0]
    np.testing.assert_allclose(found[~np.eye(4, dtype=bool)], 1)
    assert np.isnan(found.diagonal()).all()


def test_memory_of_counts_is_bounded(monkeypatch):
    """The most frequent tokens are counted, ties in the order of ids; loads count all."""
    monkeypatch.setattr("moezoo.tools.routing.tally._MOST_COUNTS", 8)
    tally = Tally(2, 2, 1, np.array([1, 3, 0, 3]))
    tally.add(np.array([[1, 3, 1, 3, 0, 1, 3]]), np.ones((1, 7), bool), np.zeros((2, 1, 7, 1), int))
    assert tally.token_ids.tolist() == [1, 3]
    assert tally.chosen[:, 0].tolist() == [[3, 3]] * 2
    assert tally.load.tolist() == [[7, 0]] * 2


def test_log_odds_by_the_formula():
    chosen, occurrences = np.array([[8, 0, 2], [1, 5, 2], [0, 0, 0]]), np.array([9, 5, 4])
    found = log_odds(chosen, occurrences)
    for e, t in itertools.product(range(3), range(3)):
        a, total = 3 * occurrences[t] / 18, 3
        y, n = chosen[e, t], chosen[e].sum()
        rest, of = chosen[:, t].sum() - y, chosen.sum() - n
        delta = math.log((y + a) / (n + total - y - a)) - math.log((rest + a) / (of + total - rest - a))
        assert found[e, t] == pytest.approx(delta / math.sqrt(1 / (y + a) + 1 / (rest + a)))
    assert found[0].argmax() == 0
    assert found[1].argmax() == 1


def test_tokens_that_chance_explains_are_not_listed():
    """Two of four tokens have an expert of their own; the others go to both, one of them a little more to the first."""
    tally, of_first = Tally(1, 2, 1, np.full(4, 30)), (30, 0, 15, 17)
    ids = np.concatenate([np.arange(30) >= count for count in of_first]).astype(int)
    tally.add(np.repeat(np.arange(4), 30)[None], np.ones((1, 120), bool), ids[None, None, :, None])
    assert 0 < log_odds(tally.chosen[0], tally.occurrences)[0, 3] < 1
    no_rows: Any = None
    (found,) = TextRouting((0,), tally, no_rows).specific_tokens()
    assert [[each.token for each in tokens] for tokens in found] == [[0], [1]]


def test_rows_of_a_mixture_by_their_number():
    """The rows of a batch are those by number, over the sources of a mixture, whose last batches have padding."""
    parts = ("data=mixture", "data.sources.a.name=synthetic", "data.sources.b.name=synthetic", "data.eval_sequences=3")
    small = [f"data.sources.{name}.{key}" for name in "ab" for key in ("vocab=32", "documents=60")]
    cfg = moezoo.compose(*parts, *small, "data.sources.b.successors=2", "batch_size=2", "seq_len=8")
    source = load(cfg.data, seq_len=8, seed=0, vocab=256)
    parts = [validation_batches(part, seq_len=8, batch_size=2, limit=3) for part in source.parts.values()]
    rows, read = rows_of_source(source, cfg), [*itertools.chain(*parts)]
    for reader, batch, expected in zip(rows.readers, rows.batches(), read, strict=True):
        np.testing.assert_array_equal(batch, expected)
        np.testing.assert_array_equal([reader(at, 1) for at in range(2)], np.stack(expected, 1)[:, :, None])
    assert [int((batch.segments > 0).any(1).sum()) for batch in read] == [2, 1, 2, 1]
    no_tally: Any = None
    text = TextRouting((0,), no_tally, rows)
    for at in range(8):  # of row 0 of the last batch
        assert text.context(3 * 16 + at).token == str(read[3].tokens[0, at])


def test_models_that_cannot_be_compared(model):
    batch = make_batch(40, packed=True)
    with refused("the models have experts per layer: 8 and 16", "another checkpoint"):
        moezoo.analysis.compare_routing(tiny_model("mixtral"), tiny_model("deepseek"), batch)
    with refused("the models have layers with experts: [0, 1, 2, 3] and [0, 1]"):
        moezoo.analysis.compare_routing(model, tiny_model("mixtral"), batch)
    dense = dataclasses.replace(model, stacks=model.stacks[1:])
    with refused("the model has no layer with experts", "upcycle.experts="):
        moezoo.analysis.routing(dense, batch)
    with refused("data contains 40, expected 0 to 39"):
        moezoo.analysis.routing(model, np.full((2, 4), 40))
    with refused("data are float64[2, 4], expected integers"):
        moezoo.analysis.routing(model, np.ones((2, 4)))
