"""`compile`: the memory of programs that are compiled and not run, for absent devices, or steps for this machine.

- Kernels: a grouped product, and an MoE layer with router; forward and backward pass in one program. Columns: target;
  part; shape; in GB on one device arguments, results, temporaries, and `E x T x K x d`: the array with one copy of each
  row per expert, which XLA's own expansion of a grouped product makes. Of a layer also what instructions outside
  kernels read and write, and what must be read and written there, where the products are such kernels of a GPU.
- Whole training steps. Columns: target; step (the overrides that compose it); MB on one device: arguments, temporaries,
  and the peak, which also has results that are not stored in arguments; what is in use at the same time at most, and
  what the memory model predicts of it; MB received per step, by the traced step.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import layer_operands, product_operands, run_layer
from benchmarks.resources import compiled_kernels
from benchmarks.results import Column, Report, Row, Table, log
from benchmarks.shapes import SHAPES
from benchmarks.timing import passes_of
from moezoo.config.build import blueprint_of, build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.hub.kept import in_format
from moezoo.kernels.grouped_matmul import grouped_matmul
from moezoo.models.adapters import NoAdapter
from moezoo.models.blueprint import Blueprint
from moezoo.nn.few_bits import cut_pieces
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import KernelOrder, device_target
from moezoo.parallel.mesh import MeshShape, mesh_of, prepare, start
from moezoo.parallel.traces import collective_traffic
from moezoo.profiling.hlo import bytes_outside_kernels
from moezoo.tools.absent import GPUS, absent_devices, compile_for, memory_of
from moezoo.training.build import build_step
from moezoo.training.step_memory import step_footprint

# The target that is this machine: its virtual CPU devices.
CPU = "cpu"


def run(keys: Any) -> Report:
    """Compile kernels or whole steps for each target.

    Raises `UserError` for unknown targets, and for two kinds of GPUs: a process compiles kernels of one kind.
    """
    kinds = {name.partition(":")[0] for name in keys.absent}
    if len(gpus := sorted(kinds & set(GPUS))) > 1:
        raise UserError(
            f"absent={' absent='.join(gpus)}: a process compiles kernels for one kind of GPU; call it once for each"
        )
    if keys.step:
        rows = list(_steps(keys.absent, keys.step, keys.format))
        columns = [Column("target", "target"), Column("step", "step")]
        names = ("arguments", "temporaries", "peak", "in use", "predicted", "received")
        columns += [Column(name, f"{name.replace(' ', '_')}_bytes", ",.1f", 1e6) for name in names]
        columns.append(Column("predicted / in use", lambda row: row["predicted_bytes"] / row["in_use_bytes"], ".2f"))
        return Report(rows, [Table("compiled, not run; MB on one device", columns, rows)])
    if CPU in keys.absent:
        raise UserError("absent=cpu: only whole steps are compiled for it; name them with step=, or other devices")
    prepare(1)
    rows, kernels = [], []
    for target, name in itertools.product(keys.absent, keys.shapes("accelerator")):
        with compiled_kernels(target) if target.partition(":")[0] in GPUS else contextlib.nullcontext([]) as found:
            rows += [row for row, _ in compile_kernels(target, name, keys.dtype or "bfloat16")]
        kernels += [{"target": target, "shape": name, **each._asdict()} for each in found]
    for each in kernels:
        del each["assembly"]
    columns = [Column(name, name) for name in ("target", "part", "shape")]
    columns += [Column(name, f"{name}_bytes", ".3f", 1e9) for name in ("arguments", "results", "temporaries")]
    columns.append(Column("E x T x K x d", "copies_bytes", ".3f", 1e9))
    for title, name in (("outside kernels", "outside_bytes"), ("must move", "must_bytes")):
        columns.append(Column(title, lambda row, name=name: row.get(name), ".3f", 1e9))
    tables = [Table("compiled, not run; forward and backward, GB on one device", columns, rows)]
    if kernels:
        columns = [Column(name, name) for name in ("target", "shape", "kernel")]
        columns += [Column(name, name, "d") for name in ("threads", "registers", "spilled", "shared", "blocks")]
        tables.append(Table("kernels for tensor cores; bytes; blocks that a multiprocessor holds", columns, kernels))
    return Report([*rows, *kernels], tables)


def compile_kernels(target: str, name: str, dtype: Any) -> Iterator[tuple[Row, jax.stages.Compiled]]:
    """Compile both kernels of a shape for an absent device; yield each one's memory, in bytes, and its program."""
    shape, device = SHAPES[name], absent_devices(target)[0]
    layer = partial(run_layer, Execution(mesh_of(MeshShape(), [device]), dtype=dtype))
    product = partial(grouped_matmul, implementation=KernelOrder((), device_target(device)))
    for part, function, make in (
        ("grouped_matmul", product, product_operands),
        ("moe_layer", layer, layer_operands),
    ):
        operands = jax.eval_shape(partial(make, shape, "uniform", dtype))
        program = compile_for(device, passes_of(function)["both"], *operands)
        memory = memory_of(program)
        assert memory is not None
        log(f"compiled {part} {name} for {target}")
        sizes = {f"{key}_bytes": getattr(memory, key) for key in ("arguments", "results", "temporaries")}
        width = jnp.dtype(dtype).itemsize
        sizes["copies_bytes"] = shape.experts * shape.rows * shape.embed * width
        text = str(program.as_text())
        if part == "moe_layer" and "mosaic_gpu" in text:
            # Tokens and cotangents become rows, results and gradients of rows become sums; and the gradient of the
            # activation reads and writes three arrays of products.
            sizes["must_bytes"] = width * (4 * (shape.tokens + shape.rows) * shape.embed + 6 * shape.rows * shape.mlp)
            sizes["outside_bytes"] = bytes_outside_kernels(text)
        yield {"target": target, "part": part, "shape": name, **sizes}, program


def _steps(targets: Sequence[str], steps: Sequence[str], format: str | None) -> Iterator[Row]:
    """Compile each of `steps`, overrides of a configuration, for each of `targets`: `cpu`, or absent devices.

    A model whose weights have a `format` of few bits trains the rest, or its adapter alone.
    """
    configs = {words: compose(*words.split()) for words in steps}
    devices = start(max(cfg.mesh.devices for cfg in configs.values()))
    there = {target: devices if target == CPU else absent_devices(target) for target in targets}
    built = {}
    for target, (words, cfg) in itertools.product(targets, configs.items()):
        execution = build_execution(cfg, mesh_of(cfg.mesh, there[target]))
        built[target, words] = build_step(cfg, execution, _blueprint(cfg, execution, format))
    for (target, words), step in built.items():
        log(f"compiling {words} for {target}")
        memory = memory_of(step.compile().program)
        assert memory is not None
        sizes = {f"{key}_bytes": getattr(memory, key) for key in ("arguments", "temporaries", "peak", "in_use")}
        predicted = step_footprint(step)
        log(f"predicted at: {predicted.moment}")
        received = collective_traffic(step.traced.jaxpr).bytes
        yield {"target": target, "step": words, **sizes, "predicted_bytes": predicted.peak, "received_bytes": received}


def _blueprint(cfg: TrainConfig, execution: Execution, format: str | None) -> Blueprint:
    """Return the blueprint of a configuration, with weights in a `format` that the mesh can lay out."""
    blueprint = blueprint_of(cfg)
    if format is None:
        return blueprint
    shapes = in_format(dataclasses.replace(blueprint, adapter=NoAdapter()).shapes, format)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
    return dataclasses.replace(blueprint, change=lambda _: cut_pieces(zeros(), execution))
