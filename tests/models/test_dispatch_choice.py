"""`dispatch=auto`: what it compares, what it chooses, and that a call runs what it chose."""

import dataclasses
import itertools

import jax
import pytest
from presets import PRESETS
from programs import count_collectives
from refusals import refused
from traffic_oracle import step_traffic

import moezoo
from moezoo.config.build import blueprint_of, build_execution
from moezoo.data import Batch, load
from moezoo.models.blueprint import Blueprint
from moezoo.models.choice import choose_dispatch, compare_strategies
from moezoo.moe.dispatch import Auto, ExpertGroup, Gather, Ragged, Ring
from moezoo.moe.dispatch.ragged import GPU_FLAG
from moezoo.parallel.kernels import Target
from moezoo.parallel.mesh import abstract_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import CallName
from moezoo.tools.calls import CALLS
from moezoo.training.build import build_step
from moezoo.training.evaluate import Evaluator
from moezoo.training.report import choice_lines, dispatch_lines


def shapes_and_execution(*words):
    cfg = moezoo.compose(*words)
    execution = on_mesh(build_execution(cfg, abstract_mesh(cfg.mesh), batches="any"))
    return cfg, Blueprint(cfg.model).shapes.stacks, execution


# The choice reads sizes only, in one place for all families, so two are enough. All presets with `-m full`.
USUAL = ("mixtral_8x7b", "deepseek_v3")
SIZED = [pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in PRESETS]


@pytest.mark.parametrize("preset", SIZED)
def test_takes_the_least_of_whole_steps(preset):
    """The whole step, by the oracle, has the least bytes with the strategy chosen: few and very many tokens per device,
    8 and 512 devices, tokens that differ over the expert axis and tokens that do not.
    """
    chosen = set()
    most = {"glm4_7_flash": 32, "gpt_oss_20b": 8, "gpt_oss_120b": 8}.get(preset, 64)  # what divides their sizes
    for fsdp, tokens, rules in (
        (1, 4096, "[data,fsdp,expert]"),
        (most, 2**19, "[data,fsdp,expert]"),
        (8, 64, "[fsdp]"),
    ):
        rows = fsdp * (8 if "expert" in rules else 1)
        words = (
            f"mesh.fsdp={fsdp}",
            "mesh.expert=8",
            f"rules.batch={rules}",
            f"batch_size={rows}",
            f"seq_len={tokens}",
        )
        cfg = moezoo.compose(f"model={preset}", *words, f"model.max_length={tokens}")
        assert cfg.dispatch == Auto()
        model = Blueprint(cfg.model).shapes
        execution = on_mesh(build_execution(cfg, abstract_mesh(cfg.mesh)))
        found = compare_strategies(model.stacks, rows, tokens, execution, "train")
        steps = {strategy: step_traffic(cfg, model, strategy=strategy()) for strategy in (Ring, Ragged, Gather)}
        totals: dict[type, int] = {key: sum(received for _, received in step.values()) for key, step in steps.items()}
        assert totals[type(found.chosen)] == min(totals.values())
        # The differences between strategies are those of whole steps, layer by layer.
        layers = sum(stack.count for stack in model.stacks for block in stack.blocks if block.moe is not None)
        for strategy, total in totals.items():
            each = found.bytes[strategy()] - found.bytes[Ring()]
            assert total - totals[Ring] == pytest.approx(layers * each, abs=64 * layers)
        chosen.add(type(found.chosen))
    assert Gather in chosen
    assert len(chosen) > 1


def test_bytes_by_hand():
    """Mixtral 8x7B on eight devices of one axis, 512 tokens per device, in bfloat16 with float32 sums."""
    _, stacks, execution = shapes_and_execution("model=mixtral_8x7b", "mesh=ep8")
    tokens, embed, mlp = 512, 4096, 14336
    weights, sent, routing = 3 * 8 * embed * mlp * 7 // 8, tokens * embed * 7, tokens * 2 * 2 * 7 * 4
    cases: list[tuple[CallName, str, int, int]] = [
        ("train", "full", 5 * 2 * sent + 3 * routing, weights * (2 + 2 + 4)),
        ("train", "none", 4 * 2 * sent + 2 * routing, weights * (2 + 2 + 4)),
        ("evaluate", "full", 2 * 2 * sent + routing, weights * 2),
        ("decode", "full", 2 * 2 * sent + routing, weights * 2),
    ]
    for call, remat, ring, gather in cases:
        found = compare_strategies(stacks, 8, tokens, dataclasses.replace(execution, remat=remat), call)
        assert (found.bytes[Ring()], found.bytes[Gather()]) == (ring, gather)
        assert found.bytes[Ragged()] == min(found.bytes.values())
        assert (found.chosen, found.room) == (Ragged(), 4)


def test_candidates_drop_nothing():
    choice, groups = Auto(chunks=2), (ExpertGroup((), 1, 8), ExpertGroup(("expert",), 8, 8))
    for strategy in itertools.chain(*map(choice.candidates, groups)):
        assert strategy.exact == strategy
        assert strategy.chunks == 2
    assert Auto().exact == Auto()


def test_nothing_to_compare_without_split_experts():
    for words in (("mesh=single",), ("mesh=fsdp8", "rules=pure_fsdp")):
        _, stacks, execution = shapes_and_execution("dispatch=auto", *words)
        found = compare_strategies(stacks, 8, 128, execution, "train")
        assert (found.chosen, found.bytes, found.room) == (Gather(), {}, 1)
        assert choice_lines(Auto(), {"train": found}) == []
    _, stacks, execution = shapes_and_execution("mesh=ep8", "dispatch=ragged")
    assert choose_dispatch(stacks, 8, 128, execution, "train") is execution
    assert compare_strategies(stacks, 8, 128, execution, "train").bytes == {}


SIZES = ("model=mixtral", "model.layers=1", "model.embed=16", "model.expert_mlp=32", "model.vocab=32", "model.heads=2")
SIZES += ("model.kv_heads=2", "model.head_dim=4", "model.experts_per_token=6")
TINY = (*SIZES, "mesh=ep8", "dispatch=auto")


@pytest.mark.parametrize(("parts", "strategy"), [(16, Ragged()), (1, Gather())])
def test_a_step_runs_the_strategy_of_its_tokens(parts, strategy):
    """The same batch at once, and in micro-steps; the traced step is the oracle's with the strategy expected."""
    cfg = moezoo.compose(*TINY, "batch_size=128", "seq_len=16", f"execution.microbatches={parts}")
    step = build_step(cfg, build_execution(cfg, abstract_mesh(cfg.mesh)))
    traffic = collective_traffic(step.traced.jaxpr).outline(2)
    for chosen in (Ragged(), Gather()):
        wanted = step_traffic(cfg, step.arguments[0].model, strategy=chosen)
        assert (traffic == wanted) == (chosen == strategy)


def test_an_open_choice_does_not_reach_a_layer():
    _, stacks, execution = shapes_and_execution(*TINY)
    with pytest.raises(AssertionError, match="choose"):
        _ = execution.strategy
    # Where parameters are stored does not depend on the strategy.
    stored = [placement.stored for placement in jax.tree.leaves(execution.placements(stacks))]
    for strategy in (Ring(), Gather()):
        there = dataclasses.replace(execution, dispatch=strategy).placements(stacks)
        assert [placement.stored for placement in jax.tree.leaves(there)] == stored


def test_the_summary_has_the_choice_and_its_numbers():
    """Training and validation each have a line; a last line names the bound where most of the room is unused."""
    cfg, _, execution = shapes_and_execution("model=deepseek_v3", "mesh=ep8", "batch_size=8", "seq_len=4096")
    first, train, evaluate, room = dispatch_lines(cfg, execution, blueprint_of(cfg))
    assert first.startswith("ring: tokens move over mesh axis expert; 32 of 256")
    assert train == "auto: ring to train; received per layer: ring 2.06 GB, ragged 2.47 GB, gather 78.9 GB"
    assert evaluate.startswith("auto: ragged to evaluate; received per layer: ")
    assert "8 times" in room
    assert "dispatch=ring dispatch.buffer_factor=2" in room
    cfg, _, execution = shapes_and_execution("mesh=fsdp4_ep2", "dispatch=ring")
    assert len(dispatch_lines(cfg, execution, blueprint_of(cfg))) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param("train", "mesh=fsdp2_ep4 rules=ep_as_cp execution.microbatches=2", marks=pytest.mark.weekly),
        ("train", "mesh=ep8 execution.remat=none trained=['.unembedding.*']"),
        pytest.param("train", "mesh=ep8 rules.batch=[data,fsdp] frozen=['*.experts.*']", marks=pytest.mark.weekly),
        ("evaluate", "mesh.fsdp=2 mesh.context=4 rules=cp_as_ep"),
        ("prefill", "mesh=ep8"),
        pytest.param("decode", "mesh=fsdp2_ep4", marks=pytest.mark.weekly),
    ],
)
def test_compares_what_traced_programs_move(call, words):
    """The bytes of two strategies differ by those of their traced programs, and the program of `auto` has the least."""
    cfg = moezoo.compose(*SIZES, "batch_size=64", "seq_len=24", *words.split(), "dispatch=auto")
    blueprint = blueprint_of(cfg)
    model, program = blueprint.shapes, CALLS[call](cfg, blueprint)
    open_choice = dataclasses.replace(program.execution, dispatch=cfg.dispatch)
    found = compare_strategies(model.stacks, program.rows, program.length, open_choice, call, blueprint.mask)
    assert found.chosen == program.execution.dispatch
    # The program of `auto` stands for that of the strategy chosen.
    received = {type(found.chosen): collective_traffic(program.trace().jaxpr).bytes}
    for strategy in {Ring, Ragged, Gather} - set(received):
        named = dataclasses.replace(cfg, dispatch=strategy())
        received[strategy] = collective_traffic(CALLS[call](named, blueprint).trace().jaxpr).bytes
    steps = cfg.execution.microbatches if call == "train" else 1
    for strategy, total in received.items():
        each = found.bytes[strategy()] - found.bytes[Ring()]
        assert total - received[Ring] == pytest.approx(steps * each, abs=64 * steps)
    assert min(received.values()) == received[type(found.chosen)]


def test_validation_has_the_tokens_of_a_whole_batch():
    """In a micro-step of training tokens move; in a batch of validation, with four times as many, weights move."""
    words = (*TINY, "batch_size=64", "seq_len=24", "execution.microbatches=4")
    cfg, _, execution = shapes_and_execution(*words)
    _, train, evaluate, *_ = dispatch_lines(cfg, execution, blueprint_of(cfg))
    assert train.startswith("auto: ragged to train")
    assert evaluate.startswith("auto: gather to evaluate")


def test_evaluation_and_a_call_do_not_take_the_strategy_of_training():
    """With as many experts per token as devices, `ring` is the least in training and `ragged` without gradients."""
    sizes = ("model.embed=64", "model.expert_mlp=256", "model.experts=16", "model.experts_per_token=8")
    cfg = moezoo.compose(*TINY, *sizes, "batch_size=64", "seq_len=24", "data=synthetic", "data.vocab=32")
    execution, model = on_mesh(build_execution(cfg)), Blueprint(cfg.model).shapes
    assert choose_dispatch(model.stacks, 64, 24, execution, "train").dispatch == Ring()
    tokens = jax.ShapeDtypeStruct((64, 24), "int32")
    source = load(cfg.data, seq_len=24, seed=0, vocab=cfg.model.vocab)
    one = jax.ShapeDtypeStruct((1, 64, 24), "int32")
    evaluation = Evaluator(model, source, cfg, execution).sums.trace(model, Batch(*(one,) * 4)).jaxpr
    called = jax.make_jaxpr(lambda model, tokens: model(tokens, execution=execution))(model, tokens)
    for program in (evaluation, called):
        assert any(kind == "ragged_all_to_all" for kind, _ in count_collectives(program))


def test_ragged_on_gpus_is_refused_without_its_flag(monkeypatch):
    """So is a run, but not one in which nothing moves, nor a mesh that is given, as to compile for absent devices."""
    monkeypatch.setattr("moezoo.parallel.mesh_execution.target_of", lambda mesh: Target("cuda", "9.0"))
    cfg, single = (moezoo.compose("dispatch=ragged", f"mesh={mesh}", "batch_size=8") for mesh in ("ep8", "single"))
    monkeypatch.delenv("XLA_FLAGS")
    with refused("dispatch=ragged", "corrupts gradients on GPUs", "dispatch=ring", f"XLA_FLAGS={GPU_FLAG}"):
        build_execution(cfg)
    with refused("dispatch=ragged", "corrupts gradients on GPUs"):
        build_execution(cfg, moezoo.make_mesh(cfg.mesh))
    build_execution(single)
    build_execution(cfg, abstract_mesh(cfg.mesh))
    bare = GPU_FLAG.removesuffix("=true")
    for flags in (f"--xla_cpu_any=1 {GPU_FLAG}", bare, f"{bare}=1", f"{bare}=false {GPU_FLAG} --xla_cpu_any=1"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        build_execution(cfg)
    for flags in (f"{GPU_FLAG} {bare}=false", f"{bare}=0", f"{bare}_of_another"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        with refused("dispatch=ragged", "corrupts gradients on GPUs"):
            build_execution(cfg)
