"""What a run starts from in place of random weights: a Hugging Face folder, or a checkpoint of another run.

Nothing here reads a weight. `moezoo.training.initial` does, when the run begins.
"""

import dataclasses
import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.config.own import path_of, saved_own
from moezoo.config.run_folders import find
from moezoo.config.settings import TrainConfig
from moezoo.data import Chat, DataSettings, PythonStdlib
from moezoo.data.file_settings import FileSettings
from moezoo.errors import UserError, locating
from moezoo.hub.folders import find_tokenizer, has_tokenizer, no_tokenizer, text_settings
from moezoo.hub.kept import Form, describe_forms, usual_forms
from moezoo.hub.opening import Described, check_tensors, describe, describe_download, open_folder, read_config
from moezoo.hub.upcycling import NOT_UPCYCLED, Upcycle
from moezoo.models.adapters import NoAdapter
from moezoo.models.blueprint import Blueprint
from moezoo.typed import MayChange, flatten, notes_of, put, show, to_plain, types_of


class Origin(NamedTuple):
    """What a run may start from.

    Attributes:
        path: A Hugging Face folder, or `checkpoints/STEP` of a run; from any working directory.
        model: Its model, with the section's key `family`.
        sha256: The hash of config.json and of the names, shapes and dtypes of tensors, or of a checkpoint's checksums.
        stored: What most of its numbers are stored as, in words.
        run: The configuration of the run; None for a Hugging Face folder.
        data: What the run was trained on; None where that is a class of the user's own.
        upcycle: What becomes of a dense model.
        described: What config.json describes, where nothing else of the folder is read; None for weights.
    """

    path: Path
    model: Mapping[str, Any]
    sha256: str
    stored: str
    run: TrainConfig | None = None
    data: DataSettings | None = None
    upcycle: Upcycle = NOT_UPCYCLED
    described: Described | None = None

    @property
    def shown(self) -> str:
        """The key and the path, for messages."""
        return f"{'init_from' if self.described is None else 'folder'}={self.path}"

    @property
    def has_tokenizer(self) -> bool:
        """Whether it is known from here how text becomes tokens; data of a run without a tokenizer may be bytes."""
        return self.tokenizer is not None or _reads_text(self.data)

    @property
    def tokenizer(self) -> Path | None:
        """The path of the tokenizer.json; None without one."""
        if self.run is None:
            return find_tokenizer(self.path)
        return None if self.data is None else self.data.tokenizer_file()

    def text_settings(self, ours: FileSettings, given: Container[str]) -> dict[str, str | None]:
        """Return what the data `ours` need to make the tokens of these weights, unless another tokenizer is `given`.

        Raises `UserError` as `moezoo.hub.folders.text_settings` does.
        """
        if self.run is None:
            return text_settings(self.path, "init_from", self.model["vocab"], ours, given)
        found = run_text_settings(self.data, ours, given)
        if found is None:
            raise no_tokenizer(show(f"init_from={self.path}"))
        return found

    def forms(self, cfg: TrainConfig) -> dict[str, Form]:
        """Return what the parameters that `cfg` does not train are stored as, by patterns of their paths."""
        if self.run is not None:
            own = self.run.execution.param_dtype
            return dict(self.run.init_forms) if own == "stored" else {"*": Form(own)}
        blueprint = Blueprint(cfg.model, trained=cfg.trained, frozen=cfg.frozen, adapter=cfg.adapter)
        if (told := self.described) is not None:
            forms = usual_forms(Blueprint(cfg.model).shapes, told.quantization, told.usual_dtype)
            return {path: form for path, form in forms.items() if path in blueprint.constant_paths}
        opened = dataclasses.replace(open_folder(self.path, self.upcycle), config=cfg.model)
        found = check_tensors(opened, blueprint.shapes)
        with locating(str(self.path)):
            return describe_forms(blueprint, found.holdings)


def run_text_settings(
    data: DataSettings | None, ours: FileSettings, given: Container[str]
) -> dict[str, str | None] | None:
    """Return what the data `ours` need to make the tokens of the `data` of a run, unless another tokenizer is `given`.

    It is what `data` have; of a mixture, its first source of files, or of chats. None where it is not known how text
    becomes tokens of `data`.
    """
    tokenizer = None if data is None else data.tokenizer_file()
    if "tokenizer" in given and not has_tokenizer(ours, tokenizer):
        return {}
    if data is None or not _reads_text(data):
        return None
    end = next((part.end_token for part in data.parts.values() if isinstance(part, FileSettings)), None)
    found = {"tokenizer": tokenizer and str(tokenizer), "end_token": end}
    if isinstance(ours, Chat):
        found["template"] = next((part.template for part in data.parts.values() if isinstance(part, Chat)), None)
    return found


def _reads_text(data: DataSettings | None) -> bool:
    """Return whether it is known how text becomes tokens of `data`; without a tokenizer they may be bytes."""
    if data is None:
        return False
    reads = any(isinstance(part, FileSettings | PythonStdlib) for part in data.parts.values())
    return reads or data.tokenizer_file() is not None


def folder_origin(path: Path, typed: str, upcycle: Upcycle) -> Origin:
    """Return what the Hugging Face folder `path` is, which the user set init_from to as `typed`.

    With `upcycle` it has a dense model, and the result describes the one that it becomes.

    Raises `UserError` for what is no such folder, and as `moezoo.from_pretrained` does for what it cannot read.
    """
    shown = show(f"init_from={typed}")
    if not path.exists():
        raise UserError(
            f"{shown}: there is no such folder; name a Hugging Face folder or a run{describe_download(path)}"
        )
    if not path.is_dir():
        raise UserError(f"{shown} is a file; name the folder that has it")
    if not (path / "config.json").exists():
        raise UserError(
            f"{shown}: neither a Hugging Face folder (config.json is missing) nor a run (config.yaml is missing); name "
            "one of these"
        )
    opened = open_folder(path, upcycle)
    stored = _stored(opened.files.guess_dtype().name, opened)
    return Origin(path.resolve(), _section(opened), opened.sha256, stored, upcycle=upcycle)


def described_origin(path: Path, typed: str, upcycle: Upcycle) -> Origin:
    """Return what the config.json of a folder says, which the user set folder to as `typed`; nothing else is read.

    `path` is the folder or the file. Raises `UserError` for what is neither, and for what moezoo does not have.
    """
    if not path.exists():
        raise UserError(
            f"{show(f'folder={typed}')}: there is no such folder, and no such file{describe_download(path)}"
        )
    described = describe(path, upcycle) if path.is_file() else read_config(path, upcycle)
    sha256 = hashlib.sha256(json.dumps(described.mapping, sort_keys=True).encode()).hexdigest()
    stored = _stored(described.usual_dtype, described)
    return Origin(path.resolve(), _section(described), sha256, stored, upcycle=upcycle, described=described)


def _section(described: Described) -> dict[str, Any]:
    return {"family": path_of(type(described.config)), **to_plain(described.config)}


def _stored(dtype: str, described: Described) -> str:
    return dtype if described.quantization is None else f"{dtype}, {described.quantization.NAME}"


def run_origin(path: Path, mapping: Mapping[str, Any], run: TrainConfig) -> Origin:
    """Return what the run `path` is, or its checkpoint, with the saved configuration `mapping`.

    `run` is that configuration with something of moezoo's in place of what is of the user's own. Raises as
    `find_weights` does.
    """
    if not isinstance(run.adapter, NoAdapter):
        raise UserError(
            f"init_from={path} is a run with an adapter; write its merged weights as a folder, moezoo convert {path} "
            "FOLDER, and start from that"
        )
    weights = find_weights(path)
    data, stored = None if "data" in saved_own(mapping) else run.data, run.execution.param_dtype
    if stored == "stored":
        stored = ", ".join(dict.fromkeys(["float32", *(form.format or form.dtype for form in run.init_forms.values())]))
    checkpoint = weights.checkpoints.resolve() / str(weights.step)
    return Origin(checkpoint, mapping["model"], weights.sha256, stored, run, data)


class RunWeights(NamedTuple):
    """A checkpoint, `checkpoints/step`, and the hash of its checksums."""

    checkpoints: Path
    step: int
    sha256: str


def find_weights(path: Path) -> RunWeights:
    """Return the checkpoint that `init_from` names: the newest of a run, or one of its `checkpoints/STEP`.

    Raises `UserError` if there is none.
    """
    checkpoints, step = find(path, "init_from")
    sums = checkpoints / str(step) / "sha256.json"
    try:
        return RunWeights(checkpoints, step, hashlib.sha256(sums.read_bytes()).hexdigest())
    except OSError:
        raise UserError(f"init_from={path}: {sums} cannot be read; name another checkpoint or run") from None


def first_settings(kind: type, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's section as training begins with weights from elsewhere: no routing losses, constant biases."""
    found, settings = dict(section), flatten(section)
    for key, (usual, idle) in _changeable(kind):
        beside = key.removesuffix(key.rpartition(".")[2])
        if usual is not None and key in settings and (idle is None or settings.get(beside + idle[0]) != idle[1]):
            found = put(found, key, usual)
    return found


def check_settings(kind: type, section: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` for a key of `changes` that contradicts the model's `section` and may not.

    Keys that a section does not have are left to the conversion.
    """
    settings, free = flatten({"model": section}), {f"model.{key}" for key, _ in _changeable(kind)}
    for key, value in changes.items():
        if key not in free and settings.get(key, value) != value:
            shown = f"{key}={show(value)} but the weights of {where} have {key}={show(settings[key])}"
            raise UserError(f"{shown}; leave it out")


def _changeable(kind: type, before: str = "") -> Iterator[tuple[str, MayChange]]:
    """Yield the keys of a model's section, and of the sections in it, of which the same weights may have others."""
    yield from ((f"{before}{name}", note) for name, note in notes_of(kind, MayChange).items())
    for name, hint in types_of(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _changeable(hint, f"{before}{name}.")  # pyright: ignore[reportArgumentType] a class
