"""Compile the program of a configuration for an absent slice in a child process, and remember its memory.

A compiler may print, abort, or serve one kind of GPU per process, so each program has a process of its own. What was
compiled is remembered by its text: the lowered program, the slice and the versions.
"""

import hashlib
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import moezoo.interrupts as interrupts
from moezoo.errors import UserError, last_words
from moezoo.host.machine import user_cache
from moezoo.parallel.traffic import CallName

# Without these, plugins look for devices and report at length that there are none, and libtpu refuses to load while
# another process has loaded it, although it only compiles.
_QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# Distributions whose versions decide what a compiler makes.
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda13-plugin")
_MARK = "moezoo-compiled "  # the line of stdout with the result, among what plugins print


class Compiled(NamedTuple):
    """A compiled program: bytes on one device, how long it took, and the most host memory of its process in bytes.

    `peak` is what is in use at the same time (`moezoo.tools.absent.Memory.in_use`).
    """

    peak: int
    arguments: int
    temporaries: int
    seconds: float
    host_bytes: int
    remembered: bool = False


def compile_apart(words: Sequence[str], topology: str, call: CallName) -> Compiled:
    """Compile what a configuration runs for the devices of a slice.

    Args:
        words: The overrides of the configuration.
        topology: The slice, as `moezoo.tools.absent.absent_devices` names it.
        call: What runs.

    Raises:
        UserError: The configuration, the slice or the compiler refuses; with the compiler's first line if it crashes.
    """
    out, err, code = _run([list(words), topology, call])
    for line in out.splitlines():
        if line.startswith(_MARK):
            found = json.loads(line.removeprefix(_MARK))
            if "error" in found:
                raise UserError(found["error"])
            return Compiled(**found)
    raise UserError(f"the compiler ended with code {code}: {last_words(err)}")


def check_compiler(topology: str) -> None:
    """Raise `UserError` if programs for a slice cannot be compiled here."""
    if error := compiler_error(topology):
        raise UserError(f"{error}; or write --estimate, which compiles nothing")


def compiler_error(topology: str) -> str | None:
    """Return why programs for a slice cannot be compiled here; None if they can."""
    out, err, code = _run([None, topology, ""])
    if found := out.partition(_MARK)[2]:
        return json.loads(found.splitlines()[0]).get("error")
    return f"the compiler ended with code {code}: {last_words(err)}"


def _run(request: list[Any]) -> tuple[str, str, int]:
    """Run a child process with a request; return its output, its errors and its code. It ends with this process."""
    command = [sys.executable, "-c", "from moezoo.tools.apart import child; child()"]
    pipes: Any = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    process = subprocess.Popen(command, text=True, env={**os.environ, **_QUIET}, **pipes)
    with process, interrupts.undoing(process.kill):
        out, err = process.communicate(json.dumps(request))
    return out, err, process.returncode


def child() -> None:
    """Compile what stdin asks for and print the result; what `compile_apart` starts."""
    words, topology, call = json.load(sys.stdin)
    try:
        if words is None:
            from moezoo.tools.absent import absent_devices

            found = {"devices": len(absent_devices(topology))}
        else:
            found = _compile(words, topology, call)._asdict()
    except UserError as error:
        found = {"error": str(error)}
    except Exception as error:  # whatever a compiler raises
        found = {"error": f"the compiler refuses: {str(error).strip().splitlines()[0][:300]}"}
    print(f"{_MARK}{json.dumps(found)}", flush=True)


def _compile(words: Sequence[str], topology: str, call: CallName) -> Compiled:
    from moezoo.config.build import blueprint_on
    from moezoo.config.compose import compose_described
    from moezoo.parallel.mesh import mesh_of, no_context_mesh
    from moezoo.tools.absent import absent_devices, memory_of
    from moezoo.tools.calls import CALLS

    began, cfg = time.monotonic(), compose_described(*words)
    mesh = mesh_of(cfg.mesh, absent_devices(topology))
    with no_context_mesh():
        lowered = CALLS[call](cfg, blueprint_on(cfg), mesh).trace().lower()
    file = user_cache() / "plan" / f"{_name(lowered.as_text(), topology)}.json"
    try:
        return Compiled(**json.loads(file.read_text()), remembered=True)
    except (OSError, ValueError, TypeError):
        memory = memory_of(lowered.compile())
    if memory is None:
        raise UserError(f"the compiler for {topology} does not report memory; write --estimate")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = Compiled(memory.in_use, memory.arguments, memory.temporaries, time.monotonic() - began, host)
    _remember(file, found)
    return found


def _name(text: str, topology: str) -> str:
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions() if each.name}
    versions = [installed.get(name, "") for name in _COMPILERS]
    flags = os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", "")
    return hashlib.sha256("\0".join((text, topology, *versions, *flags)).encode()).hexdigest()


def _remember(file: Path, found: Compiled) -> None:
    from moezoo.training.files import replace_text

    kept = found._asdict()
    del kept["remembered"]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(kept))
    except OSError:
        pass  # the folder of caches cannot be written: the program is compiled again next time
