"""The kernels for Blackwell, compiled for a B200 that is not there.

They compile in a process of their own: all kernels of a process are compiled for the first kind of GPU that it names.
"""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from moezoo.kernels.grouped_matmul import gated, grouped_matmul
from moezoo.nn.activation import SWIGLU
from moezoo.parallel.kernels import KernelOrder, device_target
from moezoo.tools.absent import absent_devices
from moezoo.tools.compiling import compile_for, memory_of


def compiled(kind: str, sizes: list[tuple[int, int, int, int]]) -> list[tuple[int, float]]:
    """Compile a gated MLP and its gradients; return the number of kernels, and temporaries / arguments."""
    device, results = absent_devices(kind)[0], []
    options: Any = {"implementation": KernelOrder((), device_target(device))}

    def mlp(group_sizes: Any, x: Any, gate: Any, up: Any, down: Any) -> Any:
        inner = gated(x, gate, up, group_sizes, activation=SWIGLU, **options)
        return grouped_matmul(inner, down, group_sizes, **options)

    def passes(x: Any, gate: Any, up: Any, down: Any, group_sizes: Any, cotangent: Any) -> Any:
        value, pull = jax.vjp(functools.partial(mlp, group_sizes), x, gate, up, down)
        return value, pull(cotangent)

    for rows, embed, width, groups in sizes:
        shapes = (rows, embed), *2 * ((groups, embed, width),), (groups, width, embed), (groups,), (rows, embed)
        operands = [jax.ShapeDtypeStruct(x, jnp.int32 if len(x) == 1 else jnp.bfloat16) for x in shapes]
        program = compile_for(device, passes, *operands)
        memory = memory_of(program)
        assert memory is not None
        kernels = (program.as_text() or "").count('custom_call_target="mosaic_gpu')
        results.append((kernels, memory.temporaries / memory.arguments))
    return results


@pytest.mark.absent
def test_kernels_of_any_size():
    """Two kernels forward and five backward. Of the first, tiles divide neither the rows nor a width."""
    sizes = [(37, 128, 72, 4), (65536, 2048, 768, 128)]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        results = other.submit(compiled, "b200", sizes).result()
    assert [kernels for kernels, _ in results] == [7, 7]
    assert results[1][1] < 0.1  # one array of rows of width 768
