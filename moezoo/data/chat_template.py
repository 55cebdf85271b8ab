"""Chat templates and the special tokens that they name, as Hugging Face folders hold them."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.errors import UserError
from moezoo.host import check_file, read_text
from moezoo.json_files import read_json
from moezoo.typed import show

CONFIG, TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, OTHERS = "chat_template.jinja", "additional_chat_templates"
_STANDARD = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_GIVE = "give a .jinja file, or a tokenizer_config.json that has chat_template"


class Template(NamedTuple):
    """A chat template.

    - `shown`: what the user wrote, or the file, as messages begin;
    - `texts`: the text of the template, "default", and of the one for chats with tools, "tool_use", if it is another;
    - `variables`: the special tokens, by the names that templates have for them, such as eos_token.
    """

    shown: str
    texts: dict[str, str]
    variables: dict[str, Any]


def folder_template(folder: str | Path, *, key: str, advice: str = "set data.template=FILE") -> Template:
    """Return the chat template of a Hugging Face folder.

    Its chat_template.jinja comes before the chat_template of its tokenizer_config.json, which has the special tokens.

    Raises `UserError`, naming `key`, if there is none, which `advice` mends, or a file is damaged.
    """
    folder = Path(os.path.expanduser(folder))
    own = (folder / TEMPLATE).exists()
    shown = show(str(folder / (TEMPLATE if own else CONFIG)))
    texts = _read_templates(folder / (TEMPLATE if own else CONFIG), shown)
    for path in sorted((folder / OTHERS).glob("*.jinja")) if own else ():
        texts[path.stem] = read_text(path, show(str(path)), _GIVE)
    if not texts:
        raise UserError(
            f"{key}: {show(str(folder))} has no chat template ({TEMPLATE}, or chat_template in {CONFIG}); {advice}"
        )
    return Template(shown, texts, special_tokens(folder))


def file_template(path: str, *, key: str, tokenizer: str | None) -> Template:
    """Return the chat template in a file: its text, or the chat_template of a .json file.

    Args:
        path: The file.
        key: The user's name of the setting.
        tokenizer: The tokenizer.json beside which tokenizer_config.json has the special tokens; None for a file
            beside the template.

    Raises:
        UserError: The file does not exist, is damaged, or has no template.
    """
    file, shown = Path(os.path.expanduser(path)), show(f"{key}={path}")
    beside = file if tokenizer is None else Path(os.path.expanduser(tokenizer))
    check_file(file, shown, _GIVE)
    texts = _read_templates(file, shown)
    if not texts:
        raise UserError(f"{shown} has no chat_template; {_GIVE}")
    return Template(shown, texts, special_tokens(beside.parent))


def missing_tokens(template: Template, names: Iterable[str]) -> str | None:
    """Return a line about the special tokens among `names` that have no text; None if there is none.

    Templates print nothing in place of a variable that has no value, so a turn would have no end, or a chat no
    beginning, without a word.

    Args:
        template: The template.
        names: The variables that it prints and does not set itself.
    """
    missing = sorted({name for name in names if name.endswith("_token") and name not in template.variables})
    if not missing:
        return None
    it = "it" if len(missing) == 1 else "them"
    return (
        f"{template.shown} prints nothing for {' and '.join(missing)}: no {CONFIG} or {TOKENS} beside the tokenizer "
        f"has {it}; if the model needs {it}, write {it} into {CONFIG}"
    )


def _read_templates(file: Path, shown: str) -> dict[str, str]:
    """Return the templates in a file: its text, or those of a .json file, one text or a list of named ones."""
    if file.suffix != ".json":
        return {"default": read_text(file, shown, _GIVE)}
    found = _read_config(file, shown).get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    named = found if isinstance(found, list) else []
    texts = {each.get("name"): each.get("template") for each in named if isinstance(each, dict)}
    if not all(isinstance(part, str) for pair in texts.items() for part in pair) or "default" not in texts:
        raise UserError(f"{shown}: chat_template is neither a text nor a list with one named default; {_GIVE}")
    return texts  # pyright: ignore[reportReturnType] checked above


def special_tokens(folder: Path) -> dict[str, Any]:
    """Return the variables that the files of a tokenizer give to templates, as transformers 5.24 does.

    special_tokens_map.json, of older versions, is read where tokenizer_config.json has no added_tokens_decoder. It
    comes first for the names of `_STANDARD`, of which null removes one, and last for texts with other names.
    """
    config = _read_config(folder / CONFIG, show(str(folder / CONFIG)))
    older = {} if "added_tokens_decoder" in config else _read_config(folder / TOKENS, show(str(folder / TOKENS)))
    other = {name: value for name, value in config.items() if name not in _STANDARD and isinstance(value, str)}
    # Here a name need not end with _token.
    extra: dict[str, Any] = {}
    for each in (config, older):
        if isinstance(found := each.get("extra_special_tokens"), dict):
            extra |= found
    named = {name: value for name, value in {**config, **older, **other}.items() if name.endswith("_token")}
    found = {name: _token_text(value) for name, value in {**named, **extra}.items()}
    return {name: text for name, text in found.items() if text is not None}


def _token_text(value: Any) -> str | None:
    """Return the text of a token, which may be in an object; None for what is no token."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _read_config(path: Path, shown: str) -> dict[str, Any]:
    """Return the object in a JSON file; empty without the file."""
    return read_json(path, shown, "copy or download it again") if path.exists() else {}
