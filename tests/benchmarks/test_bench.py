"""The benchmarks: their results, how they follow from the times, and their error messages."""

import json
import shlex
import struct
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
from refusals import by_table
from safetensors.numpy import save_file

from benchmarks import data, generate, kernels, timing
from benchmarks.one_load import load_floor
from benchmarks.parts import LAYOUTS, NARROW, PARTS
from benchmarks.shapes import SHAPES, Shape
from benchmarks.steps import Turns, overrides
from benchmarks.timing import Timing
from moezoo.cli.command import execute
from moezoo.config.compose import compose
from moezoo.config.overrides import groups
from moezoo.parallel.kernels import Target
from moezoo.tools.cost import communication
from moezoo.tools.plan.work import model_flops

KEYS = [
    "part",
    "shape",
    "implementation",
    "pass",
    "routing",
    "dtype",
    "device",
    "ms",
    "ms_spread",
    "tflops",
    "share_of_matmul",
    "share_of_batched",
    "peak_bytes",
]
SMALL = "model.layers=1 model.embed=32 model.expert_mlp=32 seq_len=16 execution.remat=none"
SYNTHETIC = "optimizer=sgd model.vocab=32 model.init_std=0.3 data=synthetic data.vocab=32 data.documents=99"
QUICK = ["seconds=0.001", "samples=2"]


def bench(capsys, part, *arguments):
    """Return the exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as caught:
        execute(PARTS[part], arguments, f"python scripts/bench.py {part}")
    return caught.value.code, *capsys.readouterr()


def assert_rows(rows, part, products):
    """Check every figure of a part that has `products` grouped products, with the shape "tiny"."""
    yardsticks = {(r["pass"], r["implementation"]): r for r in rows}
    shape = {"T": 256, "d": 32, "f": 64, "E": 8, "K": 2}
    for row in rows:
        assert list(row) == KEYS
        assert (row["part"], row["shape"], row["routing"], row["dtype"]) == (part, shape, "zipf", "float32")
        flops = products * 2 * 256 * 2 * 32 * 64 * {"forward": 1, "backward": 2, "both": 3}[row["pass"]]
        # Both figures are rounded.
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9, abs=1e-5, rel=0.05)
        for share, yardstick in (("share_of_matmul", "matmul"), ("share_of_batched", "batched matmul")):
            assert row[share] == pytest.approx(yardsticks[row["pass"], yardstick]["ms"] / row["ms"], rel=0.05, abs=1e-3)
        assert row["peak_bytes"] > 0


def test_grouped_matmul(capsys):
    """The table, the picture and the file of rows. (tests/hub runs PyTorch's implementations.)"""
    options = ["shape=tiny", "routing=zipf", "only=moezoo", "only=xla", "only=loop", "out=a/b"]
    code, out, err = bench(capsys, "grouped_matmul", *options, *QUICK)
    assert code == 0
    assert "loop over experts" in out
    assert "wrote a/b/rows.json and a/b/speed.png" in err
    assert Path("a/b/speed.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(Path("a/b/rows.json").read_text())
    assert_rows(rows, "grouped_matmul", 1)
    names = {"matmul", "batched matmul", "moezoo blocked", "xla ragged_dot", "loop over experts"}
    assert {(r["pass"], r["implementation"]) for r in rows} == set(product(("forward", "backward", "both"), names))


def test_moe_layer(capsys):
    """Selected implementations and passes, as JSON."""
    options = ["shape=tiny", "routing=zipf", "only=moezoo", "passes=forward", "passes=both", "json=true"]
    code, out, _ = bench(capsys, "moe_layer", *options, *QUICK)
    assert code == 0
    rows = json.loads(out)  # stdout has nothing else
    assert_rows(rows, "moe_layer", 3)
    names = {"matmul", "batched matmul", "moezoo blocked", "moezoo ragged_dot"}
    assert {(r["pass"], r["implementation"]) for r in rows} == set(product(("forward", "both"), names))


def test_train_step(capsys):
    step = f"mesh=single {SMALL} optimizer=sgd model.tied_embeddings=true"
    code, out, _ = bench(capsys, "train_step", f"step={step}", "json=true", *QUICK)
    assert code == 0
    rows = json.loads(out)
    assert [r["implementation"] for r in rows] == [f"moezoo {step}", "matmul"]
    assert all(list(r) == KEYS and r["shape"] == {"T": 128, "d": 32, "f": 32, "E": 8, "K": 2} for r in rows)
    assert rows[0]["share_of_matmul"] == pytest.approx(rows[0]["tflops"] / rows[1]["tflops"], rel=0.05, abs=1e-3)
    # Attention's matrices, the router, two experts, the tied table; 8.5 keys per query, 4 heads of 32 numbers, twice.
    products = 2 * 32 * 128 + 2 * 32 * 64 + 32 * 8 + 2 * 3 * 32 * 32 + 32 * 256
    flops = 3 * 2 * 128 * (products + 8.5 * 4 * 2 * 32)
    assert rows[0]["tflops"] * rows[0]["ms"] * 1e9 == pytest.approx(flops, rel=0.03)  # figures are rounded


def test_strategies(capsys):
    """Exact strategies agree after some updates on the same batches; rows, room and drops are as routed."""
    chosen = ["ring", "gather", "capacity dispatch.capacity_factor=0.5"]
    settings = f"mesh=ep8 {SMALL} {SYNTHETIC} updates=3 out=s".split()
    code, out, err = bench(capsys, "strategies", *(f"dispatch={each}" for each in chosen), *settings)
    assert code == 0
    assert "wrote s/rows.json and s/speed.png" in err
    assert "gather" in out
    rows = json.loads(Path("s/rows.json").read_text())
    assert [r["strategy"] for r in rows] == chosen
    ring, gather, capacity = rows
    assert gather["loss"] == pytest.approx(ring["loss"], abs=1e-4)
    assert gather["dropped"] == 0
    for row in rows:
        assert row["perplexity"] == pytest.approx(np.exp(row["loss"]), rel=1e-4)
        assert row["tokens_per_second"] == pytest.approx(128 / row["ms"] * 1e3, rel=1e-3)
        assert row["rows"] == pytest.approx(16 * 2 * (1 - row["dropped"]))  # 16 tokens per device, two experts each
    # Each token of eight devices at most once; the device's own assignments; half of the average load.
    assert [r["room"] for r in rows] == [8 * 16, 2 * 16, 8 * 2]
    assert 0.5 <= capacity["dropped"] < 1
    assert capacity["loss"] != pytest.approx(ring["loss"], abs=1e-4)
    assert ring["received_bytes"] > capacity["received_bytes"]


def test_layouts(capsys):
    """Layouts agree after some updates on the same batches; speeds are relative, and bytes are those of the formula."""
    ring = "rules=ep_as_cp dispatch=ring dispatch.chunks=2 mesh=fsdp4_ep2 execution.context_parallel=ring"
    chosen = ["rules=fsdp_ep mesh=fsdp2_ep4", ring]
    settings = f"{SMALL} {SYNTHETIC.replace('sgd', 'muon')}"
    options = [*(f"layout={each}" for each in chosen), "model=mixtral", *settings.split(), "updates=3", "out=s"]
    code, out, err = bench(capsys, "layouts", *options)
    assert code == 0
    assert "wrote s/rows.json and s/speed.png" in err
    assert "ep_as_cp" in out
    assert Path("s/speed.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(Path("s/rows.json").read_text())
    assert [row["model"] for row in rows] == ["mixtral"] * 2
    assert [row["rules"] for row in rows] == ["fsdp_ep", "ep_as_cp"]
    assert [row["strategy"] for row in rows] == ["ring", "ring dispatch.chunks=2"]
    assert [row["sequences"] for row in rows] == ["whole", "ring balanced"]
    assert [row["mesh"] for row in rows] == ["fsdp=2 expert=4", "fsdp=4 expert=2"]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], abs=1e-5)  # six decimals; sums in another order
    # The third update is the only one that is timed. Figures are rounded.
    assert [row["speed"] for row in rows] == [1, pytest.approx(rows[0]["ms"] / rows[1]["ms"], abs=1e-3)]
    assert [row["speed_on_mesh"] for row in rows] == [1, 1]
    for row, words in zip(rows, chosen, strict=True):
        assert row["tokens_per_second_per_device"] == pytest.approx(128 / 8 / row["ms"] * 1e3, rel=1e-3)
        assert row["peak_bytes"] > 0
        table = communication(compose(*words.split(), *settings.split()))
        assert row["received_by_axes"].keys() == {"fsdp", "expert", "fsdp expert"}
        assert sum(row["received_by_axes"].values()) == table.bytes
        assert row["received_by_axes"]["expert"] == table.by("axes")[("expert",),].bytes
        assert row["optimizer"] == "muon"
        orthogonal = [moved.bytes for (scope,), moved in table.by("scope").items() if "orthogonalise" in scope]
        assert row["orthogonal_bytes"] == sum(orthogonal) > 0
        assert row["step_flops"] == model_flops(compose(*settings.split())) / 8
        assert row["orthogonal_flops"] > row["step_flops"] / 100
    assert "ortho" in out


def test_generate_under_layouts(capsys, monkeypatch):
    """Layouts give the same tokens; under `serve` no weight is received. A difference below the noise is no figure."""
    noisy = []

    def measure(calls, *, seconds, samples):
        """Half a call of the first layout takes longer than a whole one at first, and of the second one always."""
        noisy.append((seconds, samples))
        for call in calls.values():
            call()
        longer = [7.0 if len(noisy) > 1 else 2.0, 3.0, 2.0, 3.0]
        return {name: Timing(ms, 0.0) for name, ms in zip(calls, longer, strict=True)}

    monkeypatch.setattr(generate, "measure", measure)
    layouts = ["mesh.fsdp=2 mesh.expert=2", "rules=serve mesh.expert=2 mesh.tensor=2"]
    model = "mixtral model.layers=1 model.embed=32 model.expert_mlp=32"
    options = [f"model={model}", "call=2x4x4", *(f"layout={each}" for each in layouts), *QUICK, "out=s"]
    code, out, _ = bench(capsys, "generate", *options)
    assert code == 0
    assert "received" in out
    rows = json.loads(Path("s/rows.json").read_text())
    assert [row["layout"] for row in rows] == layouts
    assert [row["same_rows"] for row in rows] == [2, 2]
    assert rows[0]["received_bytes"] > 4 * 8 * 3 * 32 * 32 / 2 > 10 * rows[1]["received_bytes"] > 0
    assert rows[0]["stored_bytes"] < rows[1]["stored_bytes"]
    assert [row["ms_per_token"] for row in rows] == [2, None]  # 4 ms for two tokens
    assert [row["speed"] for row in rows] == [1, None]
    assert "not measured" in out
    assert [samples / noisy[0][1] for _, samples in noisy] == [1, 2, 4]


def test_load(capsys):
    """What several devices hold counts once. The floor has every array twice for a moment; `moezoo` has few MB more."""
    options = ["gb=0.1", "layout=rules=ep_as_dp mesh.data=2 mesh.expert=4", "samples=1", "folder=kept", "out=s"]
    code, out, err = bench(capsys, "load", *options)
    assert code == 0
    assert "peak MB" in out
    assert "load 1/1 of kept/0.1: floor" in err
    (row,) = json.loads(Path("s/rows.json").read_text())
    assert (row["layout"], row["devices"]) == ("rules=ep_as_dp mesh.data=2 mesh.expert=4", 8)
    file = Path("kept/0.1/model.safetensors")
    assert row["file_bytes"] == file.stat().st_size == pytest.approx(1e8, rel=0.05)
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert row["rest_bytes"] == row["file_bytes"] - 8 - length
    assert 0 < row["seconds"] < 60
    assert 0 < row["floor_seconds"] < 60
    assert f"{row['seconds'] / row['floor_seconds']:.2f}" in out
    assert 0 <= row["peak_bytes"] < 0.5e8 < row["floor_peak_bytes"]
    code, _, err = bench(capsys, "load", *options[:-1])
    assert (code, err) == (2, "error: folder=kept is not empty; name a new folder\n")


def test_data(capsys, monkeypatch):
    """One run is real; the figures of the others follow from it."""
    small = shlex.split(f"{SMALL} model.heads=2 model.kv_heads=1")
    train, runs = data._train, []

    def once(*words):
        runs.append(words)
        if len(runs) == 1:
            runs.append(train(*words, *small))
        return {**runs[1], "peak_bytes": runs[1]["peak_bytes"] + len(runs) * 10**6}

    monkeypatch.setattr(data, "_train", once)
    code, out, _ = bench(capsys, "data", "gb=0.002", "out=s")
    assert code == 0
    assert "beyond empty MB" in out
    rows = json.loads(Path("s/rows.json").read_text())
    assert [row["run"] for row in rows] == ["compile", "empty", "cold", "warm"]
    assert [row["beyond_bytes"] for row in rows] == [0, 0, 10**6, 2 * 10**6]
    assert rows[3]["corpus_bytes"] == pytest.approx(2e6, rel=0.5)
    assert 1 < rows[0]["seconds"] < rows[0]["all_seconds"] < 300
    assert 1 < rows[0]["cpu_seconds"] < 200
    assert 1e8 < rows[0]["peak_bytes"] < 4e9
    assert [words[0] for words in runs[2:]] == [
        runs[0][0].replace("small", name) for name in ("small", "large", "large")
    ]


def test_the_floor_of_loading(tmp_path):
    """It reads every file, and transposes matrices in memory."""
    stored = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}
    for name, values in stored.items():
        save_file({name: values}, tmp_path / f"{name}.safetensors")
    for found, values in zip(load_floor(tmp_path), stored.values(), strict=True):
        np.testing.assert_array_equal(found, values.T)


def test_compiled_steps(capsys):
    """A whole step, compiled for this machine: its bytes are those of the formula."""
    words = f"{SMALL} mesh.context=2 execution.context_parallel=ring optimizer=sgd"
    code, out, _ = bench(capsys, "compile", "absent=cpu", f"step={words}")
    assert code == 0
    assert "temporaries" in out
    assert f"{communication(compose(*words.split())).bytes / 1e6:,.1f}" in out


def test_a_compiled_step_of_few_bits(capsys):
    """The base has one byte per number in place of four, and pieces that the mesh can lay out."""
    words = f"step={SMALL} mesh.expert=2 adapter=lora adapter.rank=2 adapter.targets=[experts] optimizer=sgd"
    sizes = []
    for options in ([], ["format=fp8"]):
        code, out, _ = bench(capsys, "compile", "absent=cpu", words, *options, "json=true")
        assert code == 0
        sizes.append(json.loads(out)[0]["arguments_bytes"])
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize("model", ["mixtral", NARROW])
def test_default_layouts(model):
    """They name every rule set that trains, and fit; the first on each mesh is the reference, `fsdp_ep` with `ring`.

    Only `tensor` is alone on its mesh.
    """
    trained = set(groups()["rules"]) - {"serve"}
    assert {f"rules={name}" for name in trained} == {layout.split()[0] for layout in LAYOUTS}
    on_mesh = {layout.partition("mesh")[2]: layout for layout in reversed(LAYOUTS) if "rules=tensor" not in layout}
    assert all(layout.startswith("rules=fsdp_ep dispatch=ring") for layout in on_mesh.values())
    Turns([(layout, [*overrides("model", model), *layout.split()]) for layout in LAYOUTS], [], {})


def test_delta_rule(capsys):
    """One result per kind of decay and for attention, by length and pass."""
    code, out, _ = bench(capsys, "delta_rule", "tokens=80", "key_heads=1", "head_dim=4", *QUICK, "out=new")
    assert not code
    assert "of attention" in out
    rows = json.loads(Path("new/rows.json").read_text())
    assert [r["implementation"] for r in rows] == ["per_head", "per_channel", "attention"] * 2
    assert all(r["ms"] > 0 for r in rows)
    assert all(r["temporary_bytes"] > 0 for r in rows)


def test_attention(capsys):
    """One result per backend, length and pass; a table with ratios, and a picture."""
    options = ["tokens=8", "tokens=96", "kv_heads=1", "group=2", "head_dim=4", "value_dim=3", "documents=3", *QUICK]
    code, out, _ = bench(capsys, "attention", *options, "out=new")
    assert not code
    assert "ratio" in out
    assert "products" in out
    assert Path("new/speed.png").exists()
    rows = json.loads(Path("new/rows.json").read_text())
    assert [r["tokens"] for r in rows] == [8] * 6 + [96] * 6
    assert [r["implementation"] for r in rows] == ["reference", "chunked", "products"] * 4
    assert [r["rows"] for r in rows] == [128] * 6 + [10] * 6
    assert all(r["ms"] > 0 for r in rows)
    assert rows[0]["sizes"]["value_dim"] == 3


def test_profile(capsys):
    """On eight devices: every part of a step has a row, and rows add up to the step."""
    small = "model.layers=1 model.embed=32 model.expert_mlp=32 model.vocab=32 seq_len=16 mesh=ep8 dispatch=ring"
    code, out, _ = bench(capsys, "profile", *small.split(), "seconds=0.01", "samples=2", "out=new")
    assert code == 0
    assert "whole step" in out
    rows = json.loads(Path("new/rows.json").read_text())
    parts = {"attention", "router", "dispatch", "experts", "loss", "optimizer", "collectives", "copies"}
    assert parts <= {row["name"] for row in rows}
    assert sum(row["ms"] for row in rows) == pytest.approx(rows[0]["step_ms"], rel=1e-3)
    for row in rows:
        phases = row["forward_ms"] + row["recomputed_ms"] + row["backward_ms"]
        assert 0 <= phases <= row["ms"] + 1e-3
        assert 0 <= row["moving_ms"] <= row["ms"] + 1e-3
        assert (row["devices"], row["settings"]) == (8, small)
    (copies,) = (row for row in rows if row["name"] == "copies")
    largest = [copy["ms"] for copy in copies["largest"]]
    assert 0 < largest[-1] <= largest[0]
    assert sum(largest) <= copies["ms"] + 1e-3
    assert len(largest) == 10 == len({(copy["copied"], copy["phase"]) for copy in copies["largest"]})
    assert copies["largest"][0]["copied"] in out


@by_table(
    """
    arguments => line
    moe_layer shape=L9 => shape=L9: not known; valid: L1, L2, L3, P1, S1
    moe_layer routing=zip => routing=zip: expected one of uniform, zipf, found zip
    moe_layer seconds=0 => seconds=0 must be above 0
    moe_layer seconds=nan => seconds=nan: expected a number such as 0.5, found no finite number
    moe_layer step=mesh=ep8 => step: there is no key 'step'
    moe_layer mesh=ep8 => mesh: there is no key 'mesh'
    moe_layer only=bloked => only=bloked: no implementation of moe_layer has this in its name
    moe_layer --json => --json: no such option; valid: --help, and KEY=VALUE
    moe_layer shapes=tiny => shapes: there is no key 'shapes'; did you mean 'shape'?
    moe_layer tiny => tiny: expected KEY=VALUE
    train_step shape=L1 => shape: there is no key 'shape'
    train_step step=mesh=epp8 => mesh=epp8: no such mesh; did you mean 'ep8'?
    attention kv_heads=0 => kv_heads=0 must be at least 1
    attention tokens=0 => tokens=0 must be at least 1
    attention tokens=128 tokens=many => tokens=many: expected a whole number such as 4, found text
    attention tokens=1e3 => expected a whole number such as 4, found a decimal number; write 1000
    attention window=0 => window=0 must be at least 1
    attention shape=L1 => shape: there is no key 'shape'
    generate call=1x2 => call=1x2: must be three numbers more than 0, such as 1x32x64
    generate call=1x4000x200 => call=1x4000x200: 4200 tokens exceed model.max_length=4096
    generate 'model=deepseek model.index_topk=64' call=1x60x5
        => call=1x60x5: 65 tokens exceed model.index_topk=64 (beyond it DeepSeek's sparse attention
    generate model=mixtral call=1x8x1 layout=mesh=ep8 => call=1x8x1: needs two or more new tokens
    generate 'model= ' => model=' ': must be a model, such as mixtral
    generate 'model=mixtral_115m mesh=ep8' => mesh=ep8 does not belong to the model
    generate 'model=mixtral_115m model.embd=3' => model.embd
    data gb=0 => gb=0 must be above 0
    data gb=1e6 => gb=1e+06 needs 3000000.0 GB in
    data tokenizer=none => tokenizer=none does not exist; give a Hugging Face tokenizer.json
    load gb=0 => gb=0 must be above 0
    load gb=1e6 => gb=1e+06: the floor, with every array twice, needs at least 1,862,645.1 GiB of memory, and
    load layout=mesh.expert=3 => mesh.expert=3 splits experts 3 ways but model.experts=8
    load layout=model.layers=3 => layout=model.layers=3: model.layers must be the same for all; a layout sets
    compile shape=L1 step=model=mixtral => shape= is for kernels and step= for training steps; leave one of
    compile format=fp8 => format= is for training steps; name them with step=
    compile absent=cpu => absent=cpu: only whole steps are compiled for it; name them with step=
    compile absent=h200 absent=b200 => absent=b200 absent=h200: a process compiles kernels for one kind of GPU
    compile absent=v5q => absent device v5q: not known; did you mean
    profile mesh=epp8 => mesh=epp8: no such mesh; did you mean 'ep8'?
    profile mesh=ep8 dtype=float32 => dtype: there is no key 'dtype'
    strategies updates=0 => updates=0 must be at least 1
    strategies updates=x => updates=x: expected a whole number such as 4, found text
    strategies mesh=epp8 => mesh=epp8: no such mesh; did you mean 'ep8'?
    strategies dispatch=rong => dispatch=rong: no such dispatch; did you mean 'ring'?
    strategies mesh=ep8 model.experts=6 => mesh.expert=8 splits experts 8 ways but
    strategies mesh=single dispatch=ring 'dispatch=gather batch_size=16'
        => dispatch=gather batch_size=16: batch_size must be the same for all; a layout sets only mesh, rules,
    strategies mesh=single model.vocab=64 => data=python_stdlib has 256 byte values but
    strategies optimizer=sgdd => optimizer=sgdd: no such optimizer; did you mean 'sgd'?
    layouts layout=optimizer.learning_rate=1e-3 optimizer.learning_rate=1e-2
        => optimizer.learning_rate=1e-2: optimizer.learning_rate is also set for optimizer.learning_rate=1e-3
    layouts layout=ring => ring: expected KEY=VALUE, found no '='; write dispatch=ring
    layouts layout=rules=fsdp_epp => rules=fsdp_epp: no such rules; did you mean 'fsdp_ep'?
    layouts model=mixtral model=mixtrel => model=mixtrel: no such model; did you mean 'mixtral'?
    layouts 'layout=rules=pure_fsdp mesh=ep8' => mesh.expert=8 but rules pure_fsdp name no axis 'expert'
    layouts rules=ep_as_cp => rules=ep_as_cp: holds for all that is compared; name it in layout=
    layouts layout=mesh=ep8 'layout=mesh=fsdp8 execution.dtype=bfloat16'
        => layout=mesh=fsdp8 execution.dtype=bfloat16: execution.dtype must be the same for all; a layout sets only
    layouts layout=steps=3 => layout=steps=3: steps must be the same for all; a layout sets only mesh, rules,
    generate layout=steps=3 => layout=steps=3: steps must be the same for all
    """
)
def test_mistakes_get_one_line(capsys, arguments, line):
    code, out, err = bench(capsys, *shlex.split(arguments))
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert line in err
    assert len(err.splitlines()) == 1


def test_does_not_overwrite(capsys, tmp_path):
    (tmp_path / "rows.json").touch()
    code, _, err = bench(capsys, "moe_layer", f"out={tmp_path}")
    assert code == 2
    assert "is not empty; name a new folder" in err


def test_alternates_and_takes_the_median(monkeypatch):
    """Only calls advance the clock. The first call takes longer and does not count."""
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "process_time", lambda: 1.5 * now[0])
    runs = count()

    def slow():
        order.append("slow")
        now[0] += 9 if next(runs) == 0 else 2

    def fast():
        order.append("fast")
        now[0] += 0.5

    timings = timing.measure({"slow": slow, "fast": fast}, seconds=100.0, samples=3)
    assert timings["slow"] == (2000, 0, 3000)
    assert timings["fast"] == (500, 0, 750)
    assert order[-6:] == ["slow", "fast"] * 3
    # Two samples of two seconds use up the time.
    order.clear()
    timing.measure({"slow": slow}, seconds=3.0, samples=9)
    assert len(order) == 2 + 2


def test_short_calls_are_repeated(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call():
        calls.append(1)
        now[0] += 0.001

    assert timing.measure({"short": call}, seconds=1.0, samples=2)["short"].ms == pytest.approx(1)
    assert len(calls) == 2 + 2 * 20


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_group_sizes(routing):
    sizes = kernels.group_sizes(Shape(1000, 1, 1, 16, 4), routing)
    assert sizes.sum() == 4000
    assert sizes.max() <= 1000  # the experts of a token differ
    skew = sizes.max() / sizes.mean()
    assert skew < 1.3 if routing == "uniform" else skew > 2
    np.testing.assert_array_equal(sizes, kernels.group_sizes(Shape(1000, 1, 1, 16, 4), routing))


def test_kernels_of_a_chip_are_timed_together():
    """The default comes first; what is taken by name follows."""
    chips = Target("cuda", "9.0"), Target("cuda", "10.0"), Target("cuda", "8.0"), Target("tpu"), Target("cpu")
    named = [["hopper", "hopper_persistent"], ["blackwell"], ["blocked"], ["ragged_dot", "megablox"], ["blocked"]]
    assert [kernels.products_for(chip) for chip in chips] == named
    assert kernels.products_for(chips[0], "float32") == ["blocked"]


def test_registry_has_the_published_sizes():
    assert SHAPES["L1"] == (8192, 2048, 768, 128, 8)
    assert SHAPES["S3"].layer_flops == 6 * 32768 * 8 * 4096 * 1024
