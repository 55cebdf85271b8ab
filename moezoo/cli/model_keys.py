"""The options of commands that run a model: that of a run, or of a Hugging Face folder."""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from moezoo.config.options import key
from moezoo.config.run_folders import run_folder
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelKeys:
    """The options that name one model."""

    run_dir: str | None = key("the folder of a run, or one of its checkpoints/STEP", "FOLDER", default=None)
    checkpoint: Literal["newest", "best"] = key(
        "with run_dir: newest, or best for that of the lowest validation loss", "newest|best", default="newest"
    )
    folder: str | None = key(
        "instead of run_dir: a Hugging Face folder with config.json, safetensors and, to read text, tokenizer.json",
        "FOLDER",
        default=None,
    )
    dtype: Literal["float32", "bfloat16", "float16", "stored"] | None = key(
        "with folder: the dtype of the parameters; stored keeps weights of few bits as they are (by default the dtype "
        "of most numbers, with bfloat16 for few bits)",
        "float32|bfloat16|float16|stored",
        default=None,
    )

    adapter: str | None = key(
        "with folder: a folder with low-rank pairs for its weights: adapter/ of a run, or one that PEFT wrote",
        "FOLDER",
        default=None,
    )

    def __post_init__(self):
        if self.run_dir is not None and self.folder is not None:
            raise UserError(f"run_dir={self.run_dir} and folder={self.folder} name two models; leave one of them out")
        if self.run_dir is None and self.folder is None:
            raise UserError(
                "name one model: run_dir=FOLDER of a run, or folder=FOLDER in Hugging Face's format; "
                "init_from is of training"
            )
        if self.folder is not None and _is_run(self.folder):
            raise UserError(f"folder={self.folder} is the folder of a run; write run_dir={self.folder}")
        if self.checkpoint != "newest" and self.folder is not None:
            raise UserError(f"checkpoint={self.checkpoint}: a folder has no checkpoints; leave it out, or name a run")
        if self.adapter is not None and self.folder is None:
            raise UserError(
                f"adapter={self.adapter}: a run has its own weights and pairs; leave it out, or name the folder that "
                "it was trained beside: folder=FOLDER"
            )
        if self.dtype is not None and self.folder is None:
            raise UserError(
                f"dtype={self.dtype}: parameters of a run have the dtype that it was trained in; leave it out"
            )


def _is_run(folder: str) -> bool:
    there = run_folder(os.path.expanduser(folder)) / "config.yaml"
    return there.exists() and not (Path(folder).expanduser() / "config.json").exists()


def configure_model(keys: ModelKeys, changes: Sequence[str]) -> Any:
    """Return the configuration that the model runs with: the run's, or the default one with the folder's model.

    Raises `UserError` for `changes` of the model.
    """
    from moezoo.config.compose import compose
    from moezoo.hub.folders import hub_model_config
    from moezoo.training.saved import saved_config

    where = f"folder={keys.folder}" if keys.folder else f"run_dir={keys.run_dir}"
    # A run may name where the folder is now that it started from.
    naming = r"(model|init_from)\b" if keys.folder else r"model\b"
    for change in changes:
        if re.match(naming, change):
            raise UserError(f"{change}: the model is that of {where}; leave this out")
    if keys.run_dir is not None:
        return saved_config(keys.run_dir, *changes)
    return dataclasses.replace(compose(*changes), model=hub_model_config(keys.folder or ""))


def named_run(keys: ModelKeys) -> str:
    """Return the folder of the run, or that of its best checkpoint. Raises `UserError` where there is no best."""
    from moezoo.training.metrics import best_checkpoint

    run_dir = keys.run_dir or ""
    return str(best_checkpoint(run_dir, "run_dir")) if keys.checkpoint == "best" else run_dir


def load_model(keys: ModelKeys, changes: Sequence[str], execution: Any) -> Any:
    """Return the model: a run's on one device, a folder's laid out for `execution`."""
    from moezoo.hub.loading import from_pretrained
    from moezoo.training.saved import load_run

    if keys.folder is None:
        return load_run(named_run(keys), *changes)[0]
    return from_pretrained(keys.folder, execution, keys.dtype, adapter=keys.adapter)
