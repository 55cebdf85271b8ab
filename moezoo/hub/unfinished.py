"""A folder that is written elsewhere until it is whole, so that nobody takes a part of it for a model."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import moezoo.interrupts as interrupts
from moezoo.errors import UserError
from moezoo.host.files import locking
from moezoo.parallel import distributed
from moezoo.typed import show

_SUFFIX = ".unfinished"
_LONGEST = 60  # characters of the name that a temporary folder has too


@contextlib.contextmanager
def becoming(
    folder: Path, sizes: Mapping[str, int], existing: Literal["refuse", "replace"] = "refuse"
) -> Iterator[Path]:
    """Yield a temporary folder, whose files become those of `folder` when the block ends. All processes call this.

    - If there is no `folder` yet, the temporary one is `.NAME.unfinished` beside it, and is renamed. Otherwise it is
      `.unfinished` inside, because `folder` may be the root of another disk, and its files are moved, the last of
      `sizes` last. If files have appeared in `folder` meanwhile, it stays as it is, and the block's files are removed.
      With `existing="replace"` each takes the place of one of its name.
    - If the block raises, or a signal ends the process, nothing is left. After a kill the temporary folder is left, and
      the next call for the same `folder` replaces it.

    Args:
        folder: The folder to make, or to move the files to.
        sizes: The name of each file and its bytes. The block must write exactly these.
        existing: What is done where `folder` has a file of one of the names.

    Raises:
        UserError: On all processes, if on one of them: `folder` cannot be made or has one of the files, the disk has
            not that many bytes free, another process writes the same folder, or has put one of the files there when the
            block ends, the processes do not share the disk, or a file is not whole.
    """
    with contextlib.ExitStack() as held:

        def begin() -> str:
            with writing(folder):
                return str(held.enter_context(_begun(folder, sizes, existing)))

        work = Path(distributed.first(begin))
        distributed.together(lambda: distributed.require_shared(work, str(work.parent), "a part of the files"))
        yield work

        def finish() -> None:
            if distributed.is_first():
                with writing(folder):
                    _finish(work, folder, sizes, existing)

        distributed.together(finish)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise an error of the file system as a `UserError`: `folder`, or something in it, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error}); name another folder") from error


@contextlib.contextmanager
def _begun(folder: Path, sizes: Mapping[str, int], existing: str) -> Iterator[Path]:
    """Make and lock the empty temporary folder; remove it if the block raises or a signal ends the process."""
    real = folder.resolve()
    inside, beside = real / _SUFFIX, real.parent / f".{real.name[:_LONGEST]}{_SUFFIX}"
    work = inside if folder.is_dir() else beside
    missing = [path for path in work.parents if not path.exists()]

    def remove_parents() -> None:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()

    def remove() -> None:
        shutil.rmtree(work, ignore_errors=True)

    with interrupts.undoing(remove_parents):
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(None, "it is no folder")
        work.mkdir(parents=True, exist_ok=True)
        busy = f"{folder}: another process is writing it, in {work}; wait for it to end"
        with locking(work, busy), interrupts.undoing(remove):
            if work == inside and beside.is_dir():  # `folder` was made after another call began
                with locking(beside, busy):
                    shutil.rmtree(beside)
            for left in work.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            _check_absent(folder, sizes, existing)
            needed, free = sum(sizes.values()), shutil.disk_usage(work).free
            if needed > free:
                raise UserError(
                    f"{folder}: cannot be written: it needs {needed:,} bytes and the disk has {free:,} bytes free; "
                    "name a folder on another disk"
                )
            yield work


def _check_absent(folder: Path, names: Iterable[str], existing: str) -> None:
    """Raise `UserError` if the folder has one of the files, unless they are to be replaced."""
    if existing == "refuse" and (found := [name for name in names if os.path.lexists(folder / name)]):
        raise UserError(f"{folder}: cannot be written ({show(found[0])} exists there); name another folder")


def _finish(work: Path, folder: Path, sizes: Mapping[str, int], existing: str) -> None:
    """Give the files their final names, after all of them are whole."""
    for name, size in sizes.items():
        found = (work / name).stat().st_size if (work / name).exists() else 0
        if found != size:
            raise UserError(f"{folder}: {show(name)} has {found} bytes of {size}, so it is not whole; save again")
    if work.name != _SUFFIX:
        os.rename(work, folder)  # fails where somebody has made `folder` with files in it
        return
    _check_absent(folder, sizes, existing)
    moved = list[Path]()

    def remove_moved() -> None:
        for path in moved:
            path.unlink(missing_ok=True)

    with interrupts.undoing(remove_moved):
        for name in sizes:
            if existing == "refuse":  # what replaces a file of an older save is not taken away again
                moved.append(folder / name)
            os.rename(work / name, folder / name)
        moved.clear()
    work.rmdir()
