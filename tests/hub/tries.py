"""What every try of a published file needs. A try yields (column, cell), ("", note) and (name, hashes of a result)."""

import contextlib
import datetime
import gzip
import hashlib
import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils

from moezoo.errors import UserError

Try = Iterator[tuple[str, Any]]
DATE = "2025-02-03"  # that templates see
_SECONDS = 120  # for one file


def read_text(path: Path) -> str:
    """Return the text of a file, which may be packed."""
    return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()


def attempt(make: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Return what a function returns, or None and its error."""
    try:
        return make(*arguments), ""
    except TimeoutError:
        raise
    except Exception as error:  # other people's files and libraries raise anything
        return None, words(error)


def words(error: BaseException) -> str:
    """Return the first line of an error."""
    return f"{'' if isinstance(error, UserError) else type(error).__name__ + ': '}{error}".split("\n")[0]


def hashes(*values: Any) -> list[str]:
    """Return a short hash of each value."""
    return [hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for value in values]


@contextlib.contextmanager
def limited() -> Iterator[Path]:
    """Give a folder for one file, the date that transformers shows to templates, and an end to what takes long."""

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Fixed":
            return cls.fromisoformat(DATE)

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {_SECONDS} seconds")

    before, chat_template_utils.datetime = chat_template_utils.datetime, Fixed  # pyright: ignore
    handler, work = signal.signal(signal.SIGALRM, stop), Path(tempfile.mkdtemp())
    signal.alarm(_SECONDS)
    try:
        yield work
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        chat_template_utils.datetime = before  # pyright: ignore
        shutil.rmtree(work)
