"""Checkpoints: orbax writes and reads the arrays; whether they are whole, and what they are of, is told here.

    checkpoints/STEP/model, training    arrays, as orbax lays them out
    checkpoints/STEP/about.json         format, versions, configuration, the loader's position, every array's shape
    checkpoints/STEP/sha256.json        of every other file

A step is written under another name, and gets its own when all of it is there: a folder that is called by a number is
whole, whenever a run was killed. Orbax alone loads flipped bytes without a word, so every file is compared with its
checksum before orbax sees the folder.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from moezoo.config.compose import run_folder
from moezoo.errors import UserError
from moezoo.parallel import distributed

# What about.json, the folder and the paths of arrays look like; raised when an older reader would misunderstand. Only
# this format is read: a version of moezoo continues its own runs.
FORMAT = 2
_READ_BY = {1: "0.1", 2: "0.2"}  # versions of moezoo
_UNFINISHED, _ABOUT, _SUMS = "unfinished.", "about.json", "sha256.json"


class Checkpoints:
    """The checkpoints of one run folder; the last `keep` stay. Saving goes on beside the next step.

    Of several processes each writes the arrays that it holds, and the first one all else; they call alike.
    """

    def __init__(self, folder: Path, keep: int):
        import orbax.checkpoint as ocp

        _silence_orbax()
        self.folder, self._keep = folder.absolute(), keep
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._finishing: threading.Thread | None = None
        self._error: Exception | None = None
        self._last: int | None = None
        if distributed.is_first():
            folder.mkdir(exist_ok=True)
            self._clear()

    def save(self, step: int, trees: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Start saving `trees` of arrays and `about`, which is JSON, as what there is after `step`.

        Waits for the save before it. Raises `UserError` if that one failed.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if step == self._last:
            return
        self._last = step
        unfinished = self.folder / f"{_UNFINISHED}{step}"
        arguments = ocp.args.Composite(**{name: ocp.args.StandardSave(tree) for name, tree in trees.items()})
        arrays = {name: _describe_arrays(tree) for name, tree in trees.items()}
        contents = {"format": FORMAT, "step": step, **about, "arrays": arrays}
        try:
            self._orbax.save(unfinished, args=arguments, force=True)
        except Exception as error:
            self._error = error
            self._check()
        self._finishing = threading.Thread(target=self._finish, args=(step, unfinished, contents), name="checkpoint")
        self._finishing.start()

    def wait(self) -> None:
        """Until what was started is there. Raises `UserError`, on every process, if it failed on any."""
        if self._finishing is not None:
            self._join()
            distributed.together(self._check)

    def close(self) -> None:
        """Wait, and let go. Raises `UserError` if the last save failed here."""
        self._join()
        try:
            self._orbax.close()
        except Exception as error:
            self._error = self._error or error
        if distributed.is_first():
            self._clear()
        self._check()

    def _join(self) -> None:
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None

    def _check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            have = steps(self.folder)
            last = f"the last good one is step {max(have)}" if have else "there is none before it"
            raise UserError(f"{self.folder}: a checkpoint could not be written ({_shorten(error)}); {last}") from None

    def _finish(self, step: int, unfinished: Path, about: Mapping[str, Any]) -> None:
        try:
            self._orbax.wait_until_finished()
            if not distributed.is_first():
                return
            (unfinished / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
            (unfinished / _SUMS).write_text(json.dumps(_hash_files(unfinished), indent=1) + "\n")
            os.rename(unfinished, self.folder / str(step))
            for old in steps(self.folder)[: -self._keep]:
                _remove(self.folder, old)
        except Exception as error:
            if distributed.is_first():
                self._clear()
            self._error = error

    def _clear(self) -> None:
        for left in self.folder.glob(f"{_UNFINISHED}*"):
            for _ in range(40):  # threads of a save that failed may still be writing
                shutil.rmtree(left, ignore_errors=True)
                if not left.exists():
                    break
                time.sleep(0.05)


def _remove(folder: Path, step: int) -> None:
    """At once, as far as anybody sees who lists the folder; what cannot be tidied away harms nobody."""
    away = folder / f"{_UNFINISHED}old.{step}"
    with contextlib.suppress(OSError):
        os.rename(folder / str(step), away)
    shutil.rmtree(away, ignore_errors=True)


def remove_beyond(folder: Path, step: int) -> None:
    """What a run that goes on after `step` had saved later. Left there, it would pass for what this one saves."""
    for later in [saved for saved in steps(folder) if saved > step]:
        _remove(folder, later)


def steps(folder: Path) -> list[int]:
    """The steps saved in a run's `checkpoints` folder, the first one first."""
    names = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def find(path: str | Path, key: str) -> tuple[Path, int]:
    """The `checkpoints` folder and the step that `path` names, a run or one of its `checkpoints/STEP`.

    Of a run it is the newest. Raises `UserError`, with the `key` that was set to `path`, when there is none.
    """
    named, run_dir = Path(path), run_folder(path)
    folder = run_dir / "checkpoints"
    saved = steps(folder)
    if named != run_dir and int(named.name) not in saved:
        there = ", ".join(map(str, saved)) or "none"
        raise UserError(f"{key}={path}: no such checkpoint; there are {there}")
    if not saved:
        raise UserError(
            f"{key}={path}: no checkpoint there (a run saves one every checkpoint_every steps and at its end); name a "
            "run that has one, or remove this one and start again"
        )
    return folder, saved[-1] if named == run_dir else int(named.name)


def read_about(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint is of, after every file of it was compared with its checksum.

    Raises `UserError` when it is of another version, damaged or none of ours; for these two it names an older one that
    is whole.
    """
    try:
        return _verify(folder / str(step))
    except _OtherFormatError:
        raise
    except UserError as error:
        for older in reversed([s for s in steps(folder) if s < step]):
            try:
                _verify(folder / str(older))
            except UserError:
                continue
            raise UserError(f"{error}; step {older} is whole: {folder / str(older)}") from None
        raise UserError(f"{error}; no older one is whole") from None


class _OtherFormatError(UserError):
    """A checkpoint, whole, that another version of moezoo reads."""


def _verify(folder: Path) -> dict[str, Any]:
    try:
        sums = json.loads((folder / _SUMS).read_text())
        wanted = {str(name): str(value) for name, value in sums.items()}
        found = _hash_files(folder)
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no whole checkpoint: {Path(error.filename).name} is missing") from None
    except (ValueError, AttributeError):
        raise UserError(f"{folder} is damaged: {_SUMS} cannot be read") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from None
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise UserError(f"{folder} is damaged: {name} is missing")
        if name not in wanted:
            raise UserError(f"{folder} is damaged: {name} is not one of its files")
        if found[name] != wanted[name]:
            raise UserError(f"{folder} is damaged: {name} is not as it was written")
    if _ABOUT not in wanted:
        raise UserError(f"{folder} is no checkpoint of moezoo: it has no {_ABOUT}")
    try:
        about = json.loads((folder / _ABOUT).read_text())
        format_, step, by = about["format"], about["step"], about["versions"]["moezoo"]
        sections = [about[name] for name in ("config", "arrays", "loader")] + list(about["arrays"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        format_, step, by, sections = None, None, None, []
    if not isinstance(format_, int) or not all(isinstance(section, dict) for section in sections):
        raise UserError(f"{folder} is no checkpoint of moezoo: {_ABOUT} does not say what it should")
    if format_ != FORMAT:
        raise _OtherFormatError(
            f"{folder} has checkpoint format {format_} and this moezoo reads format {FORMAT}; moezoo "
            f"{_READ_BY.get(format_, by)} reads it"
        )
    if step != int(folder.name):
        raise UserError(f"{folder} is the checkpoint of step {step} under another name; rename it")
    return about


def restore(folder: Path, step: int, about: Mapping[str, Any], **targets: Any) -> dict[str, Any]:
    """The trees of `targets` as saved at `step`, after `read_about` has verified the folder.

    A target is a tree of `jax.ShapeDtypeStruct` with the shardings that arrays shall have, whatever they had.

    Raises `UserError` when the checkpoint holds another model's arrays.
    """
    import orbax.checkpoint as ocp  # half of what importing moezoo would cost

    _silence_orbax()
    for name, target in targets.items():
        _compare(about["arrays"].get(name, {}), _describe_arrays(target), step)
    arguments = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        try:
            restored = reader.restore((folder / str(step)).absolute(), args=ocp.args.Composite(**arguments))
        except Exception as error:  # of whatever kind; the files are as they were written
            raise UserError(f"{folder / str(step)} cannot be read ({_shorten(error)})") from None
    return {name: restored[name] for name in targets}


def _compare(saved: Mapping[str, Any], wanted: Mapping[str, Any], step: int) -> None:
    """Names, shapes and dtypes: orbax casts silently and does not say which array differs."""
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the checkpoint" if name in saved else "this model"
        raise UserError(f"checkpoint at step {step}: array {name} exists only in {where}; use the run's own settings")
    for name, have in wanted.items():
        if saved[name] != have:
            was, now = _show_array(saved[name]), _show_array(have)
            raise UserError(
                f"checkpoint at step {step}: {name} is {was} but this model has {now}; use the run's own settings"
            )


def _describe_arrays(tree: Any) -> dict[str, list]:
    """Every array's dtype and shape, by a name that modules and tuples share."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_array_name(path): [str(leaf.dtype), list(leaf.shape)] for path, leaf in leaves}


def _array_name(path: Any) -> str:
    return "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)


def _show_array(array: list) -> str:
    return f"{array[0]}{array[1]}"


def _hash_files(folder: Path) -> dict[str, str]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p != folder / _SUMS]
    return {p.relative_to(folder).as_posix(): _hash_file(p) for p in files}


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _silence_orbax() -> None:
    """What orbax raises is told in a line of ours; it also logs every save at length, and pages of what went wrong."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "quiet", False):
        return
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in logging.Formatter().format(record))
    before = sys.unraisablehook

    def hook(raised: "sys.UnraisableHookArgs") -> None:
        # After a write failed, threads of tensorstore report the others to a loop that orbax has closed: no news.
        if str(raised.exc_value) != "Event loop is closed":
            before(raised)

    hook.quiet = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def _shorten(error: Exception) -> str:
    text = str(error)
    if "No space left" in text or "RESOURCE_EXHAUSTED" in text:
        return "no space left on the disk"
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0][:120]}"
