"""The options of commands that let a model read a text, and the text itself."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from moezoo.cli.model_keys import ModelKeys, configure_model
from moezoo.config.options import key
from moezoo.errors import UserError
from moezoo.typed import show


@dataclasses.dataclass(frozen=True)
class TextKeys(ModelKeys):
    """The options that name a model and the documents of its data."""

    split: Literal["validation", "all"] | None = key(
        "the documents: those held out for validation, or all (by default validation for a run; for a folder all, or "
        "those of data.validation)",
        "validation|all",
        default=None,
    )


class Text(NamedTuple):
    """The documents that were chosen, and the loaded data."""

    use: Literal["validation", "all"]
    source: Any


def configure_text(keys: TextKeys, changes: Sequence[str]) -> Any:
    """Return the run's configuration, or the default one with the folder's model and tokenizer; `changes` applied."""
    from moezoo.config.compose import given_keys
    from moezoo.data.file_settings import fill_in
    from moezoo.hub.folders import text_settings
    from moezoo.hub.opening import folder_argument

    cfg = configure_model(keys, changes)
    if keys.folder is None:
        return cfg
    folder = folder_argument(keys.folder)
    data = fill_in(
        cfg.data, given_keys(*changes), lambda *ours: text_settings(folder, "folder", cfg.model.vocab, *ours)
    )
    return dataclasses.replace(cfg, data=data)


def load_text(keys: TextKeys, cfg: Any, changes: Sequence[str]) -> Text:
    """Load the data. Raises `UserError` if the tokens are known to be of another tokenizer than the folder's."""
    from moezoo.data import load

    use = keys.split or ("all" if keys.folder and not cfg.data.has_own_validation else "validation")
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab, use=use)
    if keys.folder:
        _check_tokens(cfg, source, keys.folder, changes)
    return Text(use, source)


def _check_tokens(cfg: Any, source: Any, folder: str, changes: Sequence[str]) -> None:
    """Raise `UserError` if the tokens of `source` are known to be of another tokenizer than the folder's."""
    from moezoo.config.compose import given_keys
    from moezoo.data.tokenizer import is_same_tokenizer
    from moezoo.hub.folders import find_tokenizer

    own, made_by = find_tokenizer(folder), cfg.data.tokenizer_file()
    if own is None or any(key.endswith(".tokenizer") for key in given_keys(*changes)):
        return
    shown = show(f"folder={folder}")
    if source.unit == "byte":
        raise UserError(
            f"data={source.name} has bytes for tokens, but {shown} has a tokenizer.json; choose data=text "
            "data.path=FILE_OR_FOLDER"
        )
    if made_by is not None and not is_same_tokenizer(own, made_by):
        raise UserError(
            f"data={source.name}: {show(str(made_by))} made these tokens, and tokenizer.json of {shown} differs; make "
            "them again with moezoo prepare-data"
        )
