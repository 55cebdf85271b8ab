"""Validation and generation as every strategy, mesh and layout of tokens runs them, for every family.

Validation is compared with the oracle's loss, greedy tokens with the model run whole on one device for every token.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from cover import FAMILIES, LENGTH, MESHES, Family, batch, fits, model, rules
from running import expected
from table import write_section

import moezoo
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, Source, load
from moezoo.moe.dispatch import STRATEGIES, Capacity, Ragged, Ring
from moezoo.training.evaluate import Evaluator
from moezoo.training.feed import Feed

NEW = 4
# Bounded as training may be: neither validation nor generation drops anything.
BOUNDED = {"capacity": Capacity(0.25), "ragged": Ragged(0.25), "ring": Ring(0.25)}


class Way(NamedTuple):
    """How a model runs."""

    family: Family
    strategy: str
    mesh: str
    rules: str

    @property
    def execution(self) -> moezoo.Execution:
        """The execution."""
        strategy = BOUNDED.get(self.strategy) or STRATEGIES[self.strategy]()
        return moezoo.Execution(moezoo.make_mesh(MESHES[self.mesh]), rules()[self.rules], strategy)


class Seen(NamedTuple):
    """The relative error of the validation loss, and greedy tokens that are those of one device."""

    loss: float
    equal: int


def ways() -> list[Way]:
    """Every family under every strategy on every mesh, with tokens split over expert axes and the same on them."""
    layouts = ("fsdp_ep", "replicated", "cp_as_ep")
    return [
        Way(family, strategy, mesh, layout)
        for family in FAMILIES
        for strategy in STRATEGIES
        for mesh in MESHES
        for layout in layouts
        if fits(mesh, layout)
    ]


@functools.cache
def greedy(family: Family) -> np.ndarray:
    """Prompts and their continuations: the whole text runs again for every token, on one device."""
    tokens = np.pad(batch(0)["tokens"][:4, :3], ((0, 0), (0, NEW)))
    tokens[:, :3] += tokens[:, :3] == 0  # a token of its own where the row is padding
    read = jax.jit(lambda model, tokens: model(tokens).logits)
    for at in range(3, 3 + NEW):
        tokens[:, at] = np.asarray(read(model(family), tokens))[:, at - 1].argmax(-1)
    return tokens


@functools.cache
def unread() -> tuple[Source, TrainConfig]:
    """What an evaluator reads windows from; here it is given the oracle's batch instead."""
    cfg = moezoo.compose("data=synthetic")
    return load(cfg.data, seq_len=LENGTH, seed=0, vocab=cfg.model.vocab), cfg


def see(way: Way) -> Seen:
    """Validate and generate."""
    execution, wanted = way.execution, greedy(way.family)
    there = moezoo.place(model(way.family), execution)
    evaluator = Evaluator(there, *unread(), execution)
    assert execution.mesh is not None
    feed = Feed(jax.sharding.NamedSharding(execution.mesh, execution.tokens_spec), batch(0)["tokens"].shape)
    whole = feed(Batch(**batch(0)))
    nats, tokens, dropped = jax.device_get(evaluator._sums(there, whole))
    assert dropped == 0
    assert tokens == (batch(0)["labels"] >= 0).sum()
    loss = expected(way.family, "batch", 1).outcomes[0].loss
    found = np.asarray(moezoo.generate(there, wanted[:, :3], max_new_tokens=NEW, execution=execution))
    return Seen(abs(float(nats) / int(tokens) - loss) / loss, int((found[:, 3:] == wanted[:, 3:]).sum()))


# Every family, bounded strategies, tokens that are split and that are the same: the others run with `-m full`.
SOME = [
    Way("deepseek", "ragged", "fsdp2_ep4", "replicated"),
    Way("mixtral", "capacity", "fsdp2_ep2_context2", "cp_as_ep"),
    Way("qwen3_moe", "ring", "fsdp2_ep4", "fsdp_ep"),
    Way("olmoe", "ragged", "fsdp2_ep2_context2", "fsdp_ep"),
]


def check(way: Way) -> Seen:
    """What is seen must be right: float32's rounding in a mean over a hundred tokens, and every token."""
    seen = see(way)
    assert seen.loss < 1e-5, way
    assert seen.equal == 4 * NEW, way
    return seen


@pytest.mark.parametrize("way", SOME, ids="-".join)
def test_some_ways(way):
    check(way)


@pytest.mark.full
def test_all_ways():
    """All of them in one process; writes the table."""
    cases = {}
    for way in ways():
        seen = check(way)
        cases[tuple(way)] = (seen.loss, 4 * NEW - seen.equal)
        if len(cases) % 20 == 0:
            jax.clear_caches()
    about = f"""
The same tiny models, with strategies whose bound, where they have one, is a quarter of what training would need on
average: neither validation nor generation drops anything. The table shows the largest relative error of the
validation loss of rows of {LENGTH} tokens against the oracle, and how many of the {4 * NEW} tokens of four greedy
continuations differ from those of the model that runs the whole text again on one device for every token.
"""
    figures = ("validation loss", "different tokens")
    write_section("Evaluation and generation", about, Way._fields, figures, cases, by=("family",))
