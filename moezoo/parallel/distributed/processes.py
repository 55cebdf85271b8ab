"""What several processes do together: meet, agree, end.

Every process runs the same program. What only one of them can know, a clock, a full disk, a signal, is told to all
before anything is done about it: a process that leaves alone leaves the others waiting in a collective.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed as internal  # the service that processes keep in touch by has no public name
from jax.experimental import multihost_utils

from moezoo.errors import UserError
from moezoo.parallel import mesh
from moezoo.parallel.distributed.base import Distributed

# How long a process that fails waits to see whether the others fail with it.
_LEAVING_SECONDS = 5


def start(settings: Distributed, devices: int) -> None:
    """Meet the other processes, before JAX starts; on CPUs each shows its share of `devices`.

    Raises `UserError` when they cannot be found, or cannot share so many.
    """
    if not settings.is_several or jax.distributed.is_initialized():
        return
    key = f"distributed={settings.name}"
    if mesh.has_started():
        raise UserError(f"{key} comes too late: JAX has already started; train before anything else of it")
    arguments = settings.arguments()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Signals are ours to note, and a process that is gone is noticed by its heartbeat.
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
            f"{key}: nothing here says which processes there are ({error}); start them by Slurm, Open MPI, Kubernetes "
            "or on a TPU slice, or write distributed=manual"
        ) from None
    except RuntimeError as error:
        raise UserError(
            f"{key}: the processes did not all meet at {internal.global_state.coordinator_address} within "
            f"distributed.start_seconds={settings.start_seconds} ({str(error).splitlines()[0][:120]}); start all of "
            "them, with an address and a port that they can reach and nobody else uses"
        ) from None
    processes = internal.global_state.num_processes
    if devices % processes and not mesh.accelerators():
        raise UserError(
            f"a mesh of {devices} device{'s' * (devices > 1)} cannot be shared by {processes} processes; choose one "
            f"of a multiple of {processes}"
        )
    mesh.prepare(devices // processes)


def count() -> int:
    """How many processes there are; does not start JAX."""
    return internal.global_state.num_processes if jax.distributed.is_initialized() else 1


def several() -> bool:
    """Whether there are other processes."""
    return count() > 1


def name() -> str:
    """Who tells of an error, where there are several processes."""
    return f"process {internal.global_state.process_id}: " if several() else ""


def is_first() -> bool:
    """Whether this process is the one that writes and tells; does not start JAX."""
    return internal.global_state.process_id == 0


def gather_texts(text: str) -> list[str]:
    """What each process gives, in the order of their numbers. All must call it, at the same place."""
    if not several():
        return [text]
    own = text.encode()
    lengths = multihost_utils.process_allgather(np.int32(len(own)))
    width = -(-int(lengths.max()) // 1024) * 1024  # few shapes, few compilations
    padded = np.zeros(max(width, 1), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(np.asarray(rows), np.asarray(lengths), strict=True)]


def together(task: Callable[[], Any]) -> Any:
    """What `task` returns, where no process fails; a `UserError` of one ends all. `task` must not wait for others."""
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
    """What `task` returns on process 0, which must be JSON, on all."""
    value = together(lambda: task() if is_first() else None)
    return json.loads(gather_texts(json.dumps(value))[0])


def check_same(settings: Mapping[str, Any]) -> None:
    """Raise `UserError` on every process where `settings`, keys and JSON values, are not the same on all."""
    mine, *others = map(json.loads, gather_texts(json.dumps(settings)))
    for process, theirs in enumerate(others, 1):
        for key in dict.fromkeys((*mine, *theirs)):
            if mine.get(key) != theirs.get(key):
                raise UserError(
                    f"processes were started differently: {key} is {mine.get(key)} on process 0 and {theirs.get(key)} "
                    f"on process {process}; start all with the same command"
                )


def largest(number: int) -> int:
    """The largest that any process gives. All must call it, at the same place."""
    return int(multihost_utils.process_allgather(np.int32(number)).max()) if several() else number


def leave(code: int) -> None:
    """Before an exit with `code`: where the others are not leaving too, do not wait for them, so that they notice."""
    if code == 0 or not several() or _all_leave(_LEAVING_SECONDS):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def outlast_lost_process(error: Exception, settings: Distributed) -> None:
    """Before `error` is reported: if it may come from another process's death, wait until that death is noticed.

    A collective fails as soon as a process of it is gone, with an error about a connection. The coordination service
    notices the death after `settings.heartbeat_seconds` of silence and ends this process, so this function then does
    not return. It returns at once for an error that no collective raises, and after the wait where all are alive.
    """
    if isinstance(error, jax.errors.JaxRuntimeError) and several():
        _all_leave(settings.heartbeat_seconds + _LEAVING_SECONDS)


def _all_leave(seconds: int) -> bool:
    """Whether every process comes to leave within `seconds`; always waits so long where one does not."""
    client: Any = internal.global_state.client
    end = time.monotonic() + seconds
    try:
        client.wait_at_barrier(f"leaving within {seconds} s", seconds * 1000)
    except Exception:  # at once where a process is known to be gone
        time.sleep(max(0.0, end - time.monotonic()))
        return False
    return True
