"""What this machine has: memory, processors, and what XLA and JAX are told of them. Nothing imports JAX or NumPy."""

import contextlib
import ctypes
import glob
import importlib.metadata
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from moezoo.errors import UserError

# Options of glibc's mallopt, from <malloc.h>: M_TRIM_THRESHOLD (never give back the end of a heap), M_MMAP_MAX (no
# mapping for a single large block, which is given back when it is freed), M_TOP_PAD (with less than the 64 MB of a
# thread's heap, a heap that becomes empty is given back).
_KEEP = {-1: -1, -4: 0, -2: 1 << 26}
# XLA's library of fused CPU kernels, on by default, is wrong in some programs (docs/running.md). In jax 0.10.2 sums are
# wrong or end the process. From 0.11 on it also adds up products of bfloat16 in bfloat16, which ends at 256 equal
# terms, and reads numbers that nothing has written (0.12, NaN in some processes).
NO_FUSED_CPU_KERNELS = "--xla_cpu_experimental_ynn_fusion_type="
NO_FUSED_CPU_SUMS = f"{NO_FUSED_CPU_KERNELS}-reduce"
# By default XLA reports a CPU device that has waited in a collective for 20 seconds, and ends the process after 40.
# On a busy machine a device may wait for minutes, and while a laptop sleeps for hours. `moezoo.training.waiting` says
# earlier what a run waits for.
_COLLECTIVE_LIMITS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=86400",
)
# On GPUs XLA runs a program as CUDA graphs, in whose traces kernels do not name the operation that they belong to.
NO_CUDA_GRAPHS = "--xla_gpu_enable_command_buffer="


def add_xla_flags(*more: str) -> None:
    """Add to XLA_FLAGS, for this process and its children: no fused CPU kernels, long limits of collectives, `more`.

    A flag that the user has set stays. JAX reads the flags when it starts, so call this before.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("--"):  # XLA reads a file of this name
        try:
            flags = " ".join(Path(flags).read_text().split())
        except OSError:
            return
    if (jaxlib := installed("jaxlib")) is None:  # nothing will be compiled, and `moezoo doctor` reports it
        return
    fused = NO_FUSED_CPU_SUMS if jaxlib.startswith("0.10.") else NO_FUSED_CPU_KERNELS
    missing = [flag for flag in (*_COLLECTIVE_LIMITS, fused, *more) if flag.partition("=")[0] not in flags]
    if missing:
        own_flags.update(missing)
        os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()


# The device files of accelerator drivers -> the maker. Without them, an installed plugin prints errors when JAX starts.
_DEVICE_NODES = {
    "/dev/nvidia[0-9]*": "NVIDIA",
    "/dev/accel*": "TPU",
    "/dev/vfio/[0-9]*": "TPU",
    "/dev/kfd": "AMD",
}
_PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
_PLATFORMS = "JAX_PLATFORMS"
own_variables: set[str] = set()  # of the environment, that moezoo itself has set
own_flags: set[str] = set()  # of XLA_FLAGS, that moezoo itself has added


def driver_files() -> dict[str, str]:
    """Return the device files of accelerator drivers here -> whose they are: NVIDIA, TPU or AMD."""
    return {file: maker for node, maker in _DEVICE_NODES.items() for file in sorted(glob.glob(node))}


def leave_out_plugins() -> None:
    """Keep JAX on the CPU where plugins are installed, as compilers, without a driver: they report that at length.

    What the user has set stays. JAX reads the variable when it is imported. WSL2 shows GPUs of all makers as one file.
    """
    has_device = bool(driver_files()) or Path("/dev/dxg").exists()
    if _PLATFORMS not in os.environ and not has_device and any(map(installed, _PLUGINS)):
        os.environ[_PLATFORMS] = "cpu"
        own_variables.add(_PLATFORMS)


def installed(name: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def user_cache() -> Path:
    """Return moezoo's folder in the user's folder of caches: XDG_CACHE_HOME, or ~/.cache."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "moezoo"
    except RuntimeError:
        raise UserError("this user has no home folder for caches; set XDG_CACHE_HOME=FOLDER") from None


def processors() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def processor_name() -> str:
    """Return the name of this machine's processor; empty where the system does not say it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def host_memory() -> int:
    """Return the bytes of memory that this process can have: those of the machine, or of its control group if fewer."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *group_limits())


def free_memory(facts: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that this process can have now: `host_memory`, or what is available by `facts` if fewer."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", facts.read_text(), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    have = host_memory()
    return min(have, 1024 * int(found[1])) if found else have


def peak_of_process() -> int:
    """Return the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def check_host(what: str, needed: int, advice: str, where: str = "") -> None:
    """Raise `UserError` if `what` needs more bytes than this machine has; `advice` ends the message.

    `where` names the devices that share the memory.
    """
    if needed > (have := host_memory()):
        there = f"this machine has {in_gib(have)}"
        raise UserError(f"{what} needs at least {in_gib(needed)} of memory{where}, and {there}; {advice}")


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for later calls, instead of returning it to the system.

    XLA's CPU client allocates the temporaries of a program anew for each run. Every fresh page costs a page fault, and
    eight virtual devices spent a tenth of a training step on them. Blocks above 64 MB are still returned, because only
    the first thread's heap can hold them. Settings of malloc in the environment take precedence.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    set_by_user = "glibc.malloc" in tunables or any("MALLOC_" in name for name in os.environ)
    if sys.platform != "linux" or set_by_user:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for option, value in _KEEP.items():
            mallopt(option, value)


def give_back_freed_memory() -> None:
    """Return the freed memory that `keep_freed_memory` keeps to the system, where the C library can.

    A compiler needs hundreds of megabytes once, in blocks that the program does not need in these sizes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def in_gib(number: int) -> str:
    """Return a number of bytes as a user reads it."""
    return f"{number / 2**30:,.1f} GiB"


def in_units(number: int) -> str:
    """Return a number of bytes in three digits, such as "1.71 MB"."""
    count = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def group_limits(groups: Path = _GROUPS, root: Path = _MOUNTED) -> Iterator[int]:
    """Yield the limits in bytes of the control groups that this process is in, of both versions, where readable.

    `groups` is the file that lists them; they are mounted at `root`.
    """
    yield 2**63
    for folder, version in _group_folders("memory", groups, root):
        # It may be missing, not readable, or "max".
        with contextlib.suppress(OSError, ValueError):
            yield int((folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).read_text())


def processor_limits(groups: Path = _GROUPS, root: Path = _MOUNTED) -> Iterator[float]:
    """Yield the processors whose time the control groups of this process may use; arguments as for `group_limits`."""
    for folder, version in _group_folders("cpu", groups, root):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, " ".join((folder / name).read_text() for name in files).split())
            if quota > 0:  # version 1 writes -1 for no limit
                yield quota / period


def _group_folders(controller: str, groups: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of control groups that may limit this process, each with the version of control groups."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        inner = top / group.lstrip("/")  # in a container it may not exist; the limit is then at the top
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top):
                yield folder, 1 if controllers else 2
