"""Records of files of every kind, as several writers make them; forms of chats; what is no such file."""

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_forms import ASKED, BRIEF, FORMS, SAID
from refusals import refused

from moezoo.data import Chat, Jsonl, Tokens, documents, json_values, load, records, tokenize_files, train_batches
from moezoo.data.chat_records import read_chat
from moezoo.data.files import _zstd, find_files
from moezoo.data.records import ARRAY, ARROW, LINES, PARQUET, SUFFIXES, read_records
from moezoo.errors import UserError

RECORDS = [
    {"id": i, "text": f"text {i} äöü\n" * (i % 4), "messages": [{"role": "user", "content": str(i)}]} for i in range(40)
]


def arrow(records: list[Any], *, stream: bool) -> bytes:
    out, table = io.BytesIO(), pa.Table.from_pylist(records)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return out.getvalue()


def parquet(records: list[Any], **how: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), out, **how)
    return out.getvalue()


def lines(records: list[Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


# What a file holds -> its bytes, for records, and how its places are named.
KINDS: dict[str, tuple[Callable[[list[Any]], bytes], str, str]] = {
    "lines": (lines, LINES, "line {}"),
    "lines of Windows": (
        lambda records: b"\xef\xbb\xbf" + lines(records).replace(b"\n", b"\r\n"),
        LINES,
        "line {}",
    ),
    "array in a line": (lambda records: json.dumps(records).encode(), ARRAY, "(a JSON array) item {}"),
    "array, indented": (lambda records: json.dumps(records, indent=1).encode(), ARRAY, "(a JSON array) item {}"),
    "objects, as jq writes them": (
        lambda records: "\n".join(json.dumps(each, indent=2, ensure_ascii=False) for each in records).encode(),
        records.VALUES,
        "line ",
    ),
    "Parquet": (lambda records: parquet(records, row_group_size=9), PARQUET, "(Parquet) row {}"),
    "Arrow": (lambda records: arrow(records, stream=False), ARROW, "(Arrow) row {}"),
    "Arrow stream": (lambda records: arrow(records, stream=True), ARROW, "(Arrow) row {}"),
}
PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: _zstd("").compress(content),
}


def read(path: Path) -> list[Any]:
    return [json.loads(each.text) for each in read_records(find_files(str(path), key="path", suffixes=SUFFIXES))]


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_what_it_holds(tmp_path, kind, packed):
    """Whatever its name, each record comes once, in order, with its place; a file without an end is damaged."""
    write, container, place = KINDS[kind]
    path = tmp_path / "data.part"
    path.write_bytes(PACKED[packed](write(RECORDS)))
    found = list(read_records(find_files(str(path), key="path")))
    assert [json.loads(each.text) for each in found] == RECORDS
    assert {each.container for each in found} == {container}
    for number in (1, 40):
        assert found[number - 1].where.startswith(f"path={path} {place.format(number)}")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    if container != LINES or packed:
        with pytest.raises(UserError, match=f"path={path}"):
            read(path)


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("kind", ["array, indented", "Parquet", "Arrow stream"])
def test_the_same_records_are_the_same_rows_in_every_kind(tmp_path, kind, packed):
    """And a run that goes on in another process reads on at the same row."""
    (tmp_path / "lines").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_bytes(lines(RECORDS[:15]))
    (tmp_path / "lines" / "b.jsonl").write_bytes(lines(RECORDS[15:]))
    suffix = {"array, indented": ".json", "Parquet": ".parquet", "Arrow stream": ".arrow"}[kind] + packed
    (tmp_path / "other" / f"a{suffix}").write_bytes(PACKED[packed](KINDS[kind][0](RECORDS[:15])))
    (tmp_path / "other" / f"b{suffix}").write_bytes(PACKED[packed](KINDS[kind][0](RECORDS[15:])))
    if ".json" not in suffix:  # as datasets keeps them beside its files
        (tmp_path / "other" / "state.json").write_text("{}")
    sources = [load(Jsonl(path=str(tmp_path / each)), seq_len=5, seed=0, vocab=256) for each in ("lines", "other")]
    assert sources[0].facts(5) == sources[1].facts(5)
    batches = [train_batches(source, seq_len=5, batch_size=3, seed=1) for source in sources]
    for _ in range(40):
        np.testing.assert_array_equal(np.stack(next(batches[0])), np.stack(next(batches[1])))
    later = train_batches(sources[1], seq_len=5, batch_size=3, seed=1, start=40)
    np.testing.assert_array_equal(np.stack(next(batches[0])), np.stack(next(later)))


def test_token_files_of_records(tmp_path):
    """`prepare-data` with a field gives the ids of `data=jsonl`, and without one names the file."""
    (tmp_path / "a.parquet").write_bytes(parquet(RECORDS))
    path, out = str(tmp_path / "a.parquet"), str(tmp_path / "a.npy")
    assert " bytes in 40 documents" in tokenize_files(path, out, field="text")
    both = (Jsonl(path=path), Tokens(path=out))
    corpora = [load(each, seq_len=5, seed=0, vocab=256).whole for each in both]
    first, second = ([corpus.tokens[:], corpus.offsets] for corpus in corpora if corpus is not None)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with refused(f"path={path} is a Parquet file; read its rows with", "prepare-data field=COLUMN"):
        tokenize_files(path, str(tmp_path / "b.npy"))
    with refused(f"path={path} (Parquet) has no column txt; did you mean 'text'?"):
        tokenize_files(path, str(tmp_path / "b.npy"), field="txt")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=4), st.integers(1, 9), st.data())
def test_json_is_cut_anywhere_while_it_is_read(records, chunk, data):
    """Any spaces, in an array or one after another, read in parts of a few bytes."""
    ascii_, indent = data.draw(st.booleans()), data.draw(st.sampled_from([None, 0, 3]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_CHUNK", chunk)
        array = json.dumps(records, ensure_ascii=ascii_, indent=indent).encode(errors="surrogatepass")
        several = "\n".join(json.dumps(each, ensure_ascii=ascii_, indent=indent) for each in records)
        try:
            several = several.encode()
        except UnicodeEncodeError:
            return
        for text, is_array in ((array, True), (several, False)):
            found = list(json_values.read_values(io.BytesIO(text), "f", array=is_array))
            assert [json.loads(each.text) for each in found] == records
            for each in found:
                assert each.text.split("\n")[0] in text.decode().split("\n")[each.line - 1]


@pytest.mark.parametrize(
    ("text", "array", "message"),
    [
        ('[{"a": 1},\n {"a": 2}', True, "f line 2 is not JSON (column 10: Expecting ',' or ']'); write"),
        ('[{"a": 1}\n\n{"a": 2}]', True, "f line 3 is not JSON (column 1: Expecting ',' or ']'); write"),
        ('[{"a": 1},\n{"a": }]', True, "f line 2 is not JSON (column 7: Expecting value); write"),
        ('[{"a": 1}] [', True, "f line 1 is not JSON (column 12: the array has ended); write"),
        (
            '{"a":\n 1}\n{"a": "x\n"}' + " " * 30,
            False,
            "f line 3 is not JSON (column 9: Invalid control character at)",
        ),
        ('{"a":\n 1}\n{"a": "x', False, "f line 3 is not JSON (column 7: Unterminated string starting at); write"),
        (b'{"a":\n 1}\n\n{"a": "\xff"}', False, "f is not UTF-8: byte 0xff from line "),
        ("[" + "[" * 100_000, True, "f line 1 is not JSON (column 2: "),
        ('{"a": ' + "1" * 6000 + "}", False, "f line 1 is not JSON (column 1: Exceeds the limit"),
        ('{"a": "' + "x" * 200 + '"}', False, "f line 1 is not JSON (column 1: a value has more than 99 characters)"),
    ],
)
@pytest.mark.parametrize("chunk", [3, 2**20])
def test_damaged_json_names_its_line_and_column(monkeypatch, text, array, message, chunk):
    monkeypatch.setattr(json_values, "_CHUNK", chunk)
    monkeypatch.setattr(json_values, "MOST_VALUE", 99 if len(text) < 999 else 2**20)
    content = text if isinstance(text, bytes) else text.encode()
    if chunk > 99 and "more than" in message:
        return
    with refused(message):
        list(json_values.read_values(io.BytesIO(content), "f", array=array))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\3\4rest", "is a ZIP archive; unpack it"),
        (b"%PDF-1.7", "is a PDF; give its text"),
        (b"\x93NUMPY", "is a NumPy array; choose data=tokens"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS, not the data; run git lfs pull"),
        (b"<!DOCTYPE html>\n", "is a page of HTML, perhaps in place of the data; download the file itself"),
        (b"\0" * 257 + b"ustar\0", "is a tar archive; unpack it"),
        ('{"text": "a"}'.encode("utf-16"), "is UTF-16 text; convert it to UTF-8"),
        (b"name,age\n", "line 1 is not JSON (column 1: Expecting value); write one object per line"),
    ],
)
def test_other_files_are_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with refused(f"path={tmp_path}/a.jsonl {message}"):
        for each in read_records(find_files(str(tmp_path / "a.jsonl"), key="path")):
            json_values.parse_record(each.text, each.where)


def test_a_parquet_file_is_no_text(tmp_path):
    from moezoo.data import Text

    (tmp_path / "a").write_bytes(parquet(RECORDS))
    with refused(f"data.path={tmp_path}/a is a Parquet file; read its rows with data=jsonl data.field=COLUMN"):
        load(Text(path=str(tmp_path / "a")), seq_len=5, seed=0, vocab=256)


def test_a_folder_of_several_splits(tmp_path):
    """As `datasets` saves them: both would be trained on."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "data-00000-of-00001.arrow").write_bytes(arrow(RECORDS, stream=True))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with refused(f"path={tmp_path} has several splits, as datasets saves them; give one of the folders: test, train"):
        read(tmp_path)
    assert read(tmp_path / "train") == RECORDS


def test_tables_of_others(tmp_path):
    """Nested lists, categories, and what tables have to say for absent values."""
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    record = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": None,
    }
    (tmp_path / "a.parquet").write_bytes(parquet([record, record]))
    (found, _) = read(tmp_path / "a.parquet")
    assert found["tools"] is None
    assert found["messages"][0] == {"role": "user", "content": "a"}  # without the keys of the other message
    assert read_chat(found).messages == read_chat(record).messages
    categories = pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode(), "n": pa.array([1, 2, 3])})
    pyarrow.parquet.write_table(categories, tmp_path / "b.parquet")
    assert [each["text"] for each in read(tmp_path / "b.parquet")] == ["a", "b", "a"]
    mapped = pa.table(
        {"messages": pa.array([[[("role", "user"), ("content", "a")]]], pa.list_(pa.map_(pa.string(), pa.string())))}
    )
    pyarrow.parquet.write_table(mapped, tmp_path / "c.parquet")
    assert read(tmp_path / "c.parquet") == [{"messages": [{"role": "user", "content": "a"}]}]
    pyarrow.parquet.write_table(pa.table({"text": pa.array([b"a"])}), tmp_path / "d.parquet")
    with refused(f"path={tmp_path}/d.parquet (Parquet) row 1 holds a bytes, and no text or number; convert the column"):
        read(tmp_path / "d.parquet")


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_records(form):
    record, messages = FORMS[form]
    found = read_chat(record)
    assert (found.messages, found.form) == (messages, form)


@pytest.mark.parametrize(("beside", "answer"), [("input", "output"), ("context", "response")])
def test_what_belongs_to_an_instruction(beside, answer):
    record = {"instruction": "Add.", beside: "1+2", answer: "3"}
    assert read_chat(record).messages == [{"role": "user", "content": "Add.\n\n1+2"}, SAID]


@pytest.mark.parametrize("pack", ["bz2", "lzma"])
def test_every_part_of_a_packed_file_is_read(tmp_path, pack):
    """Their libraries take a damaged part behind the first for the end of the file."""
    compress = {"bz2": bz2.compress, "lzma": lzma.compress}[pack]
    parts = compress(lines(RECORDS[:20])), compress(lines(RECORDS[20:]))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(parts))
    assert read(path) == RECORDS
    for damaged in (b"\0" + parts[1][1:], parts[1][:-9], b"rest"):
        path.write_bytes(parts[0] + damaged)
        with refused(f"path={path} is damaged ("):
            read(path)


def test_which_files_of_a_folder_are_read(tmp_path):
    """The last suffix before the packing decides; what `datasets` keeps beside its files is left out."""
    (tmp_path / "a.json.parquet").write_bytes(parquet(RECORDS[:9]))
    (tmp_path / "B.JSONL.gz").write_bytes(gzip.compress(lines(RECORDS[9:])))
    (tmp_path / "a.parquet.json").write_bytes(lines(RECORDS))
    (tmp_path / "cache-0.arrow").write_bytes(arrow(RECORDS, stream=True))
    assert sorted(read(tmp_path), key=lambda record: record["id"]) == RECORDS
    split = tmp_path / "sub" / "set"
    split.mkdir(parents=True)
    (split / "dataset_dict.json").write_text("{}")
    with refused(f"path={tmp_path} has several splits, as datasets saves them"):
        read(tmp_path)


def test_chats_that_are_left_out_are_no_documents(tmp_path, template):
    """Nor turns, in `each`: what is counted is trained, and the rest is named."""
    chats = [{"messages": [*([ASKED, SAID] * 2)], "topic": "sums"} for _ in range(30)]
    for number, chat in enumerate(chats):
        chat["messages"][0] = {**ASKED, "content": f"{number}+2?"}
    chats[4]["messages"][2] = {**ASKED, "content": "NO"}
    chats[5]["messages"] = [ASKED]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(chats))
    whole = load_chats(path, template, refused="drop")
    assert whole.train.documents + whole.validation.documents == 29
    assert "keys of records that are not read: topic (30)" in whole.notes
    each = load_chats(path, template, refused="drop", loss_on="each")
    assert each.train.documents + each.validation.documents == 57
    assert each.summary["examples"] == "57, one for each turn of 29 chats"
    assert "1 of 30 chats have no turn to train" in each.notes


def test_keys_that_decide_the_chats_make_another_entry(tmp_path, template):
    path = tmp_path / "a.jsonl"
    talk = [{"from": "a", "value": "1+2?"}, {"from": "b", "value": "3"}]
    path.write_bytes(lines([{"messages": [{**talk[0], "value": f"{i}?"}, talk[1]]} for i in range(40)]))
    ways = ({"a": "user", "b": "assistant"}, {"a": "system", "b": "assistant"})
    assert len({load_chats(path, template, roles=roles).summary["sha256"] for roles in ways}) == 2
    path.write_bytes(lines([ask("NO"), *(ask(f"{i}?") for i in range(40))]))
    load_chats(path, template, refused="drop")
    with refused(f"data.path={path} line 1: "):
        load_chats(path, template)


def test_lists_of_messages(tmp_path):
    """A line that is one, whatever its first message has, is a chat, and of other data an array of records."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    path = tmp_path / "a.jsonl"
    for first in (ASKED, call, {"role": "assistant", "thinking": "a"}):
        path.write_bytes(lines([[first, SAID]]))
        (chat,) = read_records(find_files(str(path), key="path"), chats=True)
        assert json.loads(chat.text) == [first, SAID]
        assert [json.loads(each.text) for each in read_records(find_files(str(path), key="path"))] == [first, SAID]


def test_odd_tables(tmp_path):
    path = tmp_path / "a.parquet"
    text = pa.array([b"fine"] * 300 + [b"\xff"]).view(pa.string())
    pyarrow.parquet.write_table(pa.table({"text": text}), path)
    with refused(f"path={path} (Parquet) row 301 is not UTF-8: byte 0 of its string; write it again"):
        read(path)
    twice = pa.array([[("a", "1"), ("a", "2")]], pa.map_(pa.string(), pa.string()))
    pyarrow.parquet.write_table(pa.table({"text": twice}), path)
    with refused(f"path={path} (Parquet) cannot be read ("):
        read(path)
    pyarrow.parquet.write_table(
        pa.table({"question": ["a"], "answer": ["b"], "context": [pa.scalar(1, pa.date32())]}), path
    )
    chat = next(Chat(path=str(path)).documents(find_files(str(path), key="path")))
    assert json.loads(chat.text) == {"question": "a", "answer": "b"}


def test_own_names():
    """Of `data.field`, where it is set, and `data.roles`, before known names of roles."""
    record = {"ask": "1+2?", "reply": "3", "messages": [SAID]}
    assert read_chat(record, "ask/reply").messages == [ASKED, SAID]
    assert read_chat(record).messages == [SAID]
    talk = [{"from": "customer", "value": "1+2?"}, {"from": "human", "value": "3"}]
    assert read_chat({"talk": talk}, "talk", {"customer": "user", "human": "assistant"}).messages == [ASKED, SAID]
    with refused('message 1 has role "customer"; valid: system, developer, user, assistant, tool'):
        read_chat({"talk": talk}, "talk")
    with refused("data.roles.customer=client is none of moezoo's; valid: system, developer, user, assistant, tool"):
        Chat(roles={"customer": "client"})
    with refused("mesages is not there; did you mean 'messages'?; set data.field=KEY or USER/ANSWER"):
        read_chat({"messages": [SAID]}, "mesages")
    for field in ("a/b/c", "a/", "a/a"):
        with refused(f"data.field={field}: expected a key, or two different ones as USER/ANSWER"):
            Chat(field=field)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "a", "input": ["b"], "output": "c"}, "input is an array, not a string; correct it"),
        ({"question": "a", "answer": 3}, "answer is a number, neither a string nor an array of messages; correct it"),
        ({"messages": [BRIEF, ASKED], "system": "Be long."}, "system is beside messages of the system, and differs"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "chosen and rejected are a preference pair, on which moezoo"),
        ({"conversations": [{"value": "a"}]}, "message 1 has no role; valid: system"),
    ],
)
def test_forms_that_are_refused(record, message):
    with refused(message):
        read_chat(record)


@pytest.fixture
def template(tmp_path) -> Path:
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}{% if 'NO' in m.content %}{{ raise_exception('No ' + m.role) }}{% endif %}"
        "{% if 'BAD' in m.content %}{{ 1 // 0 }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    )
    return path


def ask(text: str, answer: str = "yes") -> dict[str, str]:
    return {"question": text, "answer": answer}


def load_chats(path: Path, template: Path, **how: Any) -> Any:
    return load(Chat(path=str(path), template=str(template), **how), seq_len=64, seed=0, vocab=256)


def test_chats_that_the_template_refuses(tmp_path, template, monkeypatch):
    """Counted, named with their reasons in the order of the file, and dropped on request. The cache keeps this."""
    texts = [f"why {i}?" for i in range(40)]
    for number, text in ((2, "NO"), (10, "BAD"), (11, "NO"), (30, "NO"), (31, "BAD")):
        texts[number] += text
    path, shown = tmp_path / "a.jsonl", f"data.path={tmp_path}/a.jsonl"
    path.write_bytes(lines([ask(text) for text in texts]))
    no, bad = f"data.template={template} refuses this chat: No user", f"data.template={template} line 1 fails for this"
    zero = f"{bad} chat (ZeroDivisionError: integer division or modulo by zero); correct one of them"
    said = (
        f"{shown} line 3: {no}; {shown} line 11: {zero}; {shown} line 12: {no}; in all 5 of 40 chats: "
        f"3 by {no}, 2 by {zero}"
    )
    with refused(f"{said}; correct them, or leave them out with data.refused=drop"):
        load_chats(path, template)
    for _ in range(2):
        source = load_chats(path, template, refused="drop")
        assert f"left out: {said}" in source.notes
        assert source.warnings == ("5 of 40 chats (12%) are left out: the template refuses them",)
        assert source.summary["form"] == "question/answer in JSON lines"
    kept = [ask(text) for text in texts if not {"NO", "BAD"} & {text[-2:], text[-3:]}]
    path.write_bytes(lines(kept))
    whole = load_chats(path, template)
    assert len(whole.train) + len(whole.validation) == len(source.train) + len(source.validation)
    assert not whole.warnings
    path.write_bytes(lines([ask("NO"), *kept[:20]]))
    assert not load_chats(path, template, refused="drop").warnings  # 1 of 21
    path.write_bytes(lines([ask("NO")] * 3))
    for refused_ in ("stop", "drop"):
        with refused(f"{shown} line 1: {no}; {shown} line 2: {no}; ", "in all 3 of 3 chats: 3 by"):
            load_chats(path, template, refused=refused_)
    monkeypatch.setattr(documents, "_TASK", 50)
    path.write_bytes(lines([ask("NO")] * 300))
    with refused(f"{shown} line 1: {no}; {shown} line 2: {no}; ", "in all 1", " or more chats: 1"):
        load_chats(path, template)


def test_a_file_of_two_forms(tmp_path, template):
    tmp_path = tmp_path / "chats"
    tmp_path.mkdir()
    (tmp_path / "a.jsonl").write_bytes(lines([ask("a"), {"query": "b", "response": "c"}]))
    shown = f"data.path={tmp_path}: {tmp_path}/a.jsonl"
    with refused(f"{shown} line 2: the form is query/response, but question/answer at {shown} line 1; make two files"):
        load_chats(tmp_path, template)
    (tmp_path / "a.jsonl").write_bytes(lines([ask("a"), ask("b")]))
    (tmp_path / "b.jsonl").write_text(json.dumps([{"query": "b", "response": "c"}] * 2))
    (tmp_path / "c.jsonl").write_text(json.dumps([{"query": "d", "response": "c"}] * 2))
    source = load_chats(tmp_path, template)
    assert source.summary["form"] == "question/answer in JSON lines, query/response in a JSON array: 2 files"
    (tmp_path / "d.parquet").write_bytes(parquet([{"text": "a", "n": 1}]))
    shown = f"data.path={tmp_path}: {tmp_path}/d.parquet (Parquet) has no chats"
    with refused(f"{shown}: neither messages nor another known form is there; valid: n, text; set data.field=KEY"):
        load_chats(tmp_path, template)
