"""`moezoo evaluate`: bits per byte of a run and of a Hugging Face folder; its tokenizer, and what does not fit it."""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from typing import Any

import jax
import pytest
from refusals import by_table, refused
from tokenizers_of_kinds import KINDS, TEXT, with_start

import moezoo
from moezoo.cli import evaluate
from moezoo.cli.harness import describe
from moezoo.config.compose import as_mapping, to_yaml
from moezoo.data import Chat, Synthetic, Text, tokenize_files
from moezoo.models import MixtralConfig, build_model
from moezoo.training import harness

SIZES: dict[str, Any] = {
    "embed": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "expert_mlp": 8,
    "max_length": 64,
}
RUNS = ("seq_len=16", "data.eval_sequences=0", "dispatch=gather")
LINE = re.compile(
    r"(\w+) +([\d.]+) nats per (\w+), [\d.]+ bits per \w+, perplexity ([\d.]+)(?:, ([\d.]+) bits per byte)?, over "
    r"([\d,]+) \w+s in (\d+) of (\d+) ([\w ,]+) of (?:16|64)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose tokenizer begins each text with <s>, and </s> ends a text."""
    path = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(build_model(MixtralConfig(vocab=400, z_loss=0.0, **SIZES), key=jax.random.key(0)), path)
    with_start(KINDS["byte level"]()).save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three documents."""
    path = tmp_path_factory.mktemp("texts") / "notes"
    path.mkdir()
    for number, text in enumerate((TEXT * 6, "Bär 😀", TEXT[7:40])):
        (path / f"{number}.txt").write_text(text)
    return path


def read(capsys, *arguments):
    """Run the command; return the parts of its line, and what follows."""
    capsys.readouterr()
    evaluate.main(list(arguments))
    first, *rest = capsys.readouterr().out.splitlines()
    match = LINE.fullmatch(first)
    assert match, first
    return match.groups(), rest


def test_all_documents_of_a_folders_tokenizer(folder, texts, capsys):
    """By default; of bytes and tokens the texts are the oracle, of the loss `moezoo.evaluate`."""
    (split, loss, unit, perplexity, bits, tokens, windows, total, rows), rest = read(
        capsys, f"folder={folder}", "data=text", f"data.path={texts}", *RUNS, "mesh=ep8"
    )
    library = with_start(KINDS["byte level"]())
    contents = [file.read_text() for file in sorted(texts.iterdir())]
    predicted = sum(len(library.encode(text).ids) for text in contents)  # <s> is not, </s> is
    assert (split, unit, int(tokens.replace(",", "")), rest) == ("all", "token", predicted, [])
    assert (windows, total, rows) == (*[str(-(-(predicted + 2) // 16))] * 2, "windows")
    nats = float(loss) * predicted
    assert float(bits) == pytest.approx(nats / math.log(2) / sum(len(text.encode()) for text in contents), rel=1e-5)
    assert float(perplexity) == pytest.approx(math.exp(float(loss)), rel=1e-4)
    cfg = evaluate.configure(f"folder={folder}", "data=text", f"data.path={texts}", *RUNS)
    found = as_mapping(cfg)["data"]
    assert (found["tokenizer"], found["end_token"]) == (f"{folder}/tokenizer.json", "</s>")
    again = moezoo.evaluate(moezoo.from_pretrained(folder), cfg, split="all")
    assert again.loss == pytest.approx(float(loss), abs=2e-6)
    assert again.bits_per_byte == pytest.approx(float(bits), abs=2e-6)


def test_the_split_and_what_is_set(folder, texts, capsys):
    """Validation documents alone; own validation files; a tokenizer and an end token that the user sets."""
    own = (f"folder={folder}", "data=text", *RUNS)
    path = f"data.path={texts}"
    assert read(capsys, *own, path, "split=validation")[0][0] == "validation"
    assert read(capsys, *own, f"data.validation={texts}")[0][0] == "validation"
    with refused("split=all: the validation documents of data=text are apart (data.validation="):
        read(capsys, *own, f"data.validation={texts}", "split=all")
    data = [
        as_mapping(evaluate.configure(*own, path, *more))["data"]
        for more in (["data.end_token=null"], ["data.tokenizer=null"])
    ]
    assert [(each["end_token"], each["tokenizer"] is None) for each in data] == [(None, False), (None, True)]
    found, rest = read(capsys, *own, path, "data.tokenizer=null")
    assert (found[2], found[4], rest) == ("byte", None, [])  # they are the bits per token
    result = moezoo.evaluate(moezoo.from_pretrained(folder), evaluate.configure(*own, path, "data.tokenizer=null"))
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2))


def test_a_mixture_and_its_sources(folder, texts, capsys, tmp_path):
    """Each has a line; the first is the mean over all tokens. The texts are the oracle of tokens, bytes and rows."""
    lines = ["mat", "on the mat. print", "The cat sat on the mat. " * 3]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    own = (f"folder={folder}", "data=mixture", "data.sources.a.name=text", f"data.sources.a.path={texts}", *RUNS)
    own += (
        "data.sources.b.name=jsonl",
        f"data.sources.b.path={tmp_path}/b.jsonl",
        "data.sources.b.weight=0",
        "data.sources.b.held_out=0.5",
    )
    library = with_start(KINDS["byte level"]())
    contents = {"a": [file.read_text() for file in sorted(texts.iterdir())], "b": lines}
    for packing, shown in (("stream", "windows"), ("whole", "rows of whole documents, each")):
        capsys.readouterr()
        evaluate.main([*own, f"data.packing={packing}"])
        found = [match.groups() for line in capsys.readouterr().out.splitlines() if (match := LINE.fullmatch(line))]
        assert [(each[0], each[8]) for each in found] == [("all", shown), ("a", shown), ("b", shown)]
        nats, bytes_ = {}, {}
        for (name, loss, _, _, bits, tokens, read_rows, all_rows, _), part in zip(
            found[1:], contents.values(), strict=True
        ):
            predicted = sum(len(library.encode(text).ids) for text in part)
            nats[name], bytes_[name] = float(loss) * predicted, sum(len(text.encode()) for text in part)
            assert int(tokens.replace(",", "")) == predicted
            assert float(bits) == pytest.approx(nats[name] / math.log(2) / bytes_[name], rel=1e-5)
            assert read_rows == all_rows
        bits = sum(nats.values()) / math.log(2) / sum(bytes_.values())
        assert float(found[0][4]) == pytest.approx(bits, rel=1e-5)
        assert int(found[0][6]) == sum(int(each[6]) for each in found[1:])
    capsys.readouterr()
    evaluate.main([*own, "data.sources.b.packing=whole"])
    found = re.findall(r"of \d+ ([a-z ]+)", capsys.readouterr().out)
    assert found == ["rows of ", "windows of ", "rows of whole documents"]
    with refused("data.sources.b: split=all: the validation documents of data=jsonl are apart (data.validation="):
        read(capsys, *own, f"data.sources.b.validation={tmp_path}/b.jsonl", "data.sources.b.path=null", "split=all")
    apart = (f"data.sources.a.validation={texts}", "data.sources.a.path=null", "data.packing=whole")
    capsys.readouterr()
    evaluate.main([*own, *apart])
    assert capsys.readouterr().out.startswith("validation ")


def test_chats(folder, capsys, tmp_path):
    """In the folder's template. Bits per byte are those of what the assistant has written, with what ends its turns."""
    shutil.copytree(folder, tmp_path / "m")
    turn = "{% for each in messages %}<s>{{ each.role }}\n{{ each.content }}</s>{% endfor %}"
    (tmp_path / "m/chat_template.jinja").write_text(turn + "{% if add_generation_prompt %}<s>assistant\n{% endif %}")
    answers = ["on the mat.", "The cat sat", "print 😀", "Bär"]
    chats = [[{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}] for answer in answers]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    words = (
        f"folder={tmp_path}/m",
        "data=chat",
        f"data.path={tmp_path}/a.jsonl",
        "seq_len=64",
        "data.eval_sequences=0",
    )
    found, rest = read(capsys, *words, "dispatch=gather", "mesh=single")
    library = KINDS["byte level"]()
    predicted = sum(len(library.encode(answer, add_special_tokens=False).ids) + 1 for answer in answers)
    assert (found[0], found[5], found[8], rest) == ("all", str(predicted), "rows of whole documents, each", [])
    size = sum(len(answer.encode()) for answer in answers)
    assert float(found[4]) == pytest.approx(float(found[1]) * predicted / math.log(2) / size, rel=1e-5)


def test_other_data_of_a_run(tmp_path):
    """They have the run's tokenizer, end token and template, unless these are set, or its data have none."""
    own = Chat(path="a.jsonl", tokenizer="t.json", end_token="</s>", template="t.jinja")

    def configure(data, *words):
        cfg = dataclasses.replace(moezoo.compose(), data=data)
        (tmp_path / "config.yaml").write_text(to_yaml(as_mapping(cfg)))
        return evaluate.configure(f"run_dir={tmp_path}", *words).data

    assert configure(own, "data=chat", "data.path=b.jsonl") == dataclasses.replace(own, path="b.jsonl")
    assert configure(own, "data=text") == Text(tokenizer="t.json", end_token="</s>")
    assert configure(own, "data=text", "data.end_token=null") == Text(tokenizer="t.json")
    assert configure(own, "data=text", "data.tokenizer=null") == Text()
    assert configure(own, "data.path=b.jsonl", "data.end_token=null").template == "t.jinja"
    mixture = configure(own, "data=mixture", "data.sources.a.name=text", "data.sources.b={name: text, end_token: x}")
    assert mixture.parts == {name: Text(tokenizer="t.json", end_token=end) for name, end in (("a", "</s>"), ("b", "x"))}
    assert configure(Synthetic(), "data=text") == Text()


def test_token_files(folder, texts, capsys, tmp_path):
    """Of the folder's tokenizer, also if it truncates; of another one; of bytes; without a tokenizer."""
    own = (f"folder={folder}", "data=tokens", *RUNS)
    tokenizer = KINDS["byte level"]()
    file = tmp_path / "tokenizer.json"
    for name, truncates in (("same", True), ("other", False)):
        made = with_start(tokenizer)
        if truncates:
            made.enable_truncation(2)
        else:
            made.no_truncation()
            made.add_special_tokens(["<new>"])
        made.save(str(file))
        tokenize_files(str(texts), f"{tmp_path}/{name}.npy", str(file))
    found = read(capsys, *own, f"data.path={tmp_path}/same.npy")[0]
    assert (found[0], found[4] is None) == ("all", False)
    with refused(
        f"data=tokens: {tmp_path}/other.tokenizer.json made these tokens, and tokenizer.json of folder={folder}"
    ):
        read(capsys, *own, f"data.path={tmp_path}/other.npy")
    (tmp_path / "same.tokenizer.json").unlink()
    found, rest = read(capsys, *own, f"data.path={tmp_path}/same.npy")
    assert found[4] is None
    assert rest == [f"bits per byte are not known: data.path={tmp_path}/same.npy has no tokenizer"]
    tokenize_files(str(texts), f"{tmp_path}/bytes.npy")
    with refused(f"data=tokens has bytes for tokens, but folder={folder} has a tokenizer.json; choose data=text"):
        read(capsys, *own, f"data.path={tmp_path}/bytes.npy")


def test_what_does_not_fit(folder, texts, tmp_path):
    own = (f"folder={tmp_path}/m", "data=text", f"data.path={texts}", *RUNS)
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m/generation_config.json").write_text(json.dumps({"eos_token_id": 390}))
    with refused(f"folder={tmp_path}/m: eos_token_id=390 is no token of tokenizer.json; set data.end_token to the"):
        evaluate.configure(*own)
    with refused("data.end_token=nothing is not a token of data.tokenizer=", "m/tokenizer.json; give the text of one"):
        evaluate.main([*own, "data.end_token=nothing"])
    large = KINDS["byte level"]()
    large.add_tokens([f"<{i}>" for i in range(80)])
    large.save(f"{tmp_path}/m/tokenizer.json")
    with refused(
        f"folder={tmp_path}/m: tokenizer.json has 411 tokens but the model 400; they belong to different models"
    ):
        evaluate.configure(*own)
    (tmp_path / "m/tokenizer.json").unlink()
    with refused(f"folder={tmp_path}/m has no tokenizer.json; set data.tokenizer to the path of its own, or to null"):
        evaluate.configure(*own)
    with refused("model.layers=2: the model is that of folder="):
        evaluate.configure(*own, "model.layers=2")
    with refused("init_from=x: the model is that of folder="):
        evaluate.configure(*own, "init_from=x")


@pytest.mark.filterwarnings("ignore:.*transformers 5.23 and 5.24 do not read FP8 weights that")
def test_weights_of_few_bits_stay_or_are_widened(folder, texts, tmp_path, capsys):
    moezoo.save_pretrained(moezoo.from_pretrained(folder), tmp_path / "few", format="fp8")
    shutil.copy(folder / "tokenizer.json", tmp_path / "few")
    own = (f"folder={tmp_path}/few", "data=text", f"data.path={texts}", *RUNS, "mesh=ep8")
    found, wanted = (read(capsys, *own, f"dtype={dtype}")[0] for dtype in ("stored", "float32"))
    assert float(found[1]) == pytest.approx(float(wanted[1]), abs=2e-6)
    assert found[5:] == wanted[5:]


@by_table(
    """
    words => parts
    num_fewshot=3 => num_fewshot= is for tasks of lm_eval; name some
    tasks=, mesh=single => tasks= is empty; name tasks
    tasks=a split=all => split=all: tasks name their documents themselves
    tasks=a template.x=1 => template. is of the chat template ... chat=true
    tasks=a data=text => data=text: tasks bring their own data
    tasks=a max_length=1 => max_length=1 must be at least 2
    tasks=a mesh=single => tasks need the library lm_eval ... pip install 'moezoo[lm_eval]'
    """
)
def test_tasks_that_cannot_be_run(folder, words, parts, monkeypatch):
    for name in ("lm_eval", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.setattr(os, "environ", dict(os.environ))
    harness._joined.cache_clear()
    with refused(parts):
        evaluate.main([f"folder={folder}", *words.split()])


def test_lines_of_tasks():
    """Whole texts have no examples before them, whatever was asked for."""
    results = {
        "results": {"a": {"acc,none": 0.5, "acc_stderr,none": 0.25}, "b": {"bits_per_byte,none": 2.0}},
        "groups": {"c": {"acc,none": 0.25}},
        "n-samples": {"a": {"effective": 2, "original": 4}, "b": {"effective": 3, "original": 3}},
        "n-shot": {"a": 1, "b": 1},
        "configs": {"a": {"output_type": "multiple_choice"}, "b": {"output_type": "loglikelihood_rolling"}},
    }
    assert list(describe(results)) == [
        "a, 2 of 4 documents, 1 example before each",
        "  acc  0.5000 ± 0.2500",
        "b, 3 of 3 documents",
        "  bits_per_byte  2.0000",
        "c",
        "  acc  0.2500",
    ]
