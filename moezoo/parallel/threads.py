"""Enough threads for virtual CPU devices, with jax 0.10."""

import os

import jax

from moezoo.host import processors

VARIABLES = ("PJRT_NPROC", "NPROC")  # XLA reads the first that is set, once, when JAX starts
# XLA's CPU client starts the collectives of a device in order and waits in each, but it goes on beside a loop that
# computes in other threads. So a device can wait in one collective outside loops, and in one more in each loop that is
# under way: in three at once in the compiled steps that were read, one of which hung (docs/running.md).
_PER_DEVICE = 4
_MOST = 256  # that XLA's pool for computations takes
_given: str | None = None


def _too_few() -> bool:
    return jax.__version__.startswith("0.10.")


def give_threads(devices: int) -> None:
    """Let JAX start with a thread for each collective that so many CPU devices can be waiting in at once.

    jax 0.10 has as many threads as devices, or as processors if these are more. If one device waits in two collectives,
    another may have no thread left and never start. A number that the user has set stays.
    """
    global _given
    take_back_threads()
    if devices == 1 or not _too_few() or any(name in os.environ for name in VARIABLES):
        return
    wanted = min(_PER_DEVICE * devices, _MOST)
    if wanted > processors():
        _given = os.environ[VARIABLES[0]] = str(wanted)


def take_back_threads() -> None:
    """Unset what `give_threads` has set: after JAX has started, children with other devices must not inherit it."""
    global _given
    if _given is not None and os.environ.get(VARIABLES[0]) == _given:
        del os.environ[VARIABLES[0]]
    _given = None
