"""The folder of a run: which one it is, its first files, and the lock against a second run."""

import contextlib
import datetime
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import moezoo.interrupts as interrupts
from moezoo.config.compose import as_mapping, read_run, to_yaml
from moezoo.config.run_folders import AUTO, OTHER, RUNNING, SUMS, announcement, run_folder, steps, trainer
from moezoo.config.settings import TrainConfig
from moezoo.config.text_copies import COPIES, list_copies
from moezoo.errors import UserError
from moezoo.host.files import locking
from moezoo.host.remote import as_path, is_same, is_url, remove_folder
from moezoo.models.adapters import NoAdapter
from moezoo.parallel import distributed
from moezoo.trackers import MetricsRow
from moezoo.training import report
from moezoo.training.checkpoint import FROZEN, UNFINISHED, remove_beyond
from moezoo.training.files import check_writable, making, marking, replace_file, replace_text, writing_to
from moezoo.training.metrics import MetricsLog
from moezoo.training.saved import run_settings

_CONFIG, _METRICS, _CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"
# What a run writes before its first step and removes again if it does not get there.
_FIRST = (_CONFIG, _METRICS, report.HELD_OUT_FILE, _CHECKPOINTS, COPIES)


class Opened(NamedTuple):
    """The folder of a run that goes on, and its log."""

    path: Path
    log: MetricsLog


def choose(cfg: TrainConfig, resumed: Path | None) -> Path:
    """Return the folder that this run writes; `resumed` is the folder of the run that it continues.

    Raises `UserError` if the folder holds something else or cannot be written.
    """
    if resumed is not None and (cfg.run_dir is None or is_same(as_path(cfg.run_dir), resumed)):
        folder = resumed
    elif cfg.run_dir is None:
        folder = Path("runs") / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    else:
        folder = as_path(cfg.run_dir)
        with writing_to("run_dir", folder):
            if folder.exists() and not folder.is_dir():
                raise UserError(f"run_dir={cfg.run_dir} is a file; name a folder")
            if run_folder(folder) != folder:
                raise UserError(f"run_dir={cfg.run_dir} has the name of a checkpoint's folder; name another")
            _check_free_of_others(folder)
            _check_free(folder, cfg)
    writing = {
        "tracker": cfg.tracker.active(),
        "adapter": not isinstance(cfg.adapter, NoAdapter),
        "profile.start": cfg.profile.start is not None,
    }
    if is_url(folder) and (key := next((key for key, writes in writing.items() if writes), None)):
        raise UserError(f"run_dir={folder} is no disk, and {key} writes files there; leave {key} out, or name a folder")
    if distributed.is_first():
        with writing_to("run_dir", folder):
            check_writable(folder)
    return folder


def check_idle(cfg: TrainConfig, resumed: Path) -> None:
    """Raise `UserError` if another process trains in the folder that is continued; its checkpoints come and go."""
    if not is_url(resumed) and (cfg.run_dir is None or is_same(as_path(cfg.run_dir), resumed)):
        _check_free_of_others(resumed)


def _check_free_of_others(folder: Path) -> None:
    if who := trainer(folder):
        raise UserError(_busy(folder, who))


def _busy(folder: Path, who: str) -> str:
    return f"{folder}: {who}; wait for it to end, or stop it"


@contextlib.contextmanager
def _announcing(folder: Path) -> Iterator[None]:
    """While the block runs, say in the folder that this process trains there."""
    file = folder / RUNNING
    remove = lambda: file.unlink(missing_ok=True)  # noqa: E731
    with interrupts.undoing(remove):
        replace_text(file, announcement())
        yield
    remove()


def check_shared(folder: Path) -> None:
    """Raise `UserError` on every process unless `folder` is the same folder on all, where each can write.

    The first process leaves a file there, which the others must see. Each process writes its part of a checkpoint.
    """
    with contextlib.ExitStack() as held:

        def leave_mark() -> str:
            with writing_to("run_dir", folder):
                return str(held.enter_context(marking(folder)))

        mark = as_path(distributed.first(leave_mark))

        def find_mark() -> None:
            distributed.require_shared(mark, f"run_dir={mark.parent}", "a part of a checkpoint")
            with writing_to("run_dir", mark.parent):
                check_writable(mark.parent)

        distributed.together(find_mark)


def list_saved(checkpoints: Path) -> dict[str, str]:
    """Return a hash of each checkpoint by its step, which another save of the same step changes."""
    sums = {step: checkpoints / str(step) / SUMS for step in steps(checkpoints)}
    return {str(step): hashlib.sha256(file.read_bytes()).hexdigest() for step, file in sums.items() if file.is_file()}


@contextlib.contextmanager
def opened(
    folder: Path,
    cfg: TrainConfig,
    resumed: Path | None,
    start: int,
    history: list[MetricsRow],
    held_out: Sequence[str],
    saved: Mapping[str, str] | None = None,
) -> Iterator[Opened]:
    """Make and lock the folder and write its first files, on the first process, which alone writes a log file.

    If the process is killed in here, the run can still be resumed from the same step: later checkpoints are removed
    first, and each file is replaced in one operation. If the block raises, or a signal ends the process, before the run
    has logged or saved a step, what this function made is removed; a folder that is continued stays.

    `saved` is what `list_saved` returned of the folder that is continued, before the set-up. Raises `UserError` if
    another run has trained there meanwhile.
    """
    with contextlib.ExitStack() as held:

        def begin() -> str:
            with writing_to("run_dir", folder):
                made = held.enter_context(making(folder, numbered=cfg.run_dir is None and resumed is None))
                if not is_url(made):  # an object store has no locks
                    held.enter_context(locking(made.resolve(), _busy(made, trainer(made) or OTHER)))
                    held.enter_context(_announcing(made))
                # Another run may have begun there meanwhile, or trained and ended.
                if folder == resumed and list_saved(made / _CHECKPOINTS) != saved:
                    raise UserError(f"{made}: another run has trained here since this one began; start this one again")
                if folder != resumed and not _check_free(made, cfg):
                    held.enter_context(interrupts.undoing(lambda: _remove_begun(made, len(history))))
                remove_beyond(made / _CHECKPOINTS, start)
                mapping = as_mapping(run_settings(cfg))
                _copy_texts(made, mapping)
                replace_text(made / _CONFIG, to_yaml(mapping))
                if held_out:
                    replace_text(made / report.HELD_OUT_FILE, "".join(f"{name}\n" for name in held_out))
            return str(made)

        path = as_path(distributed.first(begin))
        log = path / _METRICS if distributed.is_first() else None
        yield Opened(path, distributed.together(lambda: MetricsLog(log, history)))


def _copy_texts(folder: Path, mapping: Mapping[str, Any]) -> None:
    """Copy what makes tokens into the folder of a run, whose configuration may name copies that are there already."""
    contents = {name: file.read_bytes() for name, file in list_copies(mapping).items()}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(folder / name, lambda new, content=content: new.write_bytes(content))


def _check_free(folder: Path, cfg: TrainConfig) -> bool:
    """Raise `UserError` if the folder holds a model or a run, or a file that this run would replace or remove.

    With `resume=auto` it may hold a run that ended before its first checkpoint, which starts again: its files are
    replaced. Return whether it does.
    """
    if (folder / "config.json").exists():
        raise UserError(f"run_dir={folder} is a Hugging Face folder (it has config.json); name another folder")
    if found := [name for name in _FIRST if (folder / name).exists() or os.path.islink(folder / name)]:
        saved = steps(folder / _CHECKPOINTS)
        if cfg.resume == AUTO and not saved and _is_begun(folder):
            return True
        then = f"continue it with resume={folder}" if saved else f"remove {', '.join(found)} there"
        raise UserError(f"run_dir={folder} already holds a run; name another folder, or {then}")
    return False


def _is_begun(folder: Path) -> bool:
    """Return whether a folder without a checkpoint has a run's configuration, and among checkpoints only a run's."""
    try:
        read_run(folder, "run_dir")
    except UserError:
        return False
    there = [path.name for path in (folder / _CHECKPOINTS).iterdir()] if (folder / _CHECKPOINTS).is_dir() else []
    return all(name == FROZEN or name.isdecimal() or name.startswith(UNFINISHED) for name in there)


def _remove_begun(folder: Path, rows: int) -> None:
    """Remove the files of a run, unless it has saved a step, or has logged more than the `rows` that it began with."""
    log = folder / _METRICS
    if steps(folder / _CHECKPOINTS) or (log.exists() and log.read_bytes().count(b"\n") > rows):
        return
    for name in _FIRST:
        if (folder / name).is_dir():
            remove_folder(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
