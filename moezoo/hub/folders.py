"""What a Hugging Face folder says of its model, without its tensors."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from moezoo.data.file_settings import FileSettings
from moezoo.data.tokenizer import HuggingFace
from moezoo.errors import UserError
from moezoo.host.files import INFINITY, is_same_file, json_text, read_json
from moezoo.hub.opening import folder_argument, open_folder
from moezoo.hub.other_names import TEXT
from moezoo.hub.plan import GENERATION, Plan
from moezoo.hub.upcycling import NOT_UPCYCLED, Upcycle
from moezoo.models import ModelConfig
from moezoo.typed import convert, show


def hub_model_config(folder: str | Path, upcycle: Upcycle = NOT_UPCYCLED) -> ModelConfig:
    """Return the configuration of the model in a Hugging Face folder, whose files have its layers and experts.

    With `upcycle` it is that of the mixture of experts which the dense model in the folder becomes.

    Raises `UserError` as `from_pretrained` does.
    """
    return open_folder(folder_argument(folder), upcycle).config


def end_of_text(folder: str | Path) -> list[int]:
    """Return the tokens that end a text: `eos_token_id` of generation_config.json, or else of config.json, or none."""
    for name in (GENERATION, "config.json"):
        path = Path(folder).expanduser() / name
        mapping = read_json(path, constants=INFINITY) if path.exists() else {}
        inner = mapping.get(TEXT)
        for table in (mapping, inner if isinstance(inner, Mapping) else {}):
            if (found := table.get("eos_token_id")) is not None:
                tokens = found if isinstance(found, list) else [found]
                return [convert(int, token, f"{show(str(path))}: eos_token_id") for token in tokens]
    return []


def with_ends(plan: Plan, like: Path, ends: Sequence[int]) -> Plan:
    """Return a plan that copies the folder `like`, with `ends` among the tokens that end a text; other keys stay.

    They stand in generation_config.json, which readers take first. Raises `UserError` for a damaged file.
    """
    known = end_of_text(like)
    if not (new := [token for token in ends if token not in known]):
        return plan
    file = plan.others.get(GENERATION)
    table = {**(read_json(file) if isinstance(file, Path) else {}), "eos_token_id": [*known, *new]}
    return plan.with_files({GENERATION: json_text(table)})


def find_tokenizer(folder: str | Path) -> Path | None:
    """Return the path of a folder's tokenizer.json; None without one."""
    path = Path(folder).expanduser() / "tokenizer.json"
    return path if path.exists() else None


def tokenizer_config(beside: Path | None, template: Path | None = None) -> bytes:
    """Return a tokenizer_config.json: that `beside` a tokenizer.json, None for nothing, with a class that readers have.

    Without a class transformers takes that of the model type, which may make other ids of the same tokenizer.json.
    `TokenizersBackend` is the name of `PreTrainedTokenizerFast` that only transformers 5 knows. Where that class gets
    no `model_input_names`, transformers 4 makes inputs that the models refuse.

    `template` is a .json file whose chat_template replaces the one there.

    Raises `UserError` for a damaged file.
    """
    found = {} if beside is None else read_json(beside)
    if found.get("tokenizer_class") in (None, "TokenizersBackend"):
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if found["tokenizer_class"] == "PreTrainedTokenizerFast":
        found.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if template is not None:
        found["chat_template"] = read_json(template).get("chat_template")
    return json_text(found)


def text_settings(
    folder: Path, key: str, vocab: int, ours: FileSettings, given: Container[str]
) -> dict[str, str | None]:
    """Return what data of files needs to make the tokens of a folder: its fields `tokenizer` and `end_token`.

    The end token is the first of `end_of_text`. A chat template is that beside the tokenizer.

    Args:
        folder: The Hugging Face folder.
        key: The user's name of it, `folder` or `init_from`.
        vocab: The vocabulary of its model.
        ours: The data.
        given: The fields of it that the user has set. With another tokenizer there is nothing to return.

    Raises:
        UserError: There is no tokenizer.json, it has more tokens than the model, or it lacks the end token.
    """
    shown, file = show(f"{key}={folder}"), find_tokenizer(folder)
    if "tokenizer" in given and not has_tokenizer(ours, file):
        return {}
    if file is None:
        raise no_tokenizer(shown)
    tokenizer = HuggingFace(file, key="data.tokenizer")
    if tokenizer.vocab > vocab:
        raise UserError(
            f"{shown}: tokenizer.json has {tokenizer.vocab} tokens but the model {vocab}; they belong to different "
            "models"
        )
    found: dict[str, str | None] = {"tokenizer": str(file)}
    if "end_token" not in given and (ends := end_of_text(folder)):
        found["end_token"] = tokenizer.token_text(ends[0])
        if found["end_token"] is None:
            raise UserError(
                f"{shown}: eos_token_id={ends[0]} is no token of tokenizer.json; set data.end_token to the text of "
                "one, or to null for none"
            )
    return found


def has_tokenizer(ours: FileSettings, theirs: Path | None) -> bool:
    """Return whether data have the tokenizer of a model: a file with the same contents."""
    own = ours.tokenizer_file()
    return own is not None and theirs is not None and is_same_file(own, theirs)


def no_tokenizer(shown: str) -> UserError:
    """Return the error of weights from which it is not known how text becomes tokens."""
    return UserError(
        f"{shown} has no tokenizer.json; set data.tokenizer to the path of its own, or to null if its tokens are bytes"
    )
