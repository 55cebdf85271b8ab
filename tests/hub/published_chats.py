"""Tries a published chat template, or tokenizer, against transformers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import transformers
from chat_styles import save_tokenizer
from transformers.utils import chat_template_utils
from tries import DATE, Try, attempt, hashes, read_text

from moezoo.data.chat_format import ChatFormat, EncodedChat, LossOn
from moezoo.data.chat_records import read_chat
from moezoo.data.chat_template import Template, file_template, folder_template
from moezoo.data.tokenizer import HuggingFace

_LOSSES = tuple(loss for loss in get_args(LossOn) if loss != "all")
_VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# What looks like a special token in a template, whose tokenizer is not known.
_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]*[|｜]>|<\|\w+>|<\w+\|>|</?s>|<(?:start|end)_of_\w+>|<[be]os>|<[A-Z_|]+TOKEN\|?>|\[/?[A-Z_]+\]"  # noqa: RUF001
)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _called(arguments: Any) -> dict[str, Any]:
    """Return a chat with a call of a tool that has these arguments."""
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "lookup", "arguments": arguments}}
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "A town."}}}
    tool = {"name": "lookup", "description": "Finds the weather.", "parameters": parameters}
    result = {"role": "tool", "content": "Rain today.", "name": "lookup", "tool_call_id": "abcdefghi"}
    messages = [_user("Question alpha?"), _answer("", tool_calls=[call]), result, _answer("Reply alpha.")]
    return {"messages": messages, "tools": [{"type": "function", "function": tool}]}


_TURN, _NEXT = [_user("Question alpha?"), _answer("Reply alpha.")], [_user("Question beta?"), _answer("Reply beta.")]
_THOUGHT = [_TURN[0], _answer("Reply alpha.", reasoning_content="Musing alpha.")]
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": _TURN},
    "two": {"messages": _TURN + _NEXT},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, *_TURN, *_NEXT]},
    "thoughts": {"messages": _THOUGHT},
    "thoughts 2": {"messages": [*_THOUGHT, _NEXT[0], _answer("Reply beta.", reasoning_content="Musing beta.")]},
    "tools": _called({"city": "Oslo"}),
    "tools text": _called('{"city": "Oslo"}'),
    "parts": {"messages": [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in _TURN]},
    "prompt": {"messages": _TURN[:1]},
}
_OTHERS = ["Question alpha?", "Question beta?", "Be kind.", "Rain today.", "Finds the weather."]
TEXTS = (
    *("plain words", " leading", "trailing ", "  both  ", "\n\nlines\n", "a  b   c      d", "\t tab\t", "."),
    *("don't we'll I'VE", "1234567 12 3.14", "émigré naïve 中文字 العربية हिन्दी", "👩‍👩‍👧 🏳️‍🌈 🙂🙂"),
    *("x = {'a': [1, 2]}\n    return x\n", "\u200bzero\u200b width \u00a0nbsp", "HTTP://a.b/c?d=e&f"),
)


# Templates


def try_template(path: Path, work: Path) -> Try:
    """Yield which chats have the same text, and whether what the assistant wrote is trained."""
    template, tokenizer = _read_template(path, work)
    with ChatFormat(template, tokenizer, DATE) as chats:
        for name, chat in CHATS.items():
            read, is_prompt = read_chat(chat), name == "prompt"
            ours, fault = attempt(chats.prompt, read) if is_prompt else attempt(chats.encode, read, "all")
            other, their_fault = attempt(_render, template, chat, is_prompt)
            same = "=" if ours and ours.text == other else "D"
            yield name, "r" if fault and their_fault else "R" if fault else "T" if their_fault else same
            if fault or their_fault or same == "D":
                yield "", f"{name}: moezoo {fault or repr(ours.text)}; transformers {their_fault or repr(other)}"
            yield f"{name} text", [fault] if ours is None else hashes(ours.text, ours.ids.tolist())
        for loss in _LOSSES:
            for name, chat in CHATS.items():
                if name != "prompt":
                    yield from _try_loss(chats, name, chat, loss)


def _try_loss(chats: ChatFormat, name: str, chat: Mapping[str, Any], loss: LossOn) -> Try:
    read = read_chat(chat)
    examples, fault = attempt(chats.examples, read, loss)
    every = _written(read.messages, "all")
    judged, shown = [], []
    for number, encoded in zip(
        read.turns if loss == "each" else [len(read.messages) - 1], examples or (), strict=False
    ):
        texts = _written(read.until(number).messages, "last" if loss == "each" else loss)
        judged.append(_judge(encoded, texts, [*_OTHERS, *(each for each in every if each not in texts)]))
        shown.append(encoded.with_marks("⟦", "⟧"))
    verdict = next((each[0] for each in judged if each[0] != "ok"), "ok" if judged else "R")
    yield f"{loss}: {name}", verdict
    if fault or verdict != "ok":
        yield "", f"{loss}: {name}: {fault or repr(shown)}"
    if (loss, name) == ("last", "one"):
        yield from zip(("before", "after"), map(repr, judged[0][1:] if judged else ("", "")), strict=True)
    yield f"{name} {loss}", [fault] if fault else [part for each in examples or () for part in _hash(each)]


def _hash(encoded: EncodedChat) -> list[str]:
    return hashes(encoded.text, encoded.with_marks("\0", "\1"))


def _render(template: Template, chat: Mapping[str, Any], is_prompt: bool) -> str:
    """Return the text that transformers renders."""
    tools = chat.get("tools")
    text = template.texts["tool_use" if tools and "tool_use" in template.texts else "default"]
    return chat_template_utils.render_jinja_template(
        [chat["messages"]], tools, chat_template=text, add_generation_prompt=is_prompt, **template.variables
    )[0][0]


def _trained(encoded: EncodedChat) -> list[str]:
    """Return the parts of the text that are trained."""
    marked = encoded.with_marks("\0", "\1")
    return [part.partition("\1")[0] for part in marked.split("\0")[1:]]


def _written(messages: list[dict[str, Any]], loss: str) -> list[str]:
    """Return what the assistant has written in the messages that a loss is on."""
    turns = [message for message in messages if message["role"] == "assistant"]
    contents = [m["content"] if isinstance(m["content"], list) else [{"text": m["content"]}] for m in turns]
    parts = [
        (m.get("reasoning_content", ""), *(part["text"] for part in content), "Oslo" * ("tool_calls" in m))
        for m, content in zip(turns, contents, strict=True)
    ]
    return [text for turn in (parts[-1:] if loss == "last" else parts) for text in turn if text]


def _judge(encoded: EncodedChat, texts: list[str], absent: list[str]) -> tuple[str, str, str]:
    """Return whether `texts` and nothing else of the chat is trained, and what is trained around the first of them."""
    parts = _trained(encoded)
    there = [each for each in texts if each in encoded.text]
    found = [each for each in there if any(each in part for part in parts)]
    # Thoughts in earlier turns are left out by design.
    lost = any(each not in there for each in texts if not each.startswith("Musing"))
    faults = [f"{len(found)}/{len(there)}"] * (len(found) < len(there) or not there) + ["lost"] * lost
    faults += ["leak"] * any(each in part for each in absent for part in parts)
    first = next((part for part in parts if any(each in part for each in found)), "")
    ends = [(first.index(each), first.index(each) + len(each)) for each in found if each in first] or [(0, 0)]
    return " ".join(faults) or "ok", first[: min(ends)[0]], first[max(end for _, end in ends) :]


def _read_template(path: Path, work: Path) -> tuple[Template, HuggingFace]:
    """Return a template in a file, and a tokenizer with what looks like special tokens in it."""
    (copy := work / path.name.removesuffix(".gz")).write_text(read_text(path))
    template = file_template(str(copy), key="template", tokenizer=None)
    variables = _VARIABLES | template.variables
    found = [text for text in variables.values() if isinstance(text, str)]
    found += [text for each in template.texts.values() for text in _SPECIAL.findall(each)]
    tokenizer = HuggingFace(save_tokenizer(work / "tokenizer.json", tuple(dict.fromkeys(found))), key="tokenizer")
    return template._replace(shown="template", variables=variables), tokenizer


# Tokenizers


def try_tokenizer(path: Path, work: Path) -> Try:
    """Yield how many texts, chats and added tokens have the same ids, and how many lookalikes stay text."""
    for file in path.parent.iterdir():
        if file.is_file() and file.name.startswith(("tokenizer", "chat_template", "special_tokens_map")):
            (work / file.name.removesuffix(".gz")).write_text(read_text(file))
    own = HuggingFace(work / "tokenizer.json", key="tokenizer")
    yield "vocabulary", str(own.vocab)
    added = [token for token in own.contents()["added_tokens"] if token["content"]]
    special = [token["content"] for token in added if token["special"]]
    template, _ = attempt(lambda: folder_template(work, key="folder"))
    if template is None:
        begin, end = (special or [""])[0], (special or [""])[-1]
        text = f"{{% for m in messages %}}{begin}{{{{ m.role }}}}{end}{{{{ m.content }}}}{end}{{% endfor %}}"
        template = Template("template", {"default": text}, {})
    peer: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(work / "tokenizer.json"), **template.variables)
    peer.chat_template = template.texts["default"]
    auto, fault = attempt(lambda: transformers.AutoTokenizer.from_pretrained(work, trust_remote_code=False))
    yield from [("", f"AutoTokenizer: {fault}")] if fault else []
    yield from _compare("texts", own.encode, lambda text: peer(text)["input_ids"])
    yield from _compare("AutoTokenizer", own.encode, lambda text: auto(text)["input_ids"]) if auto else []
    same = [t["id"] == own.token_id(t["content"]) == peer.convert_tokens_to_ids(t["content"]) for t in added]
    yield "added", f"{sum(same)}/{len(same)}"
    ids = {own.token_id(text) for text in special}
    with ChatFormat(template, own, DATE) as chats:

        def encode(text: str, answer: str | None = None) -> list[int]:
            chat = [_user(text), _answer(text if answer is None else answer)]
            return chats.encode(read_chat({"messages": chat}), "all").ids.tolist()

        def count(text: str) -> int:
            return sum(number in ids for number in encode(f"a {text}b", "fine"))

        yield from _compare(
            "chats", encode, lambda text: peer.apply_chat_template([_user(text), _answer(text)])["input_ids"]
        )
        (plain, fault), looks = attempt(count, "word "), special[:40] + special[40:][-40:]
        wrong = [(look, found) for look in looks if (found := attempt(count, look)) != (plain, "")]
    yield "lookalikes stay text", f"{len(looks) - len(wrong)}/{len(looks)}"
    yield from (("", f"lookalikes: {look!r}: {found}, expected {plain or fault}") for look, found in wrong[:2])


def _compare(column: str, ours: Any, theirs: Any) -> Try:
    """Yield how many texts have the same ids, and the first that has others."""
    pairs = [(text, attempt(ours, text), attempt(theirs, text)) for text in TEXTS]
    wrong = [each for each in pairs if each[1] != each[2] or each[1][1]]
    yield column, f"{len(TEXTS) - len(wrong)}/{len(TEXTS)}"
    if wrong:
        text, (mine, fault), (other, their_fault) = wrong[0]
        yield "", f"{column}: {text!r}: {fault or mine}, transformers {their_fault or other}"
