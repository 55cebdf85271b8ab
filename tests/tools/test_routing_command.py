"""`moezoo routing`: what it prints and writes, that a page is inert whatever the text holds, and mistakes."""

import dataclasses
import html.parser
import json
import types
from typing import Any

import jax
import numpy as np
import pytest
from refusals import by_table
from tokenizers_of_kinds import KINDS, with_start

import moezoo
from moezoo.models import MixtralConfig, build_model
from moezoo.tools.routing.counted import Context, RoutingAgreement, TextRouting, compare_routing
from moezoo.tools.routing.report import escape, make_page, numbers
from moezoo.tools.routing.tally import Tally

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> &amp; 'quoted' \"twice\" \x00\x1b[2J \u202eback\n"


class Page(html.parser.HTMLParser):
    """Collects the elements of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def check_inert(self):
        """Nothing runs, and nothing is loaded: neither script nor handler, and pictures are in the page."""
        tags = {tag for tag, _ in self.elements}
        assert not tags & {"script", "iframe", "object", "embed", "link", "base", "form", "svg", "a"}
        for tag, attrs in self.elements:
            assert not any(name.startswith("on") for name in attrs), (tag, attrs)
            assert all(
                value.startswith("data:image/png;base64,") for name, value in attrs.items() if name in ("src", "href")
            )
        (policy,) = (attrs["content"] for tag, attrs in self.elements if "http-equiv" in attrs)
        assert policy.startswith("default-src 'none'")


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
    moezoo.train(cfg)
    return folder


def test_prints_and_writes_what_python_returns(run, console, tmp_path):
    """Against bfloat16, a mesh and the older checkpoint; the numbers are those of `moezoo.analysis`."""
    out = tmp_path / "new" / "look"
    ways = ("against=execution.dtype=bfloat16", "against=mesh.expert=2 dispatch=ring")
    code, printed, err = console("routing", f"run_dir={run}", *ways, f"out={out}", "top=3")
    assert (code, err) == (0, "")
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "text", *["layer"] * 2, *["differ"] * 3, *["written"] * 6]
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
    pictures = ["balance.png", "load.png", "load_by_step.png", "pairs.png"]
    assert sorted(path.name for path in out.iterdir()) == [*pictures, "routing.html", "routing.json"]
    page = (out / "routing.html").read_text()
    Page(page).check_inert()
    assert page.count("data:image/png") == 4
    for shown in ("&lt;script&gt;", "step 1", "↵", "execution.dtype=bfloat16"):
        assert shown in page


def test_a_checkpoint_and_its_default_folder(run, console):
    """One checkpoint has no older ones here; another run is compared at the same tokens."""
    code, printed, _ = console("routing", f"run_dir={run}/checkpoints/1", f"other={run}", "split=all")
    assert code == 2  # the validation file is apart
    code, printed, _ = console("routing", f"run_dir={run}/checkpoints/1", f"other={run}", "top=0")
    assert code == 0
    assert f"written     {run}/routing/routing.html" in printed
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
    Page((tmp_path / "look/routing.html").read_text()).check_inert()
    (tmp_path / "two/tokenizer.json").write_text((tmp_path / "two/tokenizer.json").read_text().replace("Ġthe", "Ġteh"))
    code, _, err = console("routing", *own, f"other={tmp_path}/two", f"out={tmp_path}/look")
    assert code == 2
    assert "make other tokens; name a model of the same tokenizer" in err
    changed = dataclasses.replace(config, experts=8)
    moezoo.save_pretrained(build_model(changed, key=jax.random.key(0)), tmp_path / "three")
    code, _, err = console("routing", *own, f"other={tmp_path}/three", f"out={tmp_path}/look")
    assert code == 2
    assert f"other={tmp_path}/three has model.experts=8, {tmp_path}/one has 4" in err


@pytest.mark.parametrize("part", ["", "</td>", "<script>", "a\u202eb", "\ud800", '"', "\x00\x7f\u200b\ufeff", "\u2028"])
def test_a_text_shows_as_text(part):
    """What is escaped reads as the text, without characters that print nothing or turn the line."""
    shown = Page(f"<p>{escape(f'x{part}y')}</p>")
    assert [tag for tag, _ in shown.elements] == ["p"]
    expected = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in part)
    assert shown.text == f"x{expected}y"
    assert shown.text.isprintable()
    shown.text.encode()


def test_a_large_model_has_a_small_page(tmp_path):
    """12 layers of 32 experts with long contexts, and pictures of 3 MB: what does not fit is named."""
    layers, experts, count = 12, 32, 60
    rng = np.random.default_rng(0)
    tally = Tally(layers, experts, 2, np.full(count, experts))
    tokens = np.arange(count * experts) % count
    first = rng.integers(0, experts, (layers, 1, len(tokens)))
    tally.add(tokens[None], np.ones((1, len(tokens)), bool), np.stack([first, (first + 1) % experts], -1))

    class Text(TextRouting):
        def context(self, place):
            return Context("<before>" * 60, "<script>" * (place % 2), "&after;" * 60)

    rows: Any = types.SimpleNamespace(unit="token")
    routing = Text((*range(1, layers + 1),), tally, rows)
    other = {"<other>": RoutingAgreement(np.full(layers, 0.5), tally.load)}
    report = numbers("<model>", "data=text, all documents", routing, other, {}, 8)
    picture = tmp_path / "large.png"
    picture.write_bytes(bytes(3_000_000))
    page = make_page("<model>", report, tally.co_activation, {"<picture>": picture})
    assert 4_000_000 < len(page.encode()) < 5_000_000
    assert "large.png" in page
    assert "layers more are in routing.json" in page
    shown = Page(page)
    shown.check_inert()
    assert "<script>" in shown.text
    assert "<mark>[" in page  # the number of a token without text
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
