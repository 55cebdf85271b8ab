"""Low-rank adapters of a model: which weights get a pair, the first numbers, and what is trained."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from refusals import by_table, refused

import moezoo
from moezoo.config.build import blueprint_of
from moezoo.models.adapters import Lora
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import count_parameters, parameter_table
from moezoo.parallel.low_rank import pairs_by_path, without_pairs
from moezoo.training.report import trained_rows

ATTENTION = {"query_down", "query_up", "kv_down", "key_up", "value_up", "out"}
THREE = {"gate", "up", "down"}


def adapted(*words: str) -> Blueprint:
    return blueprint_of(moezoo.compose("model=deepseek", "adapter=lora", "adapter.rank=4", *words))


def ends(blueprint: Blueprint) -> set[str]:
    """Return the paths of pairs without the numbers of stacks."""
    return {path.split(".", 3)[3] for path, _ in pairs_by_path(blueprint.shapes)}


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        ("attention", {f"attention.{name}" for name in ATTENTION}),
        ("experts", {f"feed_forward.experts.{name}" for name in THREE}),
        ("shared", {f"feed_forward.shared.{name}" for name in THREE}),
        ("mlp", {f"feed_forward.{name}" for name in THREE}),
        ("'*.router.weight', shared", {"feed_forward.router.weight", *(f"feed_forward.shared.{n}" for n in THREE)}),
    ],
)
def test_words_and_patterns_choose_weights(targets, wanted):
    assert ends(adapted(f"adapter.targets=[{targets}]")) == wanted


def test_all_is_every_word_and_no_router():
    found = ends(adapted())
    assert found == set().union(
        *(ends(adapted(f"adapter.targets=[{word}]")) for word in ("attention", "experts", "shared", "mlp"))
    )
    assert not any("router" in path for path in found)


def test_only_pairs_are_trained_and_what_trained_names():
    def learns(blueprint: Blueprint) -> set[str]:
        leaves = jax.tree_util.tree_leaves_with_path(blueprint.mask)
        return {jax.tree_util.keystr(path) for path, mask in leaves if mask}

    blueprint = adapted()
    pairs = {f"{path}.{part}" for path, _ in pairs_by_path(blueprint.shapes) for part in "ab"}
    assert learns(blueprint) == pairs
    router = ".stacks[1].blocks[0].feed_forward.router.weight"
    assert learns(adapted("trained=['*.router.weight']")) == pairs | {router}
    assert learns(adapted("frozen=['*.attention.*']")) == {path for path in pairs if ".attention." not in path}
    with refused("trained chooses", ".base, which is a frozen weight; choose only"):
        adapted("trained=['*.experts.gate.base']").mask  # noqa: B018


def test_the_first_numbers():
    """A has variance 1 / inputs and depends on its path alone, B is zero, and the base is that of a plain model."""
    sizes = ("model.vocab=16", "model.embed=32", "model.layers=1", "model.expert_mlp=16", "model.head_dim=8")
    words = [("adapter=lora",), ("adapter=lora", "adapter.targets=[experts]"), ()]
    key = jax.random.key(5)
    model, some, plain = (jax.jit(blueprint_of(moezoo.compose(*sizes, *more)).make)(key) for more in words)
    jax.tree.map(np.testing.assert_array_equal, without_pairs(model), plain)
    others = dict(pairs_by_path(some))
    for path, pair in pairs_by_path(model):
        inputs = math.prod(pair.a.shape[-1 - pair.inputs : -1])
        assert not np.asarray(pair.b).any()
        # The variance of n normal numbers has a standard deviation of sqrt(2 / n) of itself.
        assert abs(np.var(pair.a) * inputs - 1) < 5 * math.sqrt(2 / pair.a.size)
        if path in others:
            np.testing.assert_array_equal(pair.a, others[path].a)
    first = [np.asarray(pair.a).ravel()[:4].tolist() for _, pair in pairs_by_path(model)]
    assert len(set(map(tuple, first))) == len(first)
    ids = np.arange(12).reshape(2, 6)
    logits = jax.jit(lambda m: m(ids).logits)
    np.testing.assert_array_equal(logits(model), logits(plain))


@pytest.mark.parametrize(("scale", "factor"), [("alpha/rank", 2.5), ("alpha/sqrt(rank)", 5.0)])
def test_the_scale(scale, factor):
    assert Lora(rank=4, alpha=10.0, scale=scale).factor == factor
    blueprint = adapted("adapter.alpha=10", f'adapter.scale="{scale}"')
    assert {pair.scale for _, pair in pairs_by_path(blueprint.shapes)} == {factor}
    assert Lora(rank=4, scale=scale).factor == 1


def test_counts():
    """A pair is no parameter of the model. The summary lists pairs, what else is trained, and what is not."""
    blueprint, plain = adapted("trained=['*.router.weight']"), blueprint_of(moezoo.compose("model=deepseek"))
    assert count_parameters(blueprint.shapes, 2) == count_parameters(plain.shapes, 2)
    assert [shape for *_, shape in parameter_table(blueprint.shapes)] == [
        shape for *_, shape in parameter_table(plain.shapes)
    ]
    numbers = sum(pair.a.size + pair.b.size for _, pair in pairs_by_path(blueprint.shapes))
    rows = trained_rows(blueprint)
    assert [title for title, _ in rows] == ["adapter", "adapter", "adapter", "trained", "frozen"]
    assert "PEFT" in rows[1][1]
    assert "lacks what is trained besides" in rows[2][1]
    assert rows[0][1].startswith(f"rank 4, scale 1: {numbers:,} parameters, ")
    assert "feed_forward.experts.{gate, up, down}" in rows[0][1]
    router = next(shape for path, _, shape in parameter_table(plain.shapes) if path.endswith("router.weight"))
    assert rows[3][1].startswith(f"{math.prod(router):,} parameters")
    total, _ = count_parameters(plain.shapes, 2)
    assert rows[4][1].startswith(f"{total - math.prod(router):,} parameters")


@by_table(
    """
    words => parts
    adapter.targets=[] => adapter.targets=[] leaves nothing to adapt
    adapter.targets=[atention] => adapter.targets=atention: no such word; did you mean 'attention'?
    adapter.targets=['*.atention.*'] => adapter.targets: *.atention.* matches no whole path ... '*.attention.*'
    adapter.targets=['*norm.scale'] => adapter.targets: *norm.scale matches ... of role scale, which has no pair
    adapter.targets=[.embedding.weight]
        => adapter.targets: .embedding.weight matches ... of role embedding, which has no pair
    model=mixtral adapter.targets=[shared] => adapter.targets: this model has no weights of shared; it has
    adapter.rank=200 => adapter.rank=200 but .stacks[0].blocks[0].attention. ... is a matrix of ... choose at most
    adapter.dropout=1 => adapter.dropout=1 must be at least 0 and below 1
    adapter.dropout=0.1 adapter.targets=[.unembedding.weight]
        => adapter.dropout=0.1 is for pairs of layers, and adapter.targets has .unembedding.weight; set
    adapter.dropout=0.1 adapter.targets=[experts]
        => adapter.dropout=0.1 is for all pairs but those of experts ... adapter.targets=[experts] has no others; set
    adapter.rank=0 => adapter.rank=0 must be at least 1
    adapter.alpha=0 => adapter.alpha=0 must be above 0, or null
    adapter.scale=alpha => adapter.scale=alpha: expected one of alpha/rank, alpha/sqrt(rank)
    adapter.r=3 => adapter.r: there is no key 'r' in adapter lora
    adapter.init_from=there => adapter.init_from=there has pairs for trained weights; name the folder
    """
)
def test_mistakes(words, parts):
    with refused(parts):
        model = [] if words.startswith("model=") else ["model=deepseek"]
        blueprint_of(moezoo.compose(*model, "adapter=lora", *words.split())).mask  # noqa: B018


def test_an_adapter_is_a_choice():
    cfg = moezoo.compose("adapter=lora")
    with refused("blueprint: adapter is"):
        blueprint_of(cfg, dataclasses.replace(blueprint_of(moezoo.compose()), change=None))
