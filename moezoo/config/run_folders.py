"""The folder of a run and its checkpoints, by their names alone, and who trains there."""

import datetime
import json
import os
import socket
from pathlib import Path

from moezoo.errors import UserError
from moezoo.host.files import is_locked
from moezoo.host.remote import as_path, is_url

# The value of `resume` with which a command continues the run in `run_dir`, or starts it there.
AUTO = "auto"
# The file of a checkpoint that is written last.
SUMS = "sha256.json"
# The file in a run's folder that says, while a process trains there, which one. The lock says whether one does.
RUNNING = "running.json"
OTHER = "another process trains here"  # where it has not said who it is


def run_folder(path: str | Path) -> Path:
    """Return the folder of the run that `path` is, or that has `path` as one of its `checkpoints/STEP`."""
    path = as_path(path)
    return path.parent.parent if path.parent.name == "checkpoints" and path.name.isdecimal() else path


def steps(folder: Path) -> list[int]:
    """Return the steps saved in a run's `checkpoints` folder, in ascending order.

    On a disk a checkpoint gets its name when it is complete. In an object store it is complete with its last file.
    """
    return [step for step in numbered(folder) if not is_url(folder) or (folder / str(step) / SUMS).exists()]


def numbered(folder: Path) -> list[int]:
    """Return the numbers that are names of folders in `folder`, in ascending order."""
    names = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def announcement() -> str:
    """Return the contents of `RUNNING` for this process."""
    since = datetime.datetime.now().astimezone().isoformat(timespec="minutes")
    return json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"


def trainer(folder: Path) -> str | None:
    """Return who trains in a run's folder now, for a message; None if nobody does, or it is in an object store."""
    try:
        if is_url(folder) or not folder.is_dir() or not is_locked(folder.resolve()):
            return None
    except PermissionError:
        return None
    try:
        about = json.loads((folder / RUNNING).read_text())
        since = datetime.datetime.fromisoformat(about["since"]).astimezone()
        today = since.date() == datetime.date.today()
        when = f"{since:%H:%M}" if today else f"{since:%Y-%m-%d %H:%M}"
        return f"process {about['process']} on {about['host']} trains here since {when}"
    # It has just begun, or an older moezoo trains, or the file is damaged.
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return OTHER


def find(path: str | Path, key: str) -> tuple[Path, int]:
    """Return the `checkpoints` folder and the step of a run folder (its newest) or of one `checkpoints/STEP`.

    Raises `UserError` if there is no such checkpoint; `key` is the setting that has the value `path`.
    """
    named, run_dir = as_path(path), run_folder(path)
    folder = run_dir / "checkpoints"
    saved = steps(folder)
    if named != run_dir and int(named.name) not in saved:
        there = ", ".join(str(step) for step in saved if (folder / str(step) / SUMS).exists()) or "none"
        raise UserError(f"{key}={path}: no such checkpoint; there are {there}")
    if not saved and (who := trainer(run_dir)):
        advice = "wait for it to end, or stop it" if key == "resume" else "wait for one"
        raise UserError(f"{key}={path}: {who} and has saved no checkpoint yet; {advice}")
    if not saved:
        raise UserError(
            f"{key}={path}: no checkpoint there (a run saves one every checkpoint_minutes and at its end); name a run "
            "that has one, or remove this one and start again"
        )
    return folder, saved[-1] if named == run_dir else int(named.name)
