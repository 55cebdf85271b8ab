"""`moezoo doctor`: what is installed here, and whether it works, as a report to paste into an issue.

This process does not import JAX, so that it can report that JAX does not work. What needs JAX is in
`moezoo.tools.doctor.devices`, of which each part runs in a process of its own, because JAX may crash or wait forever.
"""

import contextlib
import dataclasses
import importlib.metadata as metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from packaging.requirements import Requirement

from moezoo.cli.command import KeysCommand
from moezoo.config.options import key, read, take_switches
from moezoo.errors import UserError, describe_end, last_words
from moezoo.host.machine import (
    host_memory,
    in_gib,
    installed,
    own_flags,
    own_variables,
    processor_limits,
    processor_name,
    processors,
)
from moezoo.terminal.tables import pairs
from moezoo.typed import Range, counted

MARK = "moezoo-doctor "  # the start of a line that a part's process prints for this one
DEVICES, STEPS = "devices", "two steps"  # the parts that start JAX
_WIDTH, _TITLE = 100, 13
_PACKAGE = Path(__file__).parents[2]
_PLUGIN = re.compile(r"jax-(cuda|rocm|oneapi)\w*-(plugin|pjrt)|libtpu")
# Variables that change results or speed and hold no secret. No other is shown.
_SHOWN = re.compile(
    r"JAX_(PLATFORMS|ENABLE_X64|DEFAULT_MATMUL_PRECISION|DISABLE_JIT|DEBUG_NANS)|XLA_(FLAGS|PYTHON_CLIENT_\w+)|PJRT_NPROC|"
    r"LIBTPU_INIT_ARGS|TPU_\w+_BOUNDS|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|NCCL_\w+|N(VIDIA_TF32_OVERRIDE|PROC)|PYTHONPATH|"
    r"OMP_NUM_THREADS|LD_(LIBRARY_PATH|PRELOAD)|SLURM_(NTASKS|PROCID|STEP_NUM_TASKS)|EQX_ON_ERROR|MALLOC_\w+"
)
# What an error may quote: the user and password of an address, and keys.
_SECRET = re.compile(r"(?<=://)\S*@|\b(hf_|sk[-_]|gh[a-z]_|github_pat_|glpat-|nvapi-|AKIA|AIza|eyJ)[\w.\-]+")


class Entry(NamedTuple):
    """One line of a report: "fact", "note" for advice, or "problem" if a run needs it; its part; and what it says."""

    kind: Literal["fact", "note", "problem"]
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    seconds: Annotated[float, Range(at_least=1.0)] = key("how long one part may take on the devices", default=300.0)


@dataclasses.dataclass(frozen=True)
class Switches:
    """The command's options with dashes."""

    markdown: bool = key("put the report between lines of ```, to paste it into an issue", default=False)
    json: bool = key("print the report as JSON, alone on stdout", default=False)


def main(arguments: Sequence[str]) -> int:
    """Print the report; return 1 if something that a run needs does not work."""
    switches, words = take_switches(Switches, arguments)
    found = [entry._replace(text=mask(entry.text)) for entry in examine(read(Keys, words).seconds)]
    facts: dict[str, list[str]] = {}
    for entry in (entry for entry in found if entry.kind == "fact"):
        facts.setdefault(entry.title, []).append(entry.text)
    notes, problems = ([e for e in found if e.kind == kind] for kind in ("note", "problem"))
    if switches.json:
        advice = ([{"part": e.title, "text": e.text} for e in each] for each in (notes, problems))
        print(json.dumps({"facts": facts, **dict(zip(("notes", "problems"), advice, strict=True))}, indent=2))
    else:
        rows = [("" if n else title, text) for title, texts in facts.items() for n, text in enumerate(texts)]
        rows += [("", ""), *((e.kind, f"{e.title}: {e.text}") for e in (*notes, *problems))]
        count = counted(len(problems), "problem")
        rows.append(("result", count if problems else "what a run needs is there and works"))
        lines = pairs(rows, _WIDTH, column=_TITLE)
        print("\n".join(["```text", *lines, "```"] if switches.markdown else lines))
    return 1 if problems else 0


def guarded(title: str, find: Callable[[], Iterable[Entry]]) -> Iterator[Entry]:
    """Yield what a part of the report finds; what it raises is a problem of one line."""
    try:
        yield from find()
    except Exception as error:
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        yield Entry("problem", title, f"failed: {name}{str(error).strip().partition(chr(10))[0][:300]}")


def examine(seconds: float) -> Iterator[Entry]:
    """Yield all entries, part by part. Where devices do not start, the two steps are tried on the CPU."""
    yield from guarded("moezoo", find_versions)
    yield from guarded("libraries", find_libraries)
    yield from guarded("machine", find_machine)
    environment = dict(os.environ)
    for title in (DEVICES, STEPS):
        found = _run_part(title, environment, seconds)
        yield from found
        if any(entry.title == "jax" for entry in found):
            return
        if title == DEVICES and all(entry.kind == "problem" for entry in found):
            if environment.get("JAX_PLATFORMS") == "cpu":
                return
            environment["JAX_PLATFORMS"] = "cpu"
            yield Entry("fact", DEVICES, "what follows is of the CPU")


def command_of(title: str) -> list[str]:
    """Return the command that runs a part and prints what it finds."""
    return [sys.executable, "-P", "-c", f"from moezoo.tools.doctor.devices import child; child({title!r})"]


def _run_part(title: str, environment: dict[str, str], seconds: float) -> list[Entry]:
    """Return the entries of a part that runs in a process of its own, and how that ended unless it ended well."""
    options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "env": environment, "timeout": seconds}
    reason = ""
    try:
        done = subprocess.run(command_of(title), check=False, **options)
        out = done.stdout
        if code := done.returncode:
            reason = f"its process {describe_end(code)}: {last_words(done.stderr.decode(errors='replace'))}".rstrip(
                ": "
            )
    except subprocess.TimeoutExpired as error:
        out, reason = error.stdout or b"", f"no answer for {seconds:g} s (seconds= sets this limit)"
    lines = out.decode(errors="replace").splitlines()
    said = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    found = [Entry(*each) for each in said if each]
    if reason:
        no_jax = f"moezoo was not imported with JAX: {reason}"
        found.append(Entry("problem", title, f"failed: {reason}") if said else Entry("problem", "jax", no_jax))
    return found


def find_versions() -> Iterator[Entry]:
    """Yield the versions of moezoo and Python, where moezoo is, and links that a clone lacks."""
    root, version, commit = _PACKAGE.parent, installed("moezoo"), ""
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty= with changes", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(asked, capture_output=True, text=True, check=False) if (root / ".git").exists() else None
        commit = f"commit {done.stdout.strip() or 'unknown'}, " if done else ""
    yield Entry("fact", "moezoo", f"{version or 'not installed'}, {commit}in {root}")
    if version is None:
        yield Entry("problem", "moezoo", f"imported from {root}, but not installed; pip install it")
    yield Entry("fact", "python", f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}")
    for name in ("models", "kernels", "conf"):
        if not (_PACKAGE / name).is_dir():
            without = "is no folder: this clone was made without symbolic links; run git config core.symlinks true"
            yield Entry("problem", "moezoo", f"{_PACKAGE / name} {without} and git checkout -- moezoo")


def find_libraries() -> Iterator[Entry]:
    """Yield the versions of the libraries that moezoo needs, which must fit, and of JAX's plugins."""
    every = map(Requirement, (metadata.requires("moezoo") or ()) if installed("moezoo") else ())
    needed = [each for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]
    plugins = {name for each in metadata.distributions() if _PLUGIN.fullmatch(name := each.name.lower())}
    names = ["jaxlib", *(each.name for each in needed), *sorted(plugins)]
    yield Entry("fact", "libraries", ", ".join(f"{name} {installed(name) or 'missing'}" for name in names))
    for each in needed:
        have = installed(each.name)
        if have is None or not each.specifier.contains(have, prereleases=True):
            asked = f"{each.name}{each.specifier}"
            text = f"{each.name} {have or 'is missing'}, and moezoo needs {asked}; pip install '{asked}'"
            yield Entry("problem", "libraries", text)


def find_machine() -> Iterator[Entry]:
    """Yield the system, processors and memory, and the variables that change results or speed."""
    usable = min([processors(), *processor_limits()])  # also those of a container
    size = f"{processor_name()}, {usable:.3g} processors, {in_gib(host_memory())} of memory"
    yield Entry("fact", "machine", f"{platform.platform()}, {size}")
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in own_flags)
    own = {*own_variables, *(["XLA_FLAGS"] if not flags else [])}
    for name in sorted(name for name in os.environ if _SHOWN.fullmatch(name) and name not in own):
        yield Entry("fact", "environment", f"{name}={flags if name == 'XLA_FLAGS' else os.environ[name]}")


def mask(text: str) -> str:
    """Return a text without secrets, the home folder and the name of the user in paths."""
    text = _SECRET.sub("***", text)
    home = os.path.expanduser("~").rstrip("/")
    for folder in {home, os.path.realpath(home)} if len(home) > 1 else ():
        text = re.sub(rf"(?<![\w/.]){re.escape(folder)}(?![\w\-])", "~", text)
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SLURM_JOB_USER")} | {Path(home).name}
    for user in names - {"", "root"}:
        text = re.sub(rf"(?<=/){re.escape(user)}(?![\w\-])", "USER", text)
    return text


COMMAND = KeysCommand(
    "doctor",
    "report what is installed here, and whether it works",
    main,
    description="Report versions, devices and environment, train two steps of a tiny model on one device and on all, "
    "and end with advice. The exit code is 1 if something that a run needs does not work. Nothing is sent anywhere, "
    "and the report shows neither keys nor your name. Page: docs/start.md of the repository.",
    keys=Keys,
    switches=Switches,
    examples=("--markdown > report.md", "seconds=600"),
    alone=True,
)
