"""Programs compiled for absent devices: their memory, their collectives and the order of their operations."""

import contextlib
import functools
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from contexts import context_of
from instructions import Ring, running_at_loads
from jax.sharding import NamedSharding, PartitionSpec
from meshes import auto_mesh
from programs import hops_over_loops, largest_array

import moezoo
from benchmarks.compiled import compile_kernels
from benchmarks.kernels import layer_operands, run_layer
from benchmarks.resources import compiled_kernels
from benchmarks.shapes import ACCELERATOR
from moezoo.config.build import build_execution
from moezoo.errors import UserError
from moezoo.kernels.attention import Attended, Operands, attend, by_intervals
from moezoo.kernels.grouped_matmul import BACKENDS, grouped_matmul, ragged_dot
from moezoo.kernels.grouped_matmul.routed import SIZES
from moezoo.models import MixtralConfig
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import Ragged
from moezoo.nn.latent_attention import Latents, expand
from moezoo.nn.ring_attention import RotateKept
from moezoo.parallel.context_parallel import Coordinates, Interval, Scoring, SequenceGroup, SplitOperands
from moezoo.parallel.execution import rematerialise
from moezoo.parallel.kernels import KernelOrder, device_target, target_of
from moezoo.parallel.mesh import mesh_of
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.weight_mover import WeightMover
from moezoo.tools.absent import ABSENT, absent_devices, compile_for, memory_of
from moezoo.training.build import build_step


def test_unknown_kind():
    with pytest.raises(UserError, match=r"^absent device h20: not known; did you mean 'h200'\?$"):
        absent_devices("h20")
    for name, sizes in {"v5p:": "2x2x2", "v5p:4x0": "2x2x2", "h200:8x": "8x8", "h200:1x1x8x8": "8x8"}.items():
        kind = name.partition(":")[0]
        with pytest.raises(UserError, match=f"^absent device {name}: {kind} takes sizes such as {kind}:{sizes}$"):
            absent_devices(name)


def test_names_what_to_install(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda\nand more")

    monkeypatch.setattr("moezoo.tools.absent.topologies.get_topology_desc", missing)
    with pytest.raises(
        UserError, match=r"^cannot compile for v5p here \(topology not implemented for cuda\); pip inst"
    ):
        absent_devices("v5p")


@pytest.mark.absent
@pytest.mark.parametrize(
    ("name", "count"), [*((kind, 8) for kind in ABSENT), ("v5p:4x4x4", 64), ("h200:4", 4), ("h200:8x8", 64)]
)
def test_devices(name, count):
    devices = absent_devices(name)
    assert len(devices) == count
    capabilities = {"a100": "8.0", "h100": "9.0", "h200": "9.0", "b200": "10.0"}
    assert device_target(devices[0]).capability == capabilities.get(name.partition(":")[0])
    assert {d.platform for d in devices} == {"tpu" if name.startswith(("v", "tpu")) else "gpu"}
    # Neither axis of the mesh is a product of axes of the slice.
    if count == 64:
        assert mesh_of(moezoo.MeshShape(fsdp=8, expert=8), devices).devices.size == count


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
def test_a_narrow_gradient_of_experts_compiles():
    """That of a low-rank pair beside a matrix of Mixtral 8x7B."""
    shapes = ((32768, 14336), jnp.bfloat16), ((32768, 16), jnp.bfloat16), ((1,), jnp.int32)
    outer = functools.partial(ragged_dot.outer, dtype=jnp.float32)
    compile_for(absent_devices("v5p")[0], outer, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("names", [(), ("hopper_persistent",)], ids=str)
def test_any_size_compiles_for_an_h200(names):
    """The kernels' tiles, of memory too, divide neither the rows nor the widths."""
    device = absent_devices("h200")[0]
    product = functools.partial(grouped_matmul, implementation=KernelOrder(names, device_target(device)))

    def passes(rows: Any, weights: Any, sizes: Any) -> Any:
        return jax.vjp(lambda x, w: product(x, w, sizes), rows, weights)[1](rows[:, :72])

    for rows in (1, 37, 300):
        shapes = ((rows, 136), jnp.bfloat16), ((4, 136, 72), jnp.bfloat16), ((4,), jnp.int32)
        text = compile_for(device, passes, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)).as_text()
        assert (text or "").count('custom_call_target="mosaic_gpu') == 2


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("contract", [1, 2])
def test_the_product_of_programs_that_stay_on_an_h200(contract, monkeypatch, capfd):
    """No register is spilled, products are issued together, and done before their slot in shared memory is free."""
    for name in ("PTX", "PTXAS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", "1")
    shape, device = ACCELERATOR["S2"], absent_devices("h200")[0]
    multiply = functools.partial(BACKENDS["hopper_persistent"].multiply, contract=contract)
    rows, weights = (shape.rows, shape.embed), (shape.experts, shape.embed, shape.mlp)
    weights = weights if contract == 1 else (shape.experts, shape.mlp, shape.embed)
    shapes = (rows, jnp.bfloat16), (weights, jnp.bfloat16), ((shape.experts,), jnp.int32)
    memory = memory_of(compile_for(device, multiply, *(jax.ShapeDtypeStruct(*each) for each in shapes)))
    assert memory is not None
    assert memory.temporaries < 0.001 * memory.results
    printed = capfd.readouterr().out
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in printed
    assert "Used 168 registers" in printed  # as many as 384 threads can have, before they exchange them
    assert "serialized" not in printed
    # A warpgroup frees a slot (it arrives without bytes) after it has waited for all but one product, or for all.
    pattern = r"wgmma\.(mma_async|commit_group|wait_group\S+ \d)|(mbarrier\.arrive)\.release\.cta\S+ _, \[%r\d+\], 1;"
    found = [" ".join(filter(None, each)) for each in re.findall(pattern, printed)]
    step = [*["mma_async"] * 4, "commit_group", "wait_group.sync.aligned 1", "mbarrier.arrive"]
    end = ["wait_group.sync.aligned 0", "mbarrier.arrive"]
    assert found in (step + end, end + step)  # what follows a loop may be printed before it


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
def test_megablox_holds_no_product_in_float32():
    """On each of two TPUs, a product and both gradients are three kernels without temporaries of that size."""
    shape, there = ACCELERATOR["L1"], mesh_of(moezoo.MeshShape(fsdp=2), absent_devices("v5p")[:2])
    product = functools.partial(grouped_matmul, implementation=KernelOrder(("megablox",), target_of(there)))

    def passes(rows: Any, weights: Any, sizes: Any, cotangent: Any) -> Any:
        value, pull = jax.vjp(lambda rows, weights: product(rows, weights[0], sizes), rows, weights)
        return value, *pull(cotangent)

    each = PartitionSpec("fsdp")
    mapped = jax.shard_map(passes, mesh=there, in_specs=each, out_specs=each)
    shapes = (2 * shape.rows, shape.embed), (2, shape.experts, shape.embed, shape.mlp)
    operands = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (*shapes, (2 * shape.rows, shape.mlp))]
    operands.insert(2, jax.ShapeDtypeStruct((2 * shape.experts,), jnp.int32))
    where = NamedSharding(there, each)
    program = jax.jit(mapped, in_shardings=where, out_shardings=where).lower(*operands).compile()
    assert (program.as_text() or "").count('custom_call_target="tpu_custom_call"') == 3
    memory = memory_of(program)
    assert memory is not None
    assert memory.temporaries < 4e6


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("kind", ["h200", "v5p"])
def test_no_row_is_copied_for_every_expert(kind):
    """No array of a forward and backward pass has that size, and temporaries stay below the stated bound.

    The kernels of an H200 spill nothing, and two of their blocks fit into a multiprocessor.
    """
    with compiled_kernels(kind) if kind == "h200" else contextlib.nullcontext([]) as kernels:
        programs = [each for name in ("L1", "S2") for each in compile_kernels(kind, name, jnp.bfloat16)]
    assert bool(kernels) == (kind == "h200")
    for kernel in kernels:
        assert (kernel.threads, kernel.spilled, kernel.blocks) == (128, 0, 2), kernel
        sums = 2 if "gated" in kernel.kernel else 1
        assert not any(running_at_loads(kernel.assembly, Ring(3, 1), sums)), kernel
    for row, program in programs:
        shape, text = ACCELERATOR[row["shape"]], program.as_text()
        weights = shape.experts * shape.embed * shape.mlp
        rows = (shape.rows + SIZES[0]) * max(shape.embed, shape.mlp)  # the last block may reach beyond all rows
        assert text is not None
        assert largest_array(text) <= max(weights, rows), row
        # In float32: gradients and products before they are rounded, and a layer's activations.
        bound = {"grouped_matmul": weights + rows, "moe_layer": 3 * weights + 6 * rows}[row["part"]]
        assert row["temporaries_bytes"] < 4 * 1.05 * bound, row
        assert ("tpu_custom_call" in text) == (kind == "v5p"), row
        if kind == "h200":  # kernels alone: both gradients of a product, and of three per row in a layer
            assert text.count('custom_call_target="mosaic_gpu') == {"grouped_matmul": 3, "moe_layer": 8}[row["part"]]
            assert not re.search(r"\bwhile\(", text)
            if row["part"] == "grouped_matmul":
                assert row["temporaries_bytes"] < 0.01 * row["arguments_bytes"]
                assert "scatter(" not in text
            else:  # the router reads tokens too
                assert row["must_bytes"] < row["outside_bytes"] < 1.2 * row["must_bytes"]


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(("heads", "kv_heads", "dims"), [(32, 8, (128, 128)), (16, 16, (192, 128))], ids=str)
def test_attention_on_an_h200_has_no_temporaries(heads, kv_heads, dims):
    """Beside numbers per query: one kernel forward, two backward, no loop, and no copy of queries, keys or values."""
    tokens, (dim, value_dim) = 4096, dims

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct((1, tokens, *shape), dtype)

    at, group = Coordinates(*(array(dtype=jnp.int32) for _ in range(2))), heads // kv_heads
    result, total = array(kv_heads, group, value_dim), array(kv_heads, group, dtype=jnp.float32)
    given = array(kv_heads, group, dim), array(kv_heads, dim), array(kv_heads, value_dim)

    def both(q: Any, k: Any, v: Any, at: Any, back: Any) -> Any:
        run = lambda q, k, v: by_intervals.attend("hopper", Operands(q, k, v, at, at, None), 1.0)  # noqa: E731
        value, pull = jax.vjp(run, q, k, v)
        return value, pull(back)

    program = compile_for(absent_devices("h200")[0], both, *given, at, Attended(result, total))
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    assert text.count('custom_call_target="mosaic_gpu') == 3
    # Per query and head the two numbers that the backward pass keeps, the three that it reads, and their transposes.
    assert memory.temp_size_in_bytes < 4 * tokens * (12 * heads + 64)


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(("dims", "temporaries"), [((128, 128), 45e6), ((192, 128), 89e6)], ids=str)
def test_attention_on_a_tpu_in_kernels(dims, temporaries):
    """Both passes on two devices: one kernel forward, two backward, no loop, and no scores."""
    tokens, heads, (dim, value_dim) = 4096, 8, dims
    there = mesh_of(moezoo.MeshShape(fsdp=2), absent_devices("v5p")[:2])
    order = KernelOrder(target=target_of(there))

    def both(q: Any, k: Any, v: Any, at: Any, seen: Any, back: Any) -> Any:
        run = lambda q, k, v: attend(Operands(q, k, v, at, at, None, seen), 1.0, implementation=order)  # noqa: E731
        value, pull = jax.vjp(run, q, k, v)
        return value, pull(back)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct((2, tokens, *shape), dtype)

    number, back = array(dtype=jnp.int32), Attended(array(heads, 1, value_dim), array(heads, 1, dtype=jnp.float32))
    given = array(heads, 1, dim), array(heads, dim), array(heads, value_dim)
    each = PartitionSpec("fsdp")
    where, mapped = NamedSharding(there, each), jax.shard_map(both, mesh=there, in_specs=each, out_specs=each)
    program = jax.jit(mapped, in_shardings=where, out_shardings=where)
    program = program.lower(*given, Coordinates(number, number), Interval(number, number), back).compile()
    text, memory = program.as_text(), memory_of(program)
    assert text is not None
    assert memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(r"\bwhile\(", text)
    assert memory.temporaries < temporaries < 4 * heads * tokens**2


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(
    ("kind", "dtype", "temporaries"),
    [
        pytest.param("a100", "bfloat16", 222e6, marks=pytest.mark.smoke),
        ("h200", "float32", 281e6),
        ("b200", "bfloat16", 222e6),
    ],
)
def test_attention_on_other_gpus(kind, dtype, temporaries):
    """Both passes in blocks of 512: a pair of these is the largest array of scores, in a third of the naive memory."""
    tokens, kv_heads, group, dim = 4096, 8, 4, 128
    device, found = absent_devices(kind)[0], {}

    def array(*shape: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct((1, tokens, *shape), dtype)

    number, result = array(dtype=jnp.int32), array(kv_heads, group, dim)
    given = result, array(kv_heads, dim), array(kv_heads, dim), Coordinates(number, number), Interval(number, number)
    for names in ((), ("reference",)):

        def both(q: Any, k: Any, v: Any, at: Any, seen: Any, back: Any, names: Any = names) -> Any:
            order = KernelOrder(names, device_target(device))
            run = lambda q, k, v: attend(Operands(q, k, v, at, at, None, seen), 1.0, implementation=order)  # noqa: E731
            value, pull = jax.vjp(run, q, k, v)
            return value, pull(back)

        program = compile_for(device, both, *given, Attended(result, array(kv_heads, group, dtype=jnp.float32)))
        memory = memory_of(program)
        assert memory is not None
        found[names] = memory.temporaries
        assert (f"f32[{kv_heads},{group * 512},512]" in (program.as_text() or "")) == (not names)
    assert found[()] < temporaries < found["reference",] / 3


@pytest.mark.absent
@pytest.mark.parametrize(("remat", "products"), [("dots", 2), ("full", 0)])
def test_what_a_layer_keeps_on_an_h200(remat, products):
    """Its tokens, products of rows as `remat` says, and numbers per token and expert of the router."""
    shape = ACCELERATOR["L1"]
    mesh = mesh_of(moezoo.MeshShape(), absent_devices("h200")[:1])
    execution = on_mesh(moezoo.Execution(mesh, dtype="bfloat16", remat=remat))
    (x, block), (context,), _ = jax.eval_shape(functools.partial(layer_operands, shape, "uniform", "bfloat16"))

    def kept(x: Any, block: Any, context: Any) -> Any:
        layer = rematerialise(lambda x, block: run_layer(execution, x, block, context), remat)
        return jax.vjp(layer, x, block)[1]

    weights = {w.shape for w in jax.tree.leaves(block)}
    found = [y for y in jax.tree.leaves(jax.eval_shape(kept, x, block, context)) if y.shape not in weights]
    wanted = 2 * (shape.tokens * shape.embed + products * shape.rows * shape.mlp)
    assert wanted <= sum(y.size * y.dtype.itemsize for y in found) <= 1.03 * wanted


AHEAD = """
import moezoo
from moezoo.tools.absent import absent_devices
from moezoo.profiling.hlo import read_computations
from moezoo.config.build import build_execution
from moezoo.parallel.mesh import mesh_of
from moezoo.training.build import build_step

cfg = moezoo.compose("model=qwen3_moe", "mesh=fsdp8", "model.layers=3", "model.embed=512", "seq_len=256")
step = build_step(cfg, build_execution(cfg, mesh_of(cfg.mesh, absent_devices("h200"))))
entry, found = read_computations(step.compile().program.as_text())
gathers = [each.text for each in found[entry].values() if each.op == "all-gather-start"]
print("ahead", sum("jvp(layers)/while" in text and "rematted" not in text for text in gathers))
"""


@pytest.mark.absent
@pytest.mark.parametrize("flag", ["false", "true"])
def test_weights_are_gathered_ahead_on_gpus(flag):
    """By the flag that docs/running.md names, gathers of the forward loop's first layer move out of the loop."""
    flags = {"XLA_FLAGS": f"--xla_gpu_enable_pipelined_all_gather={flag}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", AHEAD], env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout.split("ahead")[1]) > 0) == (flag == "true")


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("kind", ["h200", "v5p"])
@pytest.mark.parametrize("shape", [{"expert": 8}, {"fsdp": 2, "expert": 2, "context": 2}], ids=str)
def test_ragged_is_the_real_exchange(kind, shape):
    """Two per layer forward, two where the layer is recomputed, two backward; one loop over layers holds all six."""
    sizes = moezoo.MeshShape(**shape).sizes
    mesh = auto_mesh(absent_devices(kind), **sizes)
    rules = moezoo.compose("rules=fsdp_ep").rules
    if "context" in shape:  # experts over two axes
        both = {"expert": ("context", "expert")}
        store = {"embed": ("fsdp", "context", "expert"), "expert_embed": ("fsdp",), **both}
        rules = moezoo.Rules("cp_as_ep", store, both, ("data", "fsdp", "expert"), ("context",))
    execution = on_mesh(moezoo.Execution(mesh, rules, Ragged()))
    shapes = Blueprint(MixtralConfig(embed=256, layers=2)).shapes
    placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    model = jax.tree.map(placed, shapes, execution.shardings(shapes))
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32, sharding=NamedSharding(mesh, execution.tokens_spec))
    step = jax.jit(jax.grad(lambda m, t: m(t, execution=execution).logits.sum()))
    text = step.lower(model, tokens).compile().as_text()
    assert text is not None
    assert len(re.findall(r"= .* ragged-all-to-all(-start)?\(", text)) >= 6


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("kind", ["h200", "v5p"])
def test_offloaded_inputs_are_stored_on_the_host(kind):
    """The inputs of a micro-step's layers move to the host; the device needs that much less memory."""
    words = ["model=mixtral", "model.layers=16", "model.embed=128", "model.expert_mlp=128", "model.max_length=512"]
    words += ["mesh=fsdp2_ep4", "dispatch=gather", "batch_size=32", "seq_len=512", "execution.microbatches=2"]
    memory = {}
    for remat in ("full", "offload"):
        cfg = moezoo.compose(*words, f"execution.remat={remat}")
        mesh = auto_mesh(absent_devices(kind), **cfg.mesh.sizes)
        memory[remat] = build_step(cfg, build_execution(cfg, mesh)).compile().program.memory_analysis()
    inputs = 16 * (32 * 512 // 8 // 2) * 128 * 4  # layers; tokens per device and micro-step; float32 numbers
    assert (memory["full"].host_temp_size_in_bytes, memory["offload"].host_temp_size_in_bytes) == (0, inputs)
    saved = memory["full"].temp_size_in_bytes - memory["offload"].temp_size_in_bytes
    # Compilers also lay out the rest slightly differently.
    assert saved > 0.95 * inputs


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
def test_devices_work_while_rows_travel():
    """The compiled program runs shared experts between dispatch and combine, and products while results travel."""
    cfg = moezoo.compose("model=deepseek_v2_lite", "mesh=ep8")
    mesh = auto_mesh(absent_devices("v5p"), **cfg.mesh.sizes)
    execution = on_mesh(moezoo.Execution(mesh, cfg.rules, Ragged(chunks=2), dtype="bfloat16"))
    model = Blueprint(cfg.model).shapes
    moe = model.stacks[-1].blocks[0].feed_forward
    specs = execution.specs(model).stacks[-1].blocks[0].feed_forward
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), moe)
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    specs = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs, is_leaf=is_spec)
    x, valid = jax.ShapeDtypeStruct((16, 2048, cfg.model.embed), jnp.bfloat16), jax.ShapeDtypeStruct((16, 2048), bool)

    def local(moe, x, valid):
        return WeightMover(execution).gather(moe)(x, context_of(valid), execution).y

    split = execution.tokens_spec
    placed = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    arguments = jax.tree.map(placed, (one, x, valid), (specs, split, split))
    whole = jax.shard_map(local, mesh=mesh, in_specs=(specs, split, split), out_specs=split)
    text = jax.jit(whole).lower(*arguments).compile().as_text()
    assert text is not None
    order = []
    for line in text[text.index("\nENTRY") :].splitlines():
        if found := re.search(r"= .* ragged-all-to-all(-start|-done)?\(.*/(dispatch|combine)/", line):
            order.append(f"{found[2]}{found[1] or ''}")
        elif "ragged-dot-none" in line.split(" = ")[0]:
            order.append("experts")
        elif "shared/dot_general" in line:
            order.append("shared")
    results = [i for i, step in enumerate(order) if step.startswith("combine")]
    sent = [i for i, step in enumerate(order) if step.startswith("dispatch")]
    shared = [i for i, step in enumerate(order) if step == "shared"]
    assert sent[0] < shared[0]
    assert max(*sent, *shared) < results[0]
    # The products of the second chunk run between start and end of the first chunk's combine.
    start, done = order.index("combine-start"), order.index("combine-done")
    assert order[start:done].count("experts") >= 2


def compiled_ring(kind, kept, tokens=1024, heads=2, options=None):
    """Return what both passes of ring attention on four devices compile to: their hops, and what these overlap with.

    Devices have `tokens` tokens each, which keep keys and values ("pairs") or "latents".
    """
    size = 128
    mesh = auto_mesh(absent_devices(kind), context=4)
    group = SequenceGroup(("context",), 4, ("context",))
    scoring = Scoring(size**-0.5, order=KernelOrder(target=target_of(mesh)))
    split, whole = PartitionSpec(None, "context"), PartitionSpec()

    def array(*shape, spec=split, dtype=jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def of_tokens(*shape, **kwargs) -> Any:
        return array(1, 4 * tokens, *shape, **kwargs)

    make, weights, head = lambda _, kept: kept, None, size
    passed = (of_tokens(heads, size),) * 2
    if kept == "latents":
        make, weights, head = expand, (array(256, heads, size, spec=whole),) * 2, size + 64
        passed = Latents(of_tokens(256), of_tokens(64))

    def local(q, kept, weights, at, back):
        def attend(q, kept, weights):
            way = RotateKept()
            return way.attend(SplitOperands(q, kept, weights, make, way.coordinates(at, group), scoring), group)

        value, pull = jax.vjp(attend, q, kept, weights)
        return value, *pull(back)

    specs = (split, split, whole)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(*specs, split, split), out_specs=(split, *specs))
    at = Coordinates(*(of_tokens(dtype=jnp.int32) for _ in range(2)))
    arguments = of_tokens(heads, 2, head), passed, weights, at, of_tokens(heads, 2, size)
    text = jax.jit(mapped).lower(*arguments).compile(compiler_options=options).as_text()
    assert text is not None
    return hops_over_loops(text)


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize("kind", ["h200", "v5p"])
@pytest.mark.parametrize("kept", ["pairs", "latents"])
def test_hops_travel_while_attention_works(kind, kept):
    """In both passes each hop starts before its turn's loop over queries, which has the products, and ends after it.

    Only the last hop, which takes gradients home, has no such loop to overlap with.
    """
    hops = compiled_ring(kind, kept)
    # The first two turns of the backward pass are outside its loop over hops, and so is the last hop.
    outside = hops.pop("ENTRY")
    assert {(kinds, loops > 0) for kinds, loops in outside} == {("bf16", True), ("f32", False)}, outside
    assert {loops for turn in hops.values() for _, loops in turn} == {1}, hops
    forward, backward = sorted(
        ({kind for kinds, _ in turn for kind in kinds.split()} for turn in hops.values()), key=len
    )
    assert (forward, backward) == ({"bf16"}, {"bf16", "f32"}), hops


@pytest.mark.absent
@pytest.mark.usefixtures("_uncached")
def test_large_hops_travel_together_with_an_option():
    """XLA joins the hops of a turn up to 30 MiB and lets a GPU have one at a time on its way: others would block."""
    options = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
    hops = compiled_ring("h200", "pairs", tokens=4096, heads=8, options=options)
    del hops["ENTRY"]
    assert {loops for turn in hops.values() for _, loops in turn} == {1}, hops
