"""Write a Hugging Face folder."""

import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer

from moezoo.errors import UserError, describe_class
from moezoo.host.files import json_text
from moezoo.hub.carry import Carried, ModelFolder, plan_copy
from moezoo.hub.few_bits import format_argument
from moezoo.hub.folders import with_ends
from moezoo.hub.formats.base import Format
from moezoo.hub.opening import folder_argument, open_folder
from moezoo.hub.plan import GENERATION, Entry, Plan, leaving, make_file
from moezoo.hub.tensors import arrays_by_path, require_names, tensors
from moezoo.hub.values import ModelValues, Values
from moezoo.hub.weight_files import INDEX, SINGLE
from moezoo.models import ModelConfig, family_of
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.parallel import distributed
from moezoo.parallel.fetch import is_here
from moezoo.typed import Range, convert, show

_SHARD_BYTES = 5_000_000_000
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def save_pretrained(
    model: LanguageModel,
    folder: str | Path,
    like: str | Path | None = None,
    *,
    max_shard_size: int | str | None = None,
    format: Literal["fp8", "mxfp4"] | None = None,
) -> Carried:
    """Write a folder that transformers 4.57 and 5 load: config.json and safetensors.

    The arrays of the model may lie on any mesh. With several processes all of them call this, for a folder on a disk
    that they share: each writes its own files, and one tensor at a time is in the memory of each. Weights of few bits
    that `from_pretrained` kept (`dtype="stored"`) are written with the bits that the folder had. Other containers are
    written as the arrays that they stand for. Several files get an index.

    The files grow in a temporary folder, `.NAME.unfinished` beside a new `folder`, which then gets its name in one
    operation. Into a folder that exists they are moved from `.unfinished` in it, config.json last; other files stay
    there. So what a killed save leaves is never loaded, and the next one replaces it.

    Settings that transformers has no key for are lost, such as the rate at which choice biases move; a warning names
    those that were changed and differ from what `from_pretrained` will read.

    With `like`, the Hugging Face folder that the model was loaded from, the new folder also gets what the model does
    not hold. Every tensor is in the file that has it there, with the same index and metadata. Tensors that no parameter
    has, such as those for multi-token prediction or for images, are copied to the bit in their dtype; the model's own
    have the dtype of its arrays. config.json is that of `like`, in which settings that the model has changed are
    replaced. Tokenizer, chat template, generation_config.json and other texts are copied as they are. Not copied are
    code (*.py and other programs), weights in other formats, weights that no index names, hidden files and subfolders.
    Files are copied, also where `like` has links. A warning names copied tensors if the model's own differ from those
    of `like`, because they were trained with the latter.

    Args:
        model: Any model of a registered family.
        folder: Is made if it does not exist.
        like: A folder of a model of the same type and sizes.
        max_shard_size: The most bytes of tensors in one file, a number or a text such as "5GB", which is the default. A
            larger tensor has a file of its own. Leave it out with `like`, which has files of some size.
        format: Round the weights of layers, those of routers apart, to few bits: `fp8`, with blocks of 128 x 128, or
            `mxfp4`, for the experts of gpt-oss. `docs/numbers.md` defines the rounding. None leaves arrays as they are.

    Returns:
        What was copied from `like`, and what was not.

    Raises:
        UserError: `model` is no model, an array is deleted or traced, or has another shape than its configuration has.
            The folder already holds a model, or one of the files, cannot be written, or its
            disk is too small. `like` is damaged, is that folder, or is a folder of another model. Processes save
            different models. With several processes, all raise what one of them raises.
    """
    if not isinstance(model, LanguageModel):
        raise UserError(f"save_pretrained: the first argument is a {type(model).__name__}, expected a model")
    folder, arrays = folder_argument(folder), distributed.together(lambda: _own_arrays(model))
    _check_same(arrays, {"folder": folder, "like": like, "max_shard_size": max_shard_size, "format": format})
    other, rounds_to = None if like is None else folder_argument(like, "like"), format_argument(format)

    def plan() -> ModelFolder:
        planned = plan_model(model, folder, other, ModelValues(arrays), max_shard_size, rounds_to)
        check_target(folder)
        return planned

    planned = distributed.together(plan)
    carried = planned.write(folder)
    if distributed.is_first():
        for text in (*planned.notes(carried), *lost_warnings(model.config)):
            warnings.warn(f"{folder}: {text}", stacklevel=2)
    return carried


def plan_model(
    model: LanguageModel,
    folder: Path,
    like: Path | None,
    values: Values,
    max_shard_size: int | str | None = None,
    rounds_to: Format | None = None,
    text_ends: Sequence[int] = (),
) -> ModelFolder:
    """Return how a model, whose arrays may be shapes, is written to `folder`, as a copy of the folder `like` if any.

    Args:
        model: The model.
        folder: The new folder.
        like: As in `save_pretrained`.
        values: The numbers of the model.
        max_shard_size: As in `save_pretrained`.
        rounds_to: The format that weights of layers are rounded to; None for none.
        text_ends: The tokens that end a text, as far as they are known; a folder that is like another has those too.

    Raises:
        UserError: As `save_pretrained` does.
    """
    if like is None:
        return _plan_alone(model, values, _shard_bytes(max_shard_size), rounds_to, text_ends)
    if max_shard_size is not None:
        raise UserError(f"max_shard_size={show(max_shard_size)}: the files are those of {like}; leave it out")
    opened = open_folder(like)
    if folder.resolve() == opened.folder.resolve():
        raise UserError(f"folder and like are both {folder}; name another folder to write")
    planned = plan_copy(model, opened, values, rounds_to)
    return planned._replace(plan=with_ends(planned.plan, like, text_ends))


def check_target(folder: Path) -> None:
    """Raise `UserError` where there is a model, or a part of one."""
    if any((folder / name).exists() for name in ("config.json", SINGLE, INDEX)):
        raise UserError(f"{folder} already holds a model, or a part of one; name another folder")


def _plan_alone(
    model: Any, values: Values, most: int, rounds_to: Format | None, text_ends: Sequence[int]
) -> ModelFolder:
    """Return the files of a model. `most`: the bytes of tensors in one file."""
    family = family_of(model.config)
    parts = list(tensors(model, family.hub))
    require_names(arrays_by_path(model), parts)
    shards: list[list[Entry]] = [[]]
    room, leaves = most, leaving(parts, values, rounds_to)
    for entry in itertools.chain.from_iterable(map(leaves.entries, parts)):
        if entry.size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(entry)
        room -= entry.size
    last = len(shards)
    names = [SINGLE] if last == 1 else [f"model-{i + 1:05}-of-{last:05}.safetensors" for i in range(last)]
    files = list(map(make_file, names, shards))
    texts = {}
    if last > 1:
        where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        texts[INDEX] = json_text({"metadata": {"total_size": sum(f.tensor_bytes for f in files)}, "weight_map": where})
    # torch_dtype is the name before transformers 4.56.
    config = family.hub.write(model.config) | leaves.table | dict.fromkeys(("dtype", "torch_dtype"), leaves.dtype.name)
    # Without these keys, transformers' defaults make some tokens of this vocabulary special.
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if text_ends:
        config["eos_token_id"] = text_ends[0] if len(text_ends) == 1 else list(text_ends)
        texts[GENERATION] = json_text({"eos_token_id": config["eos_token_id"]})
    return ModelFolder(Plan(files, {**texts, "config.json": json_text(config)}, values), leaves)


def lost_warnings(config: ModelConfig) -> Iterator[str]:
    """Yield which settings a folder does not keep, of those that differ from the defaults of their classes."""
    lost = {ours: pair for ours, pair in family_of(config).hub.lost(config).items() if not _is_default(config, ours)}
    pairs = (f"model.{ours}={show(value)} (read back as {show(other)})" for ours, (value, other) in lost.items())
    if lost:
        yield f"transformers has no key for {', '.join(pairs)}"


def _is_default(config: ModelConfig, ours: str) -> bool:
    *sections, name = ours.split(".")
    section = functools.reduce(getattr, sections, config)
    (default,) = (field.default for field in dataclasses.fields(section) if field.name == name)
    return getattr(section, name) == default


def _own_arrays(model: LanguageModel) -> dict[str, Any]:
    """Return the arrays of a model by path. Raises `UserError` unless all hold numbers, in the shapes of its config."""
    found, expected = arrays_by_path(model), arrays_by_path(Blueprint(model.config).shapes)
    for path in expected | found:
        for array in jax.tree.leaves(found.get(path)):
            if fault := _fault(array):
                raise UserError(f"save_pretrained: {path} {fault}")
        has, wants = (f"shape {list(some[path].shape)}" if path in some else "no array" for some in (found, expected))
        if has != wants:
            raise UserError(
                f"save_pretrained: {path} has {has}, expected {wants} by model.config; save a model whose config "
                "describes its arrays"
            )
    return found


def _fault(array: Any) -> str | None:
    """Return why the numbers of an array cannot be written, in words that follow its name; None if they can."""
    if isinstance(array, Tracer):
        return "is traced; call it outside of jax.jit and other transformations"
    if isinstance(array, jax.Array):
        return "is deleted, as by a program that donates it; save before that" if array.is_deleted() else None
    if not isinstance(array, np.ndarray):
        return f"is {describe_class(array)}, expected an array"
    return None if array.dtype.isnative else f"has the byte order {array.dtype.str}; convert it to this machine's"


def _check_same(arrays: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise `UserError` on all processes unless they save the same model: otherwise they would wait for each other."""
    if not distributed.several():
        return
    facts = {key: str(value) for key, value in arguments.items()}
    for name, parameter in arrays.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameter):
            where = "on each process" if is_here(leaf) else f"split as {leaf.sharding.spec}"
            facts[name + jax.tree_util.keystr(path)] = f"{leaf.dtype}{list(leaf.shape)} {where}"
    distributed.check_same(facts, "save_pretrained: the processes differ", "call it with the same in all of them")


def _shard_bytes(size: int | str | None) -> int:
    """Return a number of bytes. Raises `UserError` for what is none."""
    if size is None:
        return _SHARD_BYTES
    if isinstance(size, str):
        # More digits are more bytes than any disk has.
        match = re.fullmatch(rf"(\d{{1,18}}(?:\.\d{{1,18}})?) ?({'|'.join(_UNITS)})|\d{{1,18}}", size)
        unit = match and match[2]
        number = int(float(match[1]) * _UNITS[unit]) if match and unit else int(size) if match else 0
        if number < 1:
            raise UserError(
                f'max_shard_size={show(size)}: expected bytes, or a size such as "5GB" in {", ".join(_UNITS)}'
            )
        return number
    return convert(int, size, "max_shard_size", valid=Range(at_least=1, at_most=10**18))
