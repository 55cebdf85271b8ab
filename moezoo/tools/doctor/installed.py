"""What is installed, for `moezoo doctor`: versions, whether they fit together, and second installations. No JAX."""

import contextlib
import importlib.metadata as metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import moezoo.interrupts as interrupts
from moezoo.errors import last_words
from moezoo.tools.doctor.entries import Entry, facts, note, problem

_PACKAGE = Path(interrupts.__file__).parent
_LINKS = ("models", "kernels", "conf")
_FOR_DEVELOPERS = ("test", "lint")
# Extras that bring JAX for other devices: `moezoo.tools.doctor.devices` tries these.
_FOR_DEVICES = ("cuda", "tpu", "plan")
_IMPORT_SECONDS = 120
_PLUGIN = re.compile(r"jax-(cuda|rocm|oneapi)\w*-(plugin|pjrt)")


def find_versions() -> Iterator[Entry]:
    """Yield the versions of moezoo and Python, and what is wrong with where moezoo is."""
    root = _PACKAGE.parent
    version = installed("moezoo")
    yield from facts("moezoo", f"{version or 'not installed'}, {_describe_checkout(root) or f'in {root}'}")
    if version is None:
        yield problem("moezoo", f"imported from {root}, but not installed; {_pip('')}")
    yield from facts("python", f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}")
    for name in _LINKS:
        if not (_PACKAGE / name).is_dir():
            yield problem(
                "moezoo",
                f"{_PACKAGE / name} is no folder: this clone was made without symbolic links; run git config "
                "core.symlinks true and git checkout -- moezoo",
            )
    if others := _other_installations(root):
        yield note(
            "moezoo",
            f"two installations: this is {root}, and pip has installed {' and '.join(others)}; other commands may run "
            f"that one; {_pip('')} in the one that you want, and unset PYTHONPATH",
        )
    found = importlib.util.find_spec("models")
    if found is not None and found.origin and Path(found.origin).parent.resolve() == (_PACKAGE / "models").resolve():
        yield note(
            "moezoo",
            f"{root} is on Python's path, so `import models` makes a second copy; import moezoo.models",
        )


def find_libraries() -> Iterator[Entry]:
    """Yield the versions of libraries that moezoo needs, and those that do not fit."""
    needed = _declared("moezoo")[""]
    names = [name for each in needed for name in ((each.name, "jaxlib") if each.name == "jax" else (each.name,))]
    yield from facts("libraries", ", ".join(f"{name} {installed(name) or 'missing'}" for name in names))
    for owner, requirements in {"moezoo": needed, "jax": _declared("jax")[""]}.items():
        for each in requirements:
            if (have := installed(each.name)) is None:
                yield problem("libraries", f"{each.name} is not installed, and {owner} needs it; {_pip('')}")
            elif not each.specifier.contains(have, prereleases=True):
                text = f"{each.name} {have} is installed, and {owner} needs {_describe(each)}"
                yield problem("libraries", f"{text}; {_pip('')}")
    jaxlib = installed("jaxlib")
    plugins = {name: have for name, have in sorted(_distributions().items()) if _PLUGIN.fullmatch(name)}
    if plugins:
        yield from facts("libraries", ", ".join(f"{name} {have}" for name, have in plugins.items()))
    for name, have in plugins.items():
        if jaxlib is not None and have != jaxlib:
            text = f"{name} {have} and jaxlib {jaxlib} are different versions, and JAX may ignore the plugin"
            yield note("libraries", f"{text}; pip install '{name}=={jaxlib}'")


def find_extras() -> Iterator[Entry]:
    """Yield what each extra of moezoo brings, as far as it is installed, and libraries that cannot be imported."""
    present, absent, probed = [], [], []
    for extra, needed in _extras().items():
        have = [f"{each.name} {installed(each.name)}" for each in needed if installed(each.name)]
        lacking = [each.name for each in needed if not installed(each.name)]
        present += [f"{extra}: {', '.join(have)}"] if have else []
        absent += [f"{extra}: no {', '.join(lacking)}; {_pip(extra)}"] if lacking else []
        for each in needed:
            version = installed(each.name)
            if version and not each.specifier.contains(version, prereleases=True):
                yield note(
                    "extras",
                    f"{each.name} {version} is installed, and moezoo[{extra}] takes {_describe(each)}; {_pip(extra)}",
                )
            if version and extra not in _FOR_DEVICES:
                probed.append((extra, each.name))
    yield from facts("extras", *([f"installed  {'; '.join(present)}"] * bool(present)), *absent)
    yield from _import_all(dict.fromkeys(probed))


def installed(name: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _module(name: str) -> str:
    """Return the module that a distribution brings: the one of its own name, or else the first of its files."""
    own, files = name.replace("-", "_"), metadata.distribution(name).files or ()
    found = sorted(file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py")
    return own if own in found or not found else found[0]


def _import_all(libraries: Iterable[tuple[str, str]]) -> Iterator[Entry]:
    """Import each of the libraries, pairs of extra and name, in a process of its own, which may crash."""
    running = []
    with contextlib.ExitStack() as held:
        for extra, name in libraries:
            command = [sys.executable, "-P", "-c", f"import {_module(name)}"]
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            process = held.enter_context(subprocess.Popen(command, text=True, **pipes))
            held.enter_context(interrupts.undoing(process.kill))
            running.append((extra, name, process))
        for extra, name, process in running:
            try:
                _, err = process.communicate(timeout=_IMPORT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                yield note("extras", f"importing {name} takes more than {_IMPORT_SECONDS} s")
                continue
            if process.returncode:
                reason = last_words(err) or f"code {process.returncode}"
                yield note(
                    "extras", f"{name} is installed and cannot be imported ({reason}); {_pip(extra, again=True)}"
                )


def _extras() -> dict[str, list[Requirement]]:
    """Return extra -> what it brings, without what it takes from other extras of moezoo and from every JAX."""
    found: dict[str, list[Requirement]] = {}
    jax = _declared("jax")
    for extra, needed in _declared("moezoo").items():
        own = [each for each in needed if each.name not in ("jax", "moezoo")]
        inner = [jax.get(name, []) for each in needed if each.name == "jax" for name in sorted(each.extras)]
        own += [each for brought in inner for each in brought if each.name != "jaxlib"]
        if own and extra and extra not in _FOR_DEVELOPERS:
            found[extra] = own
    return found


def _declared(name: str) -> dict[str, list[Requirement]]:
    """Return extra -> what it adds to a distribution, and "" -> what the distribution needs.

    Those of a clone of moezoo are in its pyproject.toml: what was installed may be of an earlier commit.
    """
    project = _PACKAGE.parent / "pyproject.toml"
    if name == "moezoo" and project.exists():
        table = tomllib.loads(project.read_text())["project"]
        texts = {"": table["dependencies"], **table["optional-dependencies"]}
        found = {extra: [Requirement(text) for text in each] for extra, each in texts.items()}
        return {extra: [each for each in some if _applies(each, "")] for extra, some in found.items()}
    try:
        every = [Requirement(text) for text in metadata.requires(name) or ()]
        extras = metadata.metadata(name).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return {"": []}
    base = [each for each in every if _applies(each, "")]
    return {"": base} | {extra: [e for e in every if e not in base and _applies(e, extra)] for extra in extras}


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _describe(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _distributions() -> dict[str, str]:
    return {name.lower(): each.version for each in metadata.distributions() if (name := each.metadata["Name"])}


def _pip(extra: str, again: bool = False) -> str:
    """Return the command that installs moezoo, with an extra."""
    root = _PACKAGE.parent
    target = "." if (root / "pyproject.toml").exists() else "moezoo"
    what = f"{target}[{extra}]" if extra else target
    options = " --force-reinstall" * again + " -e" * (target == ".")
    return f"pip install{options} {what!r}" if extra else f"pip install{options} {what}"


def _describe_checkout(root: Path) -> str:
    """Return the commit of a clone; empty where git knows none."""
    if not (root / ".git").exists():
        return ""
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode:
        return f"clone {root}, commit unknown"
    commit, dirty, _ = done.stdout.strip().partition("-dirty")
    return f"commit {commit}{' with changes' * bool(dirty)}, clone {root}"


def _other_installations(root: Path) -> list[str]:
    """Return the folders of other copies of moezoo which pip has installed, and whether one is gone."""
    found = {}
    for each in metadata.distributions(name="moezoo"):
        origin = json.loads(each.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            folder = Path(urllib.request.url2pathname(urllib.parse.urlsplit(origin["url"]).path))
            found[folder.resolve()] = "" if (folder / "moezoo").is_dir() else " (which is gone)"
        elif ((folder := Path(str(each.locate_file("")))) / "moezoo").is_dir():
            found[folder.resolve()] = ""
    return [f"{folder}{gone}" for folder, gone in sorted(found.items()) if folder != root.resolve()]
