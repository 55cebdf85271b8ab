"""Describe devices that this machine does not have, to compile programs for them.

XLA's compilers for TPU and GPU are Python wheels and need no accelerator. A program that they compile can be inspected
but not run.
"""

import os

from jax.experimental import topologies

from moezoo.errors import UserError, nearest

# Eight devices each. libtpu knows a TPU slice by a topology name; for a GPU XLA needs a description of the device.
_TPUS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150754820096
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
"""
_GPUS = {"h200": _H200}

ABSENT = (*_TPUS, *_GPUS)


def absent_devices(kind: str) -> list:
    """Return eight absent devices of a kind, for a mesh or shardings to lower and compile a program for.

    Args:
        kind: One of `ABSENT`.

    Raises:
        UserError: The kind is unknown, or its compiler is not installed.
    """
    if kind not in ABSENT:
        raise UserError(f"absent device {kind}: not known; {nearest(kind, ABSENT)}")
    # Without these, libtpu queries the cloud's metadata server and CUDA searches for a driver.
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "CUDA_VISIBLE_DEVICES": "-1"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    try:
        if kind in _TPUS:
            topology = topologies.get_topology_desc(platform="tpu", topology_name=_TPUS[kind])
        else:
            topology = topologies.get_topology_desc(platform="cuda", target_config=_GPUS[kind], topology="1x1x8")
    except Exception as error:  # the exception for a missing plugin differs between versions of JAX
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot compile for {kind} here ({reason}); pip install -e '.[absent]'") from error
    return list(topology.devices)
