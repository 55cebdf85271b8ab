"""The folder of compiled programs: what one process compiles, a later one loads."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, Mesh

from moezoo.errors import UserError
from moezoo.host.machine import user_cache

SETTINGS: Any = jax.config  # its attributes are made at run time
_set_here: str | None = None  # the folder that `use_cache` has set, where the user has set none
_is_chosen = False  # whether `use_cache` has chosen for this process


def refuse_unordered(devices: int) -> bool:
    """Turn JAX's cache off if programs of so many CPU devices would be loaded wrongly; return whether they would.

    With jax 0.10, a program for several CPU devices that is loaded from a folder has lost the order of its collectives:
    XLA restores every loop, branch and call as if its collectives had nothing to do with those outside. Two of these
    that do not depend on each other then run at once, devices pair different collectives, and the program computes
    wrong numbers or waits forever (seen in training steps of `ring` and `ragged`). jax 0.12 keeps the order.
    """
    if devices == 1 or not jax.__version__.startswith("0.10."):
        return False
    use_none()
    return True


def use_none() -> None:
    """Turn JAX's cache off in this process, whoever has set it."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # otherwise the choice at the first compilation of the process stays


@contextlib.contextmanager
def function_cache(cache_dir: str | Literal["auto"] | None = "auto") -> Iterator[None]:
    """Let JAX keep what a function of Python compiles in the block; `cache_dir` is as for `use_cache`.

    A folder that the user gave to JAX itself, a cache that is off, and what `use_cache` has chosen stay. Programs of
    several processes, or of a process with several CPU devices, are not kept (`refuse_unordered`). Afterwards JAX's
    settings are as before, so other programs of the process are not kept.

    Raises:
        UserError: The folder that `cache_dir` names cannot be written.
    """
    shortest, several = SETTINGS.jax_persistent_cache_min_compile_time_secs, jax.process_count() > 1
    several |= jax.default_backend() == "cpu" and jax.device_count() > 1
    folder = None
    if not (cache_dir is None or _is_chosen or several or SETTINGS.jax_compilation_cache_dir):
        try:
            folder = _make(cache_dir)
        except UserError:
            if cache_dir != "auto":
                raise
    if folder is None:
        yield
        return
    _set(folder, 0.0)
    try:
        yield
    finally:
        _set(None, shortest)


def _set(folder: str | None, shortest: float) -> None:
    """Make JAX keep programs that take `shortest` seconds or more to compile."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
    compilation_cache.reset_cache()  # otherwise the choice at the first compilation of the process stays


def _make(cache_dir: str | Literal["auto"]) -> str:
    """Make the folder and return its name. Raises `UserError` if it cannot be written."""
    path = user_cache() if cache_dir == "auto" else Path(cache_dir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return str(path)
    except OSError as error:
        if cache_dir == "auto":
            raise UserError(f"{path} cannot be written ({error.strerror})") from None
        raise UserError(
            f"cache_dir={cache_dir}: cannot be written ({error.strerror}); name another folder, or cache_dir=null for "
            "no cache"
        ) from None


def use_cache(cache_dir: str | Literal["auto"] | None, mesh: Mesh | AbstractMesh | None) -> str:
    """Let JAX keep compiled programs in a folder, or not; return where, or why not. Call it before anything compiles.

    A folder that the user gave to JAX itself, by JAX_COMPILATION_CACHE_DIR or in Python, stays, except where
    `refuse_unordered` refuses it. Programs of several processes on CPUs are not cached: nobody has tried.

    Args:
        cache_dir: A folder, which is made; "auto" for `moezoo.host.machine.user_cache()`; None for no cache.
        mesh: The mesh of devices that programs are compiled for.

    Raises:
        UserError: The folder that `cache_dir` names cannot be written.
    """
    global _set_here, _is_chosen
    _is_chosen = True
    assert isinstance(mesh, Mesh)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and refuse_unordered(mesh.size):
        return "off: jax 0.10 loads programs of several CPU devices wrongly"
    now = SETTINGS.jax_compilation_cache_dir
    if now != _set_here:
        return f"compiled programs in {now}, set for JAX"
    folder, answer = None, "off: cache_dir=null"
    if on_cpu and jax.process_count() > 1:
        answer = "off: several processes on CPUs"
    elif cache_dir is not None:
        try:
            folder = _make(cache_dir)
            answer = f"compiled programs in {folder}"
        except UserError as error:
            if cache_dir != "auto":
                raise
            answer = f"off: {error}"
    if folder != now:
        _set(folder, 0.0)
        _set_here = folder
    return answer
