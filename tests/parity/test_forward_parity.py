"""Validation and generation for every family, strategy, mesh and rule set.

The validation loss (float32) is compared with the oracle's (float64). Greedy tokens must equal those of the model on
one device, run on the whole text again for each token.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from cover import FAMILIES, LENGTH, MESHES, RECURRENT, ROWS, Family, batch, fits, model, rules, shape_of, shards
from running import expected
from table import write_section

import moezoo
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, Source, load
from moezoo.moe.dispatch import STRATEGIES, Capacity, Ragged, Ring
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.parallel.pipeline import Circular
from moezoo.training.evaluate import Evaluator
from moezoo.training.feed import Feed

NEW = 4  # generated tokens per prompt
# Strategies with room for a quarter of what training needs on average. Validation and generation must drop nothing even
# with these settings, which apply to training only.
BOUNDED = {"capacity": Capacity(0.25), "ragged": Ragged(0.25), "ring": Ring(0.25)}


class Setup(NamedTuple):
    """A family and how it runs."""

    family: Family
    strategy: str
    mesh: str
    rules: str
    pipeline: Circular | None = None

    def __str__(self) -> str:
        return "-".join(self[:4]) + f"-{self.pipeline}" * (self.pipeline is not None)

    @property
    def execution(self) -> MeshExecution:
        """The execution, with the bounded strategy where there is one."""
        strategy = BOUNDED.get(self.strategy) or STRATEGIES[self.strategy]()
        mesh = moezoo.make_mesh(shape_of(self.mesh))
        return on_mesh(moezoo.Execution(mesh, rules()[self.rules], strategy, pipeline=self.pipeline))


class Agreement(NamedTuple):
    """The relative error of the validation loss, and the number of greedy tokens that equal those of one device."""

    loss: float
    equal: int


def all_setups() -> list[Setup]:
    """Return every family, strategy, mesh and rule set that fits the mesh."""
    return [
        Setup(family, strategy, mesh, layout)
        for family in FAMILIES
        for strategy in STRATEGIES
        for mesh in MESHES
        for layout in rules()
        if fits(mesh, layout) and (family not in RECURRENT or shards(mesh, layout) <= 2)  # chunks of two tokens
    ]


@functools.cache
def greedy_on_one_device(family: Family) -> np.ndarray:
    """Return four prompts of three tokens, each with its greedy continuation, [4, 3 + NEW]."""
    tokens = np.pad(batch(0)["tokens"][:4, :3], ((0, 0), (0, NEW)))
    tokens[:, :3] += tokens[:, :3] == 0  # token 1 where the batch has padding
    logits = jax.jit(lambda model, tokens: model(tokens).logits)
    for at in range(3, 3 + NEW):
        tokens[:, at] = np.asarray(logits(model(family), tokens))[:, at - 1].argmax(-1)
    return tokens


@functools.cache
def unused_source() -> tuple[Source, TrainConfig]:
    """Return the data and configuration that `Evaluator` asks for; the test passes it the oracle's batch instead."""
    cfg = moezoo.compose("data=synthetic", f"batch_size={ROWS}")
    return load(cfg.data, seq_len=LENGTH, seed=0, vocab=cfg.model.vocab), cfg


def compare(setup: Setup) -> Agreement:
    """Validate and generate, and compare both. Also check that the loss counts every predicted token."""
    execution, wanted = setup.execution, greedy_on_one_device(setup.family)
    placed = moezoo.place(model(setup.family), execution)
    evaluator = Evaluator(placed, *unused_source(), execution)
    assert execution.mesh is not None
    feed = Feed(
        jax.sharding.NamedSharding(execution.mesh, execution.micro_batches_spec),
        (execution.micro_batches, ROWS // execution.micro_batches, LENGTH),
        execution.token_order(LENGTH),
    )
    cut = {name: x.reshape(execution.micro_batches, -1, LENGTH) for name, x in batch(0).items()}
    on_devices = feed(Batch(**cut))
    nats, tokens, dropped = jax.device_get(evaluator.sums(placed, on_devices))
    assert dropped == 0
    assert tokens == (batch(0)["labels"] >= 0).sum()
    loss = expected(setup.family, "batch", 1).outcomes[0].loss
    found = np.asarray(moezoo.generate(placed, wanted[:, :3], max_new_tokens=NEW, execution=execution))
    return Agreement(abs(float(nats) / int(tokens) - loss) / loss, int((found[:, 3:] == wanted[:, 3:]).sum()))


# Every family and bounded strategy, and the rule sets that differ most. The other setups run with `-m full`.
SELECTED = [
    pytest.param(Setup("deepseek", "ragged", "fsdp2_ep4", "replicated"), marks=pytest.mark.weekly),
    Setup("mixtral", "capacity", "fsdp2_ep2_context2", "cp_as_ep"),
    pytest.param(Setup("grouped", "ring", "fsdp2_ep4", "ep_as_cp"), marks=pytest.mark.weekly),
    pytest.param(Setup("olmoe", "ragged", "fsdp2_ep2_context2", "shard_exp_on_fsdp"), marks=pytest.mark.weekly),
    Setup("deepseek", "capacity", "ep2_context2_tensor2", "tensor"),
    Setup("gpt_oss", "ring", "fsdp2_ep2_context2", "cp_as_ep"),
    pytest.param(Setup("qwen3_5", "ragged", "fsdp2_ep2_context2", "fsdp_ep"), marks=pytest.mark.weekly),
    # Validation passes through stages, and generation runs all layers on each device.
    pytest.param(
        Setup("deepseek_deep", "ring", "stage2_ep4", "fsdp_ep", Circular(4, chunks=2)), marks=pytest.mark.weekly
    ),
]


def check(setup: Setup) -> Agreement:
    """Compare a setup, require agreement, and return it."""
    agreement = compare(setup)
    # The loss is a mean over about a hundred tokens. float32 gives 1e-7 here; the tolerance is that of the whole step.
    assert agreement.loss < 1e-5, setup
    assert agreement.equal == 4 * NEW, setup
    return agreement


@pytest.mark.parametrize("setup", SELECTED, ids=str)
def test_selected_setups(setup):
    check(setup)


@pytest.mark.full
def test_all_setups():
    """Check all setups in one process, and write the table of errors."""
    cases = {}
    for setup in all_setups():
        agreement = check(setup)
        cases[setup[:4]] = (agreement.loss, 4 * NEW - agreement.equal)
        if len(cases) % 20 == 0:
            jax.clear_caches()
    about = f"""
The same tiny models, with strategies whose bound, where they have one, is a quarter of what training would need on
average: neither validation nor generation drops anything. The table shows the largest relative error of the
validation loss of rows of {LENGTH} tokens against the oracle, and how many of the {4 * NEW} tokens of four greedy
continuations differ from those of the model that runs the whole text again on one device for every token.
"""
    figures = ("validation loss", "different tokens")
    write_section("Evaluation and generation", about, Setup._fields, figures, cases, by=("family",))
