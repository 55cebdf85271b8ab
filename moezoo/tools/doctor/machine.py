"""The machine, the disk and the environment, for `moezoo doctor`. Nothing imports JAX."""

import glob
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from moezoo.host import (
    OWN_XLA_FLAGS,
    host_memory,
    in_gib,
    in_units,
    own_variables,
    processor_limits,
    processor_name,
    processors,
)
from moezoo.tools.doctor.entries import Entry, facts, note, problem, shown_value

_FEWEST_FILES = 1024
_LEAST_SHARED, _GPUS = 2**30, "/dev/nvidia[0-9]*"
_DISK_BYTES, _BLOCK = 64 * 10**6, 10**6
_DISK_SECONDS = 5.0
_LEAST_FREE = 10**9

# Variables that change what a run computes or how fast. No other is shown.
_PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "MOEZOO_", "NCCL_", "PJRT_", "GLIBC_", "MALLOC_", "MEGASCALE_")
_NAMES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TF_GPU_ALLOCATOR", "TF_CPP_MIN_LOG_LEVEL"),
    *("NPROC", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "XDG_CACHE_HOME"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "EQX_ON_ERROR", "JAXTYPING_DISABLE"),
    *("SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_GPUS"),
    *("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_STEP_GPUS"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def find_machine() -> Iterator[Entry]:
    """Yield the system, processors and memory, and limits that are lower than these."""
    have, usable = os.cpu_count() or 1, processors()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    of = f"{usable} of {have} processors" if usable != have else f"{have} processor{'s' * (have != 1)}"
    library = " ".join(platform.libc_ver())
    yield from facts(
        "machine", ", ".join(filter(None, (platform.system(), platform.release(), platform.machine(), library)))
    )
    yield from facts("machine", ", ".join(filter(None, (processor_name(), of, f"{in_gib(memory)} of memory"))))
    if (share := min(processor_limits(), default=float(have))) < usable:
        yield from facts("machine", f"limit of the control group: {share:.3g} processors")
        yield note(
            "machine",
            f"the control group may use {share:.3g} of {usable} processors, and JAX starts threads for all; raise its "
            "limit, such as docker run --cpus",
        )
    if host_memory() < memory:
        yield from facts("machine", f"limit of the control group: {in_gib(host_memory())} of memory")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.is_dir() else None
    inside = ", in a container" * any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
    yield from facts(
        "machine", f"{_describe_files(files)} open files" + (f", /dev/shm of {in_units(size)}" if size else "") + inside
    )
    if files != resource.RLIM_INFINITY and files < _FEWEST_FILES:
        yield note(
            "machine",
            f"a process may open {files} files, few for checkpoints and data of many files; ulimit -n 4096",
        )
    if size is not None and size < _LEAST_SHARED and len(glob.glob(_GPUS)) > 1:
        yield note(
            "machine",
            f"/dev/shm has {in_units(size)}, and GPUs may exchange through it (NCCL): docker run --shm-size=8g",
        )


def find_disk(folder: Path) -> Iterator[Entry]:
    """Yield how much space the folder of runs has, and about how fast files there are written and read."""
    folder = folder.expanduser().absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    where = str(folder) if there == folder else f"{folder} (to be made in {there})"
    if not there.is_dir():
        yield problem("disk", f"{where}: {there} is no folder, so no run can be written; choose another folder")
        return
    free = shutil.disk_usage(there).free
    yield from facts("disk", f"{where}: {in_units(free)} free{_file_system(there)}")
    if free < _LEAST_FREE:
        yield note(
            "disk", f"{there} has {in_units(free)} free, and a checkpoint of a model of 1e8 parameters takes 1.2 GB"
        )
    try:
        size, write, read = _time_disk(there, min(_DISK_BYTES, free // 2))
    except OSError as error:
        yield problem(
            "disk", f"{there} cannot be written ({error.strerror}); choose another folder: moezoo doctor folder=FOLDER"
        )
        return
    yield from facts(
        "disk",
        f"about {in_units(round(size / write))}/s written to the disk and {in_units(round(size / read))}/s read "
        f"(one file of {in_units(size)}; other work here makes it slower)",
    )


def find_environment() -> Iterator[Entry]:
    """Yield the variables that change results or speed, and advice about some."""
    ours = {*own_variables}
    names = sorted(n for n in {*os.environ} - ours if n.startswith(_PREFIXES) or n in _NAMES)
    for name in names:
        yield from facts("environment", f"{name}={shown_value(name, os.environ[name])}")
    if not names:
        yield from facts("environment", "no variable that changes results or speed")
    flags = os.environ.get("XLA_FLAGS", "")
    if own := [flag for flag in OWN_XLA_FLAGS if flag in flags.split()]:
        yield from facts("environment", f"(moezoo itself adds {' '.join(own)} to XLA_FLAGS)")
    if found := re.search(r"host_platform_device_count=(\d+)", flags):
        yield note(
            "environment",
            f"XLA_FLAGS fixes the number of virtual CPU devices at {found[1]}, and a larger mesh is refused; unset "
            "it: a run makes as many as its mesh has",
        )


def _describe_files(files: int) -> str:
    return "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"


def _file_system(folder: Path) -> str:
    """Return the type of the file system, after a comma; empty where the system does not list it."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    real = folder.resolve()
    inside = [
        (len(Path(at).parts), number, kind)
        for number, (_, at, kind, *_) in enumerate(mounts)
        if real.is_relative_to(at)
    ]
    return f", {max(inside)[2]}" if inside else ""


def _time_disk(folder: Path, most: int) -> tuple[int, float, float]:
    """Return the bytes of a file, about `most`, and the seconds to write it to the disk and to read it. None stays."""
    block, size = os.urandom(_BLOCK), 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.monotonic()
        while not size or (size < most and time.monotonic() - began < _DISK_SECONDS):
            size += file.write(block)
        os.fsync(file.fileno())
        write = time.monotonic() - began
        if sys.platform == "linux":  # read from the disk, not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.monotonic()
        while file.read(_BLOCK):
            pass
        return size, write, time.monotonic() - began
