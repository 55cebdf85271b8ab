"""Compile programs without running them, also for absent devices, and read what they need."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


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
        device: One of `moezoo.tools.absent.absent_devices`, or of `jax.devices()`.
        function: The program.
        arguments: Trees of its arrays, or of `jax.ShapeDtypeStruct`.
    """
    there = NamedSharding(Mesh(np.asarray([device]), ("x",)), PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments)
    return jax.jit(function).lower(*shapes).compile()
