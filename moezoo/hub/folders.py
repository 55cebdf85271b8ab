"""Read Hugging Face folders.

Nothing is downloaded or unpickled, and no code from a folder runs. What a folder holds is compared with its config.json
before anything is built.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from moezoo.errors import UserError, check_type
from moezoo.host import check_host
from moezoo.hub.json_files import read_json
from moezoo.hub.nested import TEXT
from moezoo.hub.opening import check_tensors, folder_argument, open_folder
from moezoo.hub.tensors import arrays_by_path, count, list_names, require_names
from moezoo.hub.weight_files import DTYPES
from moezoo.models import ModelConfig
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.execution import Execution
from moezoo.typed import convert, show


def from_pretrained(
    folder: str | Path, execution: Execution | None = None, dtype: DTypeLike | None = None
) -> LanguageModel:
    """Load the model from a Hugging Face folder.

    Nothing is downloaded, and no code from the folder runs. Of a model for images the text model is loaded. A warning
    names tensors that no parameter has, such as those for images, and one those that hold NaN or infinities.

    Args:
        folder: A folder with config.json and safetensors, in one file or in several with an index.
        execution: The mesh and rules that lay out the arrays. By default every array is on one device.
        dtype: The dtype of the parameters: float32, bfloat16 or float16. By default the one that most stored numbers
            have, with float32 for float64. Choice biases are always float32.

    Raises:
        UserError: The architecture or a key of config.json is unknown. A tensor is missing, has no parameter, has the
            wrong shape, is cut short, or is in a file outside the folder. Embeddings are tied, but the folder has two
            that differ. `dtype` is another one. The arrays exceed the memory of this machine.
    """
    if execution is not None:
        check_type("execution", execution, Execution, "take one from moezoo.execution(cfg)")
    folder, target = folder_argument(folder), None if dtype is None else _parameter_dtype(dtype)
    opened = open_folder(folder)
    files = opened.files
    stored = target or files.common_dtype()
    shapes = Blueprint(opened.config, str(stored)).shapes
    wanted, unused = check_tensors(opened, shapes)
    for purpose, names in unused.items():
        _warn(f"{folder}: {count(names)} not loaded, for {purpose}: {list_names(names)}")
    bytes_ = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    check_host(f"{folder}: the model in {stored.name}", bytes_, "load it on a machine with more memory")
    whole = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in arrays_by_path(shapes).items()}
    require_names(whole, wanted)
    odd = []
    for tensor in wanted:
        parts = tensor.from_file(files.read(tensor.name))
        with np.errstate(over="ignore"):  # what a dtype cannot hold becomes infinite, which is reported
            for (path, index), part in zip(tensor.parts, parts, strict=True):
                whole[path][index] = part
        if not all(np.isfinite(whole[path][index]).all() for path, index in tensor.parts):
            odd.append(tensor.name)
    if odd:
        _warn(f"{folder}: tensors with NaN or infinities: {list_names(odd)}")
    model = jax.tree.unflatten(jax.tree.structure(shapes), list(whole.values()))
    if execution is None or execution.mesh is None:
        return jax.device_put(model, jax.devices()[0])
    return jax.device_put(model, execution.shardings(shapes))


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


def _parameter_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of parameters that the user asked for. Raises `UserError` unless a model can have it."""
    valid = sorted({np.dtype(kind).name for kind in DTYPES.values()})
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = show(dtype)[:80]
    if name not in valid:
        raise UserError(f"dtype={name}: expected one of {', '.join(valid)}")
    return jnp.dtype(name)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
