"""`moezoo generate`: texts and their continuations, with the model of a run or of a Hugging Face folder."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios

import jax
import numpy as np
import pytest
from refusals import refused
from training_runs import steps_only

import moezoo
import moezoo.host.machine as host
from moezoo.cli import generate as generate_command
from moezoo.cli.generate import continuations
from moezoo.generation import generate as generation
from moezoo.models import MixtralConfig, build_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model without a tokenizer: prompts are numbers."""
    config = MixtralConfig(
        vocab=40, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, expert_mlp=8, max_length=64, z_loss=0.0
    )
    path = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(build_model(config, key=jax.random.key(0)), path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_run):
    """A run of one step on token ids without a tokenizer."""
    folder = tmp_path_factory.mktemp("run") / "one"
    with steps_only():
        return moezoo.train(moezoo.compose(*small_run, "dispatch=gather", f"run_dir={folder}"))


def test_prompts_of_different_lengths(folder, capsys):
    generate_command.main([f"folder={folder}", "prompt=3 1 4", "prompt=5", "max_new_tokens=4", "mesh=ep8"])
    first, one, between, second, other = capsys.readouterr().out.splitlines()
    assert (first, between, second) == ("[1 of 2]", "", "[2 of 2]")
    model = moezoo.from_pretrained(folder)
    alone = [moezoo.generate(model, ids, max_new_tokens=4)[0].tolist() for ids in ([[3, 1, 4]], [[5]])]
    assert [[int(i) for i in text.split()] for text in (one, other)] == alone


@pytest.mark.filterwarnings("ignore:.*transformers 5.23 and 5.24 do not read FP8 weights that")
def test_weights_of_few_bits_stay_or_are_widened(folder, tmp_path):
    moezoo.save_pretrained(moezoo.from_pretrained(folder), tmp_path / "few", format="fp8")
    asked = [f"folder={tmp_path / 'few'}", "prompt=3 1 4", "max_new_tokens=4"]
    assert continuations([*asked, "dtype=stored"]) == continuations([*asked, "dtype=float32"])


def test_a_text_ends_where_the_folder_says(folder, tmp_path):
    whole = continuations([f"folder={folder}", "prompt=3 1 4", "max_new_tokens=8"])[0].split()
    new = whole[3:]
    # The first new token that is not the very first one and did not occur before.
    at = next(i for i, token in enumerate(new) if i and token not in new[:i])
    (tmp_path / "model").symlink_to(folder)
    asked = [f"folder={folder}", "prompt=3 1 4", "max_new_tokens=8"]
    assert continuations([*asked, f"eos_token_id={new[at]}"])[0].split() == whole[: 3 + at]
    config = folder / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [int(new[at])]}))
    try:
        assert continuations(asked)[0].split() == whole[: 3 + at]
        assert continuations([*asked, "stop=length"])[0].split() == whole
    finally:
        config.unlink()


def test_a_runs_model_draws_tokens_of_its_data_by_seed(run):
    drawn = [f"run_dir={run.folder}", "prompt=1 2 3", "max_new_tokens=12", "temperature=2.0", "top_k=20"]
    texts = [continuations([*drawn, f"seed={seed}"])[0] for seed in (1, 2)]
    execution = moezoo.execution(moezoo.saved_config(run.folder))
    for seed, text in zip((1, 2), texts, strict=True):
        key, ids = jax.random.key(seed), np.array([[1, 2, 3]])
        same = moezoo.generate(
            run.model, ids, max_new_tokens=12, temperature=2.0, top_k=20, vocab=32, key=key, execution=execution
        )
        assert text == " ".join(map(str, same[0]))
    assert texts[0] != texts[1]


def test_a_tokenizer_of_the_folder(folder, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(30)}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "prompt.txt").write_text("w3 w1\n")
    text = continuations([f"folder={tmp_path}", f"prompt=@{tmp_path}/prompt.txt", "max_new_tokens=6"])[0]
    ids = moezoo.generate(moezoo.from_pretrained(folder), [[3, 1]], max_new_tokens=6, vocab=30)
    assert text == " ".join(f"w{i}" for i in ids[0])
    # The same from Python.
    tokenizer = moezoo.tokenizer(tmp_path)
    assert (tokenizer.encode("w3 w1"), tokenizer.decode(ids[0]), tokenizer.vocab) == ([3, 1], text, 30)
    with refused(f"folder={folder} has no tokenizer.json"):
        moezoo.tokenizer(folder)


def test_answers_in_the_template_of_the_folder(folder, tmp_path):
    """An answer ends where the folder or its tokenizer ends texts; of the chat nothing else is printed."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(30)} | {"<a>": 30}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<a>"])
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    library.save(str(tmp_path / "tokenizer.json"))
    asked = [f"folder={tmp_path}", "chat=w3 w1", "chat=w5", "max_new_tokens=4", "mesh=ep8"]
    with refused(f"folder={tmp_path}: {tmp_path} has no chat template"):
        continuations(asked)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    where, new = [f"folder={tmp_path}", "mesh=ep8"], "max_new_tokens=4"
    texts = continuations([*where, "prompt=w3 w1 <a>", "prompt=w5 <a>", new])
    answers = [text.split()[count:] for text, count in zip(texts, (2, 1), strict=True)]
    assert [answer.split() for answer in continuations(asked)] == answers
    end = answers[0][-1]
    for file, ends in (("generation_config", {"eos_token_id": int(end[1:])}), ("tokenizer_config", {"eos_token": end})):
        (tmp_path / f"{file}.json").write_text(json.dumps(ends))
        assert continuations(asked)[0].split() == answers[0][: answers[0].index(end)]
        (tmp_path / f"{file}.json").unlink()


# A word for each role and for a variable; tools are left out.
TEMPLATE = (
    "{% set word = {'system': 'w20', 'user': 'w21', 'assistant': 'w22'} %}{% if brief %}w25 {% endif %}"
    "{% for m in messages %}{{ word[m.role] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SHORT = "max_new_tokens=4"


@pytest.fixture(scope="module")
def chats(folder, tmp_path_factory):
    """The folder with a tokenizer of words, in which no answer ends, and a template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("chats")
    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(39)} | {"<a>": 39}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<a>"])
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    library.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def record(*texts, role="user", **others):
    """Return a line with messages of a user and an assistant in turn; the last is of `role`."""
    roles = [*(("user", "assistant")[number % 2] for number in range(len(texts) - 1)), role]
    return json.dumps({"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)], **others})


def written(chats, prompt):
    """Return what the model writes after a text."""
    (text,) = continuations([f"folder={chats}", f"prompt={prompt}", SHORT])
    return text.removeprefix(prompt.replace("<a>", "").strip()).strip()


def test_what_stands_before_a_message(chats, tmp_path):
    """A history, a message of the system, and variables of the template; several messages are added each alone."""
    where = [f"folder={chats}", SHORT]
    history = tmp_path / "a.jsonl"
    history.write_text(record("w5", "w6", role="assistant") + "\n\n")
    (tmp_path / "system.txt").write_text("w1")
    asked = [*where, f"system=@{tmp_path}/system.txt", f"history={history}", "chat=w3", "chat=w4"]
    before = "w20 w1 w21 w5 w22 w6 w21"
    assert continuations(asked) == [written(chats, f"{before} {word} <a>") for word in ("w3", "w4")]
    brief = written(chats, f"w25 {before} w3 <a>")
    assert continuations([*asked[:-1], "template.brief=True"]) == [brief]
    # A history has variables too, and the keys come first. Without a message, the last one of a history is answered.
    history.write_text(record("w5", "w6", "w7", chat_template_kwargs={"brief": True}))
    for value, first in (([], "w25 "), (["template.brief=False"], "")):
        expected = written(chats, f"{first}w21 w5 w22 w6 w21 w7 <a>")
        assert continuations([*where, f"history={history}", *value]) == [expected]


def test_one_text_is_printed_while_it_is_written(chats, monkeypatch, capsys):
    monkeypatch.setattr(generation, "_PAUSE", 0.0)
    for asked in (["chat=w3 w1"], ["prompt=w3 w1"]):
        arguments = [f"folder={chats}", *asked, "max_new_tokens=9", "temperature=1.5", "seed=3"]
        (whole,) = continuations(arguments)
        generator, (text,) = generate_command.prepare(arguments)
        parts = [*generator.stream(text)]
        assert "".join(parts) == whole
        assert len([part for part in parts if part]) >= 9
        end = whole.split()[-3]
        for more in ([], ["stream=false"], [f"eos_token_id={end[1:]}"]):
            capsys.readouterr()
            generate_command.main([*arguments, *more])
            assert capsys.readouterr().out == "".join(f"{text}\n" for text in continuations([*arguments, *more]))


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *arguments):
        self.ours, self.theirs = pty.openpty()
        self.before = termios.tcgetattr(self.theirs)
        command = [sys.executable, "-m", "moezoo", "generate", *arguments]
        ends = {"stdin": self.theirs, "stdout": self.theirs, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, "TERM": "dumb"}, **ends)

    def read(self):
        """Return what is shown up to the next mark of a message to type."""
        shown = ""
        while not shown.endswith("> "):
            if select.select([self.ours], [], [], 1)[0]:
                shown += os.read(self.ours, 1000).decode(errors="replace").replace("\r\n", "\n")
            else:
                assert self.process.poll() is None, self.process.communicate()
        return shown

    def ends(self):
        """Return the exit code, the lines of errors, and whether the terminal is as before; it is closed."""
        errors = self.process.communicate()[1]
        as_before = termios.tcgetattr(self.theirs) == self.before
        for end in (self.ours, self.theirs):
            os.close(end)
        return self.process.returncode, errors.splitlines()[1:], as_before


def test_a_conversation(chats, tmp_path):
    """Each answer has read all that was said. Ctrl-D and a signal end it, and leave the terminal as it was."""
    (tmp_path / "a.jsonl").write_text(record("w5", "w6", "w7"))
    talk = Terminal(f"folder={chats}", SHORT, f"history={tmp_path}/a.jsonl", "system=w1")
    other = Terminal(f"folder={chats}")
    said = "w20 w1 w21 w5 w22 w6 w21 w7"
    answers = [written(chats, f"{said} <a>")]
    answers.append(written(chats, f"{said} w22 {answers[0]} w21 w3 <a>"))
    assert talk.read() == f"{answers[0]}\n> "
    # A private character is refused, and its message left out.
    for line, shown in (("", ""), ("\U0010ffff", ""), ("w3", f"{answers[1]}\n")):
        os.write(talk.ours, f"{line}\n".encode())
        assert talk.read().endswith(f"\n{shown}> ")
    os.write(talk.ours, b"\x04")
    code, (error,), as_before = talk.ends()
    assert (code, as_before) == (0, True)
    assert error.startswith("error: a text has the private character U+10FFFF")
    assert error.endswith("; this message is left out")
    other.read()
    other.process.send_signal(signal.SIGINT)
    assert other.ends() == (130, ["stopped by SIGINT"], True)


def test_a_model_that_memory_cannot_hold(folder, run, monkeypatch, console):
    prompt = ["prompt=1", "max_new_tokens=2"]
    loaded = moezoo.from_pretrained(folder)
    for model, what, command, *arguments in (
        (loaded, "in float32", "generate", f"folder={folder}", *prompt),
        (run.model, "in float32", "generate", f"run_dir={run.folder}", *prompt),
        (run.model, "data.documents=40", "evaluate", f"run_dir={run.folder}"),  # data are read first
    ):
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
        monkeypatch.setattr(host, "host_memory", lambda size=size: size - 1)
        code, out, err = console(command, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert what in err
        assert "this machine has 0.0 GiB" in err
