"""What a Hugging Face folder says of its model, without its tensors."""

from collections.abc import Mapping
from pathlib import Path

from moezoo.hub.json_files import read_json
from moezoo.hub.nested import TEXT
from moezoo.hub.opening import folder_argument, open_folder
from moezoo.hub.upcycling import NOT_UPCYCLED, Upcycle
from moezoo.models import ModelConfig
from moezoo.typed import convert


def hub_model_config(folder: str | Path, upcycle: Upcycle = NOT_UPCYCLED) -> ModelConfig:
    """Return the configuration of the model in a Hugging Face folder, whose files have its layers and experts.

    With `upcycle` it is that of the mixture of experts which the dense model in the folder becomes.

    Raises `UserError` as `from_pretrained` does.
    """
    return open_folder(folder_argument(folder), upcycle).config


def end_of_text(folder: str | Path) -> list[int]:
    """Return the tokens that end a text: `eos_token_id` of generation_config.json, or else of config.json, or none."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder).expanduser() / name
        mapping = read_json(path) if path.exists() else {}
        inner = mapping.get(TEXT)
        for table in (mapping, inner if isinstance(inner, Mapping) else {}):
            if (found := table.get("eos_token_id")) is not None:
                tokens = found if isinstance(found, list) else [found]
                return [convert(int, token, f"{name}: eos_token_id") for token in tokens]
    return []
