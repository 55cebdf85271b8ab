"""Read and write Hugging Face folders.

Nothing is downloaded or unpickled, and no code from a folder runs. What a folder holds is compared with its config.json
before anything is built.
"""

import contextlib
import json
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moezoo.convert import convert, show
from moezoo.errors import UserError
from moezoo.hub.carry import Carried, carry
from moezoo.hub.json_files import read_json
from moezoo.hub.nested import TEXT
from moezoo.hub.opening import folder_argument, open_folder
from moezoo.hub.tensors import Tensor, arrays_by_path, count, list_names, read_part, require_names, tensors
from moezoo.hub.weight_files import INDEX, SINGLE
from moezoo.models import ModelConfig, family_of
from moezoo.models.base import LanguageModel
from moezoo.parallel.mesh import with_auto_axes

SHARD_BYTES = 5_000_000_000  # at most, per safetensors file


def hub_model_config(folder: str | Path) -> ModelConfig:
    """Return the configuration of the model in a Hugging Face folder, whose files have its layers and experts.

    Raises `UserError` as `from_pretrained` does.
    """
    return open_folder(folder_argument(folder)).config


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


def save_pretrained(model: LanguageModel, folder: str | Path, like: str | Path | None = None) -> Carried:
    """Write a folder that transformers loads: config.json and safetensors.

    Files are at most 5 GB; several files get an index. A container is written as the array that it stands for.
    Settings that transformers has no key for are lost, such as the rate at which choice biases move; a warning names
    those that differ from what `from_pretrained` will read.

    With `like`, the Hugging Face folder that the model was loaded from, the new folder also gets what the model does
    not hold. Every tensor is in the file that has it there, with the same index and metadata. Tensors that no parameter
    has, such as those for multi-token prediction or for images, are copied to the bit in their dtype; the model's own
    have the dtype of its arrays. config.json is that of `like`, in which settings that the model has changed are
    replaced. Tokenizer, chat template, generation_config.json and other texts are copied as they are. Not copied are
    code (*.py and other programs), weights in other formats, weights that no index names, hidden files and subfolders.
    Files are copied, also where `like` has links. A warning names copied tensors if the model's own differ from those
    of `like`, because they were trained with the latter. One tensor at a time is in memory.

    Args:
        model: Any model of a registered family.
        folder: The folder, which is made if it does not exist.
        like: A folder of a model of the same type and sizes.

    Returns:
        What was copied from `like`, and what was not.

    Raises:
        UserError: `model` is no model. The folder already holds a model, or cannot be written. `like` is damaged, is
            that folder, or is a folder of another model.
    """
    if not isinstance(model, LanguageModel):
        raise UserError(f"save_pretrained: the first argument is a {type(model).__name__}, expected a model")
    folder = folder_argument(folder)
    opened = None if like is None else open_folder(folder_argument(like, "like"))
    if opened and folder.resolve() == opened.folder.resolve():
        raise UserError(f"save_pretrained: folder and like are both {folder}; name another folder to write")
    if any((folder / name).exists() for name in ("config.json", SINGLE, INDEX)):
        raise UserError(f"{folder} already holds a model, or a part of one; name another folder")
    if opened:
        with _writing(folder):
            carried = carry(model, folder, opened)
        if carried.changed and carried.tensors:
            parts = (
                f"{count(names)} from there, for {use}: {list_names(names)}" for use, names in carried.tensors.items()
            )
            _warn(f"{folder}: the model's weights differ from those of {like}, but {'; '.join(parts)}")
        if carried.rounded:
            names = list(carried.rounded)
            less = f"{count(names)} less precise than in {like}; load it with dtype=float32"
            _warn(f"{folder}: {less}: {list_names(names)}")
        if lost := _describe_lost(model.config):
            _warn(f"{folder}: {lost}")
        return carried
    family = family_of(model.config)
    arrays = arrays_by_path(with_auto_axes(model))
    plan = list(tensors(model, family.hub))
    require_names(arrays, plan)
    sizes = [math.prod(t.shape) * arrays[t.parts[0][0]].dtype.itemsize for t in plan]
    shards: list[list[Tensor]] = [[]]
    room = SHARD_BYTES
    for tensor, size in zip(plan, sizes, strict=True):
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(tensor)
        room -= size
    config = family.hub.write(model.config)
    config["dtype"] = str(model.embedding.weight.dtype)
    # Without these keys, transformers' defaults make some tokens of this vocabulary special.
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        last = len(shards)
        names = [SINGLE] if last == 1 else [f"model-{i + 1:05}-of-{last:05}.safetensors" for i in range(last)]
        for name, shard in zip(names, shards, strict=True):
            _write(folder / name, shard, arrays)
        if last > 1:
            where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in names:
            shutil.copymode(folder / "config.json", folder / name)  # safetensors makes files private
    if lost := _describe_lost(model.config):
        _warn(f"{folder}: {lost}")
    return Carried()


def _describe_lost(config: ModelConfig) -> str:
    """Return which settings a folder does not keep, on one line; empty if it keeps all."""
    lost = family_of(config).hub.lost(config)
    pairs = (f"model.{ours}={show(value)} (read back as {show(other)})" for ours, (value, other) in lost.items())
    return f"transformers has no key for {', '.join(pairs)}" if lost else ""


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise `UserError` where the folder or something in it cannot be written."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(f"{folder}: cannot be written ({reason}); name another folder") from error


def _write(path: Path, shard: list[Tensor], arrays: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    values = {t.name: t.to_file([read_part(arrays[p], index) for p, index in t.parts]) for t in shard}
    save_file(values, path, metadata={"format": "pt"})  # transformers refuses files without it


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
