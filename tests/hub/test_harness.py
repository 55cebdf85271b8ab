"""Tasks of lm_eval with moezoo's models and with lm_eval's own class for transformers, request by request."""

import dataclasses
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from mesh_cases import make_execution
from peer_results import torch
from refusals import by_table, refused
from tiny_models import CONFIGS, random_model
from tokenizers_of_kinds import KINDS, TEXT, with_start

import moezoo
from moezoo.cli import evaluate
from moezoo.training import harness

LENGTH, BATCH = 32, 3  # tokens that the models read; no batch of the tasks below is full
KINDS_OF_REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
# It refuses messages of the system, and trims contents.
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
    {{- message.role + ': ' + message.content | trim + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
# name -> the model, its tokenizer, and whether that has a token before each text.
CASES = {
    "mixtral": ("mixtral", "SentencePiece", True),
    "qwen3": ("qwen3", "byte level", False),
    "v3": ("v3", "byte level", True),
}
# Contexts: some with a space at the end, none, more than LENGTH tokens, and one that begins with the first token.
CHOICES: list[dict[str, Any]] = [
    {"text": "The cat sat on ", "choices": ["a hat", "three hats.", "x"], "answer": 0},
    {"text": "", "choices": ["The cat", "süße Äpfel"], "answer": 1},
    {"text": "<s>The cat", "choices": [" x", " sat", " € 3"], "answer": 2},
    {"text": TEXT[:150], "choices": [" two", "😀 twice 😀"], "answer": 1},
]
TEXTS = (TEXT, "The cat 😀", "a", TEXT[10:80])
QUESTIONS = [{"text": text, "answer": "a"} for text in ("The cat", "Ein Bär aß süße", TEXT[:150], "x")]
SHOTS = {"num_fewshot": 1, "fewshot_split": "test", "description": "Be brief.\n"}


class Found(NamedTuple):
    """The results of tasks, and of every kind of request its answers."""

    results: dict[str, Any]
    answers: dict[str, list[Any]]


def write_tasks(folder: Path, greedy: dict[str, Any]) -> None:
    """Write a task of each kind, and two that are asked as chats; `greedy` is a further choice."""

    def write(name: str, documents: list[dict[str, Any]], **task: Any) -> None:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        where = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        about = {"task": name, "dataset_path": "json", "dataset_kwargs": where, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**about, "doc_to_text": "{{text}}", **task}))

    folder.mkdir()
    choose: dict[str, Any] = {"doc_to_choice": "choices", "doc_to_target": "answer", "target_delimiter": ""}
    choose |= {"output_type": "multiple_choice"}
    means = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    write("choices", [*CHOICES, greedy], **choose, metric_list=means)
    write("asked_choices", CHOICES, **choose, **SHOTS, metric_list=means)
    texts = [{"text": text} for text in TEXTS]
    write("texts", texts, output_type="loglikelihood_rolling", doc_to_target="{{text}}", metric_list=[PERPLEXITY])
    answer = {"output_type": "generate_until", "doc_to_target": "{{answer}}", "metric_list": [EXACT]}
    write("answers", QUESTIONS, **answer, generation_kwargs={"until": UNTIL, "max_gen_toks": 12})
    drawn = {"do_sample": True, "temperature": 3.0, "top_k": 9, "until": UNTIL, "max_gen_toks": 12}
    write("drawn", QUESTIONS[:1], **answer, generation_kwargs=drawn)
    prompt = {"gen_prefix": "So ", **SHOTS}
    write("asked_answers", QUESTIONS, **answer, **prompt, generation_kwargs={"until": UNTIL[:1], "max_gen_toks": 7})


PERPLEXITY = {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}
EXACT = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
UNTIL = ["e", "\n", "a", "\ufffd"]
PLAIN, ASKED = ("choices", "texts", "answers"), ("asked_choices", "asked_answers")


def run(lm: Any, folder: Path, names: tuple[str, ...], *, chat: bool) -> Found:
    """Run tasks by lm_eval alone, and record what the model answers."""
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    answers: dict[str, list[Any]] = {}

    def recording(kind: str, method: Any) -> Any:
        def call(requests: list[Any]) -> list[Any]:
            answers[kind] = method(requests)
            return answers[kind]

        return call

    for kind in KINDS_OF_REQUESTS:
        setattr(lm, kind, recording(kind, getattr(type(lm), kind).__get__(lm)))
    tasks = TaskManager(include_path=str(folder), include_defaults=False).load([*names])
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=1234)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    asked: Any = {"lm": lm, "task_dict": tasks, "log_samples": False}
    results: Any = evaluate(**asked, apply_chat_template=chat, fewshot_as_multiturn=chat)
    return Found(results["results"], answers)


def find_greedy(theirs: Any, library: Any) -> dict[str, Any]:
    """Return a document with a choice that transformers' model itself would write."""
    for end in range(4, 60):
        ids = library.encode(TEXT[:end]).ids
        with torch.no_grad():
            best = int(theirs(torch.tensor([ids])).logits[0, -1].argmax())
        text = library.decode([best])
        if TEXT[end - 1] != " " and text.strip() and library.encode(TEXT[:end] + text).ids == [*ids, best]:
            return {"text": TEXT[:end], "choices": ["x y z", text], "answer": 1}
    raise AssertionError("no text has a greedy choice; take another seed")


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A folder, its tasks, and what transformers' model answers: (path, plain, asked)."""
    from lm_eval.models import huggingface

    name, kind, starts = CASES[request.param]
    path: Path = tmp_path_factory.mktemp("harness") / request.param
    path.mkdir()
    library = with_start(KINDS[kind]()) if starts else KINDS[kind]()
    vocab = -(-library.get_vocab_size() // 8) * 8
    config = dataclasses.replace(CONFIGS[name], vocab=vocab, layers=2, max_length=LENGTH)
    moezoo.save_pretrained(random_model(config), path / "m")
    library.save(str(path / "m/tokenizer.json"))
    tokens = {"eos_token": "</s>", **({"bos_token": "<s>"} if starts else {})}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (path / "m/tokenizer_config.json").write_text(json.dumps(about))
    (path / "m/generation_config.json").write_text(json.dumps({"eos_token_id": library.token_to_id("</s>")}))
    (path / "m/chat_template.jinja").write_text(TEMPLATE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and lm_eval
        load: Any = huggingface.HFLM
        peer = load(str(path / "m"), device="cpu", dtype="float32", batch_size=BATCH, attn_implementation="eager")
        write_tasks(path / "tasks", find_greedy(peer.model, library))
        yield path, run(peer, path / "tasks", PLAIN, chat=False), run(peer, path / "tasks", ASKED, chat=True)


def check(name: str, found: Found, wanted: Found) -> None:
    """Compare every answer and metric, and print the rows of the table in docs/harness.md, which `-s` shows.

    A log-probability is a sum over tokens of a few nats each, which float32 has to about 1e-6 of their size.
    """
    for kind, theirs in wanted.answers.items():
        ours = found.answers[kind]
        if kind == "generate_until":
            assert ours == theirs
            print(f"\n| {name} | {kind} | {len(ours)} | equal | equal |")
            continue
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-4)
        sums = (np.sum(np.array(answers).reshape(len(answers), -1)[:, 0]) for answers in (ours, theirs))
        print(f"\n| {name} | {kind} | {len(ours)} | {next(sums):.5f} | {next(sums):.5f} |")
    for task, metrics in wanted.results.items():
        for metric, value in metrics.items():
            ours = found.results[task][metric]
            assert ours == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), metric
            if metric in ("acc,none", "acc_norm,none", "bits_per_byte,none"):
                print(f"| {name} | {task}: {metric.removesuffix(',none')} | | {ours:.6f} | {value:.6f} |")


def test_every_answer_is_that_of_transformers(case):
    path, plain, asked = case
    lm = moezoo.LmEval(moezoo.from_pretrained(path / "m"), path / "m", batch_size=BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(path.name, run(lm, path / "tasks", PLAIN, chat=False), plain)
        check(f"{path.name}, chats", run(lm, path / "tasks", ASKED, chat=True), asked)
    lm.close()
    # The tasks have what they are for: a greedy choice, texts that are cut, and texts that end before the last token.
    greedy = [is_greedy for _, is_greedy in plain.answers["loglikelihood"]]
    assert greedy[-1]
    assert not all(greedy)
    assert len({len(text) for text in plain.answers["generate_until"]}) > 1
    assert "lost the first ones" in lm.notes()[0]


@pytest.mark.parametrize("case", ["mixtral"], indirect=True)
def test_on_a_mesh(case):
    path, plain, _ = case
    execution = make_execution("fsdp2_ep4", "ring")
    model = moezoo.from_pretrained(path / "m", execution)
    lm = moezoo.LmEval(model, path / "m", execution=execution, batch_size=BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(path.name, run(lm, path / "tasks", PLAIN, chat=False), plain)


@pytest.mark.parametrize("case", ["qwen3"], indirect=True)
def test_examples_before_each_question(case):
    path, *_ = case
    loaded = harness.load_tasks(["asked_*", "choices"], folder=f"{path}/tasks", num_fewshot=3)["tasks"]
    assert {name: task.get_config("num_fewshot") for name, task in loaded.items()} == dict.fromkeys(
        (*ASKED, PLAIN[0]), 3
    )
    loaded = harness.load_tasks([*ASKED, "choices"], folder=f"{path}/tasks")["tasks"]
    assert [task.get_config("num_fewshot") for task in loaded.values()] == [1, 1, 0]


@pytest.mark.parametrize("case", ["qwen3"], indirect=True)
def test_the_command(case, monkeypatch, capsys):
    path, plain, _ = case
    monkeypatch.setattr(os, "environ", dict(os.environ))
    asked = (f"folder={path}/m", "tasks=texts", f"tasks_path={path}/tasks", f"out={path}/found.json")
    evaluate.main([*asked, "limit=2", "mesh=ep8", "dispatch=gather", "batch_size=3"])
    nats = -sum(plain.answers["loglikelihood_rolling"][:2])
    bits = nats / math.log(2) / sum(len(text.encode()) for text in TEXTS[:2])
    assert capsys.readouterr().out.splitlines()[:2] == ["texts, 2 of 4 documents", f"  bits_per_byte  {bits:.4f}"]
    found = json.loads((path / "found.json").read_text())
    assert found["asked"]["tasks"] == "texts"
    assert found["overrides"] == ["mesh=ep8", "dispatch=gather", "batch_size=3"]
    assert found["results"]["texts"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("case", ["v3"], indirect=True)
def test_a_run_reads_texts_by_the_tokenizer_of_its_data(case):
    path, *_ = case
    model, file = moezoo.from_pretrained(path / "m"), f"{path}/m/tokenizer.json"
    ours = moezoo.LmEval(model, moezoo.compose("data=text", "data.path=a", f"data.tokenizer={file}"))
    theirs = moezoo.LmEval(model, path / "m")
    chat = [{"role": "user", "content": "Hi <s>"}]
    for each in ("prefix_token_id", "eot_token_id"):
        assert getattr(ours, each) == getattr(theirs, each) is not None
    for text in (TEXT, "<s>a"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    plain = moezoo.LmEval(model, moezoo.compose("data=python_stdlib"))
    assert plain.tok_encode("aä") == [*"aä".encode()]
    with refused("bytes has no token that begins or ends a text", "prefix_token_id=ID"):
        assert plain.prefix_token_id
    assert moezoo.LmEval(model, moezoo.compose("data=python_stdlib"), prefix_token_id=10).prefix_token_id == 10
    for lm in (ours, theirs):
        lm.close()


@pytest.mark.parametrize("case", ["qwen3"], indirect=True)
def test_what_is_drawn_is_the_same_each_time(case):
    path, plain, _ = case
    lm = moezoo.LmEval(moezoo.from_pretrained(path / "m"), path / "m", batch_size=BATCH)
    one, other = (run(lm, path / "tasks", ("drawn",), chat=False).answers["generate_until"] for _ in range(2))
    assert one == other != plain.answers["generate_until"][:1]


@pytest.mark.parametrize("case", ["qwen3"], indirect=True)
@by_table(
    """
    task => parts
    {"generation_kwargs": {"num_beams": 4}}
        => generation_kwargs: num_beams=4 is not supported ... max_gen_toks, temperature
    {"generation_kwargs": {"max_gen_toks": 32}}
        => generation_kwargs: max_gen_toks=32 leaves no room for a context in max_length=32
    {"generation_kwargs": {"do_sample": true, "max_gen_toks": 8}}
        => generation_kwargs: do_sample=true needs a temperature above 0
    {"unsafe_code": true} => tasks=mine runs code that the model writes
    {"dataset_kwargs": {"data_files": "nothing.jsonl"}} => tasks=mine cannot be loaded ... download=true
    {"task": "mines"} => tasks=mine: there is no such task; did you mean 'mines'?
    {"target_delimiter": "", "output_type": "loglikelihood", "doc_to_target": ""}
        => the continuation '' makes no token of its own
    {"output_type": "loglikelihood", "doc_to_target": TEXT} => a continuation to score has ... max_length=32
    """
)
def test_what_a_task_may_not_be(case, tmp_path, task, parts):
    path, *_ = case
    about = yaml.safe_load((path / "tasks/answers.yaml").read_text())
    changed = json.loads(task.replace("TEXT", json.dumps(TEXT)))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**about, "task": "mine", **changed}))
    with refused(parts), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tasks = harness.load_tasks(["mine"], folder=str(tmp_path))
        lm = moezoo.LmEval(moezoo.from_pretrained(path / "m"), path / "m")
        harness.run_tasks(lm, tasks)
