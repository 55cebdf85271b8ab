"""tokenizer_config.json and special_tokens_map.json of a folder, and the variables that they give to a template."""

from typing import Any

CASES: list[tuple[dict[str, Any] | None, dict[str, Any], dict[str, str]]] = [
    # Names that every tokenizer has: the older file comes first, and can remove one.
    (
        {"eos_token": "</s>"},
        {"eos_token": "<a>", "pad_token": {"content": "<p>"}},
        {"eos_token": "<a>", "pad_token": "<p>"},
    ),
    ({"eos_token": "</s>", "bos_token": "<s>"}, {"eos_token": None}, {"bos_token": "<s>"}),
    (None, {"cls_token": "<c>", "additional_special_tokens": ["<a>"]}, {"cls_token": "<c>"}),
    # Other names: it comes last, except for those in extra_special_tokens.
    ({"a_token": "<a>"}, {"a_token": "<b>", "c_token": "<c>"}, {"a_token": "<a>", "c_token": "<c>"}),
    ({"a_token": "<a>"}, {"a_token": None}, {"a_token": "<a>"}),
    (
        {"a_token": "<a>", "eos_token": "<e>", "extra_special_tokens": {"a_token": "<b>", "d": "<d>"}},
        {"extra_special_tokens": {"a_token": "<c>"}},
        {"a_token": "<c>", "d": "<d>", "eos_token": "<e>"},
    ),
    ({"extra_special_tokens": {"d": "<d>"}}, {"extra_special_tokens": ["<e>"]}, {"d": "<d>"}),
    ({"extra_special_tokens": {"eos_token": "<a>"}}, {"eos_token": "<b>"}, {"eos_token": "<a>"}),
    # It is not read where the tokenizer's tokens are in the configuration.
    ({"eos_token": "<e>", "added_tokens_decoder": {}}, {"eos_token": "<a>", "bos_token": "<b>"}, {"eos_token": "<e>"}),
]
