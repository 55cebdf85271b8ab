"""Memory of programs that are compiled for absent devices and not run.

Measures: a grouped product, and an MoE layer with router; forward and backward pass in one program.
Against: the array with one copy of each row per expert, which XLA's own expansion of a grouped product makes.
Columns: target, part, shape (a name of `moezoo.bench.shapes`); in GB on one device: arguments, results, temporaries,
and `E x T x K x d`, the size of that array.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.bench.shapes import SHAPES, Shape
from moezoo.kernels.grouped_matmul import grouped_matmul
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.positions import Context
from moezoo.parallel.absent import absent_devices
from moezoo.parallel.context_parallel import Place
from moezoo.parallel.execution import Execution


class Compiled(NamedTuple):
    """Memory of a forward and backward pass in bytes on one device, and the program's text.

    `dense` is the size of an array with one copy of each row per expert.
    """

    target: str
    part: str
    name: str
    arguments: int
    results: int
    temporaries: int
    dense: int
    text: str


def compile_all(targets: Sequence[str], names: Sequence[str], dtype: Any) -> Iterator[Compiled]:
    """Compile both parts for each of `targets` and `names` of shapes."""
    for target in targets:
        device = absent_devices(target)[0]
        for name in names:
            for part, program in (("grouped_matmul", _product), ("moe_layer", _layer)):
                yield _compile(target, device, part, name, program(SHAPES[name], jnp.dtype(dtype)))


class _Program(NamedTuple):
    function: Any
    differentiable: PyTree
    rest: PyTree
    cotangent: PyTree


def _product(shape: Shape, dtype: Any) -> _Program:
    t, d, f, e, k = shape
    x, w, c = (jax.ShapeDtypeStruct(s, dtype) for s in ((t * k, d), (e, d, f), (t * k, f)))
    return _Program(
        lambda p, sizes: grouped_matmul(p[0], p[1], sizes), (x, w), jax.ShapeDtypeStruct((e,), jnp.int32), c
    )


def _layer(shape: Shape, dtype: Any) -> _Program:
    t, d, f, e, k = shape

    def make(key: jax.Array) -> MoE:
        router = Router(d, e, k, Choice(), dtype=dtype, key=key)
        return MoE(router, Experts(e, d, f, out_std=1.0, dtype=dtype, key=key))

    block = jax.eval_shape(make, jax.random.key(0))
    x, segments = jax.ShapeDtypeStruct((1, t, d), dtype), jax.ShapeDtypeStruct((1, t), jnp.int32)
    execution = Execution(dtype=dtype)

    def run(p: PyTree, segments: jax.Array) -> jax.Array:
        place = Place(segments, segments)  # no layer of experts reads positions
        return p[1](p[0], Context(place, place), execution).y

    return _Program(run, (x, block), segments, x)


def _compile(target: str, device: Any, part: str, name: str, program: _Program) -> Compiled:
    there = NamedSharding(Mesh(np.asarray([device]), ("x",)), PartitionSpec())

    def both(differentiable: PyTree, rest: PyTree, cotangent: PyTree) -> PyTree:
        value, pull = jax.vjp(lambda p: program.function(p, rest), differentiable)
        return value, pull(cotangent)

    arguments = tuple(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), part) for part in program[1:]
    )
    compiled = jax.jit(both).lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    shape, size = SHAPES[name], jax.tree.leaves(program.cotangent)[0].dtype.itemsize
    return Compiled(
        target=target,
        part=part,
        name=name,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        dense=shape.experts * shape.rows * shape.embed * size,
        text=text,
    )


def print_compiled(results: Sequence[Compiled], console: Console) -> None:
    """Print one row per program."""
    names = ("target", "part", "shape", "arguments", "results", "temporaries", "E x T x K x d")
    table = Table(*names, title="compiled, not run; forward and backward, GB on one device", box=box.SIMPLE)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    for r in results:
        table.add_row(*r[:3], *(f"{x / 1e9:.3f}" for x in (r.arguments, r.results, r.temporaries, r.dense)))
    console.print(table)
