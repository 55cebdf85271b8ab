"""What `moezoo doctor` reports: entries, and what no report shows. Nothing imports JAX."""

import contextlib
import getpass
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from moezoo.errors import UserError

_MOST = 300  # characters of an error


class Entry(NamedTuple):
    """One line of a report.

    Attributes:
        kind: "fact"; "note" for advice; "problem" if something that a run needs does not work.
        title: The part of the report that it belongs to.
        text: What it says.
    """

    kind: Literal["fact", "note", "problem"]
    title: str
    text: str


def facts(title: str, *texts: str) -> list[Entry]:
    """Return an entry for each text."""
    return [Entry("fact", title, text) for text in texts]


def note(title: str, text: str) -> Entry:
    """Return an entry with advice."""
    return Entry("note", title, text)


def problem(title: str, text: str) -> Entry:
    """Return an entry about something that does not work."""
    return Entry("problem", title, text)


class Part(NamedTuple):
    """A part of a report.

    Attributes:
        title: Its name.
        find: A function that returns its entries; what it raises is one entry.
        needed: Whether a run needs what the part looks at.
    """

    title: str
    find: Callable[[], Iterable[Entry]]
    needed: bool = True

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of the part."""
        try:
            yield from self.find()
        except Exception as error:
            yield self.failure(describe(error))

    def failure(self, reason: str) -> Entry:
        """Return the entry of a part that failed."""
        return Entry("problem" if self.needed else "note", self.title, f"failed: {reason}")


def describe(error: BaseException) -> str:
    """Return an error as one line; the class of one that is no user's mistake, too."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:_MOST]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}".rstrip(": ")


# The start of a line that the process of parts on devices prints, among what libraries print.
MARK = "moezoo-doctor "
DEVICES = "devices"  # the part that starts JAX
# The parts on devices, in order -> whether a run needs what they look at. The last ones can take the longest.
ON_DEVICES = {
    DEVICES: True,
    "kernels": True,
    "cache": False,
    "distributed": False,
    "two steps": True,
    "compilers": False,
}

# Names of variables whose values are never shown, and texts that are tokens or keys.
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|PW\b|_PW|CREDENTIAL|AUTH|COOKIE|JWT")
_SECRETS = (
    (re.compile(r"(?<=://)\S*@"), "***@"),  # the user and password of an address
    (re.compile(r"(?<![\w/])[\w.\-]+:(?!//)[^\s@]+@(?=\w)"), "***@"),  # the same without its scheme
    (re.compile(r"(?<=[?&])([^=&\s]+)=[^&\s]*"), r"\1=***"),  # values in the query of an address
    (re.compile(r"\b(hf_|sk[-_]|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA|AIza|eyJ)[\w.\-]+"), "***"),
    (re.compile(r"\b(nvapi-|r8_|wandb_v|wandb-)[\w.\-]+"), "***"),
    (re.compile(r"(?i)\b(password|passwd|token|secret|api_?key)[=:][^\s,;&]+"), r"\1=***"),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "***"),
)
# Letters of both cases and digits in one long word.
_OPAQUE = re.compile(r"(?<![\w/.\-])(?=[\w\-]*[a-z])(?=[\w\-]*[A-Z])(?=[\w\-]*\d)[\w\-]{24,}=*(?![\w/.])")


def shown_value(name: str, value: str) -> str:
    """Return the value of a variable without what may be secret."""
    if _SECRET_NAME.search(name.upper()):
        return "(set, not shown)"
    value = _OPAQUE.sub("***", mask(value))
    for user in _users():
        value = re.sub(rf"(?<![\w.\-]){re.escape(user)}(?![\w\-])", "USER", value)
    return value


def mask(text: str) -> str:
    """Return a text without secrets, the home folder and the name of the user in paths."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    home = os.path.expanduser("~").rstrip("/")
    for folder in {home, os.path.realpath(home)} if len(home) > 1 else ():
        text = re.sub(rf"(?<![\w/.]){re.escape(folder)}(?![\w\-])", "~", text)
    for user in _users():
        text = re.sub(rf"(?<=/){re.escape(user)}(?![\w\-])", "USER", text)
    return text


def _users() -> set[str]:
    """Return the names that this user has."""
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SLURM_JOB_USER")}
    with contextlib.suppress(OSError, KeyError):  # containers run under numbers without a name
        names.add(getpass.getuser())
    names.add(Path(os.path.expanduser("~")).name)
    return {name for name in names if len(name) > 1 and name != "root"}
