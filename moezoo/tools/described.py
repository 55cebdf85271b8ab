"""What tools print of a folder of which they read config.json alone."""

from collections.abc import Sequence
from pathlib import Path

from moezoo.config.compose import FOLDER, compose_described, read_described
from moezoo.hub.kept import usual_bytes
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import count_parameters
from moezoo.typed import show


def folder_lines(words: Sequence[str]) -> list[str]:
    """Return a line on how many parameters the folder among the overrides has, and how it stores them.

    There is none without a folder. Raises `UserError` as `compose_described` does.
    """
    folders = [word for word in words if word.startswith(FOLDER)]
    if not folders:
        return []
    cfg = compose_described(*words)
    upcycle, own = cfg.upcycle, cfg.execution.param_dtype
    origin = read_described(folders[-1].removeprefix(FOLDER), upcycle)
    described = origin.described
    assert described is not None
    shapes, form = Blueprint(described.config).shapes, described.quantization
    total, _ = count_parameters(shapes, described.config.experts_per_token)
    found = f"{show(folders[-1])}: by its config.json alone, it has {total:,} parameters"
    if upcycle.experts:
        return [f"{found} after its MLPs are copied into experts"]
    found += f", stored as {origin.stored}: {usual_bytes(shapes, form, described.usual_dtype):,} bytes"
    if described.dtype is None:
        found += f"; it names no dtype, so numbers count as {described.usual_dtype}"
    if own not in ("stored", described.usual_dtype):
        found += f"; a run has numbers as execution.param_dtype={own}"
    if form is not None:
        # Which weights have few bits follows from tensors.
        found += f"; which weights are {form.NAME} only the files say, so those count that released folders have so"
    return [found]


def to_train(word: str) -> str:
    """Return an override as `moezoo train` takes it: of the folder, whose weights it reads."""
    if not word.startswith(FOLDER):
        return word
    path = Path(word.removeprefix(FOLDER))
    if path.expanduser().is_file():  # of another name it lies beside no weights
        path = path.parent if path.name == "config.json" else Path("FOLDER")
    return f"init_from={path}"
