"""The pictures of a run, and what it prints that no run of the suite does."""

import dataclasses
import functools
import io
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import by_table

import moezoo
import moezoo.training.pictures as pictures
import moezoo.training.progress as training_progress
from moezoo.config.build import build_execution
from moezoo.data import Synthetic
from moezoo.data.source import Part
from moezoo.host.machine import in_units
from moezoo.kernels.delta_rule import BACKENDS as DELTA_RULE
from moezoo.models.blueprint import Blueprint
from moezoo.nn.block_fp8 import BlockFP8
from moezoo.nn.containers import store
from moezoo.nn.delta import DeltaMixer, DeltaSizes, FullGate, HeadDecay
from moezoo.optim import AdamW, Constant, Cosine
from moezoo.parallel.kernels import Target
from moezoo.parallel.mesh import abstract_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import TrafficTable
from moezoo.terminal import progress
from moezoo.training.build import build_step
from moezoo.training.pictures import (
    draw_losses,
    draw_routing,
    load_picture,
    loss_picture,
    moving_average,
    routing_picture,
)
from moezoo.training.progress import Progress
from moezoo.training.report import data_rows, kernel_lines, print_lines, rate_line, unsplit_lines
from moezoo.training.stage_lines import stage_lines


def test_lines_are_printed_in_any_encoding(monkeypatch):
    """Also where a program that calls `moezoo.train` prints to what has no encoding."""
    for encoding, wanted in (("ascii", r"sample      \u27e6a\u27e7 \udcff"), ("utf-8", r"sample      ⟦a⟧ \udcff")):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", file)
        print_lines([("sample", "⟦a⟧ \udcff")])
        assert file.buffer.getvalue().decode() == f"{wanted}\n"
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    print_lines([("sample", "⟦a⟧")])
    assert text.getvalue() == "sample      ⟦a⟧\n"


def test_a_note_about_data_has_a_line():
    """Also that of a source of a mixture."""
    source = moezoo.data.load(
        Synthetic(vocab=9, successors=2, documents=40, document_length=9), seq_len=8, seed=0, vocab=9
    )
    warned = dataclasses.replace(source, notes=("look",))
    mixed = dataclasses.replace(source, summary={"rows": "2/3 a", "sha256": "0"}, weighted={"a": Part(warned, 1.0)})
    assert data_rows(source) == data_rows(warned)[:-1]
    assert data_rows(warned)[-1] == ("note", "look")
    assert data_rows(mixed)[-1] == ("note", "a: look")


def test_the_course_of_the_learning_rate():
    rule = AdamW(learning_rate=2e-5)
    for schedule, steps, words in (
        (Cosine(warmup_steps=4), 50, "5e-06 to 2e-05 over 4 steps, then cosine to 2e-06"),
        (Cosine(warmup_steps=0), 50, "2e-05, then cosine to 2e-06"),
        (Cosine(warmup_steps=4), 4, "5e-06 to 2e-05 over 4 steps"),
        (Constant(warmup_steps=4), 50, "5e-06 to 2e-05 over 4 steps, then constant"),
        (Cosine(), 0, "2e-05"),
    ):
        assert rate_line(rule, schedule, steps) == f"learning rate {words}"


def test_lines_on_stages():
    """Which layers lie where, how long stages wait and what halves that, and what each device receives."""
    sizes = ("mesh.stage=2", "mesh.fsdp=2", "batch_size=64", "seq_len=16", "execution.pipeline.microbatches=8")
    cfg = moezoo.compose("model=deepseek", "model.layers=9", *sizes, "execution.pipeline.chunks=2")
    execution = on_mesh(build_execution(cfg, abstract_mesh(cfg.mesh)))
    step = build_step(cfg, execution)
    lines = stage_lines(execution, step.blueprint.shapes, collective_traffic(step.traced.jaxpr))
    hops, moved = 6 * 17 * 4 * 16 * 128 * 4, lines[2].rpartition("layers to their stages ")[2]
    assert lines == [
        "layers 2 to 9 of 9 in 2 stages of 2 chunks of 2; 1 before these run whole, on the own micro-batches of every "
        "stage",
        "8 micro-batches in 17 ticks: stages have no work in 5.9% of them; execution.pipeline.microbatches=18 halves "
        "that",
        "received per device and step: activations, also of micro-batches that wait or are done, "
        f"{in_units(hops)}, layers to their stages {moved}",
    ]
    assert execution.pipeline is not None
    fewer, enough = (dataclasses.replace(execution.pipeline, microbatches=n).bubble(2) for n in (16, 18))
    assert enough <= execution.pipeline.bubble(2) / 2 < fewer
    assert stage_lines(dataclasses.replace(execution, pipeline=None), step.blueprint.shapes, TrafficTable()) == []
    (line,) = stage_lines(execution.in_turn, step.blueprint.shapes, TrafficTable(), execution.pipeline)
    assert line == "none: execution.pipeline has no effect with mesh.stage=1"


def history(count):
    """Rows whose loss is 1 / step; one loss is not finite; an evaluation at the end."""
    rows = [{"step": step, "loss": 1 / step} for step in range(1, count + 1)]
    rows[count // 2]["loss"] = None
    rows[-1]["val_loss"] = 0.5
    return rows


@pytest.mark.parametrize("width", [1, 5])
def test_moving_average(width):
    """The mean of as many values on both sides, without those that are no numbers; none where there are too few."""
    values = [4.0, np.nan, 2.0, 8.0, 1.0, 5.0, 7.0]
    found = moving_average(values, width)
    for i, value in enumerate(found):
        half = width // 2
        window = [v for v in values[max(i - half, 0) : i + half + 1] if not np.isnan(v)]
        window *= half <= i < len(values) - half
        assert value == pytest.approx(np.mean(window) if window else np.nan, nan_ok=True)


@pytest.mark.parametrize(("count", "smoothed"), [(1, False), (3, False), (40, True)])
def test_loss_picture(tmp_path, count, smoothed):
    """Whole steps on the axis; a smoothed curve of long runs, whose label describes it; validation and baseline."""
    axes = draw_losses(history(count), unit="byte", baseline=1.5).axes[0]
    ticks = axes.get_xticks()
    assert len(ticks)
    np.testing.assert_array_equal(ticks, np.round(ticks))
    assert axes.get_ylabel().endswith("nats per byte")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any("mean of 5 logged steps" in label for label in labels) == smoothed
    if smoothed:
        ((at, mean),) = ((x.get_xdata(), x.get_ydata()) for x in axes.get_lines() if "mean of" in x.get_label())
        assert list(np.asarray(at)[~np.isnan(mean)]) == list(range(3, 39))  # whole windows only
    assert any("validation (0.500" in label for label in labels)
    assert any("trigram" in label and "1.500" in label for label in labels)
    loss_picture(history(count), tmp_path / "loss.png", unit="token", baseline=None)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [2, 40])
def test_routing_picture(tmp_path, count):
    """A curve of each figure, with a gap where rows of an older version have none."""
    keys = ("mean_entropy", "lowest_entropy", "experts_in_use", "mean_violation", "max_violation")
    rows = history(count)
    for i, row in enumerate(rows[1:]):
        row |= {key: i + j / 8 for j, key in enumerate(keys)}
    curves = [line for axes in draw_routing(rows).axes for line in axes.get_lines()]
    for j, (key, line) in enumerate(zip(keys, curves, strict=True)):
        values = np.asarray(line.get_ydata())
        assert np.isnan(values[0])
        np.testing.assert_array_equal(values[1:], [i + j / 8 for i in range(count - 1)], key)
    routing_picture(rows, tmp_path / "routing.png")
    assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("experts", [8, 64])
def test_load_picture(monkeypatch, tmp_path, experts):
    """Layers have their numbers in the model."""
    drawn, save = [], pictures._save
    monkeypatch.setattr(pictures, "_save", lambda figure, path: (drawn.append(figure), save(figure, path)))
    load_picture(np.ones((2, experts), np.int32), (1, 3), tmp_path / "load.png", steps="last 2 logged steps")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert [label for label in labels if label] == ["1", "3"]


def test_rules_for_an_axis_of_one_device():
    """Only axes that inner dimensions stay split over; one device is what the other rules are for too."""
    inner = "heads, kv_heads, mlp, expert_mlp, vocab"
    line = f"mesh axis tensor has one device, so {inner} stay whole; mesh.tensor=2 or more splits them"
    for rules, mesh, found in (
        ("tensor", "mesh=fsdp2_ep4", [line]),
        ("serve", "mesh=single", [line]),
        ("tensor", "mesh.tensor=2", []),
        ("cp_as_ep", "mesh=ep8", []),
        ("fsdp_ep", "mesh=single", []),
    ):
        cfg = moezoo.compose(f"rules={rules}", mesh)
        assert unsplit_lines(cfg.rules, cfg.mesh.sizes) == found


@by_table(
    """
    words => target => product => attention
    => cpu => blocked (cpu) => chunked (cpu; documents in order)
    model.window=64 execution.attention=[splash,reference] => cpu => blocked (cpu)
        => reference (set by execution.attention on cpu: splash does not run here; window 64, documents in order)
    model=gpt_oss model.window=100 execution.dtype=bfloat16 => tpu => ragged_dot (tpu)
        => splash (tpu; window 100 in 2 of 4 layers, documents in order)
    model=llama4 model.stretch=100 execution.dtype=bfloat16 => tpu => ragged_dot (tpu)
        => splash (tpu; stretches of 100 in 3 of 4 layers, documents in order)
    => cuda 9.0 => blocked (cuda 9.0: hopper takes bfloat16, not float32)
        => reference (cuda 9.0: hopper takes bfloat16, not float32; documents in order)
    seq_len=2048 model.max_length=2048 execution.dtype=bfloat16 => cuda 8.0 => blocked (cuda 8.0)
        => chunked (cuda 8.0; documents in order)
    seq_len=64 execution.dtype=bfloat16 => cuda 9.0 => hopper (cuda 9.0)
        => reference (cuda 9.0: hopper is for 128 queries or more; documents in order)
    # The ring's calls have the keys of one device.
    seq_len=2048 model.max_length=2048 mesh.context=2 execution.context_parallel=ring => rocm gfx942
        => blocked (rocm gfx942) => reference (rocm gfx942; documents in order)
    """
)
def test_the_lines_of_kernels_give_reasons(monkeypatch, words, target, product, attention):
    """What a step is compiled for, which setting names a backend, and why one made for the chip is passed over."""
    cfg = moezoo.compose(*words.split())
    monkeypatch.setattr("moezoo.parallel.mesh_execution.target_of", lambda mesh: Target(*target.split()))
    found = kernel_lines(on_mesh(build_execution(cfg)), cfg.seq_len, Blueprint(cfg.model).shapes.stacks)
    assert found == [f"grouped_matmul: {product}", f"attention: {attention}"]


def test_attention_has_a_line_per_backend(monkeypatch):
    """Heads of layers that see all tokens are larger than those of Hopper's kernel."""
    words = ("model=gemma4", "model.window=100", "model.full_head_dim=512", "execution.dtype=bfloat16", "seq_len=256")
    cfg = moezoo.compose(*words)
    monkeypatch.setattr("moezoo.parallel.mesh_execution.target_of", lambda mesh: Target("cuda", "9.0"))
    found = kernel_lines(on_mesh(build_execution(cfg)), cfg.seq_len, Blueprint(cfg.model).shapes.stacks)
    skips = "window 100 in 5 of 6 layers, documents in order"
    assert found[1:] == [
        f"attention: hopper (cuda 9.0; {skips}; heads of 32)",
        f"attention: reference (cuda 9.0: hopper takes heads of at most 256, not 512; {skips}; heads of 512)",
    ]


def test_the_line_of_products_with_experts_in_few_bits(monkeypatch):
    """They take the portable backend, because others need whole stacks."""
    cfg = moezoo.compose("execution.dtype=bfloat16")
    monkeypatch.setattr("moezoo.parallel.mesh_execution.target_of", lambda mesh: Target("cuda", "9.0"))
    rounded = functools.partial(BlockFP8.rounded, size=(4, 4))
    change = lambda model: store(model, lambda path: ".experts." in path, rounded)  # noqa: E731
    stacks = Blueprint(cfg.model, change=change).shapes.stacks
    line = kernel_lines(on_mesh(build_execution(cfg)), cfg.seq_len, stacks)[0]
    assert line == "grouped_matmul: blocked (cuda 9.0: hopper takes whole stacks, not weights of few bits)"


@by_table(
    """
    words => tokens => line
    => 128 => chunked (cpu)
    mesh.context=2 execution.context_parallel=ring => 16 => reference (cpu)
    execution.delta_rule=[reference] => 128 => reference (set by execution.delta_rule on cpu)
    execution.delta_rule=[bare,reference] => 128
        => reference (set by execution.delta_rule on cpu: bare takes bfloat16, not float32)
    """
)
def test_the_line_of_the_delta_rule(monkeypatch, words, tokens, line):
    """It is there where a layer has such a mixer, as that of attention is; its queries are float32."""
    monkeypatch.setitem(DELTA_RULE, "bare", DELTA_RULE["reference"]._replace(dtypes=("bfloat16",)))
    cfg, sizes, dtype = moezoo.compose(*words.split()), DeltaSizes(2, 2, 4, 4), jnp.dtype("float32")

    def make(key):
        parts = HeadDecay(8, sizes, dtype=dtype, key=key), FullGate(8, sizes, dtype=dtype, key=key)
        return DeltaMixer(8, sizes, *parts, epsilon=1e-6, out_std=1.0, dtype=dtype, key=key)

    (stack,) = Blueprint(cfg.model).shapes.stacks
    recurrent = dataclasses.replace(stack.blocks[0], attention=eqx.filter_eval_shape(make, jax.random.key(0)))
    recurrent = dataclasses.replace(stack, blocks=(recurrent,))
    execution = on_mesh(build_execution(cfg))
    kernels = lambda *stacks: [one.partition(":")[0] for one in kernel_lines(execution, int(tokens), stacks)]  # noqa: E731
    assert kernel_lines(execution, int(tokens), [recurrent])[-1] == f"delta_rule: {line}"
    assert kernels(recurrent) == ["grouped_matmul", "delta_rule"]
    assert kernels(stack, recurrent) == ["grouped_matmul", "attention", "delta_rule"]


def test_a_long_evaluation_prints_a_line_now_and_then(monkeypatch, capsys):
    """With a batch every 12 seconds: a line when 30 have passed, and none at the end."""
    now = 0
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now))
    with Progress(0, 3, bound=None, layers=(0,)) as shown:
        for done in range(9):
            now = 5000 + 12 * done
            shown.batches(done, 8)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["evaluation: 3 of 8 batches", "evaluation: 6 of 8 batches"]


def test_the_bar_has_the_time_left_at_80_columns(monkeypatch):
    """Beside every figure that a row may have; no figure is broken."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    row = dict.fromkeys(("mean_entropy", "lowest_entropy", "mean_violation"), 0.5) | {
        "max_violation": 12.5,
        "step": 1000,
    }
    row |= {"loss": 12.3456, "val_loss": 2.3456, "tokens_per_second": 1234567.0, "experts_in_use": 1.0, "dropped": 3}
    with Progress(0, 10000, bound="buffer_factor", layers=(0,)) as shown:
        shown.row(row | {"dropped_by_layer": [3]}, np.array([[8, 0]]))
    lines = terminal.getvalue().rpartition("step 1000/10000")[2].splitlines()
    assert lines[0].endswith(" left")
    for figure in ("loss 12.3456", "dropped 37.5%", "validation 2.3456", "violation 0.50/12.50", "1,234,567 tokens/s"):
        assert any(figure in line for line in lines), figure


def test_the_time_left_is_by_the_time_of_all_steps(monkeypatch, capsys):
    """A pause counts as a part of all steps, and not as the speed from now on; a resumed run begins anew."""
    now = 0.0
    monkeypatch.setattr(training_progress, "time", types.SimpleNamespace(monotonic=lambda: now))
    row = dict.fromkeys(("mean_entropy", "lowest_entropy", "mean_violation", "max_violation", "loss"), 0.5)
    row |= {"tokens_per_second": 1.0, "experts_in_use": 1.0, "dropped": 0}
    with Progress(100, 120, bound=None, layers=(0,)) as shown:
        for step in range(101, 111):
            now += 60.0 + 600.0 * (step == 110)
            shown.row(row | {"step": step}, None)
    lines = [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "19:00 left"
    assert lines[-2:] == ["11:00 left", "20:00 left"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_of_the_summary_break_between_words(monkeypatch, is_terminal):
    """Below each other, beside one title; a word that is too long stays whole, and a file has each line as it is."""
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    path = "runs/" + "long" * 9
    print_lines([("mesh", "one two-three four five six seven eight"), ("", path), ("", "a  b")])
    broken = ["mesh        one two-three four five six", f"{'':12}seven eight"]
    whole = ["mesh        one two-three four five six seven eight"]
    ends = [f"{'':12}{path}", f"{'':12}a  b"]
    assert stream.getvalue().splitlines() == [*(broken if is_terminal else whole), *ends]


def test_an_evaluation_is_in_the_bar_of_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for done, is_shown in ((3, True), (4, False)):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdout", terminal)
        with Progress(1, 9, bound=None, layers=(0,)) as shown:
            for batch in range(done + 1):
                shown.batches(batch, 4)
        _, step, after = terminal.getvalue().rpartition("step 1/9")
        assert step
        assert ("evaluation: batch 3/4" in after) == is_shown
