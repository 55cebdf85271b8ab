"""Run several processes as one: how they find each other, and what they do together: meet, agree, end.

Every process runs the same program. What only one process can know, such as a signal, a full disk or the time, is
shared with all before any process acts on it: a process that leaves alone leaves the others waiting in a collective.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from jax._src import distributed as internal  # the coordination service has no public name
from jax.experimental import multihost_utils

from moezoo.errors import UserError
from moezoo.parallel import mesh
from moezoo.typed import AtMost, Count, Size, check_fields, show

# How long a failing process waits to see whether the others fail too.
_LEAVING_SECONDS = 5
# A network file system may show a new file to other machines after some seconds.
_SHARED_SECONDS = 10
# How many keys that differ between processes a message names.
_MOST_KEYS = 3


class Distributed:
    """How the processes of a run find each other.

    An entry that lets users set the two numbers of seconds declares both as fields.

    Attributes:
        name: The entry's key in `DISTRIBUTED`.
        is_several: Whether a run expects other processes.
        coordinator: The address where the processes meet, HOST:PORT; None if the settings do not contain it.
        heartbeat_seconds: After this time of silence a process counts as dead, and the others end.
        start_seconds: How long processes wait for each other at the start.

    Raises:
        UserError: A setting has a wrong type, or a number of seconds is less than 1.
    """

    name: ClassVar[str]
    is_several: ClassVar[bool] = True
    coordinator: str | None = None
    heartbeat_seconds: Size = 30
    start_seconds: Size = 300

    def __post_init__(self):
        check_fields("distributed", self)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `jax.distributed.initialize` that describe the other processes.

        By default there are none: JAX reads the cluster's environment.

        Raises:
            UserError: A setting is missing.
        """
        return {}


@dataclasses.dataclass(frozen=True)
class Alone(Distributed):
    """One process: the entry `distributed=none`."""

    name: ClassVar[str] = "none"
    is_several: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Auto(Distributed):
    """The processes of a TPU slice, Slurm, Open MPI or Kubernetes: the entry `distributed=auto`."""

    name: ClassVar[str] = "auto"
    heartbeat_seconds: int = 30
    start_seconds: int = 300


@dataclasses.dataclass(frozen=True)
class Manual(Distributed):
    """Processes that the user starts with their numbers: the entry `distributed=manual`.

    Attributes:
        coordinator: The address where they meet, HOST:PORT on process 0.
        processes: The number of processes.
        process: The number of this process, from 0.

    Raises:
        UserError: The address is not HOST:PORT, or `process` is not below `processes`.
    """

    name: ClassVar[str] = "manual"
    coordinator: str | None = None
    processes: int | None = None
    process: Annotated[Count, AtMost("processes", strict=True)] | None = None
    heartbeat_seconds: int = 30
    start_seconds: int = 300

    def __post_init__(self):
        super().__post_init__()
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise UserError(f"distributed.coordinator={self.coordinator} must be HOST:PORT, such as localhost:8476")

    def arguments(self) -> dict[str, Any]:
        """Return address, number of processes and number of this process."""
        for field, example in (("coordinator", "HOST:PORT"), ("processes", "2"), ("process", "0")):
            if getattr(self, field) is None:
                raise UserError(f"distributed=manual needs distributed.{field}; write distributed.{field}={example}")
        return {
            "coordinator_address": self.coordinator,
            "num_processes": self.processes,
            "process_id": self.process,
            "cluster_detection_method": "deactivate",
        }


DISTRIBUTED: dict[str, type[Distributed]] = {kind.name: kind for kind in (Alone, Auto, Manual)}


def start(settings: Distributed, devices: int) -> None:
    """Meet the other processes, before JAX starts; on CPUs each process gets an equal share of `devices`.

    Raises:
        UserError: JAX has already started, the processes do not meet, or they cannot share the devices equally.
    """
    if not settings.is_several or jax.distributed.is_initialized():
        return
    key = f"distributed={settings.name}"
    if mesh.has_started():
        raise UserError(f"{key} comes too late: JAX has already started; call moezoo.train before any other use of it")
    arguments = settings.arguments()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # moezoo handles signals itself, and heartbeats detect a process that has died.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=settings.start_seconds,
            heartbeat_timeout_seconds=settings.heartbeat_seconds,
            shutdown_timeout_seconds=settings.heartbeat_seconds,
        )
    except ValueError as error:
        raise UserError(
            f"{key}: no cluster describes the processes ({error}); start them with Slurm, Open MPI, Kubernetes or on a "
            "TPU slice, or write distributed=manual"
        ) from None
    except RuntimeError as error:
        raise UserError(
            f"{key}: the processes did not all meet at {internal.global_state.coordinator_address} within "
            f"distributed.start_seconds={settings.start_seconds} ({str(error).splitlines()[0][:120]}); start all of "
            "them, with an address that all can reach and a free port"
        ) from None
    processes = internal.global_state.num_processes
    if devices % processes and not mesh.accelerators():
        raise UserError(
            f"a mesh of {devices} device{'s' * (devices > 1)} cannot be divided among {processes} processes; choose a "
            f"mesh whose number of devices is a multiple of {processes}"
        )
    mesh.prepare(devices // processes)


def count() -> int:
    """Return the number of processes; does not start JAX."""
    return internal.global_state.num_processes if jax.distributed.is_initialized() else 1


def several() -> bool:
    """Return whether there are other processes; does not start JAX."""
    return count() > 1


def name() -> str:
    """Return the prefix of a message, "process 1: "; empty for a single process."""
    return f"process {internal.global_state.process_id}: " if several() else ""


def is_first() -> bool:
    """Return whether this is process 0, which alone writes files and prints; does not start JAX."""
    return internal.global_state.process_id == 0


def gather_texts(text: str) -> list[str]:
    """Return the text of each process, by process number. All processes must call it at the same point."""
    if not several():
        return [text]
    own = text.encode()
    lengths = multihost_utils.process_allgather(np.int32(len(own)))
    width = -(-int(lengths.max()) // 1024) * 1024  # rounded up, so that few shapes are compiled
    padded = np.zeros(max(width, 1), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(np.asarray(rows), np.asarray(lengths), strict=True)]


def together(task: Callable[[], Any]) -> Any:
    """Run `task` on every process and return its result; if one process raises `UserError`, all do.

    `task` must not wait for other processes. All processes must call this at the same point.
    """
    result, own = None, None
    try:
        result = task()
    except UserError as error:
        own = error
    messages = gather_texts("" if own is None else str(own))
    if own is not None:
        raise own
    for process, message in enumerate(messages):
        if message:
            raise UserError(f"process {process}: {message}")
    return result


def first(task: Callable[[], Any]) -> Any:
    """Run `task` on process 0 and return its result, which must be JSON, on all processes."""
    value = together(lambda: task() if is_first() else None)
    return json.loads(gather_texts(json.dumps(value))[0])


def check_same(facts: Mapping[str, Any], what: str, advice: str) -> None:
    """Raise `UserError` on every process unless `facts`, keys and JSON values, are the same on all.

    The message begins with `what`, names the keys that differ, and ends with `advice`.
    """
    mine, *others = map(json.loads, gather_texts(json.dumps(facts)))
    for process, theirs in enumerate(others, 1):
        differ = [
            f"{key} is {show(mine.get(key))} on process 0 and {show(theirs.get(key))} on process {process}"
            for key in dict.fromkeys((*mine, *theirs))
            if mine.get(key) != theirs.get(key)
        ]
        if differ:
            more = f", and {len(differ) - _MOST_KEYS} more differ" * (len(differ) > _MOST_KEYS)
            raise UserError(f"{what}: {', '.join(differ[:_MOST_KEYS])}{more}; {advice}")


def require_shared(path: Path, shown: str, part: str) -> None:
    """Raise `UserError` unless this process soon sees what the first process has made at `path`.

    The message begins with `shown`, the folder around it, in which each process writes `part`.
    """
    end = time.monotonic() + _SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise UserError(
                f"{shown} is not the folder that process 0 has there, but each process writes {part}; name a folder on "
                "a file system that all processes share"
            )
        time.sleep(0.1)


def largest(number: int) -> int:
    """Return the largest number that any process gives. All processes must call it at the same point."""
    return int(multihost_utils.process_allgather(np.int32(number)).max()) if several() else number


@contextlib.contextmanager
def within(seconds: float, message: str) -> Iterator[None]:
    """Bound a block that waits for other processes: after `seconds`, print `message` and end this process with code 2.

    No exception could end such a wait: it is in C++. The others then notice the death of this process.
    """
    if not several():
        yield
        return

    def end() -> None:
        print(f"{name()}error: {message}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(code: int) -> None:
    """Prepare an exit with `code`: if the others do not exit too, end this process without waiting for them.

    The others then notice its death. Otherwise this function returns.
    """
    if code == 0 or not several() or _all_leave(_LEAVING_SECONDS):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def outlast_lost_process(error: Exception, settings: Distributed) -> None:
    """Call this before `error` is reported: if it may come from another process's death, wait until that is detected.

    A collective fails when one of its processes dies, with an error about a connection. The coordination service
    detects the death after `settings.heartbeat_seconds` of silence and ends this process; then this function does not
    return. It returns immediately for errors that no collective raises, and after the wait if all processes are alive.
    """
    if isinstance(error.__cause__ or error, jax.errors.JaxRuntimeError) and several():
        _all_leave(settings.heartbeat_seconds + _LEAVING_SECONDS)


def _all_leave(seconds: int) -> bool:
    """Return whether every process begins to leave within `seconds`. If one does not, wait for the whole time."""
    client: Any = internal.global_state.client
    end = time.monotonic() + seconds
    try:
        client.wait_at_barrier(f"leaving within {seconds} s", seconds * 1000)
    except Exception:  # raised immediately if a process is known to be dead
        time.sleep(max(0.0, end - time.monotonic()))
        return False
    return True
