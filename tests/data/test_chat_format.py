"""Chats in templates: their text and tokens, and which are trained, against tables written by hand."""

# ruff: noqa: RUF001 the bars of DeepSeek's special tokens are wide

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_styles import CASES, HARMONY, MARKED, PLAIN, QWEN, STYLES, THINKING, WITH_TOOL, save_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import by_table, refused
from tokenizers import Tokenizer
from tokenizers_of_kinds import IN_VOCABULARY, special_in_vocabulary

from moezoo.data import chat_template, chat_turns
from moezoo.data.chat_format import ChatFormat, EncodedChat, LossOn
from moezoo.data.chat_records import Chat, read_chat
from moezoo.data.chat_template import Template
from moezoo.data.tokenizer import Bytes, Guarded, HuggingFace

DATE = "2025-02-03"
CHAT = read_chat({"messages": PLAIN})


def template(text: str, **variables) -> Template:
    return Template("T", {"default": text}, variables)


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The formats of all styles, each with processes of its own that stay for all tests."""
    folder, made = tmp_path_factory.mktemp("formats"), {}
    for name, style in STYLES.items():
        path = save_tokenizer(folder / f"{name}.json", style.special)
        tokenizer = HuggingFace(path, key="data.tokenizer")
        made[name] = ChatFormat(template(style.template, **style.variables), tokenizer, DATE)
    yield made
    for each in made.values():
        each.close()


def table(found: EncodedChat) -> str:
    """Return the text with ⟦ and ⟧ around what is trained."""
    return found.with_marks("⟦", "⟧")


@pytest.mark.parametrize(("style", "chat"), CASES)
def test_what_is_trained(formats, style, chat):
    """The assistant's turns with the token that ends each, of its last turn, and all; no call of a tool's result."""
    messages, expected = STYLES[style].chats[chat]
    read = read_chat({"messages": messages, "tools": STYLES[style].tools if chat == "tools" else None})
    assert table(formats[style].encode(read, "assistant")) == expected
    before, last = expected.rsplit("⟦", 1)
    assert table(formats[style].encode(read, "last")) == before.replace("⟦", "").replace("⟧", "") + "⟦" + last
    whole = formats[style].encode(read, "all")
    assert whole.mask.all()
    assert whole.text == expected.replace("⟦", "").replace("⟧", "")


@pytest.mark.parametrize("style", STYLES)
def test_special_tokens_of_a_template_are_single_tokens(formats, tmp_path, style):
    """And everything else is as the tokenizer of the file reads it."""
    messages, expected = next(iter(STYLES[style].chats.values()))
    found = formats[style].encode(read_chat({"messages": messages}), "assistant")
    own = HuggingFace(save_tokenizer(tmp_path / "own.json", STYLES[style].special), key="key")
    assert found.ids.tolist() == own.encode(found.text)
    assert len(expected) > len(found.ids)


def test_a_prompt_ends_with_the_beginning_of_an_answer(formats):
    asked = read_chat({"messages": PLAIN[:2]})
    assert formats["qwen"].prompt(asked).text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert formats["mistral"].prompt(asked).text == "<s>[INST] Be brief.\n\n Hi\n[/INST]"


def test_prompt_and_completion_are_a_chat(formats):
    text = read_chat({"prompt": "Hi", "completion": "Hello!"})
    lists = read_chat({"prompt": [{"role": "user", "content": "Hi"}], "completion": PLAIN[2:3]})
    with_null = read_chat({"messages": None, "prompt": "Hi", "completion": "Hello!", "tools": None})
    assert text == lists == with_null
    assert table(formats["mistral"].encode(text, "assistant")) == "<s>[INST] Hi[/INST]⟦ Hello!</s>⟧"


def test_a_chat_without_an_answer(formats):
    for style in ("qwen", "marked"):
        for loss_on in ("assistant", "last"):
            assert not formats[style].encode(read_chat({"messages": PLAIN[:2]}), loss_on).mask.any()


def test_tools_and_variables_reach_the_template(tmp_path):
    texts = {"default": "no tools {{ mood }} {{ documents }} {{ tools }}"}
    texts["tool_use"] = "{{ tools[0].function.name }} {{ mood }}"
    with ChatFormat(Template("T", texts, {"mood": "any"}), Bytes(), DATE) as chats:
        none = [(tools, "no tools good None None") for tools in (None, [], "[]")]
        for tools, expected in (*none, (json.dumps(QWEN.tools), "sum good")):
            chat = read_chat({"messages": PLAIN, "tools": tools, "chat_template_kwargs": {"mood": "good"}})
            assert chats.encode(chat, "all").text == expected
        assert chats.encode(CHAT, "all").text == "no tools any None None"


def test_arguments_as_json_text_are_objects(formats):
    call = {"function": {"name": "sum", "arguments": '{"of":[1,2]}'}}
    written = [{**message, "tool_calls": [call]} if "tool_calls" in message else message for message in WITH_TOOL]
    both = [read_chat({"messages": messages, "tools": QWEN.tools}) for messages in (WITH_TOOL, written)]
    assert len({formats["qwen"].encode(chat, "all").text for chat in both}) == 1


def test_bytes(tmp_path):
    """No token is special, and a character may be several tokens."""
    with ChatFormat(template(STYLES["deepseek"].template, bos_token="<b>"), Bytes(), DATE) as chats:
        found = chats.encode(read_chat({"messages": PLAIN}), "assistant")
    assert bytes(found.ids.tolist()).decode() == found.text
    trained = bytes(found.ids[found.mask].tolist()).decode()
    assert trained == "Hello!<｜end▁of▁sentence｜>See you.<｜end▁of▁sentence｜>"


def test_a_token_is_trained_if_one_of_its_characters_is(tmp_path):
    """Of tokens that stand across an edge of the assistant's text, both, as in transformers' mask."""
    path = save_tokenizer(tmp_path / "t.json", (), words=("b>a", "e<c"))
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = read_chat({"prompt": "ab>", "completion": "ae"})
    tail = {"role": "user", "content": "<cd"}
    with ChatFormat(template(text), HuggingFace(path, key="key"), DATE) as chats:
        assert table(chats.encode(chat, "assistant")) == "a⟦b>ae⟧"
        longer = Chat([*chat.messages, tail], None, {})
        assert table(chats.encode(longer, "assistant")) == "a⟦b>ae<c⟧d"


LIKE = ("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|>", " ", "\n", "ä", "<think>", "</b>", "x")


@given(st.lists(st.lists(st.sampled_from(LIKE), max_size=6).map("".join), min_size=3, max_size=3))
@settings(max_examples=30, deadline=None)
def test_special_tokens_in_a_users_text_stay_text(formats, contents):
    """The tokens of what a user, the system or a tool writes are those of a tokenizer without special tokens."""
    system, user, tool = contents
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}, *WITH_TOOL[1:]]
    messages[3] = {"role": "tool", "content": tool}
    found = formats["qwen"].encode(read_chat({"messages": messages}), "assistant")
    ids = []
    for special, text in (
        ("<|im_start|>", f"system\n{system}"),
        ("<|im_end|>", "\n"),
        ("<|im_start|>", f"user\n{user}"),
        ("<|im_end|>", "\n"),
        ("<|im_start|>", 'assistant\n<tool_call>\n{"name": "sum", "arguments": {"of": [1, 2]}}\n</tool_call>'),
        ("<|im_end|>", "\n"),
        ("<|im_start|>", f"user\n<tool_response>\n{tool}\n</tool_response>"),
        ("<|im_end|>", "\n"),
        ("<|im_start|>", "assistant\nIt is 3."),
        ("<|im_end|>", "\n"),
    ):
        ids += [formats["qwen"]._guarded._tokenizer.token_id(special), *PLAIN_TOKENIZER.encode(text)]
    assert found.ids.tolist() == ids
    assert found.text.count(user) >= (user != "")


class _PlainTokenizer:
    """The tokenizer of the styles without special tokens: one token for each byte, and <think>."""

    def __init__(self):
        self._library = None

    def encode(self, text: str) -> list[int]:
        if self._library is None:
            from tokenizers import Tokenizer

            path = save_tokenizer(Path("plain.json"), ())
            contents = json.loads(path.read_text())
            (think,) = contents["added_tokens"]
            self._think, self._library = think["id"] + 2, Tokenizer.from_file(str(path))
        ids = self._library.encode(text, add_special_tokens=False).ids
        return [self._think if number == self._think - 2 else number for number in ids]


PLAIN_TOKENIZER = _PlainTokenizer()


def test_an_assistants_special_tokens_are_tokens(formats):
    """A template that splits or keeps them decides what they mean."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    found = formats["qwen"].encode(read_chat({"messages": messages}), "assistant")
    end = formats["qwen"]._guarded._tokenizer.token_id("<|im_end|>")
    assert found.ids.tolist().count(end) == 4


def test_texts_may_become_special_tokens_only_together(formats):
    """The end of one text and the beginning of the next, without anything of the template between them."""
    guarded = formats["qwen"]._guarded
    for left, right in (("a<|im_en", "d|>b"), ("<|im_start", "|>"), ("a<|im_end|  ", ">")):
        text = guarded.guard(left).rstrip() + guarded.guard(right)
        assert not guarded.encode(text).special.any()
        assert guarded.restore(text) == left.rstrip() + right


@pytest.mark.parametrize("kind", IN_VOCABULARY)
def test_special_tokens_that_are_words_of_the_vocabulary(tmp_path, kind):
    """All tokens keep their ids; a word of a user's text is none of them; unknown words stay unknown."""
    special_in_vocabulary(kind).save(path := str(tmp_path / "t.json"))
    own = Tokenizer.from_file(path)
    guarded = Guarded(HuggingFace(tmp_path / "t.json", key="key"))
    for text in ("  a END b  ", "a<late>  b END END<late>", "ab q END", "a  END", "<unk>a"):
        assert guarded.encode(text).ids.tolist() == own.encode(text).ids
    assert guarded.encode("a  END  END").special.tolist() == [False, True, True]
    end, ids = own.token_to_id("END"), guarded.encode(guarded.guard("a END  b")).ids.tolist()
    assert end not in ids
    assert [ids[0], *ids[-2:]] == own.encode("a  b").ids
    if kind in ("byte level", "whole words", "BPE"):
        assert "".join(str(own.id_to_token(number)) for number in ids[1:-2]).strip("Ġ") == "END"
        assert len(ids[1:-2]) >= len("END")


@pytest.mark.parametrize(("special", "text"), [("END", "END"), ("Ġ", " "), ("<0x0A>", "\n")])
def test_a_tokenizer_that_reads_text_as_special(tmp_path, special, text):
    """Merges, characters and bytes make the special token of a text; others keep their ids."""
    save_tokenizer(path := tmp_path / "t.json", (special,), words=("END",))
    if special == "<0x0A>":
        contents = json.loads(path.read_text())
        vocab = {"<0x0A>": 0, "a": 1}
        contents |= {"model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}}
        path.write_text(json.dumps(contents | {"pre_tokenizer": None}))
    own = HuggingFace(path, key="data.tokenizer")
    guarded = Guarded(own)
    found = guarded.encode(f"{special}a<think>")
    assert found.ids.tolist() == [own.token_id(token) for token in (special, "a", "<think>")]
    assert found.special.tolist() == [True, False, False]
    with refused(f"data.tokenizer={path} reads the text", "as a special token, also where it is a user's; give an"):
        guarded.encode(guarded.guard(f"a{text}"))


def test_other_tokens_with_other_ids_are_found_before_the_first_text(tmp_path, monkeypatch):
    save_tokenizer(path := tmp_path / "t.json", ("END",))
    monkeypatch.setattr(Guarded, "_replace", lambda _, contents: contents["added_tokens"].reverse())
    with refused(f"data.tokenizer={path}: its added token <think> is 257, but 256 where texts of special tokens stay"):
        Guarded(HuggingFace(path, key="data.tokenizer"))


@by_table(
    r"""
    record => message
    {} => neither messages nor another known form is there; the object is empty; set data.field=KEY
    {"message": []} => neither messages nor another known form is there; did you mean 'message'?; set data.f
    {"messages": []} => messages is empty; give at least one message, or leave the line out
    {"messages": "Hi"} => messages is a string, not an array of messages; set data.field
    {"messages": ["Hi"]} => message 1 is a string, not an object; write {"role": ..., "content": ...}
    {"messages": [{"role": "user", "content": "Hi"}, {}]}
        => message 2 has no role; valid: system, developer, user, assistant, tool
    {"messages": [{"role": "bot", "content": "a"}]} => message 1 has role "bot"; valid: system, developer, user
    {"messages": [{"role": ["user"], "content": "a"}]} => message 1 has role ["user"]; valid: system, developer
    {"messages": [{"role": "user", "content": 7}]} => message 1: content is a number, expected a string; correct it
    {"messages": [{"role": "user"}]} => message 1 has no content; only an assistant's message with tool_calls may ha
    {"messages": [{"role": "assistant", "content": null}]} => message 1 has no content; only an assistant's message
    {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}
        => message 1: part 1 of content has type "image" and no text; only text is read
    {"messages": [{"role": "user", "content": ["Hi"]}]}
        => message 1: part 1 of content is a string, expected {"type": "text", "text": ...}
    {"messages": [{"role": "assistant", "content": null, "tool_calls": {"name": "f"}}]}
        => message 1: tool_calls is an object, expected an array of objects; correct it
    {"messages": null, "prompt": "Hi"} => messages is null, not an array of messages; set data.field
    {"messages": [{"role": "assistant", "content": "a", "thinking": "b", "reasoning": [{"text": "b"}]}]}
        => message 1: reasoning is an array, expected a string; correct it
    {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"function": "f"}]}]}
        => message 1: the function of a call is a string, expected an object; correct it
    {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}
        => message 1: weight is 0.5, expected 0 or 1; correct it
    {"prompt": "Hi", "completion": null} => completion is null, neither a string nor an array of messages; correct
    {"messages": PLAIN, "tools": "none"} => tools is a string, not an array; write a list of objects, or null
    {"messages": PLAIN, "chat_template_kwargs": []} => chat_template_kwargs is an array, not an object; write names
    {"messages": PLAIN, "chat_template_kwargs": {"tools": 1}} => chat_template_kwargs has tools, which every templa
    {"messages": PLAIN, "tools": [DEEP]} => objects and arrays are more than 100 deep
    {"prompt": "a\ud800", "completion": ""}
        => a text has U+D800, half of a surrogate pair, which no UTF-8 can hold; corre
    {"prompt": "\udbff\udffc", "completion": ""}
        => a text has the private character U+10FFFC, which moezoo needs for itself
    """
)
def test_records_that_are_refused(record, message):
    with refused(message):
        read_chat(json.loads(record.replace("PLAIN", json.dumps(PLAIN)).replace("DEEP", "[" * 100 + "]" * 100)))


@by_table(
    r"""
    text => message
    {{ '\ud800' }} => T fails for this chat (UnicodeEncodeError: 'utf-8' codec
    {{ 1 => T line 1 is not a chat template (unexpected end of template, expected 'end of print statement'.); corr
    {{ messages | random }} => T line 1 is not a chat template (No filter named 'random'.); correct it
    {{ raise_exception('No ' + messages[0].role) }} => T refuses this chat: No system
    NEWLINE{{ messages.__class__ }} => T line 2 does what a template must not do (access to '__class__' of
    {{ messages | attr('__class__') }} => T line 1 does what a template must not do (access to '__class_
    {{ messages.append(1) }} => T line 1 does what a template must not do (access to 'append' of list)
    {{ ''.join.__self__ }} => T line 1 does what a template must not do (access to '__self__' of
    {% include '/etc/passwd' %} => T line 1 fails for this chat (TypeError: no loader for this environ
    {{ messages[9].role }} => T line 1 fails for this chat (list object has no element 9); correct one of
    {% macro f() %}{{ f() }}{% endmacro %}{{ f() }} => T line 1 fails for this chat (RecursionError: max
    {{ 'a' * 2 * 10**9 }} => rendering it by T needs more than 1 GiB of memory; correct the template or
    {{ 'ä' * (6 * 10**6) }} => rendering it by T gives more than 10 MB of text; correct the template or
    {% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
        => rendering it by T takes more than 100,000 steps, items of loops and calls of functions; correct the
    {% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}
        => rendering it by T takes more than 100,000 steps
    {% for x in [1] recursive %}{% if loop.depth0 < 3 %}{{ loop(range(999)) }}{% endif %}{% endfor %}
        => rendering it by T takes more than 100,000 steps
    {{ (messages | length) ** (10 ** 9) }}
        => rendering it by T takes more than 0 seconds of processor time, the last guard; correct the template or leave
    {{ messages[2].content }} => T line 1 fails for this chat (list object has no element 2); correct one of them
    {{ messages | length }}
        => T does not show which text is the assistant's: the chat up to message 3 ends with "3", and the whole has "5"
        there; give a template that has {% generation %} around it, or set data.loss_on=ea
    {% for m in messages %}{{ m.content if loop.last or m.role != 'assistant' else '-' }}{% endfor %}
        => T does not show which text is the assistant's: the chat up to message 3 ends with "Be brief. Hi\nHello!", and
        the whole has "Be brief. Hi\n-ByeSee you." there; give a template that has {% generation %} around it, or set
        data.loss_on=each
    """
)
def test_templates_that_are_refused(monkeypatch, text, message):
    monkeypatch.setattr(chat_template, "SECONDS", 0.3 if "seconds" in message else 60)
    monkeypatch.setattr(chat_template, "STEPS", 10**5)
    with ChatFormat(template(text.replace("NEWLINE", "\n")), Bytes(), DATE) as chats, refused(message):
        chats.encode(CHAT, "assistant")


def test_a_template_that_rewrites_earlier_turns(formats):
    """Each turn can be trained as the template shows the chat then, unless it marks what the assistant has written."""
    chat = read_chat({"messages": [*THINKING, *THINKING]})
    text = MARKED.template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    with ChatFormat(template(text), Bytes(), DATE) as chats:
        with refused("T does not show which text is the assistant's: the chat up to message 2 ends with"):
            chats.encode(chat, "assistant")
        for tables in (map(table, chats.examples(chat, "each")), map(table, formats["marked"].examples(chat, "each"))):
            one, two = tables
            assert "⟦<think>\nwell\n</think>\n\nHello!<|im_end|>" in one
            assert two.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n")
            assert two.count("⟦<think>\nwell") == two.count("⟦") == 1
    with refused("T does not show which text is the assistant's: the chat up to message 2 ends with"):
        formats["harmony"].encode(read_chat({"messages": [*HARMONY.chats["one turn"][0][1:], *THINKING]}), "assistant")


TURNS = "{% for m in messages %}<{{ m.role }}>"
# By kind: a template, and its table of a chat of two turns, of which the first has thoughts and the second has none.
HEADERS = {
    "thoughts begin": (
        TURNS + "{% if m.reasoning_content %}[T]{{ m.reasoning_content }}[/T]{% endif %}{{ m.content }}</e>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>[T]\n{% endif %}",
        "<user>a</e><assistant>[T]⟦well[/T]b</e>⟧<user>c</e><assistant>⟦d</e>⟧",
        "<user>x</e><assistant>[T]\\n",
    ),
    "no thoughts are written": (
        TURNS + "{% if m.role == 'assistant' %}[T]{{ m.reasoning_content }}[/T]{% endif %}{{ m.content }}</e>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>[T]\n{% endif %}",
        "<user>a</e><assistant>[T]⟦well[/T]b</e>⟧<user>c</e><assistant>[T]⟦[/T]d</e>⟧",
        "<user>x</e><assistant>[T]\\n",
    ),
    "an empty thought is an end alone": (
        TURNS + "{% if m.role == 'assistant' %}{{ '[T]' + m.reasoning_content if m.reasoning_content }}[/T]{% endif %}"
        "{{ m.content }}</e>{% endfor %}{% if add_generation_prompt %}<assistant>[T]{% endif %}",
        "<user>a</e><assistant>[T]⟦well[/T]b</e>⟧<user>c</e><assistant>⟦[/T]d</e>⟧",
        "<user>x</e><assistant>[T]",
    ),
    "a prompt of other white space": (
        TURNS + " {{ m.content }}</e>{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}",
        "<user> a</e><assistant> ⟦b</e>⟧<user> c</e><assistant> ⟦d</e>⟧",
        "<user> x</e><assistant>\\n",
    ),
    "a prompt behind every chat": (
        TURNS + "{{ m.content }}</e>{% endfor %}<assistant>",
        "<user>a</e><assistant>⟦b</e>⟧<user>c</e><assistant>⟦d</e>⟧<assistant>",
        None,
    ),
    "white space behind the chat": (
        TURNS + "{{ m.content }}</e>{% endfor %}{{ '\n' }}{% if add_generation_prompt %}<assistant>{% endif %}",
        "<user>a</e><assistant>⟦b</e>⟧<user>c</e><assistant>⟦d</e>⟧\n",
        "<user>x</e>\\n<assistant>",
    ),
    "two tags end a turn": (
        TURNS + "{{ m.content }}</e><user>{% endfor %}",
        "<user>a</e><user>⟦<assistant>b</e><user>⟧<user>c</e><user>⟦<assistant>d</e><user>⟧",  # it ignores the prompt
        None,
    ),
    "the next role's token ends a turn": (
        TURNS + "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        "<user>a<assistant>⟦b<user>⟧c<assistant>⟦d<user>⟧",
        None,
    ),
    "an end before the next turn": (
        "{% for m in messages %}{{ '</e>' if not loop.first }}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}</e><assistant>{% endif %}",
        "<user>a</e><assistant>⟦b</e>⟧<user>c</e><assistant>⟦d</e>⟧",
        None,
    ),
}


@pytest.fixture(scope="module")
def tags(tmp_path_factory) -> HuggingFace:
    path = save_tokenizer(tmp_path_factory.mktemp("tags") / "t.json", ("<user>", "<assistant>", "</e>", "[/T]"))
    return HuggingFace(path, key="key")


@pytest.mark.parametrize("kind", HEADERS)
def test_a_prompt_that_finished_turns_do_not_have(tags, kind):
    """The header of a turn never depends on its answer, even if that begins as the prompt goes on."""
    text, expected, prompt = HEADERS[kind]
    thoughts = {"role": "assistant", "reasoning_content": "well", "content": "b"}
    messages = [{"role": "user", "content": "a"}, thoughts, *({"role": r, "content": c} for r, c in PAIR)]
    with ChatFormat(template(text), tags, DATE) as chats, pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            assert table(chats.encode(read_chat({"messages": messages}), "assistant")) == expected
            for answer in ("[T]", "[T]\n", "\n", "<", " "):
                chat = read_chat({"prompt": "a", "completion": f"{answer}d"})
                last = expected.rsplit("⟦", 1)[1].replace("d", f"{answer}d", 1)
                assert table(chats.encode(chat, "assistant")).endswith("⟦" + last)
            patch.setattr(chat_turns, "_fit", lambda *_: None)  # from the beginnings of the chat
        (end,) = chats.ends()
        assert tags.token_text(end) == ("<user>" if "next role" in kind else "</e>")
        notes = [f'generate begins an answer behind "{prompt}", which finished turns do not have'] if prompt else []
        assert chats.notes() == notes


PAIR = (("user", "c"), ("assistant", "d"))


def test_a_turn_with_the_text_of_another_message_is_refused(tags):
    """Of templates that write messages in another order; also a message that `all` is to leave out."""
    system, *chat = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "u"), *PAIR[1:])]
    backwards = TURNS.replace("messages", "messages | reverse") + "{{ m.content }}</e>{% endfor %}<assistant>"
    later = "{% for m in messages[1:] %}{{ m.content }}{{ messages[0].content if loop.first }}</e>{% endfor %}"
    cases: list[tuple[str, list[Any], LossOn]]
    cases = [(backwards, chat, "last"), (later, [system | {"weight": 0}, *chat], "all")]
    for text, messages, loss_on in cases:
        with (
            ChatFormat(template(text), tags, DATE) as chats,
            refused("T does not show which text is the assistant's: "),
        ):
            chats.encode(read_chat({"messages": messages}), loss_on)
    first = "{{ messages[0].content[:0] }}" + TURNS + "{{ m.content }}{% endfor %}"
    begins = refused(
        "T does not show which text is the assistant's: the chat begins with a message of the assistant; le"
    )
    with ChatFormat(template(first), tags, DATE) as chats, begins:
        chats.encode(read_chat({"messages": chat[1:]}), "assistant")


def test_blocks_of_a_message_that_is_excluded():
    """A block is of the message whose text it has, or else of the one before; empty ones, and an end for the last."""
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}<{{ m.content }}>{% endif %}{% if loop.last %}{% generation %}</e>{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    roles = ("assistant", "user", "assistant", "assistant")
    for excluded, expected in (({0}, "0<1>⟦2⟧⟦3⟧⟦</e>⟧"), ({3}, "⟦0⟧<1>⟦2⟧3</e>"), ({0, 2}, "0<1>2⟦3⟧⟦</e>⟧")):
        messages = [{"role": r, "content": str(n), "weight": int(n not in excluded)} for n, r in enumerate(roles)]
        with ChatFormat(template(text), Bytes(), DATE) as chats:
            found = table(chats.encode(read_chat({"messages": messages}), "assistant"))
            assert found.replace("⟧⟦", "") == expected.replace("⟧⟦", "")


def test_blocks_are_trained_whole(tags):
    """All of a turn, and white space behind what ends it; with `last` those of the last turn alone, if it is empty."""
    text = TURNS + (
        "{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}{% endgeneration %}-"
        "{% generation %}{{ '</e>\n' if m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    first = "<user>a<assistant>⟦b⟧-⟦</e>\n⟧"
    with ChatFormat(template(text), tags, DATE) as chats:
        for answer, last in (("d", "<user>c<assistant>⟦d⟧-⟦</e>\n⟧"), ("", "<user>c<assistant>-")):
            contents = (("user", "a"), ("assistant", "b"), PAIR[0], ("assistant", answer))
            chat = read_chat({"messages": [{"role": role, "content": content} for role, content in contents]})
            assert table(chats.encode(chat, "assistant")) == first + last
            assert table(chats.encode(chat, "last")) == re.sub("[⟦⟧]", "", first) + last


@pytest.mark.parametrize(
    ("messages", "tools", "renderings"), [([*WITH_TOOL, *PLAIN[1:]], QWEN.tools, 2), (PLAIN[1:], None, 1)]
)
def test_turns_are_found_in_few_renderings(formats, messages, tools, renderings):
    """By patterns in a rendering or two of the whole, as in renderings of its beginning for each turn."""
    chat = read_chat({"messages": messages * 9, "tools": tools})
    chats = formats["qwen"]
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        render = chats._renderer.render
        patch.setattr(chats._renderer, "render", lambda request: asked.append(request) or render(request))
        found = chats.encode(chat, "assistant")
        lengths = [len(request["messages"]) for request in asked if len(request["messages"]) > 9]
        assert lengths == [len(chat.messages)] * renderings
        for name, other in (("Turns._find_texts", {}), ("_fit", None)):
            patch.setattr(f"moezoo.data.chat_turns.{name}", lambda *_, other=other: other)
            assert table(chats.encode(chat, "assistant")) == table(found)
    assert table(found).count("⟦") == 9 * sum(message["role"] == "assistant" for message in messages)


def test_arguments_of_calls_in_the_form_that_a_template_takes():
    """As an object, and as text where it fails with that."""
    text = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<{{ ARGUMENTS }}>{% endfor %}{% endfor %}"
    for arguments, written, expected in (
        ("c.function.arguments | tojson", '{"of":[1,2]}', '{"of": [1, 2]}'),
        ("'' + c.function.arguments", '{"of":[1,2]}', '{"of":[1,2]}'),
        ("'' + c.function.arguments", {"of": ["ä"]}, '{"of": ["ä"]}'),
        ("c.function.arguments.of", '{"of":[1,2]}', "[1, 2]"),
    ):
        call = {"function": {"name": "sum", "arguments": written}}
        messages = [WITH_TOOL[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        with ChatFormat(template(text.replace("ARGUMENTS", arguments)), Bytes(), DATE) as chats:
            assert table(chats.encode(read_chat({"messages": messages}), "assistant")) == f"1+2?⟦<{expected}>⟧"
            notes = ["1 example with the arguments of calls as text: T fails with objects"]
            assert chats.notes() == (notes if "+" in arguments else [])


def test_contents_in_the_form_that_a_template_takes():
    """Parts reach a template that loops over them, also a text does, if it shows none otherwise."""
    parts = [{"type": "text", "text": part} for part in ("H", "i")]
    for shown, content, expected in (
        ("{{ m.content }}", parts, "Hi"),
        ("{% for part in m.content %}{{ part.text }}-{% endfor %}", parts, "H-i-"),
        ("{% for part in m.content %}{{ part.text }}-{% endfor %}", "Hi", "Hi-"),
        ("{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}", parts, "H"),
        ("{{ m.content | tojson }}", parts, '"Hi"'),
    ):
        text = f"{{% for m in messages %}}<{{{{ m.role }}}}>{shown}{{% endfor %}}"
        with ChatFormat(template(text), Bytes(), DATE) as chats:
            chat = read_chat({"messages": [{"role": role, "content": content} for role in ("user", "assistant")]})
            assert table(chats.encode(chat, "assistant")) == f"<user>{expected}⟦<assistant>{expected}⟧"


def test_stand_ins_in_what_python_writes_of_a_list(formats):
    """A template may print a list of a user's texts as Python does."""
    with ChatFormat(
        template("{{ tools[0].enum }}{{ messages[0].content }}"), formats["qwen"]._tokenizer, DATE
    ) as chats:
        chat = read_chat({"messages": PLAIN[1:2], "tools": [{"enum": ["<", "a"]}]})
        assert chats.encode(chat, "all").text == "['<', 'a'] Hi\n"
    private = refused("the template writes the private character U+100001; give another template")
    with ChatFormat(template("{{ '\U00100001' }}"), formats["qwen"]._tokenizer, DATE) as chats, private:
        chats.encode(CHAT, "all")


def test_a_filter_around_a_block():
    """Its text is as filtered, and so is the mask; what marks make different is refused."""
    block = "{% filter F %}{% generation %}{{ m.content }}{% endgeneration %}{% endfilter %}"
    text = f"{{% for m in messages %}}{block}{{% endfor %}}"
    chat = read_chat({"messages": [{"role": "assistant", "content": " Ab\n"}]})
    for name, expected in (("trim", "⟦Ab⟧"), ("upper", "⟦ AB\n⟧")):
        with ChatFormat(template(text.replace("F", name, 1)), Bytes(), DATE) as chats:
            assert table(chats.encode(chat, "assistant")) == expected
    why = "T fails for this chat (a block {% generation %} is inside another, cut, or in a filter that changes"
    with ChatFormat(template(text.replace("F", "center(9)", 1)), Bytes(), DATE) as chats, refused(why):
        chats.encode(chat, "assistant")


@pytest.mark.parametrize("style", ["qwen", "marked"])
def test_messages_that_a_record_excludes(formats, style):
    """By any of the keys, of any role; a key that nobody reads is named once."""
    messages = [dict(message) for message in PLAIN]
    whole = table(formats[style].encode(read_chat({"messages": messages}), "assistant"))
    second = whole.replace("⟦Hello!<|im_end|>⟧", "Hello!<|im_end|>")
    for weight in ({"weight": 0}, {"loss": False}, {"loss_weight": 0.0}, {"train": False}, {"train": True, "loss": 0}):
        messages[2] = {**PLAIN[2], **weight, "mood": "good"}
        chat = read_chat({"messages": messages})
        assert table(formats[style].encode(chat, "assistant")) == second
        assert len(formats[style].examples(chat, "each")) == 1
    assert table(formats[style].encode(chat, "all")).count("⟦") == 2
    messages[1:3] = [{**PLAIN[1], "weight": 0}, {**PLAIN[2], "weight": 1}]
    assert "⟧<|im_start|>user\n Hi\n<|im_end|>\n⟦" in table(
        formats[style].encode(read_chat({"messages": messages}), "all")
    )
    assert formats[style].notes() == ["key mood in 11 messages has no effect: T does not read it"]


def test_a_special_token_that_prints_nothing_is_named():
    """Where the template asks whether there is one, it is not."""
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for text, line in (
        (
            "{{ bos_token }}",
            "T prints nothing for bos_token: no tokenizer_config.json or special_tokens_map.json beside",
        ),
        ("{% if bos_token is defined %}{{ bos_token }}{% endif %}{{ eos_token | default('') }}", None),
    ):
        with ChatFormat(template(text + turns), Bytes(), DATE) as chats:
            assert [note[:88] for note in chats.notes()] == ([line[:88]] if line else [])


def test_a_comment_about_blocks_is_none():
    text = "{# {% endgeneration %} #}{% for m in messages %}{{ m.content }}{% endfor %}"
    with ChatFormat(template(text), Bytes(), DATE) as chats:
        assert table(chats.encode(read_chat({"prompt": "a", "completion": "b"}), "assistant")) == "a⟦b⟧"


def test_a_process_that_dies_is_replaced():
    with ChatFormat(template("{{ messages[0].content }}"), Bytes(), DATE) as chats:
        assert chats.encode(CHAT, "all").text == "Be brief."
        (child,) = chats._renderer._all
        assert child._process is not None
        child._process.kill()
        child._process.wait()
        with refused("rendering it by T ended its process (exit code -9); correct the template or leave"):
            chats.encode(CHAT, "all")
        assert chats.encode(CHAT, "all").text == "Be brief."
