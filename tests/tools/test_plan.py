"""The rows of a plan: their parts agree with what is known otherwise, and what they advise helps."""

import dataclasses
import math
import sys

import pytest
from refusals import refused

import moezoo
from moezoo.moe.dispatch.ragged import GPU_FLAG
from moezoo.tools import apart
from moezoo.tools.memory_model import footprint, least_footprint
from moezoo.tools.plan import candidates, command
from moezoo.tools.plan import estimate as plan
from moezoo.tools.plan.hardware import parse_slice
from moezoo.tools.plan.units import show_bytes, show_seconds
from moezoo.tools.sharding.describe import describe

EIGHT = parse_slice("v5p:2x2x2")
TINY = ("model=mixtral", "mesh.fsdp=4", "mesh.expert=2", "batch_size=16", "seq_len=64")


def test_a_row_agrees_with_its_parts():
    """Collectives are those of the traced step; the bound is the largest of the times; shares follow from it."""
    row, cfg = plan.estimate(TINY, EIGHT), moezoo.compose(*TINY)
    found = footprint(cfg)
    assert (row.fits, row.reason, row.mesh) == (True, "", {"fsdp": 4, "expert": 2})
    assert (row.rules, row.dispatch) == ("fsdp_ep", "ring")
    assert row.collectives == describe(cfg).collectives
    assert row.bytes_per_device == found.peak == sum((row.memory or {}).values())
    assert row.seconds is not None
    assert row.step_seconds == max(row.seconds.values()) == row.seconds[row.bound_by or ""]
    assert row.step_seconds is not None
    assert (row.unoverlapped_seconds or 0.0) >= row.step_seconds
    assert row.tokens_per_second_per_device == pytest.approx(16 * 64 / 8 / row.step_seconds)
    assert row.model_flops is not None
    assert row.utilisation == pytest.approx(row.model_flops / row.step_seconds / EIGHT.chip.flops)
    assert row.flops_per_device is not None
    assert row.flops_per_device > row.model_flops  # layers are recomputed


@pytest.mark.newer
def test_a_row_with_stages():
    """Ticks without work are FLOPs that take time and are not the model's; what fits is found with stages too."""
    words = ("model=mixtral", *candidates.mesh_words("stage2_fsdp4"), "batch_size=64", "seq_len=64")
    row, more = (plan.estimate((*words, f"execution.pipeline.microbatches={n}"), EIGHT) for n in (2, 4))
    assert (row.mesh, row.bubble, more.bubble) == ({"stage": 2, "fsdp": 4}, 1 / 3, 1 / 5)
    assert row.model_flops == more.model_flops
    assert (row.flops_per_device or 0) > (more.flops_per_device or 0)
    assert row.seconds is not None
    assert row.seconds["compute"] == pytest.approx((row.flops_per_device or 0) / EIGHT.chip.flops)
    assert row.memory is not None
    assert row.memory["gathered weights of the stage"] > 0
    assert plan.estimate((*words, "execution.pipeline.gather=tick"), EIGHT).collectives != row.collectives
    small = EIGHT._replace(chip=EIGHT.chip._replace(hbm_bytes=footprint(moezoo.compose(*words)).peak * 4 // 5))
    advice = list(plan.settings_that_help(words, small))
    assert advice
    for each in advice:
        assert footprint(moezoo.compose(*words, *each.split())).peak <= small.chip.predicted_bytes


def test_ragged_is_not_chosen_for_gpus(monkeypatch):
    """XLA's collective is wrong there: `auto` and a search leave it out, and a row that names it comes last."""
    words, gpus = ("model=mixtral", "mesh.expert=8", "batch_size=64", "seq_len=64", "model.experts=32"), "h100:8"
    monkeypatch.delenv("XLA_FLAGS")
    rows = [plan.estimate((*words, f"dispatch={name}"), parse_slice(gpus)) for name in ("ragged", "ring", "auto")]
    assert [row.dispatch for row in rows] == ["ragged", "ring", "auto: ring"]
    assert [GPU_FLAG in row.caution for row in rows] == [True, False, False]
    assert plan.sort(rows)[-1] is rows[0]
    assert (rows[0].step_seconds or 0) < (rows[1].step_seconds or 0)  # by its bytes it would come first
    on_tpus = plan.estimate((*words, "dispatch=auto"), EIGHT)
    assert (on_tpus.dispatch, on_tpus.caution) == ("auto: ragged", "")
    for topology, moving in ((gpus, "ring"), ("v5p:2x2x2", "ragged")):
        named = {word for each in candidates.searched(words[:1], parse_slice(topology), "train") for word in each}
        assert {word for word in named if word.startswith("dispatch")} == {f"dispatch={moving}", "dispatch=gather"}


def test_what_does_not_fit_says_what_helps():
    """Each advice fits when it is taken, and what was cut off has no estimate of time where only the least is asked."""
    small = EIGHT._replace(chip=EIGHT.chip._replace(hbm_bytes=footprint(moezoo.compose(*TINY)).peak * 2))
    assert plan.estimate(TINY, small).fits
    many = (*TINY, "batch_size=256")
    row = plan.estimate(many, small, least=True)
    assert (row.fits, row.step_seconds) == (False, None)
    assert "most is" in row.reason
    advice = list(plan.remedies(many, small))
    assert advice
    for each in advice:
        words = each[each.index("(") + 1 : -1] if "devices" in each else each
        assert footprint(moezoo.compose(*many, *words.split())).peak <= small.chip.predicted_bytes, each


def test_a_search_traces_no_layers_where_arguments_do_not_fit(monkeypatch):
    target = plan.target_of(EIGHT)
    held, peak = least_footprint(moezoo.compose(*TINY), target), footprint(moezoo.compose(*TINY), target=target).peak
    assert 0 < held <= peak
    small = EIGHT._replace(chip=EIGHT.chip._replace(hbm_bytes=held))
    with monkeypatch.context() as patch:
        patch.setattr(plan, "footprint", None)
        row = plan.estimate(TINY, small, least=True)
        assert plan.with_memory(plan.refused(TINY, small, "no"), small, "train").memory is None
    assert (row.fits, row.bytes_per_device, row.memory) == (False, held, None)
    assert "of arguments and gradients, where at most" in row.reason
    whole = plan.with_memory(row, small, "train")
    assert (whole.fits, whole.bytes_per_device) == (False, peak)
    assert plan.with_memory(whole, small, "train") is whole
    # Strategies that are not timed are other programs, also where their arguments are equal.
    other = plan.estimate((*TINY, "dispatch=gather"), small, least=True)
    assert other.bytes_per_device == held
    assert len(plan.distinct([row, other])) == 2


@pytest.mark.parametrize(("topology", "share"), [("v5p:2x2x2", 0.93), ("h200:8", 0.95 * 0.93)])
def test_up_to_which_prediction_fits(monkeypatch, topology, share):
    """A prediction may be 0.93 of what a compiler uses, which may be all that JAX takes: on a GPU .95 by a variable."""
    where = parse_slice(topology)
    peak = footprint(moezoo.compose(*TINY), target=plan.target_of(where)).peak
    for factor, fits in ((1.001, True), (0.999, False)):
        chip = where.chip._replace(hbm_bytes=int(peak / share * factor))
        row = plan.estimate(TINY, where._replace(chip=chip))
        assert (row.fits, row.usable_bytes) == (fits, int(chip.hbm_bytes * share / 0.93 + 1e-6))
        assert row.reason.startswith("" if fits else f"{show_bytes(peak)} in the ")
        # What a compiler uses is no prediction.
        for used in (0, 1):
            found = apart.Compiled(row.usable_bytes + used, 0, 0, 0.0, 0)
            monkeypatch.setattr(apart, "compile_apart", lambda *_, found=found: found)
            assert command._compiled(row, where, "train").fits is not bool(used)


@pytest.mark.parametrize(
    ("words", "topology", "fits"),
    [
        ("model=deepseek_v3 mesh.fsdp=64 batch_size=3072 seq_len=8192 dispatch=gather", "v5p:4x4x4", False),
        ("model=mixtral_8x7b mesh.fsdp=64 batch_size=768 seq_len=4096 dispatch=gather", "v5p:4x4x4", True),
        ("model=mixtral_8x7b mesh.fsdp=64 batch_size=3072 seq_len=4096 dispatch=gather", "v5p:4x4x4", False),
    ],
)
def test_orders_of_size(words, topology, fits):
    row = plan.estimate(words.split(), parse_slice(topology), least=True)
    assert row.fits is fits, row.reason


def test_what_cannot_be_laid_out_stays_with_the_reason():
    row = plan.estimate(("model=mixtral", "mesh.expert=3", "rules=fsdp_ep", "dispatch=ring"), EIGHT)
    assert (row.fits, row.mesh, row.rules, row.dispatch) == (False, {"expert": 3}, "fsdp_ep", "ring")
    assert "mesh.expert" in row.reason or "expert" in row.reason
    assert row.step_seconds is None
    rows = plan.sort([row, plan.estimate(TINY, EIGHT)])
    assert [each.fits for each in rows] == [True, False]


def test_names_of_meshes():
    assert candidates.mesh_words("fsdp16_ep4") == ("mesh.fsdp=16", "mesh.expert=4")
    assert candidates.mesh_words("single") == ("mesh=single",)
    for name in ("fsdp16_ep4", "dp2_cp4_tp8", "single"):
        mesh = moezoo.compose(*candidates.mesh_words(name)).mesh.sizes
        assert candidates.mesh_name(mesh) == name


def test_a_search_has_only_meshes_of_the_slice():
    """Of all rules in turns, once each."""
    found = list(candidates.searched(("model=mixtral", "batch_size=64", "seq_len=64"), EIGHT, "train"))
    assert len(found) == len(set(found)) > 20
    assert not [words for words in found if "mesh.stage" in " ".join(words)]
    for words in found[:5]:
        cfg = moezoo.compose(*words)
        assert math.prod(cfg.mesh.sizes.values()) == 8
        describe(dataclasses.replace(cfg), parts="parameters")
    assert len({moezoo.compose(*words).rules.name for words in found[:10]}) > 3


def test_a_compiler_that_crashes(monkeypatch, tmp_path):
    """Its first line is the error; what it prints elsewhere is not shown."""
    broken = tmp_path / "python"
    broken.write_text(
        "#!/bin/sh\necho 'F0000 12:00 x.cc:1] Check failed: no such layout' >&2\necho more >&2\nkill -6 $$\n"
    )
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with refused("the compiler ended with code -6: F0000 12:00 x.cc:1] Check failed: no such layout"):
        apart.compile_apart(TINY, "v5p:2x2x2", "train")


@pytest.mark.absent
def test_what_was_compiled_is_remembered(monkeypatch, tmp_path):
    """By the program, not by the words that compose it; and nothing of plugins is printed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ("model=mixtral", "model.layers=1", "mesh=fsdp8", "batch_size=8", "seq_len=32")
    first = apart.compile_apart(words, "v5p:2x2x2", "evaluate")
    again = apart.compile_apart((*words, "log_every=7"), "v5p:2x2x2", "evaluate")
    assert again == first._replace(remembered=True)
    assert not first.remembered
    assert first.peak >= first.arguments > 0


def test_names_of_programs(monkeypatch):
    """Another program, slice or flag is another entry of the cache."""
    names = {apart._name(text, topology) for text in ("a", "b") for topology in ("v5p:2x2x2", "v5e:2x4")}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    assert len(names | {apart._name("a", "v5p:2x2x2")}) == 5


def test_equal_programs():
    """Other rules may lay out a mesh in the same way; another mesh or strategy does not."""
    words = ("model=mixtral", "batch_size=16", "seq_len=64")
    layouts = [
        f"rules={rules} {mesh}"
        for rules in ("fsdp_ep", "cp_as_ep", "ep_as_dp")
        for mesh in ("mesh=ep8", "mesh=fsdp2_ep4", "mesh=fsdp4_ep2")
    ]
    programs = {layout: plan.program_of((*words, "dispatch=ring", *layout.split()), EIGHT) for layout in layouts}
    assert programs["rules=fsdp_ep mesh=ep8"] == programs["rules=cp_as_ep mesh=ep8"]
    assert len(set(programs.values())) == 6
    assert plan.program_of((*words, "mesh=ep8", "dispatch=ragged"), EIGHT) not in programs.values()


def test_units():
    numbers = (0, 1023, 1024, 640 * 2**10, 2**20, 2**30 - 1, 72.8 * 2**30, 12345 * 2**30)
    shown = ["0.0 B", "1,023.0 B", "1.0 KiB", "640.0 KiB", "1.0 MiB", "1,024.0 MiB", "72.8 GiB", "12,345.0 GiB"]
    assert [*map(show_bytes, numbers)] == shown
    numbers = (7.911e-5, 0.99864, 11.352, 39.9, 123456.7, 5e-10)
    assert [*map(show_seconds, numbers)] == ["79.11 us", "998.6 ms", "11.35 s", "39.9 s", "123,457 s", "0.5 ns"]
