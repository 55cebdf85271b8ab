"""Writing files and folders so that nothing incomplete is left, also by a signal (`moezoo.interrupts`)."""

import contextlib
import itertools
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import moezoo.interrupts as interrupts
from moezoo.errors import UserError
from moezoo.host.remote import is_url
from moezoo.typed import show


@contextlib.contextmanager
def writing_to(key: str, folder: Path | str) -> Iterator[None]:
    """Raise an error of the file system as a `UserError`; `key` is the setting that has the value `folder`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{key}={show(str(folder))}: cannot write there ({error.strerror}); name another folder"
        ) from error


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Make or replace a file in one operation: `write` receives the path of another, which then takes its name."""
    if is_url(path):
        with tempfile.TemporaryDirectory() as folder:
            write(new := Path(folder) / path.name)
            path.write_bytes(new.read_bytes())
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with interrupts.undoing(lambda: temporary.unlink(missing_ok=True)):
        write(temporary)
        os.replace(temporary, path)


def replace_text(path: Path, text: str) -> None:
    """Make or replace a text file in one operation."""
    # Text may hold names of files, which need not be UTF-8.
    replace_file(path, lambda new: new.write_text(text, encoding="utf-8", errors="surrogateescape"))


@contextlib.contextmanager
def marking(folder: Path) -> Iterator[Path]:
    """Make the folder, unless it exists, and an empty file there while the block runs; yield the path of the file.

    Raises `OSError` if that is not possible. Nothing is left of either.
    """
    remove_folder, mark = _remover(folder), folder / f".{uuid.uuid4().hex}.partial"

    def remove() -> None:
        with contextlib.suppress(OSError, ValueError):
            mark.unlink()
        remove_folder()

    with interrupts.undoing(remove):
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"")
        yield mark
    remove()


def check_writable(folder: Path) -> None:
    """Raise `OSError` unless the folder can be made and a file written there; nothing is left of the attempt."""
    with marking(folder):
        pass


@contextlib.contextmanager
def making(folder: Path, *, numbered: bool = False) -> Iterator[Path]:
    """Make a folder and its parents. Those that are new and empty are removed if the block raises, or after a signal.

    With `numbered`, a number is appended to the name if the folder exists.
    """
    made = folder
    with contextlib.ExitStack() as held:
        for number in itertools.count(2):
            held.enter_context(interrupts.undoing(_remover(made)))
            try:
                made.mkdir(parents=True, exist_ok=not numbered)
                break
            except FileExistsError:
                if not numbered:
                    raise
                made = folder.with_name(f"{folder.name}_{number}")
        yield made


def _remover(folder: Path) -> Callable[[], None]:
    """Return what removes the folder and its parents again, as far as they do not exist now and are empty then."""
    missing = [] if is_url(folder) else [path for path in (folder, *folder.parents) if not path.exists()]

    def remove() -> None:
        for path in missing:
            with contextlib.suppress(OSError, ValueError):  # no path may hold a null character
                path.rmdir()

    return remove
