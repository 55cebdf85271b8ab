"""Tries published chat templates, tokenizers, configurations and indexes against transformers.

    python tests/hub/published.py FOLDER [--write FILE] [--compare FILE]

prints a table of each kind, with a row for every file below FOLDER, and then why something was refused. Files are known
by what they hold, and may be packed by gzip. `--write` saves hashes of what was rendered and trained, and `--compare`
shows which of them differ from saved ones.

In the columns of a template: `=` the same text, `r` both refuse, `R` moezoo alone refuses, `T` transformers alone,
`D` other texts. In those of a loss: `ok` all that the assistant wrote and nothing of others is trained, `R` refused,
otherwise how many of the assistant's texts are trained, `leak` where others' text is, `lost` where the template leaves
something out. `before` and `after` is what is trained around an answer.
"""

import argparse
import collections
import contextlib
import datetime
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).parents[1]))

import torch
import transformers
from chat_styles import save_tokenizer
from transformers.utils import chat_template_utils

from moezoo.data.chat_format import ChatFormat, EncodedChat
from moezoo.data.chat_records import read_chat
from moezoo.data.chat_template import Template, file_template, folder_template
from moezoo.data.tokenizer import HuggingFace
from moezoo.errors import UserError
from moezoo.hub.nested import find_nesting
from moezoo.hub.opening import Described, read_config
from moezoo.hub.tensors import tensors
from moezoo.hub.upcycling import NOT_UPCYCLED, Upcycle
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import count_parameters, parameter_table

DATE = "2025-02-03"
SECONDS = 120  # for one file
LOSSES = ("assistant", "last")
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# What looks like a special token in a template, whose tokenizer is not known.
_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]*[|｜]>|<\|\w+>|<\w+\|>|</?s>|<(?:start|end)_of_\w+>|<[be]os>|<[A-Z_|]+TOKEN\|?>|\[/?[A-Z_]+\]"  # noqa: RUF001
)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


_TURN, _TURNS = [_user("Question alpha?"), _answer("Reply alpha.")], [_user("Question beta?"), _answer("Reply beta.")]
_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "lookup", "arguments": {"city": "Oslo"}}}
_TOOL = {
    "name": "lookup",
    "description": "Finds the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A town."}}},
}
_CALLED = [
    _user("Question alpha?"),
    _answer("", tool_calls=[_CALL]),
    {"role": "tool", "content": "Rain today.", "name": "lookup", "tool_call_id": "abcdefghi"},
    _answer("Reply alpha."),
]
_THOUGHT = [_user("Question alpha?"), _answer("Reply alpha.", reasoning_content="Musing alpha.")]
_THOUGHTS = [_user("Question beta?"), _answer("Reply beta.", reasoning_content="Musing beta.")]
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": _TURN},
    "two": {"messages": _TURN + _TURNS},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, *_TURN, *_TURNS]},
    "thoughts": {"messages": _THOUGHT},
    "thoughts 2": {"messages": _THOUGHT + _THOUGHTS},
    "tools": {"messages": _CALLED, "tools": [{"type": "function", "function": _TOOL}]},
    "parts": {"messages": [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in _TURN]},
    "prompt": {"messages": _TURN[:1]},
}
_AS = {"kimi_k2": "deepseek_v3"}  # types that transformers lacks
OTHERS = ("Question alpha?", "Question beta?", "Be kind.", "Rain today.", "Finds the weather.")
TEXTS = (
    "plain words",
    " leading",
    "trailing ",
    "  both  ",
    "\n\nlines\n",
    "a  b   c      d",
    "\t tab\t",
    "don't we'll I'VE",
    "1234567 12 3.14",
    "émigré naïve 中文字 العربية हिन्दी",
    "👩‍👩‍👧 🏳️‍🌈 🙂🙂",
    "x = {'a': [1, 2]}\n    return x\n",
    "​zero​ width  nbsp",
    "HTTP://a.b/c?d=e&f",
    ".",
)


class Row(NamedTuple):
    """What trying a file gave: the columns of its table, lines that explain them, and hashes by what was encoded."""

    kind: str
    name: str
    cells: dict[str, str]
    notes: list[str]
    hashes: dict[str, list[str]]


def read_text(path: Path) -> str:
    """Return the text of a file, which may be packed."""
    return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()


def kind_of(path: Path) -> str:
    """Return what a file holds."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".jinja"):
        return "template"
    found = json.loads(read_text(path)) if name.endswith(".json") else None
    if not isinstance(found, dict):
        return "other"
    if "weight_map" in found:
        return "index"
    if "added_tokens" in found and "model" in found:
        return "tokenizer"
    if "chat_template" in found and not any((path.parent / f"tokenizer.json{end}").exists() for end in ("", ".gz")):
        return "template"
    return "config" if {"model_type", "architectures"} & found.keys() else "other"


def words(error: BaseException) -> str:
    """Return the first line of an error."""
    return f"{'' if isinstance(error, UserError) else type(error).__name__ + ': '}{error}".split("\n")[0]


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a function returns, or None and the error."""
    try:
        return make(), ""
    except TimeoutError:
        raise
    except Exception as error:  # other people's files and libraries raise anything
        return None, words(error)


def hash_of(*values: Any) -> list[str]:
    """Return a short hash of each value."""
    return [hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for value in values]


# Templates


def trained_spans(encoded: EncodedChat) -> list[list[int]]:
    """Return the parts [begin, end) of the text that are trained."""
    ends, spans = [*encoded.begins[1:].tolist(), len(encoded.text)], []
    for begin, end, trained in zip(encoded.begins.tolist(), ends, encoded.mask.tolist(), strict=True):
        if trained and spans and spans[-1][1] == begin:
            spans[-1][1] = end
        elif trained and end > begin:
            spans.append([begin, end])
    return spans


def written(messages: list[dict[str, Any]], loss: str) -> list[str]:
    """Return what the assistant has written in the messages that a loss is on."""
    turns = [message for message in messages if message["role"] == "assistant"]
    parts = [(m.get("reasoning_content", ""), m["content"], "Oslo" * ("tool_calls" in m)) for m in turns]
    return [text for turn in (parts[-1:] if loss == "last" else parts) for text in turn if text]


def judge(encoded: EncodedChat, texts: list[str], absent: list[str]) -> tuple[str, str, str]:
    """Return whether `texts` and nothing else of the chat is trained, and what is trained around them."""
    text, spans = encoded.text, trained_spans(encoded)
    parts = ["".join(text[begin:end]) for begin, end in spans]
    there = [each for each in texts if each in text]
    found = [each for each in there if any(each in part for part in parts)]
    wrong = [each for each in absent if any(each in part for part in parts)]
    faults = [f"{len(found)}/{len(there)}"] if len(found) < len(there) or not there else []
    faults += ["lost"] if len(there) < len([each for each in texts if not each.startswith("Musing")]) else []
    faults += ["leak"] if wrong else []
    first = next((part for part in parts if any(each in part for each in found)), "")
    before = min((first.index(each) for each in found if each in first), default=0)
    after = max((first.index(each) + len(each) for each in found if each in first), default=0)
    return " ".join(faults) or "ok", first[:before], first[after:]


def try_format(template: Template, tokenizer: HuggingFace) -> Iterator[tuple[str, Any]]:
    """Yield cells as (column, value), notes as ("", line) and hashes as (name, list)."""

    def theirs(chat: Mapping[str, Any], prompt: bool) -> str:
        tools = chat.get("tools")
        text = template.texts["tool_use" if tools and "tool_use" in template.texts else "default"]
        return chat_template_utils.render_jinja_template(
            [chat["messages"]], tools, chat_template=text, add_generation_prompt=prompt, **template.variables
        )[0][0]

    with ChatFormat(template, tokenizer, DATE) as chats:
        for name, chat in CHATS.items():
            read, prompt = read_chat(chat), name == "prompt"
            ours, fault = attempt(lambda: chats.prompt(read) if prompt else chats.encode(read, "all"))  # noqa: B023
            other, their_fault = attempt(lambda: theirs(chat, prompt))  # noqa: B023
            same = "=" if ours and ours.text == other else "D"
            yield name, "r" if fault and their_fault else "R" if fault else "T" if their_fault else same
            if fault or their_fault or same == "D":
                yield "", f"{name}: moezoo {fault or repr(ours.text)}; transformers {their_fault or repr(other)}"
            yield f"{name} text", [fault] if ours is None else hash_of(ours.text, ours.ids.tolist())
        for loss in LOSSES:
            for name, chat in CHATS.items():
                if name == "prompt":
                    continue
                read = read_chat(chat)
                texts = written(read.messages, loss)
                ours, fault = attempt(lambda: chats.encode(read, loss))  # noqa: B023
                rest = [each for each in written(read.messages, "all") if each not in texts]
                verdict, before, after = judge(ours, texts, [*OTHERS, *rest]) if ours else ("R", "", "")
                yield f"{loss}: {name}", verdict
                if fault:
                    yield "", f"{loss}: {name}: {fault}"
                elif verdict != "ok":
                    yield "", f"{loss}: {name}: {ours.with_marks('⟦', '⟧')!r}"
                if (loss, name) == ("last", "one"):
                    yield from (("before", repr(before)), ("after", repr(after)))
                yield f"{name} {loss}", [fault] if ours is None else hash_of(ours.text, trained_spans(ours))


def template_of(path: Path, work: Path) -> tuple[Template, HuggingFace]:
    """Return a template in a file, and a tokenizer with what looks like special tokens in it."""
    (copy := work / path.name.removesuffix(".gz")).write_text(read_text(path))
    template = file_template(str(copy), key="template", tokenizer=None)
    variables = VARIABLES | template.variables
    found = [*(text for text in variables.values() if isinstance(text, str))]
    found += [text for each in template.texts.values() for text in _SPECIAL.findall(each)]
    tokenizer = HuggingFace(save_tokenizer(work / "tokenizer.json", tuple(dict.fromkeys(found))), key="tokenizer")
    return template._replace(shown="template", variables=variables), tokenizer


# Tokenizers


def try_tokenizer(path: Path, work: Path) -> Iterator[tuple[str, Any]]:
    """Yield cells and notes as `try_format` does."""
    for file in path.parent.iterdir():
        if file.is_file() and file.name.startswith(("tokenizer", "chat_template", "special_tokens_map")):
            (work / file.name.removesuffix(".gz")).write_text(read_text(file))
    own, contents = HuggingFace(work / "tokenizer.json", key="tokenizer"), json.loads(read_text(path))
    yield "vocabulary", str(own.vocab)
    added = [token for token in contents["added_tokens"] if token["content"]]
    special = [token["content"] for token in added if token["special"]]
    template, fault = attempt(lambda: folder_template(work, key="folder"))
    if template is None:
        begin, end = (special or [""])[0], (special or [""])[-1]
        text = f"{{% for m in messages %}}{begin}{{{{ m.role }}}}{end}{{{{ m.content }}}}{end}{{% endfor %}}"
        template = Template("template", {"default": text}, {})
    peer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(work / "tokenizer.json"), clean_up_tokenization_spaces=False, **template.variables
    )
    auto, why = attempt(lambda: transformers.AutoTokenizer.from_pretrained(work, trust_remote_code=False))
    for column, other in (("texts", peer), ("AutoTokenizer", auto)):
        wrong = [text for text in TEXTS if other and other(text)["input_ids"] != own.encode(text)]
        yield column, f"{len(TEXTS) - len(wrong)}/{len(TEXTS)}" if other else "r"
        if wrong:
            yield "", f"{column}: {wrong[0]!r}: {own.encode(wrong[0])}, transformers {other(wrong[0])['input_ids']}"
    yield from [("", f"AutoTokenizer: {why}")] if why else []
    same = [t["id"] == own.token_id(t["content"]) == peer.convert_tokens_to_ids(t["content"]) for t in added]
    yield "added", f"{sum(same)}/{len(same)}"
    peer.chat_template = template.texts["default"]
    ids, looks = {own.token_id(text) for text in special}, special[:40] + special[-40:]
    with ChatFormat(template, own, DATE) as chats:

        def count(text: str) -> int:
            found = chats.encode(read_chat({"messages": [_user(text), _answer("fine")]}), "all").ids.tolist()
            return sum(number in ids for number in found)

        wrong, fault = [], ""
        for text in TEXTS:
            chat = [_user(text), _answer(text)]
            found, fault = attempt(lambda: chats.encode(read_chat({"messages": chat}), "all").ids.tolist())  # noqa: B023
            other = peer.apply_chat_template(chat)["input_ids"]
            if found != other:
                wrong.append(f"{text!r}: {fault or found}, transformers {other}")
        yield "chats", f"{len(TEXTS) - len(wrong)}/{len(TEXTS)}"
        yield from (("", f"chats: {each}") for each in wrong[:2])
        wrong, (plain, _) = [], attempt(lambda: count("a word b"))
        for look in looks:
            found, fault = attempt(lambda: count(f"a {look}b"))  # noqa: B023
            wrong += [(look, fault or f"{found} special tokens, expected {plain}")] if found != plain or fault else []
        yield "lookalikes stay text", f"{len(looks) - len(wrong)}/{len(looks)}"
        yield from (("", f"lookalikes: {each}") for each in wrong[:2])


# Configurations and indexes


def described(path: Path, work: Path) -> tuple[Described, Upcycle]:
    """Return what a config.json describes; a dense model with one expert."""
    (work / "config.json").write_text(read_text(path))
    try:
        return read_config(work), NOT_UPCYCLED
    except UserError as error:
        if "a dense model" not in str(error):
            raise
        return read_config(work, one := Upcycle(experts=1, per_token=1)), one


def count_theirs(work: Path) -> int:
    """Return the number of parameters of transformers' model that moezoo counts too.

    Choice biases are buffers in moezoo, which has no index for sparse attention.
    """
    mapping = json.loads((work / "config.json").read_text())
    mapping = mapping.get("text_config", mapping)
    for key in ("quantization_config", "auto_map"):
        mapping.pop(key, None)
    mapping["model_type"] = _AS.get(mapping["model_type"], mapping["model_type"])
    (work / "config.json").write_text(json.dumps(mapping))
    config = transformers.AutoConfig.from_pretrained(work, trust_remote_code=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    apart = re.compile(r"score_correction_bias$|\.indexer\.")
    return sum(each.numel() for name, each in model.named_parameters() if not apart.search(name))


def try_config(path: Path, work: Path) -> Iterator[tuple[str, Any]]:
    """Yield cells and notes as `try_format` does."""
    kind = json.loads(read_text(path)).get("model_type")
    yield "model_type", str(kind)
    found, fault = attempt(lambda: described(path, work))
    if found is None:
        yield from (("read", "refused"), ("", fault.replace(f"{work}/", "")))
        return
    config, upcycle = found[0].config, found[1]
    yield "read", "upcycled" if upcycle.experts else "yes"
    shapes = Blueprint(config, "bfloat16").shapes
    total, active = count_parameters(shapes, config.experts_per_token)
    if upcycle.experts:  # the dense model has no routers
        table = parameter_table(shapes)
        total = active = total - sum(torch.Size(shape).numel() for name, _, shape in table if ".router." in name)
    yield from (("parameters", f"{total:,}"), ("active", f"{active:,}"))
    theirs, fault = attempt(lambda: count_theirs(work))
    yield "transformers", f"{theirs:,}" if theirs else "refused"
    yield "same", "" if theirs is None else "=" if theirs == total else f"{total - theirs:+,}"
    yield from [("", f"transformers: {fault}")] if fault else []


def try_index(path: Path, work: Path) -> Iterator[tuple[str, Any]]:
    """Yield cells and notes as `try_format` does. The config.json is beside, or in `configs` under the same name."""
    index = json.loads(read_text(path))
    names, size = set(index["weight_map"]), (index.get("metadata") or {}).get("total_size")
    yield from (("tensors", str(len(names))), ("total_size", str(size)))
    stem = path.name.split(".json")[0].removesuffix(".safetensors.index")
    configs = [path.with_name("config.json"), *path.parents[1].glob(f"configs/{stem}.json*")]
    config = next((each for each in configs if each.exists()), None)
    if config is None:
        yield "names", "no config"
        return
    found, upcycle = described(config, work)
    nesting = find_nesting(found.mapping, names, work) if found.is_nested else None
    shapes = Blueprint(found.config, "bfloat16").shapes
    hub = found.family.dense if upcycle.experts else found.hub
    plan = [each for each in tensors(shapes, hub) if not (upcycle.experts and ".router." in each.parts[0][0])]
    expected = {nesting.to_folder(each.name) if nesting else each.name for each in plan}
    stems = {name.removesuffix(".weight") for name in expected}
    # Weights of few bits have other names that begin with theirs, such as those of scales.
    begins = {name: _stem(name, stems) for name in names - expected}
    missing = expected - names - {name for name in expected if name.removesuffix(".weight") in begins.values()}
    left = {name for name, begin in begins.items() if begin is None}
    unused = nesting.find_unused(hub, left, expected) if nesting else hub.find_unused(left, expected)
    unknown = sorted(left - set(unused))
    yield "names", "=" if not missing and not unknown else f"{len(missing)} missing, {len(unknown)} unknown"
    yield "unused", str(len(unused))
    yield from (("", f"{what}: {', '.join(some[:3])}") for what, some in (("missing", sorted(missing)), ("unknown", unknown)) if some)


def _stem(name: str, stems: set[str]) -> str | None:
    """Return the one of `stems` that a name begins with, before a dot or an underscore; None if there is none."""
    cuts = [name[: found.start()] for found in re.finditer(r"[._]", name)]
    return next((cut for cut in reversed(cuts) if cut in stems), None)


# The command


@contextlib.contextmanager
def limited() -> Iterator[Path]:
    """Give a folder for a file that is tried, the date, and an end to what takes long."""

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Fixed":
            return cls.fromisoformat(DATE)

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    before, chat_template_utils.datetime = chat_template_utils.datetime, Fixed  # pyright: ignore
    handler, work = signal.signal(signal.SIGALRM, stop), Path(tempfile.mkdtemp())
    signal.alarm(SECONDS)
    try:
        yield work
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        chat_template_utils.datetime = before  # pyright: ignore
        shutil.rmtree(work)


def try_file(path: Path, name: str) -> Row:
    """Return the row of a file, whatever it holds."""
    row = Row("other", name, {}, [], {})
    try:
        row = row._replace(kind=kind_of(path))
        tries = {"tokenizer": try_tokenizer, "config": try_config, "index": try_index}
        with limited() as work:
            if row.kind == "template":
                cells = try_format(*template_of(path, work))
            elif row.kind in tries:
                cells = tries[row.kind](path, work)
            else:
                cells = iter(())
            for column, value in cells:
                if isinstance(value, list):
                    row.hashes[column] = value
                elif column:
                    row.cells[column] = value
                else:
                    row.notes.append(str(value))
    except Exception as error:  # every file gets a row
        row.cells["fault"] = "fault"
        row.notes.append(words(error))
    return row


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a table, and how often each short cell occurs in a column."""
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    lines = [["file", *columns], *([row.name, *(row.cells.get(each, "") for each in columns)] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    for line in lines:
        yield " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    for column in columns:
        counts = collections.Counter(row.cells.get(column, "") for row in rows)
        if max(map(len, counts)) < 9:
            yield f"{column}: {', '.join(f'{count} {cell or None}' for cell, count in counts.most_common())}"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return 1 if hashes differ from those compared with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what is tried, with all folders in it")
    parser.add_argument("--write", type=Path, help="a file for hashes of texts and of what is trained")
    parser.add_argument("--compare", type=Path, help="such a file, of another version")
    given = parser.parse_args(arguments)
    paths = sorted(path for path in given.folder.rglob("*") if path.is_file())
    rows = [try_file(path, str(path.relative_to(given.folder))) for path in paths]
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        print(f"\n# {kind}: {len(own)}\n", *table(own), sep="\n")
    print("\n# Notes\n", *(f"{row.name}: {note}" for row in rows for note in row.notes), sep="\n")
    hashes = {row.name: row.hashes for row in rows if row.hashes}
    if given.write:
        given.write.write_text(json.dumps(hashes, indent=1))
    return compare(json.loads(given.compare.read_text()), hashes) if given.compare else 0


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Print what differs; return 1 if anything does."""
    pairs = [(file, name) for file in before for name in before[file] if name in now.get(file, {})]
    different = [(file, name) for file, name in pairs if before[file][name] != now[file][name]]
    print(f"\n# Compared: {len(pairs)}, different: {len(different)}\n")
    for file, name in different:
        one, other = before[file][name], now[file][name]
        kinds = ["refused" if len(each) == 1 else "read" for each in (one, other)]
        what = "text or mask" if kinds == ["read", "read"] else " -> ".join(kinds)
        print(f"{file}: {name}: {what}{'' if len(other) > 1 else ': ' + other[0]}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
