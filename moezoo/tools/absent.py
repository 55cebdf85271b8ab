"""Compile programs without running them, also for devices that this machine does not have, and read what they need.

XLA's compilers for TPU and GPU are Python wheels and need no accelerator.
"""

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moezoo.errors import UserError, nearest
from moezoo.tools.plan.hardware import CHIPS

# A kind of GPU as XLA describes it: compute capability, multiprocessors and their 32-bit lanes, clock in GHz, bytes of
# shared memory per multiprocessor and most per block, bytes of the second cache.
GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 167936, 166912, 40 << 20),
    "h100": ("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 233472, 232448, 50 << 20),
    "h200": ("NVIDIA H200", 9, 132, 128, 1.98, 233472, 232448, 60 << 20),
    "b200": ("NVIDIA B200", 10, 148, 128, 1.965, 233472, 232448, 126 << 20),
}


def _description(kind: str) -> str:
    """Return XLA's description of a kind of GPU."""
    name, major, cores, lanes, clock, shared, most_shared, cache = GPUS[kind]
    chip = CHIPS[kind]
    # Instructions that only one generation has, such as those of its tensor cores, are a feature of their own.
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {most_shared}
  core_count: {cores} fpus_per_core: {lanes} clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {chip.hbm_speed:.0f} l2_cache_size: {cache} device_memory_size: {chip.hbm_bytes}
  cuda_compute_capability {{ major: {major} {extension} }}
}}
platform_name: "CUDA" device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
"""


ABSENT = tuple(CHIPS)


def absent_devices(name: str) -> list:
    """Return absent devices, for a mesh or shardings to lower and compile a program for.

    Kernels for tensor cores are all compiled for the first kind of GPU that a process compiles one for.

    Args:
        name: One of `ABSENT`, for eight devices; or with sizes, of the chips of a TPU slice as `v5p:4x4x4`, of GPUs in
            one node as `h200:4`, or of nodes and GPUs in each as `h200:8x8`.

    Raises:
        UserError: The kind or the sizes are unknown, or the compiler is not installed.
    """
    kind, _, sizes = name.partition(":")
    if kind not in ABSENT:
        raise UserError(f"absent device {kind}: not known; {nearest(kind, ABSENT)}")
    eight = "x".join(map(str, CHIPS[kind].eight))
    if name != kind and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", sizes):
        raise UserError(f"absent device {name}: {kind} takes sizes such as {kind}:{'8x8' if kind in GPUS else eight}")
    # Without these, libtpu queries the cloud's metadata server and CUDA searches for a driver.
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "CUDA_VISIBLE_DEVICES": "-1"}
    for key, value in quiet.items():
        os.environ.setdefault(key, value)
    try:
        if kind not in GPUS:
            where = f"{kind}:{sizes or eight}"
            topology = topologies.get_topology_desc(platform="tpu", topology_name=where)
        else:
            where = "x".join(["1", "1", *(sizes or eight).split("x")][-3:])
            topology = topologies.get_topology_desc(platform="cuda", target_config=_description(kind), topology=where)
    except Exception as error:  # the exception for a missing plugin differs between versions of JAX
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot compile for {name} here ({reason}); pip install 'moezoo[plan]'") from error
    return list(topology.devices)


class Memory(NamedTuple):
    """The bytes of a compiled program on one device.

    `peak` is the sum of the first three, without results that are stored in arguments. `in_use` is what is in use at
    the same time, at most: a TPU's compiler leaves gaps between temporaries where there is room. The CPU's compiler
    does not report it; there it is `peak`.
    """

    arguments: int
    results: int
    temporaries: int
    peak: int
    in_use: int


def memory_of(program: "jax.stages.Compiled") -> Memory | None:
    """Return the memory of a program; None where the compiler does not report it."""
    found = program.memory_analysis()
    if found is None:
        return None
    arguments, results, temporaries = (
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.temp_size_in_bytes,
    )
    peak = arguments + results - found.alias_size_in_bytes + temporaries
    (device, *_) = jax.tree.leaves(program.input_shardings)[0].device_set
    in_use = peak if device.platform == "cpu" else found.peak_memory_in_bytes
    return Memory(arguments, results, temporaries, peak, in_use)


def compile_for(device: Any, function: Callable[..., Any], *arguments: Any) -> "jax.stages.Compiled":
    """Compile `function` for one device, which may be absent.

    Args:
        device: One of `absent_devices`, or of `jax.devices()`.
        function: The program.
        arguments: Trees of its arrays, or of `jax.ShapeDtypeStruct`.
    """
    there = NamedSharding(Mesh(np.asarray([device]), ("x",)), PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments)
    return jax.jit(function).lower(*shapes).compile()
