"""The kernels for tensor cores, compiled for GPUs that are not there.

Each kind compiles in a process of its own: all kernels of a process are compiled for the first kind that it names.
"""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from instructions import Ring, running_at_loads

from moezoo.kernels.grouped_matmul import gated, grouped_matmul
from moezoo.nn.mlp import SWIGLU
from moezoo.parallel.kernels import KernelOrder, device_target
from moezoo.tools.absent import absent_devices, compile_for, memory_of


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


def compiled_apart(kind: str, *sizes: tuple[int, int, int, int]) -> list[tuple[int, float]]:
    """Return what `compiled` returns in another process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        return other.submit(compiled, kind, list(sizes)).result()


@pytest.mark.absent
@pytest.mark.smoke
def test_kernels_of_any_size():
    """Two kernels forward and five backward. Of the first, tiles divide neither the rows nor a width."""
    (few, _), (many, temporaries) = compiled_apart("b200", (37, 128, 72, 4), (65536, 2048, 768, 128))
    assert (few, many) == (7, 7)
    assert temporaries < 0.1  # one array of rows of width 768


@pytest.mark.absent
@pytest.mark.smoke
def test_no_load_overwrites_what_a_product_may_read(monkeypatch, tmp_path):
    """In PTX, as the assembler of an H200 gets it, products are waited for before their tiles are loaded again."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    compiled_apart("h200", (65536, 2048, 768, 128))  # LLVM would unroll loops of few steps, which cannot be read then
    loops = {path.stem: path.read_text() for path in tmp_path.glob("*.ptx")}
    assert len(loops) >= 4  # equal kernels compile once
    for name, text in loops.items():
        found = running_at_loads(text, Ring(3, 1), 2 if "gated" in name else 1)
        assert found, name
        assert not any(found), name
