"""Mesh axes, their sizes, and the devices of a mesh: accelerators, or virtual CPU devices."""

import dataclasses
import math
import os
import re
import warnings
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax._src import xla_bridge  # JAX has no public function that reports whether it has started
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh

from moezoo.errors import UserError, check_type
from moezoo.host import (
    NO_FUSED_CPU_KERNELS,
    NO_FUSED_CPU_SUMS,
    driver_files,
    keep_freed_memory,
    own_variables,
    processors,
)
from moezoo.parallel.cache import SETTINGS, refuse_unordered
from moezoo.typed import Range, check_fields, convert

STAGE = "stage"  # the axis of pipeline stages (`moezoo.parallel.pipeline`)
AXES = (STAGE, "data", "fsdp", "expert", "context", "tensor")

# Virtual CPU devices of a process: each has threads, and from 10,000 on JAX starts in seconds and ends in minutes.
_MOST_CPU_DEVICES = 4096

_ASYNC = "JAX_CPU_ENABLE_ASYNC_DISPATCH"
# What JAX's own variables take.
_BOOLEANS: dict[str, bool] = {name: True for name in ("y", "yes", "t", "true", "on", "1")}
_BOOLEANS |= {name: False for name in ("n", "no", "f", "false", "off", "0")}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The size of each mesh axis. At most one size, not that of `stage`, is -1: all devices that the other axes leave.

    Attributes:
        stage: The number of pipeline stages.
        axis_types: JAX's type of all axes, `auto` or `explicit`. It matters to your own operations on arrays of the
            mesh: with `auto` the compiler lays out their results; with `explicit` the layout is part of their types,
            and JAX refuses what is ambiguous. moezoo's own programs are the same with both.

    Raises:
        UserError: A size is no whole number, or neither positive nor -1, or two sizes are -1, or that of `stage` is.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    axis_types: Literal["auto", "explicit"] = "auto"
    stage: int = 1  # last: Python calls may give the others by position

    def __post_init__(self):
        check_fields("mesh", self)
        rest = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(rest) > 1:
            raise UserError(f"mesh.{rest[0]} and mesh.{rest[1]} are both -1; only one axis can take the rest")
        if self.stage == -1:
            raise UserError("mesh.stage=-1: the number of stages is a choice; give it as a number")
        for axis in AXES:
            if getattr(self, axis) < 1 and axis not in rest:
                raise UserError(f"mesh.{axis}={getattr(self, axis)} must be at least 1, or -1 for all devices left")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        """The product of the sizes other than -1."""
        return math.prod(size for size in self.sizes.values() if size != -1)

    @property
    def types(self) -> tuple[AxisType, ...]:
        """The type of each axis, as JAX takes it."""
        return (AxisType.Auto if self.axis_types == "auto" else AxisType.Explicit,) * len(AXES)


def has_started() -> bool:
    """Return whether JAX has started, after which its number of devices is fixed."""
    return xla_bridge.backends_are_initialized()


def _warn_of_fused_cpu_kernels() -> None:
    """Warn if JAX has started with the kernels that importing moezoo turns off, which is then too late."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    if not has_started() or not {NO_FUSED_CPU_KERNELS, NO_FUSED_CPU_SUMS} & {*flags}:
        return
    program = jax.jit(jnp.sum).lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
    if jax.default_backend() == "cpu" and "ynn" in str(program.as_text()):
        warnings.warn(
            "JAX has started before moezoo was imported, so XLA's fused CPU kernels are on: sums may be wrong, and "
            "results NaN; import moezoo before JAX makes an array",
            stacklevel=2,
        )


_warn_of_fused_cpu_kernels()
if own_variables and not SETTINGS.jax_platforms:  # JAX was imported before moezoo set its variable
    jax.config.update("jax_platforms", "cpu")


def accelerators() -> bool:
    """Return whether a driver shows accelerators and JAX may use them; does not start JAX."""
    return (SETTINGS.jax_platforms or "") != "cpu" and bool(driver_files())


def cpu_devices(count: int) -> None:
    """Make JAX run on `count` virtual CPU devices. Call it in a notebook's first cell, before any other use of JAX.

    Raises:
        UserError: `count` is no whole number, it is less than 1, JAX has already started with another number of CPU
            devices, or JAX_CPU_ENABLE_ASYNC_DISPATCH is neither true nor false.
    """
    count = convert(int, count, "cpu_devices: count", valid=Range(at_least=1))
    if has_started():
        have = jax.local_device_count("cpu")
        if have != count:
            raise UserError(
                f"cpu_devices({count}) comes too late: JAX has already started with {have} CPU "
                f"device{'s' * (have != 1)}; call it before anything else of JAX (restart the notebook's kernel first)"
            )
        return
    refuse_unordered(count)
    give_threads(count)
    keep_freed_memory()
    _run_in_calling_thread(count)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _run_in_calling_thread(devices: int) -> None:
    """Let JAX run programs of one CPU device on the thread that calls them, unless `_ASYNC` is true; of more, if false.

    JAX itself does not read the variable.

    The temporaries of a program are one block of memory. Only the heap of the first thread keeps freed blocks above
    64 MB (`keep_freed_memory`). On a thread of XLA, each run of a large program touches fresh pages, which took a sixth
    of a training step.
    """
    value = os.environ.get(_ASYNC)
    if value is not None and value.lower() not in _BOOLEANS:
        raise UserError(f"{_ASYNC}={value}: must be true or false; or unset it")
    if value is not None or devices == 1:
        jax.config.update("jax_cpu_enable_async_dispatch", value is not None and _BOOLEANS[value.lower()])


THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")  # XLA reads the first that is set, once, when JAX starts
# XLA's CPU client starts the collectives of a device in order and waits in each, but it goes on beside a loop that
# computes in other threads. So a device can wait in one collective outside loops, and in one more in each loop that is
# under way: in three at once in the compiled steps that were read, one of which hung (docs/running.md).
_THREADS_PER_DEVICE = 4
_MOST_THREADS = 256  # that XLA's pool for computations takes
_threads_given: str | None = None


def _too_few_threads() -> bool:
    return jax.__version__.startswith("0.10.")


def give_threads(devices: int) -> None:
    """Let JAX start with a thread for each collective that so many CPU devices can be waiting in at once.

    jax 0.10 has as many threads as devices, or as processors if these are more. If one device waits in two collectives,
    another may have no thread left and never start. A number that the user has set stays.
    """
    global _threads_given
    take_back_threads()
    if devices == 1 or not _too_few_threads() or any(name in os.environ for name in THREAD_VARIABLES):
        return
    wanted = min(_THREADS_PER_DEVICE * devices, _MOST_THREADS)
    if wanted > processors():
        _threads_given = os.environ[THREAD_VARIABLES[0]] = str(wanted)


def take_back_threads() -> None:
    """Unset what `give_threads` has set: after JAX has started, children with other devices must not inherit it."""
    global _threads_given
    if _threads_given is not None and os.environ.get(THREAD_VARIABLES[0]) == _threads_given:
        del os.environ[THREAD_VARIABLES[0]]
    _threads_given = None


def prepare(wanted: int) -> None:
    """Configure JAX before it starts: `wanted` CPU devices, and no search for accelerators without a driver.

    Raises:
        UserError: There are no accelerators, and `wanted` are too many for virtual CPU devices, or
            JAX_CPU_ENABLE_ASYNC_DISPATCH is neither true nor false.
    """
    if has_started():
        return
    # A number that the user has set, by variable or by call, takes precedence.
    found = re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    fixed = max(SETTINGS.jax_num_cpu_devices, int(found[1]) if found else 0)
    if not accelerators():
        if wanted > _MOST_CPU_DEVICES:
            raise UserError(
                f"a mesh of {wanted} devices: this machine has no accelerators and can have at most "
                f"{_MOST_CPU_DEVICES} virtual CPU devices; choose a smaller mesh"
            )
        refuse_unordered(wanted)
        give_threads(max(wanted, fixed))
        keep_freed_memory()
        _run_in_calling_thread(max(wanted, fixed))
        if not SETTINGS.jax_platforms:
            jax.config.update("jax_platforms", "cpu")
    if fixed < 1:
        jax.config.update("jax_num_cpu_devices", min(wanted, _MOST_CPU_DEVICES))


def start(wanted: int = 1) -> list[Any]:
    """Start JAX, if it has not started, with `wanted` virtual CPU devices or the accelerators; return its devices.

    Raises:
        UserError: JAX cannot start on the platform that JAX_PLATFORMS names; otherwise as `prepare`.
    """
    prepare(wanted)
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a plugin for "cuda" is installed
        reason = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0].rstrip(".") or "it is not installed"
        raise UserError(
            f"JAX_PLATFORMS={SETTINGS.jax_platforms or ''}: JAX cannot start there ({reason}); set JAX_PLATFORMS=cpu "
            "to run on virtual CPU devices, or unset it"
        ) from None
    finally:
        take_back_threads()


def check_precision() -> None:
    """Raise `UserError` where JAX makes arrays of 64 bits, which programs of moezoo do not mix with theirs."""
    if SETTINGS.jax_enable_x64:
        raise UserError(
            "JAX_ENABLE_X64=1: arrays would have 64 bits, and moezoo computes in 32 and fewer; unset it, or leave "
            "out jax.config.update('jax_enable_x64', True)"
        )


def make_mesh(shape: MeshShape) -> Mesh:
    """Return the mesh of `shape` over this machine's devices; without accelerators, over virtual CPU devices.

    Raises:
        UserError: JAX makes arrays of 64 bits, `shape` is no `MeshShape`, there are too few devices, or the other axes
            do not divide the devices that -1 takes.
    """
    check_type("shape", shape, MeshShape, "write moezoo.MeshShape(expert=8), or take cfg.mesh of a configuration")
    check_precision()
    return mesh_of(shape, start(shape.devices))


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """Return the mesh of `shape` without devices, to trace programs for more devices than this machine has.

    Raises:
        UserError: A size is -1, or JAX makes arrays of 64 bits.
    """
    check_precision()
    rest = [axis for axis, size in shape.sizes.items() if size == -1]
    if rest:
        raise UserError(f"mesh.{rest[0]}=-1 takes the devices of a machine, but this mesh has none; give a number")
    return AbstractMesh(tuple(shape.sizes.values()), AXES, axis_types=shape.types)


def no_context_mesh() -> AbstractContextManager:
    """Return a context without the mesh of `jax.set_mesh`, to trace and read programs for any mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def mesh_of(shape: MeshShape, devices: list) -> Mesh:
    """Return the mesh of `shape` over the first of `devices`. Raises as `make_mesh` does."""
    sizes, wanted = shape.sizes, shape.devices
    have, platform = len(devices), devices[0].platform
    rest = next((axis for axis, size in sizes.items() if size == -1), None)
    if rest is not None and have >= wanted:
        if have % wanted:
            raise UserError(
                f"mesh.{rest}=-1 takes all devices the other axes leave, but they multiply to {wanted}, which does "
                f"not divide {have} devices; set mesh.{rest} to a number"
            )
        sizes[rest] = have // wanted
        wanted = have
    named = " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1) or "mesh=single"
    if have < wanted:
        if platform == "cpu":
            raise UserError(
                f"{named} needs {wanted} devices but JAX has already started with {have} on the CPU; ask for "
                f"{wanted} first: moezoo.cpu_devices({wanted}) or JAX_NUM_CPU_DEVICES={wanted}"
            )
        raise UserError(
            f"{named} needs {wanted} devices but this machine has {have} ({platform}); choose a smaller mesh, or "
            f"set JAX_PLATFORMS=cpu to run on {wanted} virtual CPU devices"
        )
    if have > wanted and jax.process_count() > 1:
        raise UserError(
            f"{named} takes {wanted} of {have} devices, and with {jax.process_count()} processes it must take all; "
            "choose a larger mesh, or write -1 for one of its axes"
        )
    # `jax.make_mesh` does not split an axis of a TPU slice, so 8 x 8 of 4 x 4 x 4 chips would be refused.
    layout = create_device_mesh(tuple(sizes.values()), devices[:wanted], allow_split_physical_axes=True)
    return Mesh(layout, AXES, axis_types=shape.types)
