"""`moezoo routing`: what it prints and writes, that a page shows a text as it is, whatever it holds, and mistakes."""

import ast
import dataclasses
import json
import re
import types
from typing import Any

import jax
import numpy as np
import pytest
from markdown_it import MarkdownIt  # rich brings it
from refusals import by_table
from tokenizers_of_kinds import KINDS, with_start
from training_runs import steps_only

import moezoo
import moezoo.tables as tables
from moezoo.models import MixtralConfig, build_model
from moezoo.tools.routing.counted import Context, RoutingAgreement, TextRouting, compare_routing
from moezoo.tools.routing.report import code, make_page, numbers
from moezoo.tools.routing.tally import Tally

HOSTILE = "<script>alert(1)</script>![x](http://x/y) &amp; `|`\\| 'quoted' \"twice\" \x00\x1b[2J \u202eback\n"
# What a page is made of; a picture is a file beside it.
KINDS_OF_A_PAGE = {"heading", "paragraph", "bullet_list", "list_item", "table", "thead", "tbody", "tr", "th", "td"}
KINDS_OF_A_LINE = {"text", "softbreak", "code_inline", "image"}


def read_page(page: str) -> tuple[list[str], list[str]]:
    """Return the code and the pictures of a page, in which no text became anything else, and no row has other cells."""
    blocks = MarkdownIt("commonmark").enable("table").parse(page)
    assert {re.sub("_(open|close)$", "", each.type) for each in blocks} <= {*KINDS_OF_A_PAGE, "inline"}
    inside = [part for each in blocks for part in each.children or ()]
    assert {part.type for part in inside} <= KINDS_OF_A_LINE
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    pictures = [str(part.attrs["src"]) for part in inside if part.type == "image"]
    return [part.content for part in inside if part.type == "code_inline"], pictures


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "hostile.txt"
    path.write_text(HOSTILE * 12)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    """Two checkpoints of a tiny model of bytes."""
    model = ("model.layers=2", "model.embed=16", "model.heads=2", "model.kv_heads=1", "model.head_dim=8")
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder.parent / "train.txt").write_text("To train on. " * 40)
    data = ("data=text", f"data.path={folder.parent}/train.txt", f"data.validation={text}", "data.eval_sequences=6")
    cfg = moezoo.compose(
        *(*model, *data, "model.expert_mlp=8", "seq_len=16", "batch_size=4", "steps=2", "eval_every=0"),
        *("checkpoint_every=1", "mesh=single", "dispatch=gather", "log_every=1", f"run_dir={folder}"),
    )
    with steps_only():
        moezoo.train(cfg)
    return folder


def test_prints_and_writes_what_python_returns(run, console, tmp_path):
    """Against bfloat16, a mesh and the older checkpoint; the numbers are those of `moezoo.analysis`."""
    out = tmp_path / "new" / "look"
    ways = ("against=execution.dtype=bfloat16", "against=mesh.expert=2 dispatch=ring")
    code, printed, err = console("routing", f"run_dir={run}", *ways, f"out={out}", "top=3")
    assert (code, err) == (0, "")
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "text", *["layer"] * 2, *["differ"] * 3, *["written"] * 5]
    found = json.loads((out / "routing.json").read_text())
    model, cfg = moezoo.load_run(run)
    text = moezoo.analysis.routing(model, cfg)
    older = compare_routing(model, moezoo.load_run(run / "checkpoints/1")[0], cfg)
    assert found["tokens"] == text.tally.tokens == 96
    assert found["balance"]["lowest_entropy"] == pytest.approx(float(text.tally.balance.lowest_entropy))
    for row, layer in enumerate(found["layers"]):
        assert layer["load"] == layer["load_by_step"]["2"] == text.tally.load[row].tolist()
        assert layer["load_by_step"]["1"] == older.load[row].tolist()
        assert layer["agreement"]["step 1"] == pytest.approx(older.agreement[row])
        assert layer["agreement"]["mesh.expert=2 dispatch=ring"] == 1
        assert layer["dead"] == [e for e, load in enumerate(layer["load"]) if load == 0]
        assert {len(tokens) for tokens in layer["tokens"]} <= {0, 1, 2, 3}
        for pair in layer["pairs"]:
            assert pair["together"] == text.tally.pairs[(row, *pair["experts"])]
            assert pair["relative"] == pytest.approx(text.tally.co_activation[(row, *pair["experts"])])
        assert f"entropy {layer['entropy']:.3f}" in lines[2 + row]
    assert "of choices" in lines[4]
    assert "execution.dtype=bfloat16" in lines[4]
    pictures = ["load.png", "load_by_step.png", "pairs.png"]
    assert sorted(path.name for path in out.iterdir()) == [*pictures, "routing.json", "routing.md"]
    shown, drawn = read_page((out / "routing.md").read_text())
    assert sorted(drawn) == pictures
    named = {found["model"], found["text"], "execution.dtype=bfloat16", "mesh.expert=2 dispatch=ring", "step 1"}
    assert named <= {*shown}
    listed = [token for layer in found["layers"] for tokens in layer["tokens"] for token in tokens]
    texts = [ast.literal_eval(each) for each in shown if each not in named]
    assert texts == [token[name] for token in listed for name in ("before", "token", "after")]


def test_a_checkpoint_and_its_default_folder(run, console):
    """One checkpoint has no older ones here; another run is compared at the same tokens."""
    code, printed, _ = console("routing", f"run_dir={run}/checkpoints/1", f"other={run}", "split=all")
    assert code == 2  # the validation file is apart
    code, printed, _ = console("routing", f"run_dir={run}/checkpoints/1", f"other={run}", "top=0")
    assert code == 0
    assert f"written     {run}/routing/routing.md" in printed
    assert printed.count("differ") == 1
    assert "load_by_step" not in printed


def test_tokens_of_a_tokenizer(tmp_path, text, console):
    """Of a Hugging Face folder, with whole words; its own tokens are the same to the bit."""
    config = MixtralConfig(
        vocab=400, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, expert_mlp=8, experts=4, z_loss=0.0
    )
    for name in ("one", "two"):
        moezoo.save_pretrained(build_model(config, key=jax.random.key(0)), tmp_path / name)
        with_start(KINDS["byte level"]()).save(str(tmp_path / name / "tokenizer.json"))
    own = (f"folder={tmp_path}/one", "data=text", f"data.path={text}", "seq_len=16", "dispatch=gather", "mesh=single")
    code, printed, _ = console("routing", *own, f"other={tmp_path}/two", f"out={tmp_path}/look")
    assert code == 0
    assert f"0.000% of choices (layers 0.000% to 0.000%): {tmp_path}/two" in printed
    read_page((tmp_path / "look/routing.md").read_text())
    (tmp_path / "two/tokenizer.json").write_text((tmp_path / "two/tokenizer.json").read_text().replace("Ġthe", "Ġteh"))
    code, _, err = console("routing", *own, f"other={tmp_path}/two", f"out={tmp_path}/look")
    assert code == 2
    assert "make other tokens; name a model of the same tokenizer" in err
    changed = dataclasses.replace(config, experts=8)
    moezoo.save_pretrained(build_model(changed, key=jax.random.key(0)), tmp_path / "three")
    code, _, err = console("routing", *own, f"other={tmp_path}/three", f"out={tmp_path}/look")
    assert code == 2
    assert f"other={tmp_path}/three: the models have experts per layer: 4 and 8" in err


@pytest.mark.parametrize(
    "part", ["", "`", "``|``", "\\", "\\|", "<!--", "\u202e\ud800", "\"'", "\x00\x7f\u200b\ufeff\u2028", "\n\n# x"]
)
def test_a_text_shows_as_text(part):
    """Every text is one piece of code in its cell, without characters that print nothing, and is the text in Python."""
    texts = [part, f"x{part}y", f" {part} "]
    rows = [[code(repr(text)), code(repr(text))] for text in texts]
    shown, _ = read_page("\n".join(tables.markdown(("a", "b"), rows, right=[0])))
    assert [ast.literal_eval(each) for each in shown] == [text for text in texts for _ in "ab"]
    assert "".join(shown).isprintable()


def test_a_large_model_has_a_small_page():
    """12 layers of 32 experts with long contexts: what does not fit is named."""
    layers, experts, count = 12, 32, 60
    rng = np.random.default_rng(0)
    tally = Tally(layers, experts, 2, np.full(count, experts))
    tokens = np.arange(count * experts) % count
    first = (tokens + rng.integers(0, 4, (layers, 1, len(tokens)))) % experts  # a few experts for each token
    tally.add(tokens[None], np.ones((1, len(tokens)), bool), np.stack([first, (first + 1) % experts], -1))

    class Text(TextRouting):
        def context(self, place):
            return Context("<before>" * 60, "<script>" * (place % 2), "&after;" * 50)

    rows: Any = types.SimpleNamespace(unit="token")
    routing = Text((*range(1, layers + 1),), tally, rows)
    other = {"<other>": RoutingAgreement(np.full(layers, 0.5), tally.load)}
    report = numbers("<model>", "data=text, all documents", routing, other, {}, 8)
    page = make_page(report, ["large.png"])
    assert 1_800_000 < len(page.encode()) < 2_000_100
    left = re.search("([0-9]+) layers? more: see routing.json", page)
    assert left is not None
    assert page.count("## Layer ") == layers - int(left[1]) < layers
    shown, pictures = read_page(page)
    assert pictures == ["large.png"]
    assert "'<script>'" in shown
    assert "'[1]'" in shown or "'[0]'" in shown  # the number of a token without text
    assert page.count("50.000%") == layers


@by_table(
    """
    words => line
    => name one model: run_dir=FOLDER of a run, or folder=FOLDER
    run_dir=a folder=b => run_dir=a and folder=b name two models; leave one of them out
    RUN against=seq_len=8 => against=seq_len=8: seq_len=8 is no way to run the model; give keys of mesh,
    RUN against=execution.param_dtype=bfloat16 => against= ... execution.param_dtype=bfloat16 is no way to run
    RUN against=execution.dtyp=bfloat16 => execution.dtyp: ... did you mean 'dtype'?
    RUN against=mesh="'ep8" => against=mesh='ep8: a quote is not closed
    RUN top=-1 => top=-1 must be at least 0
    RUN out=/dev/null => out=/dev/null: cannot write there (File exists); name another
    RUN out=/dev/null/x => out=/dev/null/x: cannot write there (Not a directory); name another folder
    RUN other=nowhere => other=nowhere:
    RUN model.layers=3 => model.layers=3: the model is that of RUN; leave this out
    """
)
def test_mistakes(run, refuses, words, line):
    refuses(*(each.replace("RUN", f"run_dir={run}") for each in (f"routing {words}", line)))
