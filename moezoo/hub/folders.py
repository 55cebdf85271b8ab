"""Read and write Hugging Face folders.

No other module reads or writes safetensors. Nothing is downloaded or unpickled, and no code from a folder runs.
"""

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from moezoo.convert import convert
from moezoo.errors import UserError, nearest
from moezoo.hub.tensors import Tensor, arrays_by_path, read_part, tensors
from moezoo.models import FAMILIES, Family, ModelConfig, build_model, family_of
from moezoo.models.base import LanguageModel
from moezoo.parallel.execution import Execution
from moezoo.parallel.host import check_host

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
SHARD_BYTES = 5_000_000_000  # at most, per safetensors file
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def from_pretrained(
    folder: str | Path, execution: Execution | None = None, dtype: DTypeLike | None = None
) -> LanguageModel:
    """Load the model from a Hugging Face folder.

    Nothing is downloaded, and no code from the folder runs. A warning names tensors that hold NaN or infinities.

    Args:
        folder: holds config.json and safetensors, in one file or in several with an index.
        execution: the mesh and rules that lay out the arrays. By default every array is on one device.
        dtype: the dtype of the parameters; by default the one that most stored numbers have. Choice biases are always
            float32.

    Raises:
        UserError: The architecture is unknown. A tensor is missing, has no parameter, has the wrong shape, is cut
            short, or is in a file outside the folder. The arrays exceed the memory of this machine.
    """
    folder = Path(folder).expanduser()
    family, config = _family_and_config(folder)
    files = _Files(folder)
    stored = jnp.dtype(dtype) if dtype is not None else files.common_dtype()
    shapes = jax.eval_shape(lambda: build_model(config, key=jax.random.key(0), dtype=str(stored)))
    wanted = list(tensors(shapes, family.hub))
    _check_names(files, wanted, family, folder)
    bytes_ = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    check_host(f"{folder}: the model in {stored.name}", bytes_, "load it on a machine with more memory")
    whole = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in arrays_by_path(shapes).items()}
    odd = []
    for tensor in wanted:
        array = files.read(tensor.name, tensor.shape)
        if not np.isfinite(array.astype(np.float32)).all():
            odd.append(tensor.name)
        for (path, index), part in zip(tensor.parts, tensor.from_file(array), strict=True):
            whole[path][index] = part
    if odd:
        _warn(f"{folder}: tensors with NaN or infinities: {_list_names(odd)}")
    model = jax.tree.unflatten(jax.tree.structure(shapes), list(whole.values()))
    if execution is None or execution.mesh is None:
        return jax.device_put(model, jax.devices()[0])
    return jax.device_put(model, execution.shardings(shapes))


def hub_model_config(folder: str | Path) -> ModelConfig:
    """Return the configuration of the model in a Hugging Face folder. Raises `UserError` as `from_pretrained` does."""
    return _family_and_config(Path(folder).expanduser())[1]


def end_of_text(folder: str | Path) -> list[int]:
    """Return the tokens that end a text: `eos_token_id` of generation_config.json, or else of config.json, or none."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder).expanduser() / name
        found = _json(path, "cannot be read").get("eos_token_id") if path.exists() else None
        if found is not None:
            found = found if isinstance(found, list) else [found]
            return [convert(int, token, f"{name}: eos_token_id") for token in found]
    return []


def save_pretrained(model: LanguageModel, folder: str | Path) -> None:
    """Write a folder that transformers loads: config.json and safetensors.

    Files are at most 5 GB; several files get an index. A container is written as the array that it stands for.
    Settings that transformers has no key for are lost, such as the rate at which choice biases move.

    Raises:
        UserError: The folder already holds a model, or cannot be written.
    """
    folder = Path(folder).expanduser()
    if any((folder / name).exists() for name in ("config.json", _SINGLE, _INDEX)):
        raise UserError(f"{folder} already holds a model; name another folder")
    family = family_of(model.config)
    arrays = arrays_by_path(model)
    plan = list(tensors(model, family.hub))
    sizes = [_size(t, arrays) for t in plan]
    shards: list[list[Tensor]] = [[]]
    room = SHARD_BYTES
    for tensor, size in zip(plan, sizes, strict=True):
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(tensor)
        room -= size
    config = family.hub.config_to_hub(model.config)
    config["dtype"] = str(model.embedding.weight.dtype)
    # Without these keys, transformers' defaults make some tokens of this vocabulary special.
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = (
            [_SINGLE]
            if len(shards) == 1
            else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        )
        for name, shard in zip(names, shards, strict=True):
            _write(folder / name, shard, arrays)
        if len(shards) > 1:
            where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in names:
            shutil.copymode(folder / "config.json", folder / name)  # safetensors makes files private
    except (OSError, _safetensors_error()) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(f"{folder}: cannot be written ({reason}); name another folder") from error


def _safetensors_error() -> type[Exception]:
    """Return the error that safetensors raises for files that it cannot read or write."""
    from safetensors import SafetensorError

    return SafetensorError


def _size(tensor: Tensor, arrays: Mapping[str, Any]) -> int:
    return int(np.prod(tensor.shape)) * arrays[tensor.parts[0][0]].dtype.itemsize


def _write(path: Path, shard: list[Tensor], arrays: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    values = {t.name: t.to_file([read_part(arrays[p], index) for p, index in t.parts]) for t in shard}
    save_file(values, path, metadata={"format": "pt"})  # transformers refuses files without it


class _Files:
    """The tensors of a folder, in one file or in the files that an index names."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        self._folder, self._open, self._error = folder, safe_open, _safetensors_error()
        self._handles: dict[Path, Any] = {}
        if (folder / _INDEX).exists():
            index = _json(folder / _INDEX, "cannot be read").get("weight_map")
            if not isinstance(index, dict) or not index:
                raise UserError(f"{folder / _INDEX} has no weight_map; download the folder again")
            for name, file in index.items():
                if not isinstance(file, str) or Path(file).name != file:
                    raise UserError(f"{folder / _INDEX} places {name} in '{file}', outside the folder; do not trust it")
            self._where = {name: folder / file for name, file in index.items()}
        elif (folder / _SINGLE).exists():
            self._where = dict.fromkeys(self._handle(folder / _SINGLE).keys(), folder / _SINGLE)
        else:
            raise UserError(f"{folder} has neither {_SINGLE} nor {_INDEX}; only safetensors are read")

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._where)

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = self._open(path, framework="numpy")
            except FileNotFoundError as error:
                raise UserError(f"{path} is missing but the index names it; download the folder again") from error
            except (self._error, OSError) as error:
                reason = str(error).partition("\n")[0]
                raise UserError(f"{path} cannot be read ({reason}); download it again") from error
        return self._handles[path]

    def common_dtype(self) -> np.dtype:
        """Return the dtype that most stored numbers have."""
        sizes: dict[str, int] = {}
        for name, path in self._where.items():
            part = self._slice(path, name)
            sizes[part.get_dtype()] = sizes.get(part.get_dtype(), 0) + int(np.prod(part.get_shape()))
        most = max(sizes, key=lambda kind: sizes[kind])
        if most not in _DTYPES:
            raise UserError(f"{self._folder} stores {most}, expected one of {', '.join(_DTYPES)}; convert it first")
        return _DTYPES[most]

    def _slice(self, path: Path, name: str) -> Any:
        try:
            return self._handle(path).get_slice(name)
        except self._error as error:
            raise UserError(f"{path} has no {name} but the index places it there; download it again") from error

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor; raise `UserError` if its shape is not `shape`."""
        part = self._slice(self._where[name], name)
        if tuple(part.get_shape()) != shape:
            raise UserError(
                f"{self._folder}: {name} has shape {list(part.get_shape())}, expected {list(shape)} by config.json; "
                "the two files belong to different models"
            )
        if part.get_dtype() not in _DTYPES:
            raise UserError(
                f"{self._folder}: {name} is {part.get_dtype()}, expected {', '.join(_DTYPES)}; convert it first"
            )
        return self._handle(self._where[name]).get_tensor(name)


def _check_names(files: _Files, wanted: list[Tensor], family: Family, folder: Path) -> None:
    expected = {t.name for t in wanted}
    left = files.names - expected
    over = family.hub.find_unused(left, expected)
    if missing := sorted(expected - files.names):
        raise UserError(f"{folder}: {_tensors(missing)} missing: {_list_names(missing)}")
    if left := sorted(left - over):
        raise UserError(f"{folder}: {_tensors(left)} not in the model of config.json: {_list_names(left)}")
    if over:
        names = _list_names(sorted(over))
        _warn(f"{folder}: {_tensors(sorted(over))} not loaded, for multi-token prediction: {names}")


def _family_and_config(folder: Path) -> tuple[Family, ModelConfig]:
    mapping = _json(folder / "config.json", "no config.json; name a Hugging Face model folder")
    family = _family(mapping, folder)
    try:
        return family, family.hub.config_from_hub(mapping)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # for example a table in place of a number
        raise UserError(f"{folder}/config.json: a setting does not have the expected type ({error})") from error


def _family(mapping: Mapping[str, Any], folder: Path) -> Family:
    kinds = {kind: family for family in FAMILIES.values() for kind in family.hub.MODEL_TYPES}
    kind = mapping.get("model_type")
    if kind is None:
        raise UserError(f"{folder}/config.json has no model_type; expected one of {', '.join(sorted(kinds))}")
    if kind not in kinds:
        raise UserError(f"{folder}/config.json: unknown model_type '{kind}'; {nearest(str(kind), kinds)}")
    return kinds[kind]


def _json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        mapping = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path.parent}: {otherwise}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(mapping, dict):
        raise UserError(f"{path} is not a JSON object; download it again")
    return mapping


def _tensors(names: list[str]) -> str:
    return f"{len(names)} tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _list_names(names: list[str]) -> str:
    """Return all names in one line. Names that differ only by layer and expert numbers become one, with their count."""
    alike: dict[tuple[str | None, ...], list[list[str]]] = {}
    for name in sorted(names):
        parts = name.split(".")
        alike.setdefault(tuple(None if part.isdecimal() else part for part in parts), []).append(parts)
    shown = []
    for pattern, group in alike.items():
        columns = zip(pattern, zip(*group, strict=True), strict=True)
        text = ".".join(_range(column) if part is None else part for part, column in columns)
        shown.append(text + (f" ({len(group)})" if len(group) > 1 else ""))
    return ", ".join(shown)


def _range(numbers: Sequence[str]) -> str:
    lowest, highest = min(map(int, numbers)), max(map(int, numbers))
    return f"{lowest}" if lowest == highest else f"{lowest}-{highest}"


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
