"""One process of `bench.py load`: `python -P one_load.py write|load|floor FOLDER KEY=VALUE ...`.

It prints figures as JSON. The peak of memory is that of a process, so every measurement has a process of its own.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.hub.loading import from_pretrained
from moezoo.hub.saving import save_pretrained
from moezoo.models import build_model
from moezoo.parallel.mesh import start


def main(what: str, folder: Path, *words: str) -> dict[str, Any]:
    """Write a folder with a random model in bfloat16, or measure how it is loaded. The floor takes one device."""
    cfg = compose(*words)
    if what == "floor":
        start()
        return _measure(lambda: load_floor(folder))
    if what == "load":
        execution = build_execution(cfg, batches="any")
        return _measure(lambda: from_pretrained(folder, execution))
    start()
    save_pretrained(build_model(cfg.model, key=jax.random.key(0), dtype="bfloat16"), folder)
    # Everything is read once, so that it is in the system's cache.
    return {"file_bytes": sum(len(path.read_bytes()) for path in folder.glob("*.safetensors"))}


def load_floor(folder: Path) -> list[jax.Array]:
    """Load the tensors as they are stored, and bring every matrix into the order in which JAX multiplies with it."""
    arrays = [array for path in sorted(folder.glob("*.safetensors")) for array in load_file(path).values()]
    return [jax.device_put(np.ascontiguousarray(array.T)) for array in arrays]


def _measure(load: Callable[[], Any]) -> dict[str, Any]:
    """Return seconds, bytes of the arrays, and bytes of memory besides them: more than a process that loads nothing.

    Arrays that share memory, such as copies on virtual devices, count once.
    """
    device = jax.block_until_ready(jax.numpy.zeros(3)).device
    empty, began = _most_memory(), time.perf_counter()
    loaded = jax.block_until_ready(load())
    seconds = time.perf_counter() - began
    shards = [shard.data for array in jax.tree.leaves(loaded) for shard in array.addressable_shards]
    rest = sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())
    peak = _most_memory() - empty - (rest if device.platform == "cpu" else 0)
    where = {"device": device.device_kind, "devices": len({shard.device for shard in shards})}
    return {"seconds": seconds, "rest_bytes": rest, "peak_bytes": peak, **where}


def _most_memory() -> int:
    """Return the most bytes of memory that this process has had; `getrusage` also counts those of its parent."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


if __name__ == "__main__":
    try:
        print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])))
    except UserError as error:
        sys.exit(f"error: {error}")
