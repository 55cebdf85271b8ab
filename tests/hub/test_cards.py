"""Model cards: what they say is what the run recorded, and no written file names a folder, a user or a machine."""

import json
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chat_styles import save_tokenizer
from tiny_models import mixtral, random_model
from training_runs import steps_only

import moezoo
from moezoo.config.compose import as_mapping
from moezoo.hub.adapters import save_adapter
from moezoo.hub.card import README, Facts, license_of, prompt_of, read_card, write_card
from moezoo.hub.plan import Plan
from moezoo.hub.public_names import Named, last_name, name_of_model, without_paths
from moezoo.hub.values import ModelValues
from moezoo.training.exporting import plan_export
from moezoo.training.facts import run_facts

MARK = "zzperson"  # in the path of everything that is read
SIZES = {"training": 12, "validation": 5}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


class Folders(NamedTuple):
    """A base and a run with low-rank pairs beside it, whose data and template are files."""

    root: Path
    base: Path
    run: moezoo.Run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp(MARK)
    base = root / "models--org--tiny" / "snapshots" / "0123abc"
    moezoo.save_pretrained(random_model(mixtral(vocab=300)), base)
    with_place(base / "config.json", _name_or_path=str(root / "made/from"))
    save_tokenizer(base / "tokenizer.json", ("<|end|>", "<|user|>", "<|assistant|>"))
    (base / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with_place(base / "tokenizer_config.json", name_or_path=str(base), special_tokens_map_file=f"{root}/map.json")
    (base / README).write_text("---\nlicense: other\nlicense_link: LICENSE\nlicense_name: own\n---\n# Tiny\n")
    (root / "own.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    for side, count in SIZES.items():
        chats = [{"prompt": f"{side} {i}", "completion": "yes"} for i in range(count)]
        (root / f"{side}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    with pytest.MonkeyPatch.context() as patch, steps_only():
        patch.setenv("HOME", str(root))
        patch.setenv("USER", MARK)
        patch.setattr(socket, "gethostname", lambda: MARK)
        run = moezoo.train(
            moezoo.compose(
                f"init_from={base}",
                "adapter=lora",
                "adapter.rank=2",
                "optimizer.learning_rate=0.3",  # so high that the last validation is not the best
                "schedule=constant",
                "data=chat",
                f"data.path={root}/training.jsonl",
                f"data.validation={root}/validation.jsonl",
                f"data.template={root}/own.json",
                "seq_len=64",
                "batch_size=4",
                "steps=4",
                "log_every=1",
                f"run_dir={root}/runs/mine",
            )
        )
    return Folders(root, base, run)


def with_place(path: Path, **keys: str) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def table(card: str) -> dict[str, list[str]]:
    """Return the rows of a card's tables by their first column."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line[:1] == "|"]
    return {first: others for first, *others in rows}


def counts(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


WAYS: dict[str, Any] = {
    "run": lambda made, target: plan_export(str(made.run.folder), target),
    "run like its base": lambda made, target: plan_export(str(made.run.folder), target, like=str(made.base)),
    "base and adapter": lambda made, target: plan_export(
        str(made.base), target, adapter=str(made.run.folder / "adapter")
    ),
    "base": lambda made, target: plan_export(str(made.base), target, dtype="bfloat16"),
}


@pytest.mark.parametrize("way", [*WAYS, "adapter"])
def test_no_file_names_a_person(made, way, tmp_path, monkeypatch):
    """Neither a folder, nor the user, nor the machine; configurations name no path at all."""
    monkeypatch.setenv("USER", MARK)
    monkeypatch.setattr(socket, "gethostname", lambda: MARK)
    folder = made.run.folder / "adapter"
    if way != "adapter":
        folder = tmp_path / "new"
        WAYS[way](made, str(folder)).write()
    for path in folder.iterdir():
        data = path.read_bytes()
        assert not [word for word in (MARK, str(tmp_path), str(Path.home())) if word.encode() in data], path.name
        if path.suffix == ".json" and path.name != "tokenizer.json":
            assert not re.search(r'": "(/|~|[A-Z]:)', data.decode()), path.name
    assert (folder / README).exists()


def test_the_facts_of_a_run(made, tmp_path):
    """Counts of each side, and losses of the steps that the weights have seen."""
    rows = {row["step"]: row for row in made.run.history}
    assert 0 < made.run.validations.step < 4
    for step in (4, made.run.validations.step):
        source = made.run.folder if step == 4 else made.run.folder / f"checkpoints/{step}"
        plan_export(str(source), str(tmp_path / str(step))).write()
        card = (tmp_path / str(step) / README).read_text()
        assert f"The weights are those of step {step}." in card
        found = {title: cells for title, cells in table(card).items() if "," in title}
        seen = {number: row for number, row in rows.items() if number <= step}
        best = min(seen, key=lambda number: seen[number]["val_loss"])
        expected = {
            "training, first": (1, "loss"),
            "training, last": (step, "loss"),
            "validation, before the first step": (0, "val_loss"),
            "validation, best": (best, "val_loss"),
            "validation, last": (step, "val_loss"),
        }
        assert found == {title: [str(n), f"{rows[n][key]:.4f}"] for title, (n, key) in expected.items()}
    sides = {line.split(":")[0].strip(" -"): counts(line) for line in card.splitlines() if line.startswith("  - ")}
    for side, documents in SIZES.items():
        # Each token is a byte, and each turn has two special ones.
        text = sum(len(f"{side} {i}") + len("yes") + 4 for i in range(documents))
        assert sides[side] == [documents, text]
    assert "- chat, `training.jsonl`\n" in card
    assert "`validation.jsonl`, documents" in card
    assert "low-rank pairs (lora, rank=2)" in card
    assert re.search(r"moezoo \S+, JAX \d\S+, Python 3\.", card)


def test_the_header(made, tmp_path):
    """The base by its name on the Hub, its license as far as it is no file beside it, and nothing that is not known."""
    heads = {}
    for way in ("run", "base and adapter"):
        WAYS[way](made, str(tmp_path / way)).write()
        heads[way] = read_card(tmp_path / way).split("---\n")[1].splitlines()
    heads["adapter"] = read_card(made.run.folder / "adapter").split("---\n")[1].splitlines()
    for way, head in heads.items():
        assert {"base_model: org/tiny", "license: other", "license_name: own"} <= {*head}, way
        assert not [line for line in head if line.startswith(("license_link", "datasets"))]
    assert "library_name: peft" in heads["adapter"]
    assert "base_model_relation: adapter" in heads["adapter"]
    config = json.loads((made.run.folder / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"
    # What the adapter's card says of training goes with the pairs.
    assert "`training.jsonl`" in read_card(tmp_path / "base and adapter")


def test_whose_card_a_copy_has(made, tmp_path):
    """A copy of a folder keeps the folder's, which is of the same weights; no other folder gets it."""
    export = plan_export(str(made.base), str(tmp_path / "copy"))
    assert f"README.md   that of {made.base}" in export.describe()
    export.write()
    assert read_card(tmp_path / "copy") == read_card(made.base)
    merged = WAYS["run like its base"](made, str(tmp_path / "like"))
    assert f"README.md   a model card; that of {made.base} is of other weights, and is not copied" in merged.describe()
    WAYS["run"](made, str(tmp_path / "run")).write()
    plan_export(str(tmp_path / "run"), str(tmp_path / "few"), format="fp8").write()
    card = read_card(tmp_path / "few")
    assert "rounded to fp8" in card
    assert "`training.jsonl`" in card
    moezoo.save_pretrained(random_model(mixtral()), tmp_path / "plain")
    plan_export(str(tmp_path / "plain"), str(tmp_path / "half"), dtype="bfloat16").write()
    card = read_card(tmp_path / "half")
    assert "A copy of the base" in card
    assert "Base: `plain`." in card
    assert not re.search("Training|Losses|base_model|license:", card.partition("## What")[0])


@pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own
@pytest.mark.parametrize("way", ["run", "adapter"])
def test_the_programs_of_cards_run(made, way, tmp_path, capsys):
    """In transformers, PEFT and moezoo: those of a folder with a chat template, and of an adapter of one without."""
    pytest.importorskip("peft", reason="PEFT is not installed: pip install -e '.[peers]'")
    folder, adapter = made.base, made.run.folder / "adapter"
    if way == "run":
        folder = tmp_path / "new"
        WAYS[way](made, str(folder)).write()
    programs = re.findall(r"```python\n(.*?)```", read_card(adapter if way == "adapter" else folder), re.DOTALL)
    for program in programs:
        if "vllm" not in program:
            exec(program.replace("FOLDER", str(folder)).replace("ADAPTER", str(adapter)), {})
    assert capsys.readouterr().out.strip()


def test_the_template_of_a_file(made, tmp_path):
    """A .json file gives its chat template, and the special tokens stay those beside the tokenizer."""
    plan_export(str(made.run.folder), str(tmp_path / "new")).write()
    found = json.loads((tmp_path / "new/tokenizer_config.json").read_text())
    assert found == {
        "eos_token": "<|end|>",
        "name_or_path": "org/tiny",
        "special_tokens_map_file": "map.json",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": TEMPLATE,
    }
    assert "apply_chat_template" in read_card(tmp_path / "new")


def test_a_card_of_the_users_own_stays(made, tmp_path):
    """In the folder of an adapter, which is written again."""
    folder, model = tmp_path / "adapter", made.run.model
    save_adapter(model, folder, base=tmp_path / "some" / "base")
    card = read_card(folder)
    assert "Base: `base`." in card
    assert "Training" not in card
    save_adapter(model, folder, base=tmp_path / "other", existing="replace")
    assert "Base: `other`." in read_card(folder)
    (folder / README).write_text("mine")
    save_adapter(model, folder, existing="replace")
    assert read_card(folder) == "mine"


def test_older_runs_have_recorded_less():
    """Their cards leave out what is not known."""
    cfg = moezoo.compose("data=text", "data.path=/home/zzperson/texts", "data.tokenizer=/home/zzperson/t.json")
    facts = run_facts({"versions": {"moezoo": "0.1"}, "config": as_mapping(cfg)}, [], 7, None)
    card = write_card(facts._replace(name="old"))
    assert "- text, `texts`\n\n### Settings" in card
    assert "Losses" not in card
    assert "Trained with moezoo 0.1.\n" in card
    assert "zzperson" not in card


def test_data_of_the_users_own_and_mixtures():
    one = {"name": "text", "path": "/data/zzperson", "weight": 0.25}
    two = {"name": "jsonl", "path": "~/b/*.jsonl", "tokenizer": None, "weight": 1.0}
    mapping = as_mapping(moezoo.compose())
    mapping["data"] = {"name": "mixture", "sources": {"one": one, "two": two}}
    mapping["optimizer"] = {"name": "mine.Rule", "secret": "/home/zzperson"}
    sizes = {"training": {"documents": 1, "tokens": 2000}, "validation": {"documents": 3, "tokens": 4}}
    recorded = {"two": {"kind": "jsonl", "unit": "byte", "held_out": "1 in 20", **sizes}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/data/zzperson")
        facts = run_facts({"versions": {}, "config": mapping, "data": recorded}, [], 7, None)
    card = write_card(facts)
    assert (
        "- one: text, weight 0.25\n- two: jsonl, `*.jsonl`, weight 1\n  - training: 1 document, 2,000 bytes\n"
        "  - validation: 3 documents, 4 bytes: 1 in 20\n"
    ) in card
    assert table(card)["optimizer"] == ["mine.Rule"]
    assert "zzperson" not in card
    two["weight"] = 0  # only validated on
    card = write_card(run_facts({"versions": {}, "config": mapping, "data": recorded}, [], 7, None))
    assert "weight 0\n  - validation: 3 documents, 4 bytes: 1 in 20\n" in card


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("/a/models--org--name-1.5/snapshots/0af", Named("org/name-1.5", is_hub=True)),
        ("/a/models--gpt2/snapshots/0af", Named("gpt2", is_hub=True)),
        ("/a/runs/base/checkpoints/500", Named("base")),
        ("/a/b/", Named("b")),
        ("b", Named("b")),
        ("/data/me", Named("")),
        ("/home/me", Named("")),
        ("/home", Named("")),
        ("~nobody", Named("")),
    ],
)
def test_names_of_folders(folder, named, monkeypatch):
    monkeypatch.setenv("HOME", "/data/me")
    assert name_of_model(folder) == named


def test_names_in_config_json(tmp_path, monkeypatch):
    """Of the form of the Hub's, and no folder here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    for stated, named in (
        ("org/name", Named("org/name", is_hub=True)),
        ("/home/me/name", Named("base")),
        ("", Named("base")),
    ):
        (tmp_path / "base/config.json").write_text(json.dumps({"_name_or_path": stated}))
        assert name_of_model(tmp_path / "base") == named
    (tmp_path / "base/config.json").write_text('{"_name_or_path": "org/name"}')
    (tmp_path / "org/name").mkdir(parents=True)
    assert name_of_model(tmp_path / "base") == Named("base")
    assert last_name(r"C:\Users\me\name") == "name"


def test_a_license_is_carried_line_by_line():
    link = "license_link: https://a.b/c"
    assert license_of(f"---\r\nlicense: mit\r\n{link}\r\n---\r\nlicense: gpl\r\n") == ["license: mit", link]
    for place in ("LICENSE", "file:///home/me/LICENSE"):
        assert license_of(f"---\nlicense_link: {place}\n---\n") == []
    assert license_of("# Title\n---\nlicense: mit\n---\n") == []
    card = write_card(Facts("a`b\n", "", license=["license: mit"]))
    assert card.startswith("---\n")
    assert "Its `license` is that of the base's card" in card
    assert "no `datasets`" in card


@pytest.mark.parametrize(
    ("config", "given"), [('"chat_template": null', "text"), ('"chat_template": "{{ 1 }}"', "chat"), ('"a": 1', "text")]
)
def test_a_program_gives_chats_where_there_is_a_template(config, given):
    files: dict[str, Path | bytes] = {"tokenizer.json": b"{}", "tokenizer_config.json": f"{{{config}}}".encode()}
    assert prompt_of(files, "ids") == given


def test_configurations_name_no_place():
    """Not those of folders and files, by any key that libraries have for them; a name on the Hub stays."""
    stated = {
        "cache_dir": "/home/me/cache",
        "tokenizer_path": "/home/me/t",
        "vocab_file": "a/b",
        "name_or_path": "org/a",
    }
    texts = {"tokenizer_config.json": json.dumps(stated).encode(), "config.json": b"{}"}
    plan = without_paths(Plan((), texts, ModelValues({})))
    found = plan.others["tokenizer_config.json"]
    assert isinstance(found, bytes)
    assert json.loads(found) == {
        "cache_dir": "cache",
        "tokenizer_path": "t",
        "vocab_file": "b",
        "name_or_path": "org/a",
    }
