"""The instructions of the kernels for tensor cores, without the compiler of a GPU.

JAX lowers a kernel to a module whose products, copies and waits stand in it as text of PTX, the GPU's assembly, which
the compiler copies.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import pytest

# A product that may be waited for; a wait, of Hopper for all but so many products, and of Blackwell at a barrier of the
# tensor core; and a copy of a tile into shared memory. Modules of jax 0.10 have some as operations of the same names.
_COMMIT = r"wgmma\.commit[._]group|tcgen05\.commit"
_WAIT = r"wgmma\.wait[._]group\.sync\.aligned\s+(\d+)|tcgen05\.fence(?:::| <)after"
_LOAD = r"cp\.async\.bulk\.tensor\.(?:\dd\.)?shared(?:::cta|\.cluster)\.global"


class Ring(NamedTuple):
    """The buffers of a loop: of how many steps, and for how many steps more each is kept after its own."""

    steps: int
    later: int


def rings_of(patch: pytest.MonkeyPatch) -> list[Ring]:
    """Return a list that gets the ring of each loop that is traced."""
    mosaic_gpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    found, really = [], mosaic_gpu.emit_pipeline

    def emit(*rest: Any, in_specs: Sequence[Any], max_concurrent_steps: int, **options: Any) -> Any:
        (later,) = {spec.delay_release for spec in in_specs}
        found.append(Ring(max_concurrent_steps, later))
        return really(*rest, in_specs=in_specs, max_concurrent_steps=max_concurrent_steps, **options)

    patch.setattr(mosaic_gpu, "emit_pipeline", emit)
    return found


def texts_of(patch: pytest.MonkeyPatch, function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> list[str]:
    """Return the text of each kernel of a program for a GPU."""
    gpu: Any = importlib.import_module("jax.experimental.mosaic.gpu")
    found, really = [], gpu.lower_mgpu_dialect

    def lower(module: Any, *rest: Any, **options: Any) -> None:
        really(module, *rest, **options)
        found.append(str(module))

    with patch.context() as here:
        for place in (gpu, gpu.core.dialect_lowering):  # of two versions of JAX
            here.setattr(place, "lower_mgpu_dialect", lower)
        jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    return found


def running_at_loads(text: str, ring: Ring, sums: int) -> list[int]:
    """Return, for each load in the loops of a kernel, how many products may still read what it overwrites.

    Args:
        text: The kernel, as a module or in PTX: one loop, or several, which have the same buffers.
        ring: The buffers.
        sums: How many sums take products by turns. At its first barrier after a product, a sum waits for the product
            before it, and at the next one for the product.
    """
    events = [(found[0], found[1]) for found in re.finditer(f"{_COMMIT}|{_LOAD}|{_WAIT}", text)]
    commits = [i for i, (event, _) in enumerate(events) if re.match(_COMMIT, event)]
    # The last loop ends with its loads; more of them before it are the first ones of the next loop, for every buffer.
    tiles = sum(bool(re.match(_LOAD, event)) for event, _ in events[commits[-1] :])
    *_, last = (i for i, (event, _) in enumerate(events) if re.match(_LOAD, event))
    running, found = [], []  # the steps of products that may run; what is returned
    loads = waits = 0  # since the last product
    for step in range(3):
        for event, count in events[commits[0] : last + 1]:
            if re.match(_COMMIT, event):
                running, loads, waits = [*running, step], 0, 0
            elif re.match(_LOAD, event):
                loads += 1
                overwritten = step - ring.later if loads <= tiles else step
                found.append(sum(each <= overwritten for each in running))
            else:
                most, waits = max(0, sums - waits) if count is None else int(count), waits + 1
                running = running[max(0, len(running) - most) :]
    return found
