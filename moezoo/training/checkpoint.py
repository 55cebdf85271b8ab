"""Checkpoints: orbax writes and reads the arrays; this module makes sure that they are complete and undamaged.

    checkpoints/STEP/model, training    arrays, in orbax's format
    checkpoints/STEP/about.json         format, versions, configuration, the loader's position, every array's shape
    checkpoints/STEP/sha256.json        the checksum of every other file
    checkpoints/frozen/                 the arrays of the model that no step changes, if any, and their sha256.json

A checkpoint is written to a folder with a temporary name, which is renamed to STEP when every file is complete. So a
folder named by a number is always complete, even if the run is killed during a save. The first one that is written has
the frozen arrays too: they get their own name before it gets its, and later ones refer to them. Orbax loads damaged
files without an error, so every file is compared with its checksum before orbax reads the folder.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from moezoo.config.run_folders import SUMS, numbered, steps
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.host.remote import absolute, is_url, list_files, remove_folder
from moezoo.parallel import distributed

# The version of about.json, of the folder's layout and of array names. Only this version is read: each version of
# moezoo continues its own runs.
FORMAT = 2
_READ_BY = {1: "0.1", 2: "0.2"}  # versions of moezoo
# Orbax gives up a save after some minutes, in which a file system may stall, and the time that its bytes take on a slow
# disk, including the checksums, which one process reads. A process ends if it still waits for others later.
_STALL_SECONDS, _BYTES_PER_SECOND, _LATER_SECONDS = 300, 50_000_000, 60
# The coroutines of orbax that a failed write leaves, as Python warns of them.
_UNAWAITED = r"coroutine '(_?async_serialize_\w+|_serialize_\w+|run_sync|cancellable|\w+Handler)\b.*never awaited"
# What prevents writing, and what is to be done.
_REASONS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "your quota of the disk is used up; remove files, or name another run_dir",
    errno.EFBIG: "a file is too large for the limit of this process, ulimit -f, or for the file system; raise it",
    errno.EMFILE: "too many open files for the limit of this process; raise it with ulimit -n",
    errno.EROFS: "the disk can only be read",
}
UNFINISHED, _ABOUT = "unfinished.", "about.json"
FROZEN = "frozen"


def count_kept(cfg: TrainConfig) -> int:
    """Return how many checkpoints stay in the folder of a run between two saves, the best one included."""
    return min(cfg.checkpoint_keep + (cfg.eval_every != 0), cfg.last_step + 1)


class Checkpoints:
    """The checkpoints of one run folder. A save continues in the background while the next step runs.

    With several processes, all of them make the same calls; each writes its own arrays, the first one all other files.
    `seconds` is how long the last complete save took.

    In an object store, where nothing can be renamed, a checkpoint is written under its own name. It counts from the
    moment that its last file is there: the checksums. Each has the frozen arrays, and `keeps_frozen` is False.
    """

    def __init__(self, folder: Path, count: int, size: int):
        """Use `folder`, and keep the newest `count` checkpoints in it and the best; each has `size` bytes of arrays."""
        import orbax.checkpoint as ocp

        _silence_orbax()
        self.folder, self._count = absolute(folder), count
        self._remote, self.keeps_frozen = is_url(folder), not is_url(folder)
        self._most_seconds = _STALL_SECONDS + size // _BYTES_PER_SECOND
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), timeout_secs=self._most_seconds)
        self._finishing: threading.Thread | None = None
        self._error: Exception | None = None
        self._has_failed = False
        self._last: int | None = None
        self._began, self.seconds = 0.0, 0.0
        if distributed.is_first():
            folder.mkdir(exist_ok=True)
            self._handle = None if self._remote else os.open(folder, os.O_RDONLY)
            self._clear()
            if not steps(folder):  # a run was killed before its first checkpoint was complete
                remove_folder(folder / FROZEN)
        self._has_frozen = distributed.first((folder / FROZEN).is_dir)
        self._report_all = _leave_out_failed_writes()

    def save(self, step: int, trees: Mapping[str, Any], about: Mapping[str, Any], best: int | None = None) -> None:
        """Wait for the previous save, then start to save the state after `step`; a second save of it does nothing.

        `trees` are trees of arrays by name, `about` JSON values for about.json. The tree `FROZEN` is that of the run,
        always with the same numbers, and written once. The checkpoint of step `best` is kept beside the newest ones.
        Raises `UserError` if the previous save failed.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if step == self._last:
            return
        self._last, self._began = step, time.monotonic()
        unfinished = self.folder / (str(step) if self._remote else f"{UNFINISHED}{step}")
        arrays = {name: _describe_arrays(tree) for name, tree in trees.items()}
        written = {name: tree for name, tree in trees.items() if not (name == FROZEN and self._has_frozen)}
        self._has_frozen |= FROZEN in trees
        arguments = ocp.args.Composite(**{name: ocp.args.StandardSave(tree) for name, tree in written.items()})
        contents = {"format": FORMAT, "step": step, **about, "arrays": arrays}
        try:
            with self._bounded():
                self._orbax.save(unfinished, args=arguments, force=True)
        except Exception as error:
            self._error = error
            self._check()
        self._finishing = threading.Thread(
            target=self._finish, args=(step, unfinished, contents, best), name="checkpoint"
        )
        self._finishing.start()

    def wait(self) -> None:
        """Wait until the save that was started is complete. Raises `UserError` on all processes if one failed."""
        if self._finishing is not None:
            with self._bounded():
                self._join()
                distributed.together(self._check)

    def close(self) -> None:
        """Wait for the save that was started, and stop. Raises `UserError` if it failed on this process."""
        with self._bounded():
            self._join()
            try:
                self._orbax.close()
            except Exception as error:
                self._error = self._error or error
        if distributed.is_first():
            self._clear()
            if self._handle is not None:
                os.close(self._handle)
        self._check()
        if not self._has_failed:  # what a failed write has left may report until the process ends
            self._report_all()

    def _bounded(self) -> AbstractContextManager[None]:
        """Bound a wait for the other processes, which may be stuck or have failed in the save."""
        late = f"the processes did not finish it within {self._most_seconds} s"
        return distributed.within(self._most_seconds + _LATER_SECONDS, self._describe_failure(late))

    def _join(self) -> None:
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None

    def _check(self) -> None:
        if self._error is not None:
            error, self._error, self._has_failed = self._error, None, True
            raise UserError(self._describe_failure(_shorten(error))) from error

    def _describe_failure(self, why: str) -> str:
        have = steps(self.folder)
        last = f"the last complete one is step {max(have)}" if have else "there is no earlier one"
        return f"{self.folder}: a checkpoint could not be written ({why}); {last}"

    def _finish(self, step: int, unfinished: Path, about: Mapping[str, Any], best: int | None) -> None:
        try:
            self._orbax.wait_until_finished()
            if not distributed.is_first():
                return
            if self._handle is not None and not os.path.samestat(os.stat(self.folder), os.fstat(self._handle)):
                raise FileNotFoundError("the folder was removed while the run went on")  # orbax has made it again
            if (frozen := unfinished / FROZEN).is_dir():
                _write_json(frozen / SUMS, _hash_files(frozen))
                os.rename(frozen, self.folder / FROZEN)
            if FROZEN in about["arrays"]:
                about = {**about, FROZEN: _hash_sums(self.folder / FROZEN)}
            _write_json(unfinished / _ABOUT, about)
            _write_json(unfinished / SUMS, _hash_files(unfinished))
            if not self._remote:
                os.rename(unfinished, self.folder / str(step))
            for old in steps(self.folder)[: -self._count]:
                if old != best:
                    _remove(self.folder, old)
            self.seconds = time.monotonic() - self._began
        except Exception as error:
            self._error = error
            if distributed.is_first():
                with contextlib.suppress(OSError):  # `close` tries again
                    self._clear()

    def _clear(self) -> None:
        if self._remote:
            for step in set(numbered(self.folder)) - set(steps(self.folder)):
                remove_folder(self.folder / str(step))
            return
        for left in self.folder.glob(f"{UNFINISHED}*"):
            for _ in range(40):  # threads of a save that failed may still be writing
                shutil.rmtree(left, ignore_errors=True)
                if not left.exists():
                    break
                time.sleep(0.05)


def _remove(folder: Path, step: int) -> None:
    """Let a checkpoint disappear in one operation, then delete it; a failed deletion does no harm."""
    if is_url(folder):
        (folder / str(step) / SUMS).unlink(missing_ok=True)
        remove_folder(folder / str(step))
        return
    away = folder / f"{UNFINISHED}old.{step}"
    with contextlib.suppress(OSError):
        os.rename(folder / str(step), away)
    shutil.rmtree(away, ignore_errors=True)


def remove_beyond(folder: Path, step: int) -> None:
    """Remove checkpoints after `step`, so that they are not mistaken for those of the run that continues from it."""
    for later in [saved for saved in steps(folder) if saved > step]:
        _remove(folder, later)


def read_about(folder: Path, step: int) -> dict[str, Any]:
    """Compare every file of a checkpoint with its checksum, and return its about.json.

    Raises `UserError` if the checkpoint has another format, is damaged or is not moezoo's, or is removed meanwhile. If
    it is damaged or not moezoo's, the message names the newest older checkpoint that is complete.
    """
    try:
        return _verify(folder / str(step))
    except _OtherFormatError:
        raise
    except UserError as error:
        check_kept(folder / str(step))
        for older in reversed([s for s in steps(folder) if s < step]):
            try:
                _verify(folder / str(older))
            except UserError:
                continue
            raise UserError(f"{error}; step {older} is complete: {folder / str(older)}") from None
        raise UserError(f"{error}; no older one is complete") from None


def check_kept(checkpoint: Path) -> None:
    """Raise `UserError` if a checkpoint that was there has been removed while it was read."""
    if int(checkpoint.name) not in steps(checkpoint.parent):
        raise UserError(
            f"{checkpoint} was removed while it was read: a run trains there, and keeps its newest checkpoints "
            "(checkpoint_keep); try again"
        )


class _OtherFormatError(UserError):
    """The checkpoint is complete, but another version of moezoo reads it."""


def _verify_files(folder: Path) -> set[str]:
    """Compare every file of a folder with its checksum, and return their names."""
    try:
        sums = json.loads((folder / SUMS).read_text())
        wanted = {str(name): str(value) for name, value in sums.items()}
        found = _hash_files(folder)
    except FileNotFoundError as error:
        raise UserError(f"{folder} is not a complete checkpoint: {Path(error.filename).name} is missing") from None
    except (ValueError, AttributeError, RecursionError):
        raise UserError(f"{folder} is damaged: {SUMS} cannot be read") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from None
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise UserError(f"{folder} is damaged: {name} is missing")
        if name not in wanted:
            raise UserError(f"{folder} is damaged: {name} does not belong to it")
        if found[name] != wanted[name]:
            raise UserError(f"{folder} is damaged: {name} has changed since it was written")
    return set(found)


def _verify(folder: Path) -> dict[str, Any]:
    if _ABOUT not in _verify_files(folder):
        raise UserError(f"{folder} is not a checkpoint of moezoo: it has no {_ABOUT}")
    try:
        about = json.loads((folder / _ABOUT).read_text())
        format_, step, by = about["format"], about["step"], about["versions"]["moezoo"]
        sections = [about[name] for name in ("config", "arrays", "loader")] + list(about["arrays"].values())
        if not isinstance(format_, int) or not all(isinstance(section, dict) for section in sections):
            raise TypeError
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder} is not a checkpoint of moezoo: {_ABOUT} lacks what moezoo writes there") from None
    if format_ != FORMAT:
        raise _OtherFormatError(
            f"{folder} has checkpoint format {format_} and this moezoo reads format {FORMAT}; moezoo "
            f"{_READ_BY.get(format_, by)} reads it"
        )
    if step != int(folder.name):
        raise UserError(f"{folder} is the checkpoint of step {step}; rename the folder to {step}")
    if FROZEN in about["arrays"]:
        _verify_frozen(folder, about)
    return about


def _verify_frozen(folder: Path, about: Mapping[str, Any]) -> None:
    frozen = folder.parent / FROZEN
    if not frozen.is_dir():
        raise UserError(
            f"{folder} needs the frozen arrays in {frozen}, which is missing; copy it from the run's folder"
        )
    _verify_files(frozen)
    if _hash_sums(frozen) != about.get(FROZEN):
        raise UserError(f"{frozen} has the frozen arrays of another run than {folder}; copy it from the run's folder")


def restore(folder: Path, step: int, about: Mapping[str, Any], **targets: Any) -> dict[str, Any]:
    """Restore trees of arrays by name from the `checkpoints` folder, after `read_about`, which returned `about`.

    `targets` are trees of `jax.ShapeDtypeStruct`, whose shardings may differ from those at the time of saving. The tree
    `model` has the frozen arrays too. Raises `UserError` if the checkpoint holds the arrays of another model.
    """
    import orbax.checkpoint as ocp  # slow to import

    _silence_orbax()
    for name, target in targets.items():
        check_arrays(saved_arrays(about, name), target, step)
    frozen = about["arrays"].get(FROZEN, {})
    parts = {(folder / str(step), name): target for name, target in targets.items()}
    if frozen and "model" in targets:
        mask = jax.tree_util.tree_map_with_path(lambda path, _: array_name(path) in frozen, targets["model"])
        parts[folder, FROZEN], parts[folder / str(step), "model"] = eqx.partition(targets["model"], mask)
    restored: dict[str, Any] = {}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        for (where, name), target in parts.items():
            try:
                restored[name] = _read_tree(reader, absolute(where / name), target)
            except Exception as error:  # orbax raises many kinds; the files themselves are undamaged
                check_kept(folder / str(step))
                raise UserError(f"{where / name} cannot be read ({_shorten(error)})") from None
    if FROZEN in restored:
        restored["model"] = eqx.combine(restored["model"], restored.pop(FROZEN))
    return restored


def saved_arrays(about: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what about.json has of a tree; of `model`, the frozen arrays too."""
    arrays = about["arrays"]
    return arrays.get(name, {}) | (arrays.get(FROZEN, {}) if name == "model" else {})


def check_arrays(saved: Mapping[str, Any], target: Any, step: int) -> None:
    """Raise `UserError` unless `saved` has the names, shapes and dtypes of the arrays (or shapes) in `target`.

    `saved` is what about.json has of a tree. Orbax casts silently and does not report which array differs.
    """
    wanted = _describe_arrays(target)
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the checkpoint" if name in saved else "this model"
        raise UserError(f"checkpoint at step {step}: array {name} exists only in {where}; use the run's own settings")
    for name, have in wanted.items():
        if saved[name] != have:
            was, now = (f"{dtype}{shape}" for dtype, shape in (saved[name], have))
            raise UserError(
                f"checkpoint at step {step}: {name} is {was} but this model has {now}; use the run's own settings"
            )


def _describe_arrays(tree: Any) -> dict[str, list]:
    """Return the dtype and shape of every array, by a name that is the same for modules and tuples."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {array_name(path): [str(leaf.dtype), list(leaf.shape)] for path, leaf in leaves}


def _read_tree(reader: Any, folder: Any, target: PyTree) -> PyTree:
    """Return the tree of `target` with the arrays of the same names in `folder`.

    orbax compares empty fields too, which a module of another version may have more or less of. So it is asked for the
    tree that it has.
    """
    import orbax.checkpoint as ocp

    by_name = {array_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(target)}
    stored = reader.metadata(folder).item_metadata.tree
    wanted = jax.tree_util.tree_map_with_path(lambda path, _: by_name[array_name(path)], stored)
    found = reader.restore(folder, args=ocp.args.StandardRestore(wanted))
    arrays = {array_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(found)}
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[array_name(path)], target)


def array_name(path: Any) -> str:
    """Return the name of an array in a checkpoint, from its path in a tree."""
    return "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


def _hash_sums(folder: Path) -> str:
    return hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()


def _hash_files(folder: Path) -> dict[str, str]:
    found = {}
    for path in list_files(folder):
        if path != folder / SUMS:
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _silence_orbax() -> None:
    """Stop orbax from logging every save and every error at length; this module reports errors in one line."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # After a failed write, orbax closes its event loop and leaves writes that have not begun. Python warns of them when
    # they are collected, which may be at exit.
    warnings.filterwarnings("ignore", _UNAWAITED, RuntimeWarning)
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in logging.Formatter().format(record)


def _leave_out_failed_writes() -> Callable[[], None]:
    """Keep Python from reporting what a failed write leaves; return what ends that.

    Threads of tensorstore still report to an event loop that orbax has closed. An event loop that could not open its
    files is collected without them.
    """
    before = sys.unraisablehook

    def report(raised: "sys.UnraisableHookArgs") -> None:
        unopened = isinstance(raised.exc_value, AttributeError) and raised.object is asyncio.BaseEventLoop.__del__
        if str(raised.exc_value) != "Event loop is closed" and not unopened:
            before(raised)

    def end() -> None:
        if sys.unraisablehook is report:
            sys.unraisablehook = before

    sys.unraisablehook = report
    return end


def _shorten(error: Exception) -> str:
    text = str(error)
    # Libraries have the system's words somewhere in long lines.
    if found := next((what for number, what in _REASONS.items() if os.strerror(number) in text), None):
        return found
    if "RESOURCE_EXHAUSTED" in text:
        return _REASONS[errno.ENOSPC]
    line = (text.splitlines() or [""])[0]
    return f"{type(error).__name__}: {line if len(line) <= 200 else f'{line[:60]} ... {line[-130:]}'}"
