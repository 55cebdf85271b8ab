"""Chats in the styles of six families of published templates, with the text that each must give, written by hand.

In a table, what the assistant has written, and with it what is trained, stands between ⟦ and ⟧.
"""

# ruff: noqa: RUF001 the bars of DeepSeek's special tokens are wide

from pathlib import Path
from typing import Any, NamedTuple

CALL = {"type": "function", "function": {"name": "sum", "arguments": {"of": [1, 2]}}}
TOOL = {"type": "function", "function": {"name": "sum", "description": "Adds <b>.", "parameters": {"type": "object"}}}
PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]
WITH_TOOL: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
THINKING: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nHello!"},
]


class Style(NamedTuple):
    """A template, its special tokens, the variables of its tokenizer_config.json, and chats with their tables."""

    template: str
    special: tuple[str, ...]
    variables: dict[str, str]
    chats: dict[str, tuple[list[dict[str, Any]], str]]
    tools: list[dict[str, Any]] | None = None


# Qwen2.5: a default system message, tools as JSON lines, results of tools in a turn of the user.
QWEN = Style(
    template="""\
{%- set first = messages[0] %}
{{- '<|im_start|>system\\n' + (first.content if first.role == 'system' else 'You help.') }}
{%- if tools %}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    special=("<|im_start|>", "<|im_end|>"),
    variables={"eos_token": "<|im_end|>"},
    chats={
        "plain": (
            PLAIN,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\n"
            "⟦Hello!<|im_end|>⟧\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦See you.<|im_end|>⟧\n",
        ),
        "tools": (
            WITH_TOOL,
            '<|im_start|>system\nYou help.\n<tools>\n{"type": "function", "function": {"name": "sum", "description": '
            '"Adds <b>.", "parameters": {"type": "object"}}}\n</tools><|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n'
            '<|im_start|>assistant\n⟦<tool_call>\n{"name": "sum", "arguments": {"of": [1, 2]}}\n</tool_call>'
            "<|im_end|>⟧\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            "⟦It is 3.<|im_end|>⟧\n",
        ),
    },
    tools=[TOOL],
)

# Llama 3: headers, trimmed contents, no line end between turns; the date as text.
LLAMA = Style(
    template="""\
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    variables={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    chats={
        "plain": (
            PLAIN,
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 03 Feb 2025\n\n"
            "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
            "⟦Hello!<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦See you.<|eot_id|>⟧",
        ),
        "tools": (
            WITH_TOOL,
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 03 Feb 2025\n\n<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n1+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            '⟦{"name": "sum", "parameters": {"of": [1, 2]}}<|eot_id|>⟧<|start_header_id|>ipython<|end_header_id|>\n\n'
            "3<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦It is 3.<|eot_id|>⟧",
        ),
    },
)

# Mistral: no generation prompt; the system message is part of the first one of the user; turns must alternate.
MISTRAL = Style(
    template="""\
{%- if messages and messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
""",
    special=("<s>", "</s>", "[INST]", "[/INST]"),
    variables={"bos_token": "<s>", "eos_token": "</s>"},
    chats={
        "plain": (
            PLAIN,
            "<s>[INST] Be brief.\n\n Hi\n[/INST]⟦ Hello!</s>⟧[INST] Bye[/INST]⟦ See you.</s>⟧",
        )
    },
)

# DeepSeek V3: wide bars, no white space between turns, calls of tools without content.
DEEPSEEK = Style(
    template="""\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = ns.system + message['content'] %}
    {%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<｜User｜>' + message['content'] + '<｜Assistant｜>' }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {%- for call in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '\\n' }}
            {{- call['function']['arguments'] | tojson(ensure_ascii=True) }}{{ '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
""",
    special=(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        *(f"<｜tool▁{what}▁{end}｜>" for what in ("call", "output") for end in ("begin", "end")),
    ),
    variables={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    chats={
        "plain": (
            PLAIN,
            "<｜begin▁of▁sentence｜>Be brief.<｜User｜> Hi\n<｜Assistant｜>⟦Hello!<｜end▁of▁sentence｜>⟧<｜User｜>Bye"
            "<｜Assistant｜>⟦See you.<｜end▁of▁sentence｜>⟧",
        ),
        "tools": (
            WITH_TOOL,
            "<｜begin▁of▁sentence｜><｜User｜>1+2?<｜Assistant｜>⟦<｜tool▁call▁begin｜>sum\n"
            '{"of": [1, 2]}<｜tool▁call▁end｜><｜end▁of▁sentence｜>⟧<｜tool▁output▁begin｜>3<｜tool▁output▁end｜>'
            "⟦It is 3.<｜end▁of▁sentence｜>⟧",
        ),
        "thinking": (
            THINKING,
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>⟦\n\nHello!<｜end▁of▁sentence｜>⟧",
        ),
    },
)

# gpt-oss: channels, and an end of its own for the last turn, so only chats of one turn show what is the assistant's.
HARMONY = Style(
    template="""\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role in ('system', 'developer') %}
        {{- '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
""",
    special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
    variables={"eos_token": "<|return|>"},
    chats={
        "one turn": (
            [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "thinking": "Greet.", "content": "Hello!"},
            ],
            "<|start|>system<|message|>Current date: 2025-02-03<|end|><|start|>developer<|message|># Instructions\n\n"
            "Be brief.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant⟦<|channel|>analysis<|message|>Greet."
            "<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>⟧",
        )
    },
)

# Gemma 4: results of tools stand inside of the model's turn, and a prompt to answer ends with an empty thought.
GEMMA = Style(
    template="""\
{{- bos_token }}
{%- for message in messages %}
    {%- set before = messages[loop.index0 - 1].role if loop.index0 else '' %}
    {%- if message.role == 'tool' %}
        {{- '<|tool_response>response:sum{value:' + message.content + '}<tool_response|>' }}
    {%- else %}
        {%- if not (message.role == 'assistant' and before == 'tool') %}
            {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + '{of:[' + call.function.arguments.of | join(',') }}
            {{- ']}<tool_call|>' }}
        {%- endfor %}
        {%- if message.content %}
            {{- message.content | trim + '<turn|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
    {{- '<|turn>model\\n<|channel>thought\\n<channel|>' }}
{%- endif %}
""",
    special=(
        *("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    ),
    variables={"bos_token": "<bos>", "eos_token": "<turn|>"},
    chats={
        "plain": (
            PLAIN,
            "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n⟦Hello!<turn|>⟧\n"
            "<|turn>user\nBye<turn|>\n<|turn>model\n⟦See you.<turn|>⟧\n",
        ),
        "tools": (
            WITH_TOOL,
            "<bos><|turn>user\n1+2?<turn|>\n<|turn>model\n⟦<|tool_call>call:sum{of:[1,2]}<tool_call|>⟧<|tool_response>"
            "response:sum{value:3}<tool_response|>⟦It is 3.<turn|>⟧\n",
        ),
    },
    tools=[TOOL],
)

# A template that marks what the assistant has written, and leaves thoughts out of earlier turns, as Qwen3's does.
MARKED = Style(
    template="""\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content if loop.last else message.content.split('</think>')[-1].lstrip('\\n') }}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    special=("<|im_start|>", "<|im_end|>"),
    variables={"eos_token": "<|im_end|>"},
    chats={
        "history": (
            [*THINKING, *THINKING],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nwell\n</think>\n\nHello!<|im_end|>⟧\n",
        )
    },
)

STYLES = {
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
    "gemma": GEMMA,
    "marked": MARKED,
}
CASES = [(style, chat) for style in STYLES for chat in STYLES[style].chats]


def save_tokenizer(
    path: Path, special: tuple[str, ...], words: tuple[str, ...] = (), added: tuple[str, ...] = ("<think>",)
) -> Path:
    """Write a tokenizer.json: byte-level, each byte a token, also the beginnings of `words`, special and other ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = {character: number for number, character in enumerate(alphabet)}, []
    for word in words:
        for length in range(2, len(word) + 1):
            if word[:length] not in vocab:
                vocab[word[:length]] = len(vocab)
                merges.append((word[: length - 1], word[length - 1]))
    tokenizer: Any = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(path))
    return path
