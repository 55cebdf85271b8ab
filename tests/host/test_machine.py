"""The memory of a machine and of its control groups, and files that are none."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused

import moezoo.host.machine as host
from moezoo.host.files import check_file
from moezoo.host.machine import (
    add_xla_flags,
    check_host,
    group_limits,
    host_memory,
    keep_freed_memory,
    processor_limits,
)


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a/b\n", {"memory.max": "900", "a/memory.max": "max", "a/b/memory.max": "700"}, [700, 900]),
        ("0::/\n", {"memory.max": "max"}, []),
        ("0::/of/the/host\n", {"memory.max": "500"}, [500]),
        ("4:cpu,memory:/a\n2:cpu:/b\n", {"memory/a/memory.limit_in_bytes": "300", "b/memory.max": "1"}, [300]),
        ("4:pids:/a\n", {"memory.max": "100"}, []),
        (None, {"memory.max": "100"}, []),
    ],
)
def test_limits_of_control_groups(tmp_path, groups, files, limits):
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(f"{text}\n")
    assert sorted(group_limits(tmp_path / "groups", tmp_path / "root")) == [*limits, 2**63]


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a\n", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, [1.5]),
        ("0::/a\n", {"cpu.max": "400000 100000", "a/cpu.max": "50000 100000"}, [0.5, 4.0]),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, [2.0]),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("3:memory:/\n", {"cpu.max": "50000 100000"}, []),
    ],
)
def test_limits_of_processors(tmp_path, groups, files, limits):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(f"{text}\n")
    assert sorted(processor_limits(tmp_path / "groups", tmp_path / "root")) == limits


def test_host_memory():
    assert 2**28 < host_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    check_host("seq_len=4", host_memory(), "use less")
    with refused("seq_len=4 needs at least 8,589,934,592.0 GiB", "this machine has", "use less"):
        check_host("seq_len=4", 2**63, "use less")


def test_what_is_no_file(tmp_path):
    (tmp_path / "file").write_text("abc")
    assert check_file(tmp_path / "file", "path=file", "give one") == 3
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path, found in (
            (Path("/dev/zero"), "a device, not a file"),
            (Path("pipe"), "a pipe, not a file"),
            (Path("socket"), "a socket, not a file"),
            (tmp_path, "a folder, not a file"),
            (Path("none"), "does not exist"),
            (Path("file/below"), "does not exist"),
            (Path("x" * 300), "cannot be read (File name too long)"),
            (Path("x\0"), "embedded null"),
        ):
            with refused("path=this ", found, "give one"):
                check_file(path, "path=this", "give one")


def test_freed_memory_is_kept_unless_the_environment_sets_malloc(monkeypatch):
    calls = {}
    monkeypatch.setattr("moezoo.host.machine.ctypes.CDLL", lambda name: SimpleNamespace(mallopt=calls.__setitem__))
    monkeypatch.setattr("moezoo.host.machine.sys.platform", "linux")
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.dynamic_sort=2")
    keep_freed_memory()
    assert calls == {-1: -1, -4: 0, -2: 2**26}  # M_TRIM_THRESHOLD, M_MMAP_MAX, M_TOP_PAD in <malloc.h>
    calls.clear()
    with monkeypatch.context() as changed:
        changed.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        keep_freed_memory()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    keep_freed_memory()
    assert not calls


FLAG = "--xla_cpu_experimental_ynn_fusion_type="
STUCK, END = (f"--xla_cpu_collective_call_{name}_timeout_seconds=" for name in ("warn_stuck", "terminate"))
LIMITS = f"{STUCK}600 {END}86400"


@pytest.mark.parametrize(("version", "wanted"), [("0.10.2", f"{LIMITS} {FLAG}-reduce"), ("0.12.0", f"{LIMITS} {FLAG}")])
def test_flags_of_xla(monkeypatch, tmp_path, version, wanted):
    """Fused kernels are off, and limits of collectives long. A value of the user's own stays, also in a file."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    own, file = f"{FLAG}+LIBRARY_FUSION_TYPE_DOT {END}5 {STUCK}1", tmp_path / "flags"
    file.write_text(own)
    other = tmp_path / "other"
    other.write_text("--xla_a=1\n--xla_b=2\n")
    none = str(tmp_path / "none")
    cases = {"": wanted, "--xla_a=1": f"--xla_a=1 {wanted}", own: own, str(file): str(file), none: none}
    cases[f"{END}5"] = f"{END}5 {wanted.replace(f' {END}86400', '')}"
    cases[str(other)] = f"--xla_a=1 --xla_b=2 {wanted}"
    for given, after in cases.items():
        monkeypatch.setenv("XLA_FLAGS", given)
        add_xla_flags()
        assert os.environ["XLA_FLAGS"] == after
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    add_xla_flags("--xla_a=", "--xla_b=")
    assert os.environ["XLA_FLAGS"] == f"--xla_a=1 {wanted} --xla_b="


@pytest.mark.parametrize("late", [False, True])
def test_importing_the_package_sets_them(late):
    """Before a public name is used, so before an array; a process that has made one before is warned of the kernels."""
    lines = ["import os, moezoo, jax", "moezoo.Execution()", "print(jax.__version__[:5], os.environ['XLA_FLAGS'])"]
    code = "\n".join(["import jax.numpy as jnp; jnp.ones(2) + 1"] * late + lines)
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    version, *flags = done.stdout.split()
    assert flags == [*LIMITS.split(), f"{FLAG}-reduce" if version == "0.10." else FLAG]
    assert ("import moezoo before JAX makes an array" in done.stderr) is late


def test_plugins_without_a_driver_are_left_out(monkeypatch):
    """Compilers of the extra `plan` are plugins that print tracebacks; what the user has set, and drivers, decide."""
    monkeypatch.setattr(host, "own_variables", set())
    monkeypatch.setattr(host, "installed", {"libtpu": "0.1"}.get)
    for set_to, drivers, chosen in (("", {"/dev/nvidia0": "NVIDIA"}, None), ("tpu", {}, "tpu"), ("", {}, "cpu")):
        assert not host.own_variables
        monkeypatch.setenv("JAX_PLATFORMS", set_to)
        if not set_to:
            monkeypatch.delenv("JAX_PLATFORMS")
        monkeypatch.setattr(host, "driver_files", lambda drivers=drivers: drivers)
        host.leave_out_plugins()
        assert os.environ.get("JAX_PLATFORMS") == chosen
    assert host.own_variables == {"JAX_PLATFORMS"}


# Programs of public reports (github.com/jax-ml/jax/issues/39103, 39257, 40412) that some versions compute wrongly, or
# never finish.
REPORTED = """
import moezoo, jax, jax.numpy as jnp
rows = jnp.arange(32769.0)[:, None] * jnp.array([1.0, 0, 0])
squares = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)
print(float(squares[-1]))
spread = jax.jit(lambda x, y: jnp.log(jnp.sum(x[..., None, None, None, None, None] * y, axis=2)))
print(float(spread(jnp.ones((10, 4, 6)), jnp.ones((10, 4, 6, 9, 9, 9, 9, 9))).max()))
x = jnp.ones((3, 1, 2, 2, 8, 8, 8))
print(float(jax.jit(lambda x, y: jnp.sum(x * y, axis=3))(x, x).min()))
"""


def test_programs_that_xla_is_reported_to_compute_wrongly():
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", REPORTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    squares, logarithm, ones = map(float, done.stdout.split())
    assert (squares, ones) == (32768.0**2, 2.0)
    assert logarithm == pytest.approx(math.log(6))
