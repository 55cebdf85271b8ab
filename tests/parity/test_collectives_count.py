"""The traced step has exactly the collectives that the rules and the strategy ask for.

`traffic_oracle` says the count and bytes of every collective. `test_step_parity` compares it with the trace of each
case of the cover. This file checks that it shares nothing with moezoo, counts cases by hand, compares the whole product
with `-m full`, and reads three other properties from traced programs.
"""

import ast
import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import stage_oracle
import traffic_oracle
from contexts import context_of
from cover import Case, config, product
from programs import count_collectives
from running import STEPS, batch_shapes
from stage_oracle import STAGE, stage_traffic
from traffic_oracle import step_traffic

import moezoo
from moezoo import Execution
from moezoo.config.build import blueprint_of
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import STRATEGIES
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.mesh import abstract_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import collective_traffic, equations
from moezoo.parallel.traffic import Traffic, TrafficTable
from moezoo.tools.calls import CALLS
from moezoo.training.loss import cross_entropy
from moezoo.training.step import Step


@functools.cache
def traced(case: Case, **changes: int) -> Any:
    """Return the traced step of a case, with changes to its model's configuration."""
    blueprint = Blueprint(config(case.family, case.balance, **changes))
    optimizer = Optimizer(case.rule, Constant(), STEPS, case.execution.placements(blueprint.shapes))
    return Step(blueprint, optimizer, case.execution, batch_shapes(case.microbatches)).traced.jaxpr


def predicted(case: Case) -> traffic_oracle.Traffic:
    """Return the traffic by the oracle."""
    return step_traffic(case.settings, Blueprint(config(case.family, case.balance)).shapes)


@pytest.mark.parametrize("oracle", [traffic_oracle, stage_oracle])
def test_the_oracle_of_traffic_shares_nothing_with_what_it_checks(oracle):
    """It imports the standard library, paths in trees, and of moezoo what reads the declarations of parameters."""
    tree = ast.parse(Path(oracle.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(getattr(node, "module", None) or alias.name, alias.name) for node in imports for alias in node.names}
    read = {("moezoo.parallel.axes", name) for name in ("Axes", "axes_of", "parameter_table")}
    read |= {("jax.tree_util", name) for name in ("keystr", "tree_leaves", "tree_leaves_with_path")}
    standard = ("math", "re", "collections", "collections.abc", "dataclasses", "itertools", "typing", "traffic_oracle")
    others = {pair for pair in names if pair[0] not in standard}
    assert others == read if oracle is traffic_oracle else others < read
    assert "__import__" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.full
def test_traffic_of_the_whole_product():
    """With Muon once per family, mesh and rules, the only columns that its collectives depend on; AdamW has none."""
    muon = {(c.family, c.mesh, c.rules): c for c in product() if c.optimizer == "muon"}
    cases = [*(c for c in product() if c.optimizer == "sgd"), *muon.values()]
    wrong = [str(case) for case in cases if collective_traffic(traced.__wrapped__(case)).outline(2) != predicted(case)]
    assert not wrong


def test_one_device_exchanges_nothing():
    case = Case("ring", "single", "fsdp_ep", "full", 2, "batch")
    assert collective_traffic(traced(case)) == predicted(case) == {}


def test_mixtral_on_fsdp2_ep4_counted_by_hand():
    """Two layers, `ring`. Experts are split over `expert` and their width over `fsdp`; other weights over both axes."""
    program = traced(Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 1, "batch"))
    counts = count_collectives(program)
    assert counts == {
        # Layers x (query, key, value, out, router) x (forward, repeated); embedding; head.
        ("all_gather", ("fsdp", "expert")): 2 * 5 * 2 + 1 + 1,
        ("reduce_scatter", ("fsdp", "expert")): 2 * 5 + 2,  # the gradient of each
        # Layers x (gate, up, down of experts) x (forward, repeated).
        ("all_gather", ("fsdp",)): 2 * 3 * 2,
        ("reduce_scatter", ("fsdp",)): 2 * 3,  # the gradient of each
        # Per layer: tokens and routing, forward and repeated; the gradient of the results.
        ("all_gather", ("expert",)): 2 * 5,
        ("reduce_scatter", ("expert",)): 2 * 3,  # per layer: the results; the gradients of tokens and routing
        # The number of tokens; the loss and five statistics of routing; the gradients of three norms; the global norm.
        ("psum", ("expert", "fsdp")): 1 + 6 + 3 + 1,
    }
    table = collective_traffic(program)
    assert {scope: traffic.count for (scope,), traffic in table.by("scope").items()} == {
        "embedding/weights": 2,
        "head/weights": 2,
        "layers/weights": 2 * 3 * 8,
        "layers/feed_forward/dispatch": 2 * 3 * 2,  # tokens and routing, in the forward, repeated and backward pass
        "layers/feed_forward/combine": 2 * 2,  # in the forward and backward pass
        "routing": 5,
        "loss": 2,
        "gradient_sums": 3,
        "gradient_norm": 1,
    }


def test_olmoe_on_fsdp2_tensor4_counted_by_hand():
    """What devices exchange that share heads, widths and the vocabulary. Two key heads are stored on all four."""
    table = collective_traffic(traced(Case("gather", "fsdp2_tensor4", "tensor", "full", 1, "batch", "olmoe")))
    found = {key: t.count for key, t in table.by("scope", "phase", "collective", "axes").items() if "tensor" in key[3]}
    over = ("psum", ("tensor",))
    assert found == {
        ("embedding", "forward", *over): 1,
        # Per layer: the results of attention, and the squares of two norms of projections.
        ("layers/attention", "forward", *over): 2 * 3,
        ("layers/attention", "recomputed", *over): 2 * 3,
        # The gradients of tokens, of the squares, and of the scales of the norms.
        ("layers/attention", "backward", *over): 2 * (1 + 2 + 2),
        ("layers/weights", "backward", *over): 2 * 2,  # those of keys and values
        # The results of the experts, which nothing needs again; the gradients of tokens and gates.
        ("layers/feed_forward", "forward", *over): 2,
        ("layers/feed_forward", "backward", *over): 2 * 2,
        # The largest logit; the sums of a token; the gradients of tokens and of the scale of the norm.
        ("head", "forward", "pmax", ("tensor",)): 1,
        ("head", "forward", *over): 1,
        ("head", "backward", *over): 2,
        ("gradient_norm", "outside", "psum", ("fsdp", "tensor")): 1,
    }


@pytest.mark.parametrize("frozen", [True, False])
def test_traffic_of_a_tied_table(frozen):
    """Alone trained, its gradient has two parts, that of the logits and that of the tokens; frozen, it has none."""
    case = Case("ring", "ep2_context2_tensor2", "tensor", "full", 1, "batch", "grouped_periodic")
    table = (".embedding.weight",)
    blueprint = Blueprint(config(case.family), trained=None if frozen else table, frozen=table if frozen else ())
    shapes = blueprint.shapes
    optimizer = Optimizer(case.rule, Constant(), STEPS, case.execution.placements(shapes))
    step = Step(blueprint, optimizer, case.execution, batch_shapes(1))
    found = collective_traffic(step.traced.jaxpr).outline(2)
    assert found == step_traffic(case.settings, shapes, trained=lambda path: (path in table) != frozen)
    found = {key: t.count for key, t in found.by("scope", "collective").items() if "scatter" in key[1]}
    gradients = {scope: found.get((f"{scope}/weights", "reduce_scatter"), 0) for scope in ("embedding", "head")}
    assert gradients == dict.fromkeys(gradients, int(not frozen))


@pytest.mark.parametrize(
    "words",
    [
        "model=mixtral mesh.stage=2 execution.pipeline.microbatches=4",
        "model=mixtral mesh.stage=2 execution.pipeline.microbatches=6 execution.pipeline.gather=tick",
        "model=mixtral mesh.stage=2 execution.pipeline.microbatches=4 execution.pipeline.chunks=2",
        # A dense layer before, and one layer of five after those of the stages.
        "model=deepseek model.layers=6 mesh.stage=2 execution.pipeline.microbatches=2 execution.microbatches=2 "
        "execution.pipeline.gather=tick execution.remat=none",
    ],
)
def test_what_stages_hand_on(words):
    """Every tick has three hops each way. Weights move once per pass, or in every tick, and routing is summed once."""
    cfg = moezoo.compose(*words.split(), "mesh.fsdp=2", "mesh.expert=2", "batch_size=96", "seq_len=16")
    blueprint = blueprint_of(cfg)
    found = {}
    for row, traffic in collective_traffic(CALLS["train"](cfg, blueprint).trace().jaxpr).items():
        if row.axes == STAGE or (row.scope == "layers/weights" and "stage" not in row.axes):
            key = row.collective, row.axes
            found[key] = found.get(key, Traffic(0, 0)) + traffic
    assert found == stage_traffic(cfg, blueprint.shapes)
    assert found["ppermute", STAGE].count % 6 == 0


@pytest.mark.parametrize("strategy", ["ring", "ragged", "capacity"])
def test_devices_that_share_widths_exchange_the_same_rows(strategy):
    """What moves between experts is the same with two devices along `tensor` as with one."""
    blueprint = Blueprint(config("mixtral"))

    def exchanged(tensor: int) -> TrafficTable:
        mesh = abstract_mesh(moezoo.MeshShape(expert=4, tensor=tensor))
        how = on_mesh(Execution(mesh, moezoo.compose("rules=tensor").rules, STRATEGIES[strategy]().exact))
        optimizer = Optimizer(SGD(), Constant(), STEPS, how.placements(blueprint.shapes))
        table = collective_traffic(Step(blueprint, optimizer, how, batch_shapes(1)).traced.jaxpr)
        return TrafficTable({row: t for row, t in table.items() if row.scope.endswith(("dispatch", "combine"))})

    assert exchanged(1) == exchanged(2) != {}


def test_no_device_has_whole_logits():
    vocab = 88
    program = traced(Case("ring", "ep2_context2_tensor2", "tensor", "full", 1, "batch"), vocab=vocab)
    inside = [each.equation for each in equations(program) if each.mesh]
    sizes = {size for each in inside for value in each.outvars for size in getattr(value.aval, "shape", ())}
    assert vocab not in sizes
    assert vocab // 2 in sizes


@pytest.mark.parametrize(("strategy", "family"), [("gather", "mixtral"), ("ring", "deepseek")])
def test_program_does_not_grow_with_depth(strategy, family):
    case = Case(strategy, "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", family)
    sizes = [len(list(equations(traced(case, layers=layers)))) for layers in (4, 32)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_have_no_scatter_add(strategy):
    """The layer and its gradients sum in a fixed order, which is repeatable and faster than a scatter-add."""
    layer = Blueprint(config()).shapes.stacks[0].blocks[0].feed_forward
    unstacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layer)
    x = jax.ShapeDtypeStruct((4, 8, unstacked.router.weight.shape[0]), jnp.float32)
    valid = jax.ShapeDtypeStruct((4, 8), jnp.bool)

    def objective(moe: Any, x: Any, valid: Any) -> Any:
        y, sums, _ = moe(x, context_of(valid), on_mesh(Execution(dispatch=STRATEGIES[strategy]())))
        return (y**2).sum() + sums.probabilities.sum() + sums.z

    program = jax.make_jaxpr(jax.value_and_grad(objective, (0, 1)))(unstacked, x, valid)
    names = {e.equation.primitive.name for e in equations(program)}
    assert "custom_jvp_call" in names or "while" in names  # the program contains the experts
    assert not {name for name in names if name.startswith("scatter") and name != "scatter"}


def test_loss_has_no_array_of_all_logits():
    """No array of the loss and its gradient is as large as tokens times vocabulary; logits are computed in chunks."""
    vocab, tokens, embed = 2**16, 2**12, 8
    model = Blueprint(config(vocab=vocab, embed=embed)).shapes
    hidden = jax.ShapeDtypeStruct((4, tokens // 4, embed), jnp.float32)
    labels = jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32)

    def objective(model: Any, hidden: Any, labels: Any) -> Any:
        return cross_entropy(model, hidden, labels, on_mesh(Execution()))

    program = jax.make_jaxpr(eqx.filter_value_and_grad(objective))(model, hidden, labels)
    sizes = [getattr(v.aval, "size", 0) for e in equations(program) for v in e.equation.outvars]
    # A chunk has 512 of 4,096 tokens.
    assert max(sizes) == 512 * vocab < tokens * vocab
