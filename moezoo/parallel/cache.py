"""The folder of compiled programs: what one process compiles, a later one loads."""

import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, Mesh

from moezoo.errors import UserError
from moezoo.host import user_cache

SETTINGS: Any = jax.config  # its attributes are made at run time
_set_here: str | None = None  # the folder that `use_cache` has set, where the user has set none


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


def use_cache(cache_dir: str | Literal["auto"] | None, mesh: Mesh | AbstractMesh | None) -> str:
    """Let JAX keep compiled programs in a folder, or not; return where, or why not. Call it before anything compiles.

    A folder that the user gave to JAX itself, by JAX_COMPILATION_CACHE_DIR or in Python, stays, except where
    `refuse_unordered` refuses it. Programs of several processes on CPUs are not cached: nobody has tried.

    Args:
        cache_dir: A folder, which is made; "auto" for `moezoo.host.user_cache()`; None for no cache.
        mesh: The mesh of devices that programs are compiled for.

    Raises:
        UserError: The folder that `cache_dir` names cannot be written.
    """
    global _set_here
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
        path = user_cache() if cache_dir == "auto" else Path(cache_dir).expanduser().absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                folder, answer = str(path), f"compiled programs in {path}"
        except OSError as error:
            if cache_dir != "auto":
                raise UserError(
                    f"cache_dir={cache_dir}: cannot be written ({error.strerror}); name another folder, or "
                    "cache_dir=null for no cache"
                ) from None
            answer = f"off: {path} cannot be written ({error.strerror})"
    if folder != now:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()  # otherwise the choice at the first compilation of the process stays
        _set_here = folder
    return answer
