"""data=chat: files of chats as a source, its cache, and every error, with its file and line."""

import dataclasses
import gzip
import itertools
import json
import re
import shutil
from pathlib import Path

import naive_files as naive
import numpy as np
import pytest
from chat_styles import PLAIN, QWEN, THINKING, WITH_TOOL, save_tokenizer
from refusals import by_table, refused

from moezoo.cli.prepare_data import main as prepare_data
from moezoo.data import Chat, Source, chat_template, load
from moezoo.data.chat import folder_format
from moezoo.data.chat_format import ChatFormat
from moezoo.data.chat_records import read_chat
from moezoo.data.epochs import PackedEpochs, make_epochs
from moezoo.data.tokenizer import HuggingFace
from moezoo.errors import UserError

SEQ = 400
SHORT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CHATS = [{"messages": chat} for chat in (PLAIN, PLAIN[:3], WITH_TOOL, THINKING, SHORT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a tokenizer and a template."""
    folder = tmp_path_factory.mktemp("folder")
    save_tokenizer(folder / "tokenizer.json", QWEN.special)
    (folder / "chat_template.jinja").write_text(QWEN.template)
    (folder / "tokenizer_config.json").write_text(json.dumps(QWEN.variables))
    return folder


def write(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings(path: Path, folder: Path, **others) -> Chat:
    return Chat(path=str(path), tokenizer=str(folder / "tokenizer.json"), **others)


def load_chats(chat: Chat) -> Source:
    return load(chat, seq_len=SEQ, seed=0, vocab=300)


def documents(source: Source) -> list[tuple[list[int], list[bool]]]:
    """Return the ids and the mask of every stored document."""
    found = []
    for corpus in (source.train, source.validation):
        assert corpus.mask is not None
        for start, length in zip(corpus.starts, np.diff(corpus.offsets), strict=True):
            part = slice(start, start + length)
            found.append((corpus.tokens[part].tolist(), corpus.mask[part].tolist()))
    return found


@pytest.mark.parametrize("loss_on", ["assistant", "last", "each", "all"])
def test_documents_are_chats_with_masks(folder, tmp_path, loss_on):
    """With and without the cache, from plain and packed files; jinja2 renders only what is not in the cache."""
    others = [{"messages": [{"role": "user", "content": f"{i}"}, SHORT[1]]} for i in range(20)]
    records = [*CHATS, *others, *CHATS]
    with ChatFormat(settings(tmp_path, folder).read_template(), tokenizer(folder), "2025-01-01") as chats:
        encoded = [chats.examples(read_chat(record), loss_on) for record in records]
    made = [[(each.ids.tolist(), each.mask.tolist()) for each in examples] for examples in encoded]
    # All examples of a chat are on the same side, and equal chats too.
    held_out = [naive.chat_hash([ids for ids, _ in examples]) % 20 == 0 for examples in made]
    assert 0 < sum(held_out) < len(records)
    expected = [m for m, out in zip(made, held_out, strict=True) if not out for m in m]
    expected += [m for m, out in zip(made, held_out, strict=True) if out for m in m]
    (tmp_path / "chats").mkdir()
    write(tmp_path / "chats" / "a.jsonl", records[:7])
    rest = write(tmp_path / "rest.jsonl", records[7:])
    (tmp_path / "chats" / "b.jsonl.gz").write_bytes(gzip.compress(rest.read_bytes()))
    source = load_chats(settings(tmp_path / "chats", folder, loss_on=loss_on))
    assert documents(source) == expected
    assert source.vocab == 259
    assert source.summary["held out"] == "1 chat in 20, by a hash of its content"
    assert source.summary["duplicates"] == "5 of 30 chats equal an earlier one"
    counted = "34, one for each turn of 30 chats" if loss_on == "each" else None
    assert source.summary.get("examples") == counted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "_Child", None)
        warm = load_chats(settings(tmp_path / "chats", folder, loss_on=loss_on))
    assert documents(warm) == expected
    assert warm.facts(SEQ) == source.facts(SEQ)


def test_what_a_user_should_know_of_chats(folder, tmp_path, monkeypatch):
    """A chat that ends its process is left out, and named; the run goes on. The cache keeps these notes."""
    ask = chat_template._Child.ask

    def killed(child, message):
        if "DIE" in str(message.get("messages")) and child._process is not None:
            child._process.kill()
        return ask(child, message)

    monkeypatch.setattr(chat_template._Child, "ask", killed)
    asked = {"role": "user", "content": "a", "mood": "good"}
    records = [{"messages": [asked, {"role": "assistant", "content": text}]} for text in ("b", "DIE", "c", "d")]
    path = write(tmp_path / "a.jsonl", records)
    for _ in range(2):
        source = load_chats(settings(path, folder))
        assert source.notes == (
            f"key mood in 4 messages has no effect: {folder}/chat_template.jinja does not read it",
            f"data.path={path} line 2 is left out: rendering it by {folder}/chat_template.jinja ended its process "
            "(exit code -9); correct the template or leave the chat out",
        )
        assert len(source.train) + len(source.validation) == 3 * 42
        monkeypatch.setattr(chat_template, "_Child", None)


def test_nul_characters_are_counted(folder, tmp_path):
    """In what is trained: other keys have no effect."""
    asked = [{"role": "user", "content": f"{i}\0"} for i in range(3)]
    records = [{"messages": [each, *PLAIN[2:3]], "other": "\0"} for each in asked]
    unread, note = load_chats(settings(write(tmp_path / "a.jsonl", records), folder)).notes
    assert unread == "keys of records that are not read: other (3)"
    assert note.startswith(f"3 NUL characters in 3 documents, such as data.path={tmp_path}/a.jsonl line 1;")


def tokenizer(folder: Path) -> HuggingFace:
    return HuggingFace(folder / "tokenizer.json", key="key")


def test_everything_that_decides_the_tokens_makes_another_entry(folder, tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        [{**record, "also": [{"role": "user", "content": f"{i}"}, PLAIN[2]]} for i, record in enumerate(CHATS)],
    )
    template = tmp_path / "t.jinja"
    template.write_text(QWEN.template.replace("'You help.'", "strftime_now('%Y') + eos_token"))
    first = settings(path, folder)
    others = [first, settings(path, folder, template=str(template))]
    others += [dataclasses.replace(others[1], date="2026-01-01"), dataclasses.replace(first, field="also")]
    others += [dataclasses.replace(first, loss_on=loss_on) for loss_on in ("last", "all")]
    facts = [load_chats(chat).facts(SEQ)["the sha256 of all token ids"] for chat in others]
    assert len(set(facts)) == len(facts)
    same = dataclasses.replace(first, template=str(folder / "chat_template.jinja"))
    assert load_chats(same).facts(SEQ) == load_chats(first).facts(SEQ)


def test_a_question_ends_where_the_answer_begins(folder, tmp_path):
    """That of the first held-out chat that is short enough for an answer; an answer ends as the tokenizer says."""
    asked = [{"prompt": "why? " * 9, "completion": "b"}, {"prompt": "why?", "completion": "b"}]
    chat = Chat(validation=str(write(tmp_path / "v.jsonl", asked)), tokenizer=str(folder / "tokenizer.json"))
    source = load(chat, seq_len=SEQ, seed=0, vocab=300, use="validation")
    own = tokenizer(folder)
    system = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"
    short = f"{system}why?<|im_end|>\n<|im_start|>assistant\n"
    for longest, expected in (
        (400, own.encode(short.replace("why?", "why? " * 9))),
        (80, own.encode(short)),
        (20, own.encode(short.replace("why?", "why? " * 9))[-19:]),
    ):
        question = source.question(longest)
        assert question is not None
        assert question.tolist() == expected
    assert source.decode(own.encode(short)) == short
    assert source.ends == (own.token_id("<|im_end|>"),)
    other = dataclasses.replace(chat, end_token="<|im_start|>")
    assert load(other, seq_len=SEQ, seed=0, vocab=300, use="validation").ends == tuple(
        map(own.token_id, ("<|im_start|>", "<|im_end|>"))
    )


@pytest.mark.parametrize("loss_on", ["assistant", "each"])
def test_few_chats(folder, tmp_path, loss_on):
    """Each split has whole chats, of which none is on both sides; one line says why."""
    few = [CHATS[i] for i in (1, 0, 1, 0, 1)]
    with ChatFormat(settings(tmp_path, folder).read_template(), tokenizer(folder), "2025-01-01") as chats:
        made = [[each.ids.tolist() for each in chats.examples(read_chat(record), loss_on)] for record in few]
    least = min(made, key=lambda chat: (made.count(chat), naive.chat_hash(chat)))
    expected = (
        [each for chat in made if chat != least for each in chat],
        [each for chat in made if chat == least for each in chat],
    )
    source = load_chats(settings(write(tmp_path / "a.jsonl", few), folder, loss_on=loss_on))
    assert [ids for ids, _ in documents(source)] == [*expected[0], *expected[1]]
    assert source.train.documents == len(expected[0])
    assert source.summary["duplicates"] == "3 of 5 chats equal an earlier one"
    assert source.summary["held out"] == (
        "one of the fewest copies, with the smallest hash, since 2 different chats are too few to hold out 5%; set "
        "data.validation=FILE to choose others"
    )
    for records, found in ((CHATS[:1], "one chat alone"), (CHATS[:1] * 3, "3 chats that are all equal")):
        with refused(f"data.path={tmp_path}/a.jsonl has {found}; give more, or set data.validation"):
            load_chats(settings(write(tmp_path / "a.jsonl", records), folder, loss_on=loss_on))


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_chats_longer_than_a_row(folder, tmp_path, too_long):
    """Cut at their end, with the loss up to there, or left out; what has no loss then is in no row. All is counted."""
    seq_len, late = 50, {"messages": [{"role": "user", "content": "why? " * 9}, SHORT[1]]}
    apart = str(write(tmp_path / "v.jsonl", [{"messages": [{"role": "user", "content": ""}, SHORT[1]]}]))
    chat = settings(write(tmp_path / "a.jsonl", [*CHATS, late]), folder, too_long=too_long, validation=apart)
    source = load(chat, seq_len=seq_len, seed=0, vocab=300)
    trained = documents(source)[: source.train.documents]
    fits = [len(ids) <= seq_len + 1 for ids, _ in trained]
    if too_long == "drop":
        trained = [document for document, fit in zip(trained, fits, strict=True) if fit]
    labels = [
        [token for token, predicted in zip(ids[1 : seq_len + 1], mask[1 : seq_len + 1], strict=True) if predicted]
        for ids, mask in trained
    ]
    epochs = make_epochs(source, seq_len=seq_len, seed=0)
    assert isinstance(epochs, PackedEpochs)
    rows = epochs.rows(0)
    batch = rows.read(np.arange(len(rows)))
    assert sorted(batch.labels[batch.labels != -1]) == sorted(itertools.chain.from_iterable(labels))
    packed, *counted = epochs.describe()
    assert packed.startswith(f"whole: {len([ids for ids in labels if ids])} documents in {len(rows)} rows")
    how = {"cut": "are cut at their end", "drop": "are left out"}[too_long]
    expected = [f"{fits.count(False)} documents longer than a row {how}"]
    if empty := labels.count([]):
        expected.append(f"{empty} documents without a token to predict are left out")
    assert counted == expected
    assert (empty > 0) == (too_long == "cut")


@by_table(
    r"""
    line => message
    {'messages' => line 3 is not JSON (column 2: Expecting property name enclosed
    {"messages": [], "messages": []} => line 3 is not JSON (an object has the key messages twice)
    {"messages": SHORT, "chat_template_kwargs": {"a": NaN}} => line 3 is not JSON (NaN is no number of JSON)
    {"messages": SHORT, "tools": "[{\"a\": 1, \"a\": 2}]"} => line 3: tools is a string, not an array
    7 => line 3: the record is a number, not an object; write {"messages": [{"role": ..., "content": ...}, ...]}
    {"prompt": "a", "completion": "b"} => line 3: the form is prompt/completion, but messages at data.path=
    {"chosen": SHORT, "rejected": SHORT} => line 3: chosen and rejected are a preference pair, on which moezoo
    {"messages": []} => line 3: messages is empty; give at least one message, or leave the line out
    {"messages": SHORT}\n\n{"messages": [{"role": "bot"}]}
        => line 5: message 1 has role "bot"; valid: system, developer
    {"messages": [{"role": "user", "content": 1}]} => line 3: message 1: content is a number, expected a string
    {"messages": ASKED SLOW} => line 3: rendering it by data.template=t.jinja takes more than 100,000 steps
    {"messages": ASKED NO} => line 3: data.template=t.jinja refuses this chat: not this
    {"messages": ASKED GET} => line 3: data.template=t.jinja line 3 does what a template must not
    {"messages": ASKED FAIL} => line 3: data.template=t.jinja line 4 fails for this chat (ZeroDivis
    """
)
def test_refusals_name_the_line(folder, tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(chat_template, "STEPS", 10**5)
    Path("t.jinja").write_text(
        "{% if messages[0].content == 'SLOW' %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% elif messages[0].content == 'NO' %}{{ raise_exception('not this') }}\n"
        "{% elif messages[0].content == 'GET' %}\n{{ messages.__class__ }}\n"
        "{% elif messages[0].content == 'FAIL' %}{{ 1 / 0 }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    asked = r'[{"role": "user", "content": "\1"}, {"role": "assistant", "content": ""}]'
    text = re.sub(r"ASKED (\w+)", asked, line.replace("SHORT", json.dumps(SHORT)).replace(r"\n", "\n"))
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": SHORT})] * 2 + [text]))
    for path, shown in ((tmp_path / "a.jsonl", ""), (tmp_path, f": {tmp_path}/a.jsonl")):
        with refused(f"data.path={path}{shown} {message}"):
            load_chats(settings(path, folder, template="t.jinja"))
    assert not list(tmp_path.glob("caches/**/tokens.npy"))


def test_settings_that_are_refused(folder, tmp_path):
    path = write(tmp_path / "a.jsonl", CHATS)
    with refused("data.template is required for data=chat; pass data.template=FILE, or data.tokenizer=FILE in a fol"):
        load_chats(Chat(path=str(path)))
    with refused("data.date=1 May is no date (Invalid isoformat string: '1 May'); write one such as 2025-01-01"):
        Chat(date="1 May")
    with refused("data.loss_on=user: expected one of assistant, last, each, all, found user"):
        Chat(loss_on="user")  # pyright: ignore[reportArgumentType]
    with refused("data.end_token=</s> is not a token of data.tokenizer=", "tokenizer.json; give the text of one"):
        load_chats(settings(path, folder, end_token="</s>"))
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with refused(f"data.path={path} line 1: data.template={tmp_path}/bad.jinja line 1 is not a chat template ("):
        load_chats(settings(path, folder, template=str(tmp_path / "bad.jinja")))
    for text in ("", "{# nothing #}"):
        (tmp_path / "bad.jinja").write_text(text)
        with refused(f"data.path={path}: the template data.template={tmp_path}/bad.jinja writes nothing for these"):
            load_chats(settings(path, folder, template=str(tmp_path / "bad.jinja"), loss_on="all"))
    shutil.copytree(folder, tmp_path / "twice")
    (tmp_path / "twice" / "tokenizer_config.json").write_text('{"eos_token": "a", "eos_token": "b"}')
    with refused(f"{tmp_path}/twice/tokenizer_config.json is not JSON (an object has the key eos_token twice)"):
        load_chats(settings(path, tmp_path / "twice"))


@pytest.mark.parametrize(("version", "have"), [(None, "which renders chats"), ("3.1.5", "3.1.5 is installed")])
def test_a_missing_library(folder, tmp_path, monkeypatch, version, have):
    def find(name: str) -> str:
        if name == "jinja2" and version is None:
            raise chat_template.importlib.metadata.PackageNotFoundError
        return version if name == "jinja2" else "1"

    monkeypatch.setattr(chat_template.importlib.metadata, "version", find)
    with refused(f"{folder}/chat_template.jinja needs jinja2 3.1.6 or newer, {have}; pip install 'moezoo[chat]'"):
        settings(write(tmp_path / "a.jsonl", CHATS), folder).encode_line(1)


def test_a_chat_is_shown_with_what_is_trained(folder, tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "a.jsonl", CHATS)
    for variables, begin, end in (
        ({"FORCE_COLOR": "1", "TERM": "xterm"}, "\033[1;32m", "\033[0m"),
        ({"NO_COLOR": "1"}, "[", "]"),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        prepare_data([f"chat={path}", f"folder={folder}"])
        out, error = capsys.readouterr()
        assert out == QWEN.chats["plain"][1].replace("⟦", begin).replace("⟧", end) + "\n"
        assert error.endswith("tokens, of which 16 are predicted\n")
    prepare_data([f"chat={path}", f"folder={folder}", "loss_on=each"])
    out, error = capsys.readouterr()
    before, last = QWEN.chats["plain"][1].replace("⟦", "[").replace("⟧", "]").split("<|im_start|>user\nBye")
    both = before.replace("[", "").replace("]", "") + "<|im_start|>user\nBye" + last
    assert out == f"{before}\n{both}\n"
    assert error.startswith("2 examples: ")
    prepare_data([f"chat={path}", f"folder={folder}", "number=2", "loss_on=all"])
    assert capsys.readouterr().out.startswith("[<|im_start|>system\nBe brief.")
    for arguments, message in (
        (
            [f"chat={path}", f"folder={folder}", "number=9"],
            f"chat={path} has no chat number 9; choose a smaller number",
        ),
        ([f"chat={path}", f"folder={tmp_path}/x"], f"folder={tmp_path}/x is no folder; name one with tokenizer.json"),
        ([f"chat={path}", "out=x.npy"], f"chat={path} prints a chat, and writes no file; leave path and out out"),
        (["out=x.npy"], "path is missing; write path=FILE_OR_FOLDER: a UTF-8 text file"),
        ([f"chat={write(tmp_path / 'b.jsonl', [{}])}", f"folder={folder}"], f"chat={tmp_path}/b.jsonl line 1: neither"),
        (
            [f"chat={write(tmp_path / 'b.jsonl', [{'talk': 1}])}", f"folder={folder}", "field=talk/back"],
            f"chat={tmp_path}/b.jsonl line 1: talk/back is not there",
        ),
    ):
        with pytest.raises(UserError) as caught:
            prepare_data(arguments)
        assert str(caught.value).startswith(message)


def test_a_missing_template_is_named_by_the_keys_at_hand(folder, tmp_path):
    """Training sets data.template, prepare-data template, and generate reads the folder alone."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((Path(folder) / "tokenizer.json").read_bytes())
    path = write(tmp_path / "a.jsonl", CHATS)
    with refused(f"tokenizer={bare}/tokenizer.json: {bare} has no chat template", "set template=FILE"):
        prepare_data([f"chat={path}", f"folder={bare}"])
    with refused(f"data.tokenizer={bare}/tokenizer.json: {bare} has no chat", "set data.template=FILE"):
        settings(path, bare).encode_line(1)
    with refused(f"folder={bare}: {bare} has no chat template", "write chat_template.jinja there"):
        folder_format(str(bare))
