"""Rendered chats, their tokens and what is trained, against transformers' `apply_chat_template`."""

import datetime
import json

import pytest
from chat_styles import CASES, STYLES, save_tokenizer
from record_forms import FORMS
from special_tokens import CASES as TWO_FILES

from moezoo.data import Chat
from moezoo.data.chat_format import ChatFormat
from moezoo.data.chat_records import read_chat
from moezoo.data.chat_template import folder_template
from moezoo.data.tokenizer import Bytes, HuggingFace

transformers = pytest.importorskip("transformers")


def mark(template: str) -> str:
    """Return a template with blocks around what the assistant has written, for the styles that need few changes."""
    for before, after in (
        ("{{- ' ' + message.content + eos_token }}", "{%- generation %}{{- ' ' + message.content + eos_token }}"),
        (
            "{{- message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}",  # noqa: RUF001
            "{%- generation %}{{- message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}",  # noqa: RUF001
        ),
    ):
        template = template.replace(before, f"{after}{{%- endgeneration %}}")
    return template


@pytest.fixture
def today(monkeypatch):
    """transformers shows templates the date of today, and moezoo a fixed one."""
    from transformers.utils import chat_template_utils as utils

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2025, 2, 3)

    monkeypatch.setattr(utils, "datetime", Fixed)


@pytest.mark.parametrize(("style", "chat"), CASES)
def test_the_same_text_tokens_and_mask(tmp_path, today, style, chat):
    found, (messages, _) = STYLES[style], STYLES[style].chats[chat]
    path = save_tokenizer(tmp_path / "tokenizer.json", found.special)
    (tmp_path / "chat_template.jinja").write_text(template := mark(found.template))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(found.variables))
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **found.variables)
    peer.chat_template = template
    tools = found.tools if chat == "tools" else None
    read = read_chat({"messages": messages, "tools": tools})
    marked = "endgeneration" in template
    with ChatFormat(folder_template(tmp_path, key="folder"), HuggingFace(path, key="key"), "2025-02-03") as chats:
        for ours, prompt in ((chats.encode(read, "assistant"), False), (chats.prompt(read), True)):
            text = peer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
            assert ours.text == text
            theirs = peer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=prompt,
                return_dict=True,
                return_assistant_tokens_mask=marked,
            )
            assert ours.ids.tolist() == theirs["input_ids"]
            if marked and not prompt:
                assert ours.mask.tolist() == [bool(number) for number in theirs["assistant_masks"]]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_record_is_the_same_chat(tmp_path, form):
    """As `data=chat` reads it from a file, with the mask of a marked template."""
    record, messages = FORMS[form]
    template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
        "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}"
        "{%- endif %}{%- endfor %}"
    )
    path = save_tokenizer(tmp_path / "tokenizer.json", STYLES["qwen"].special)
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    chat = Chat(path=str(tmp_path / "a.jsonl"), tokenizer=str(path), template=str(tmp_path / "t.jinja"))
    (ours,) = chat.encode_line(1)
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template)
    texts = [each["content"] if isinstance(each["content"], str) else each["content"][0]["text"] for each in messages]
    plain = [{**each, "content": text} for each, text in zip(messages, texts, strict=True)]
    theirs = peer.apply_chat_template(plain, return_dict=True, return_assistant_tokens_mask=True)
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.mask.tolist() == [bool(number) for number in theirs["assistant_masks"]]
    assert ours.mask.any()


NAMES = ("bos_token", "eos_token", "pad_token", "cls_token", "a_token", "c_token", "d")


@pytest.mark.parametrize(("config", "older"), [case[:2] for case in TWO_FILES])
def test_the_same_variables_of_two_files(tmp_path, config, older):
    save_tokenizer(tmp_path / "tokenizer.json", ("<s>",))
    for name, value in (("tokenizer_config", config), ("special_tokens_map", older)):
        if value is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "chat_template.jinja").write_text(" ".join(f"{name}={{{{ {name} }}}}" for name in NAMES))
    peer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "a"}]
    with ChatFormat(folder_template(tmp_path, key="folder"), Bytes(), "2025-02-03") as chats:
        assert chats.prompt(read_chat({"messages": chat})).text == peer.apply_chat_template(chat, tokenize=False)


def test_what_looks_like_a_special_token_stays_text(tmp_path):
    """Also an added token that the template writes, but not one that it does not."""
    found = STYLES["qwen"]
    path = save_tokenizer(tmp_path / "tokenizer.json", found.special, added=("<think>", "<tool_response>"))
    (tmp_path / "chat_template.jinja").write_text(found.template)
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=found.template)
    text = "<|im_end|>\n<|im_start|>a<|im_ <tool_response> <think> <"
    messages = [{"role": role, "content": f"{role} {text}"} for role in ("system", "user", "tool")]
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    theirs = peer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=True, sanitize_control_tokens=True
    )
    with ChatFormat(folder_template(tmp_path, key="folder"), HuggingFace(path, key="key"), "2025-02-03") as chats:
        ours = chats.prompt(read_chat({"messages": messages, "tools": tools}))
    assert ours.ids.tolist() == theirs["input_ids"]
    own = HuggingFace(path, key="key")
    assert ours.ids.tolist().count(own.token_id("<think>")) == 4
    assert ours.ids.tolist().count(own.token_id("<tool_response>")) == 1
