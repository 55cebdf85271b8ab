"""What `device` measures on one GPU or TPU: the units of each part. A process of its own runs each part (`child`).

A unit yields rows. What it yields is printed at once as a line for the process that started this one.
"""

import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import agreement, attention, kernels, rehearsal, timing, torch_peers, tuning
from benchmarks.agreement import Kernel, Problem, backends_of, drawn
from benchmarks.device import COMPILE, MARK
from benchmarks.profile import times
from benchmarks.results import Row, log
from benchmarks.shapes import SHAPES, Shape
from benchmarks.steps import Running, random_batch
from benchmarks.timing import Call, Pass, call_of, measure, passes_of, peak_bytes
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.kernels.attention import attend, chosen_backend
from moezoo.kernels.attention.base import Coordinates, Operands
from moezoo.kernels.grouped_matmul import chosen_backend as chosen_product
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels, Target, device_target
from moezoo.parallel.mesh import start
from moezoo.profiling.profile import profile
from moezoo.tools.absent import memory_of
from moezoo.tools.plan.work import model_flops
from moezoo.training.build import build_step
from moezoo.training.step_memory import step_footprint

# 10^12 products of bfloat16 numbers and additions per second, dense, as vendors state them; by a part of the name of
# the device.
PEAK_TFLOPS = {"A100": 312, "H100 PCIe": 756, " NVL": 835, "H100": 989, "H200": 989, "B200": 2250}
PEAK_TFLOPS |= {"v5 lite": 197, "v5e": 197, "v5": 459, "v6 lite": 918, "v6e": 918}  # a v5p is a "TPU v5"
# Milliseconds of the forward pass of a layer in bfloat16 on one H100, as the authors of VeOmni state them for PyTorch's
# grouped product (pull request 460).
PUBLISHED_MS = {"L3": 10.22, "P1": 11.41}
# How far the memory of a step may be from what the memory model predicts of it.
MEMORY_GOAL = 0.05


class Size(NamedTuple):
    """How large what is measured is; heads are key heads, query heads for each, and dimensions.

    `lengths` are those of rows of the delta rule, and `recurrent` its key heads, value heads for each, and dimensions.
    """

    checked: tuple[Mapping[str, agreement.Problem], Mapping[str, agreement.Scores], Mapping[str, agreement.Recurrence]]
    repeats: int
    numbers: int
    width: int
    shape: Shape | None
    tokens: int | None
    heads: tuple[int, int, int]
    lengths: tuple[int, ...]
    recurrent: tuple[int, int, int]
    model: str
    step: str
    real: str
    presets: tuple[str, ...]


_TOY = "model.layers=1 model.embed=32 model.expert_mlp=32 model.experts=4 model.experts_per_token=2 model.vocab=64"
SIZES = {
    # The model has two billion parameters of which 0.4 are active.
    "full": Size(
        checked=(agreement.PROBLEMS, agreement.SCORES, agreement.RECURRENCES),
        repeats=200,
        numbers=2**30,
        width=8192,
        shape=None,
        tokens=None,
        heads=(8, 4, 128),
        lengths=(4096, 8192, 16384, 32768),
        recurrent=(16, 2, 128),
        model="qwen3_moe model.vocab=32768 model.embed=2048 model.layers=6 model.heads=16 model.kv_heads=4 "
        "model.head_dim=128 model.experts=64 model.experts_per_token=8 model.expert_mlp=768 model.max_length=4096",
        step="batch_size=4 seq_len=4096",
        real="olmoe_1b_7b",
        presets=agreement.PRESETS,
    ),
    "toy": Size(
        checked=agreement.TOYS,
        repeats=1,
        numbers=2**16,
        width=128,
        shape=Shape(16, 32, 32, 2, 2),
        tokens=128,
        heads=(1, 1, 64),
        lengths=(80,),
        recurrent=(1, 1, 8),
        model=f"qwen3_moe {_TOY}",
        step="batch_size=1 seq_len=16",
        real=f"olmoe {_TOY}",
        presets=(f"mixtral {_TOY}",),
    ),
}


class Here(NamedTuple):
    """Where and how a part is measured: the target that kernels are chosen for, and the keys of the command."""

    target: Target
    size: Size
    keys: Any
    folder: Path

    @property
    def peak(self) -> int | None:
        """The vendor's TFLOP/s of this kind of device, or None if it is not known."""
        return peak_of(jax.devices()[0].device_kind)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that are timed; a rehearsal leaves out the one that is a part of the other."""
        return PASSED[-1:] if self.keys.rehearse else PASSED

    def lacks(self, unit: "Unit") -> str | None:
        """Return why the kernels that a unit needs cannot be measured; None if they can."""
        broken = [f"{name} is broken: {self.keys.broken[name]}" for name in unit.needs if name in self.keys.broken]
        return "; ".join(broken) or None

    def shape(self, name: str) -> Shape:
        """Return a shape by its name; the toy in its place."""
        return self.size.shape or SHAPES[name]

    def time(self, call: Call, flops: float, **row: Any) -> Row:
        """Return a row with the time of a call, and its speed. A call that takes long is timed three times."""
        seconds = self.keys.seconds if self.keys.rehearse else max(self.keys.seconds, 2.5 * timing.run(call, 1))
        found = measure({"": call}, seconds=seconds, samples=self.keys.samples)[""]
        speed = flops / found.ms / 1e9
        row |= {**found.rounded(4), "tflops": round(speed, 5)}
        return row | ({"utilisation": round(speed / self.peak, 4)} if self.peak else {})


def peak_of(kind: str) -> int | None:
    """Return the peak of a kind of device, or None if it is not known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in kind), None)


class Unit(NamedTuple):
    """One measurement.

    Attributes:
        name: Its name in its part.
        measure: A function that yields its rows; of the compiled `program` and its operands, if it has one.
        program: What is compiled and drawn before.
        about: The kernel whose correctness it is about.
        needs: The kernels without which it is left out.
    """

    name: str
    measure: Callable[..., Iterable[Row]]
    program: Kernel | None = None
    about: str | None = None
    needs: tuple[str, ...] = ()


class LeftOutError(Exception):
    """Why there is nothing to measure."""


class Programs:
    """The programs of a part's units. On a device all are compiled at once, before the first is timed."""

    def __init__(self):
        self._made: dict[str, Any] = {}

    def compile(self, units: Sequence[Unit]) -> Iterator[Row]:
        """Compile the programs of units. What fails is an error of its unit."""

        def one(unit: Unit) -> None:
            assert unit.program is not None
            try:
                self._made[unit.name] = _compiled(unit.program)
            except Exception as error:
                self._made[unit.name] = error

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(one, units))
        yield {"implementation": "XLA", "programs": len(units)}

    def of(self, unit: Unit) -> tuple[Any, ...]:
        """Return a unit's program, compiled now if it is not yet, and its operands; nothing if it has none."""
        if unit.program is None:
            return ()
        program = self._made.pop(unit.name, None) or _compiled(unit.program)
        if isinstance(program, Exception):
            raise program
        return program, *unit.program.make()


def _compiled(kernel: Kernel) -> Any:
    return jax.jit(kernel.run).lower(*jax.eval_shape(kernel.make)).compile()


def _env(here: Here, _: str) -> Iterator[Unit]:
    yield Unit("device", partial(_describe, here))
    yield Unit("numbers", _numbers)
    yield Unit("versions", _versions)


def _describe(here: Here) -> Iterator[Row]:
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    text = ""
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
        text = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True).stdout
    yield {
        "implementation": "jax",
        "device": device.device_kind,
        "capability": here.target.capability,
        "memory_bytes": stats.get("bytes_limit"),
        "driver": (text or getattr(device.client, "platform_version", "")).strip()[:300],
    }


def _numbers() -> Iterator[Row]:
    """Compute a few numbers that are known, as they are and jitted: on some cards they are wrong unless jitted."""
    known: dict[str, tuple[Callable[[], Any], Any]] = {
        "ones(4) + 1": (lambda: jnp.ones(4) + 1, np.full(4, 2.0)),
        "sqrt(512)": (lambda: jnp.sqrt(jnp.float32(512)), np.float32(22.627417)),
        "a draw": (lambda: jax.random.bits(jax.random.key(0), (4,), "uint32"), np.asarray(DRAWN, np.uint32)),
    }
    for (name, (call, wanted)), (how, run) in itertools.product(
        known.items(), {"not jitted": lambda call: call(), "jitted": lambda call: jax.jit(call)()}.items()
    ):
        found = np.asarray(run(call))
        agrees = bool(np.allclose(found, wanted, rtol=1e-6, atol=0))
        yield {"implementation": how, "result": name, "found": found.tolist(), "agrees": agrees}


# The first bits of `jax.random.key(0)`.
DRAWN = (4070199207, 4202968722, 1427181096, 2012915765)


def _versions() -> Iterator[Row]:
    names = sorted({each.name for each in importlib.metadata.distributions() if each.name})
    chosen = ("jax", "nvidia", "torch", "triton", "libtpu", "equinox", "optax", "numpy", "tokamax", "moezoo")
    shown = {name: importlib.metadata.version(name) for name in names if name.lower().startswith(chosen)}
    yield {"implementation": "installed", "versions": {"python": sys.version.split()[0], **shown}}


def _right(here: Here, _: str) -> Iterator[Unit]:
    def one(check: agreement.Check, repeats: int, program: Any, *operands: Any) -> Iterator[Row]:
        yield agreement.compare(check, program, operands, repeats)

    for check in agreement.checks(here.target, *here.size.checked):
        kernel, repeats = check.kernel, here.size.repeats
        if kernel.name.split()[1] in agreement.PORTABLE:  # XLA's own programs, and slow ones on a GPU
            repeats = max(1, repeats // 10)
        # What is wrong at a size is not tried at the next.
        needs = (kernel.name,)
        yield Unit(
            f"{kernel.name} {check.sizes} {check.dtype}", partial(one, check, repeats), kernel, kernel.name, needs
        )


def _ceilings(here: Here, _: str) -> Iterator[Unit]:
    n, width = here.size.numbers, here.size.width

    def copy(program: Any, x: Any) -> Iterator[Row]:
        row = here.time(call_of(program, x), 0.0, implementation="read and write")
        yield row | {"gigabytes_per_second": round(4 * n / row["ms"] / 1e6, 2)}

    def multiply(program: Any, *operands: Any) -> Iterator[Row]:
        yield here.time(call_of(program, *operands), 2 * width**3, implementation=kernels.MATMUL)

    reading = Kernel("", lambda x: x + jnp.bfloat16(1), partial(drawn, "bfloat16", (n,)))
    matmul = Kernel("", jnp.matmul, partial(drawn, "bfloat16", *((width, width),) * 2))
    yield Unit("copy", copy, reading)
    yield Unit("matmul", multiply, matmul)


def _products(here: Here, name: str) -> Iterator[Unit]:
    """Yield the products of a layer: with gate or up, and (narrow) with down, by each kernel of every backend."""
    shape, speeds = here.shape(name), {}
    sizes = tuple(kernels.group_sizes(shape, "uniform").tolist())
    flops = shape.product_flops

    def matmul(width: str, program: Any, *operands: Any) -> Iterator[Row]:
        row = here.time(call_of(program, *operands), flops, implementation=kernels.MATMUL, result=width)
        speeds[width] = row["tflops"]
        yield row

    def one(who: str, role: str, width: str, products: int, program: Any, *operands: Any) -> Iterator[Row]:
        row = here.time(call_of(program, *operands), flops * products, implementation=who, result=f"{role}, {width}")
        share = round(row["tflops"] / speeds[width], 4) if width in speeds else None
        yield row | {"share_of_matmul": share, "peak_bytes": peak_bytes(program)}

    problems = {
        width: Problem(sizes, shape.rows, *sides)
        for sides, width in {(shape.mlp, shape.embed): "narrow", (shape.embed, shape.mlp): "wide"}.items()
    }
    for width, (_, rows, inputs, outputs) in problems.items():
        make = partial(drawn, "bfloat16", (rows, inputs), (inputs, outputs))
        yield Unit(f"matmul {width}", partial(matmul, width), Kernel("", jnp.matmul, make))
    roles = [(who, role) for who in backends_of("grouped_matmul", here.target) for role in agreement.roles_of(who)]
    for (who, role), width in itertools.product(roles, problems):
        if role.startswith("gated") and width == "narrow":
            continue  # no layer has it
        kernel = agreement.product(who, role, here.target, problems[width])
        run = partial(one, f"moezoo {who}", role, width, kernel.products)
        yield Unit(f"{who} {role} {width}", run, kernel, needs=(kernel.name,))


def _attention(here: Here, name: str) -> Iterator[Unit]:
    """Yield causal attention of one row: backends, and cuDNN on a GPU."""
    tokens, (heads, group, dim) = here.size.tokens or int(name), here.size.heads
    # Of each query, on average half of the keys: two products forward, five backward.
    work = 2 * tokens * (tokens + 1) / 2 * heads * group * 2 * dim
    wide, narrow = (1, tokens, heads, group, dim), (1, tokens, heads, dim)
    make = partial(drawn, "bfloat16", wide, narrow, narrow, wide)

    def own(name: str, q: Any, k: Any, v: Any) -> Any:
        at = Coordinates(jnp.arange(tokens, dtype=jnp.int32)[None], jnp.ones((1, tokens), jnp.int32))
        return attention.call(q, k, v, at, scale=dim**-0.5, window=None, implementation=name)

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        flat = q.reshape(1, tokens, -1, dim)
        return jax.nn.dot_product_attention(flat, k, v, is_causal=True, implementation="cudnn").reshape(q.shape)

    def one(who: str, passed: str, program: Any, *operands: Any) -> Iterator[Row]:
        flops = work * (1.0 if passed == "forward" else 3.5)
        who = who if who == "cudnn" else f"moezoo {who}"
        row = here.time(call_of(program, *operands), flops, implementation=who, **{"pass": passed})
        yield row | {"peak_bytes": peak_bytes(program)}

    functions: dict[str, Callable[..., Any]] = {n: partial(own, n) for n in backends_of("attention", here.target)}
    for (name, function), passed in itertools.product([*functions.items(), ("cudnn", cudnn)], here.passes):
        if name == "cudnn" and jax.default_backend() != "gpu":
            yield Unit(f"{name} {passed}", partial(_left_out, "cuDNN needs an NVIDIA GPU"))
            continue
        run = passes_of(function)[passed]
        kernel = Kernel("", lambda *o, run=run: run(o[:3], (), o[3]), make)
        needs = tuple(f"attention {name} {role}" for role in agreement.PASSES[: 1 if passed == "forward" else 2])
        yield Unit(f"{name} {passed}", partial(one, name, passed), kernel, needs=needs)


def _delta_rule(here: Here, _: str) -> Iterator[Unit]:
    """Yield the delta rule in chunks by length, beside causal attention of equal width, one document per row."""
    heads, group, dim = here.size.recurrent

    def one(who: str, passed: str, tokens: int, program: Any, *operands: Any) -> Iterator[Row]:
        row = here.time(call_of(program, *operands), 0.0, implementation=f"moezoo {who}", **{"pass": passed})
        speed = round(tokens / row["ms"] * 1e3, 1)
        yield row | {"tokens": tokens, "tokens_per_second": speed, "peak_bytes": peak_bytes(program)}

    passes = agreement.PASSES[-1:] if here.keys.rehearse else agreement.PASSES
    for tokens, passed in itertools.product(here.size.lengths, passes):
        sizes = agreement.Recurrence(tokens, heads, group, dim, dim)
        made = [
            agreement.recurrence("chunked", passed, decays, here.target, sizes, "bfloat16", tokens)
            for decays in agreement.DECAYS
        ]
        own, scores = (
            chosen_backend(here.target, tokens, tokens),
            agreement.Scores(tokens, heads, group, dim, dim, tokens),
        )
        made.append(agreement.attention(own, passed, here.target, scores, "bfloat16", tokens))
        for kernel in made:
            who = kernel.name.replace(f" {passed}", "")
            yield Unit(f"{tokens} {kernel.name}", partial(one, who, passed, tokens), kernel, needs=(kernel.name,))


def _left_out(reason: str) -> Iterator[Row]:
    raise LeftOutError(reason)
    yield


def _torch(here: Here, name: str) -> Iterator[Unit]:
    if importlib.util.find_spec("torch") is None:
        yield Unit("all", partial(_left_out, "PyTorch is not installed"))
        return

    def one(who: str, passed: str, make: Callable[[], tuple[Call, float]]) -> Iterator[Row]:
        yield here.time(*make(), implementation=f"torch {who}", **{"pass": passed})

    tokens, (heads, group, dim) = here.size.tokens or 8192, here.size.heads
    calls = torch_peers.yardsticks(here.shape(name), tokens, heads, group, dim)
    for (who, passed), make in calls.items():
        yield Unit(f"{who} {passed}", partial(one, who, passed, make))


def _product_kernels(who: str) -> tuple[str, ...]:
    return tuple(f"grouped_matmul {owner} {role}" for role, owner in agreement.owners(who).items())


def _layers(here: Here, name: str) -> Iterator[Unit]:
    shape = here.shape(name)

    @jax.jit
    def operands() -> tuple[Any, ...]:
        (x, block), fixed, cotangent = kernels.layer_operands(shape, "uniform", "bfloat16")
        return (x, block), fixed, cotangent

    def one(who: str, passed: str, program: Any, *operands: Any) -> Iterator[Row]:
        flops = shape.layer_flops * (1 if passed == "forward" else 3)
        row = here.time(call_of(program, *operands), flops, implementation=f"moezoo {who}", **{"pass": passed})
        published = PUBLISHED_MS.get(name) if passed == "forward" else None
        yield row | {"published_ms": published, "peak_bytes": peak_bytes(program)}

    backends = backends_of("grouped_matmul", here.target)
    if here.keys.rehearse:  # layers of kernels that are all rehearsed as products
        backends = [who for who in backends if agreement.PRODUCTS[who].gated or who in agreement.PORTABLE]
    for who, passed in itertools.product(backends, here.passes):
        execution = Execution(dtype="bfloat16", remat="none", kernels=Kernels(grouped_matmul=(who,)))
        kernel = Kernel("", passes_of(partial(kernels.run_layer, execution))[passed], operands)
        yield Unit(f"{who} {passed}", partial(one, who, passed), kernel, needs=_product_kernels(who))


def _tune(here: Here, name: str) -> Iterator[Unit]:
    def one(backend: str) -> Iterator[Row]:
        rows = []
        for row in tuning.tune(backend, here.target, [name], here.keys):
            rows.append(row)
            # After each, so that a part that does not end leaves the best so far.
            tuning.write(tuning.table_of(rows), here.folder)
            yield row

    if here.target.capability is None or here.keys.rehearse:
        yield Unit("all", partial(_left_out, "sizes of blocks are measured on GPUs"))
        return
    backends = [*backends_of("grouped_matmul", here.target), *backends_of("attention", here.target)]
    for backend in (name for name in backends if name in tuning.TRIED):
        needs = () if backend == "chunked" else _product_kernels(backend)
        yield Unit(backend, partial(one, backend), needs=needs)


def _step(here: Here, _: str) -> Iterator[Unit]:
    yield from _steps(here, f"model={here.size.model} {here.size.step}")


def _olmoe(here: Here, name: str) -> Iterator[Unit]:
    """Yield a step of OLMoE-1B-7B; `name` is how many of its 16 layers it has."""
    layers = int(name) if here.size.shape is None else int(name) // 8
    words = f"model={here.size.real} model.layers={layers} {here.size.step}"
    yield from _steps(here, f"{words} optimizer.moment_dtype=bfloat16 execution.remat=dots")


def _steps(here: Here, words: str) -> Iterator[Unit]:
    words += " mesh=single execution.dtype=bfloat16" + _instead(here)

    def step() -> Iterator[Row]:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        cfg = compose(*words.split())
        predicted = step_footprint(build_step(cfg, build_execution(cfg)))
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        if limit is not None and predicted.peak > limit:
            needs = f"needs {predicted.peak / 1e9:.1f} GB by the memory model, and the device gives {limit / 1e9:.1f}"
            raise LeftOutError(f"{words}: {needs}")
        running = Running(cfg)
        made = _allocated()
        call = partial(running.run, random_batch(running))
        row = here.time(call, model_flops(cfg), implementation="moezoo", settings=words)
        tokens = cfg.batch_size * cfg.seq_len
        memory, allocated = memory_of(running.compiled.program), _allocated()
        # The allocator's peak is of the process: it is the step's if making the state took less.
        found = {"compiled": memory and memory.in_use, "allocated": max(allocated, made) > made and allocated}
        apart = {name: round(size / predicted.peak - 1, 4) for name, size in found.items() if size}
        yield row | {
            "tokens_per_second": round(tokens / row["ms"] * 1e3, 1),
            "peak_bytes": running.peak,
            "in_use_bytes": memory and memory.in_use,
            "device_peak_bytes": allocated or None,
            "predicted_bytes": predicted.peak,
            "predicted_at": predicted.moment,
            "apart": apart,
            "apart_goal": MEMORY_GOAL,
            "in_goal": all(abs(each) <= MEMORY_GOAL for each in apart.values()),
        }
        for scope in times(*profile(call, 3, str(running.compiled.program.as_text()))):
            yield {"implementation": "profile", "scope": scope.pop("name"), **scope}

    yield Unit("step", step)


def _allocated() -> int:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def _instead(here: Here) -> str:
    """Return the settings that replace default kernels which are broken."""
    words, broken = "", here.keys.broken.keys()
    if broken & {*_product_kernels(chosen_product(here.target))}:
        words += " execution.grouped_matmul=[blocked]"
    own = chosen_backend(here.target, 4096, 4096)
    if broken & {f"attention {own} {role}" for role in agreement.PASSES}:
        words += " execution.attention=[chunked]"
    return words


def _decode(here: Here, name: str) -> Iterator[Unit]:
    """Yield one query for each of 8 rows over a cache as generation stores it: [batch, heads, slots, dim]."""
    rows, slots, (heads, group, dim) = 8, here.size.tokens or int(name), here.size.heads
    for kind, (kv, each), width in (("grouped", (heads, group), dim), ("latent", (1, 16 * heads), 4 * dim + dim // 2)):
        shapes = (rows, 1, kv, each, width), (rows, kv, slots, width), (rows, kv, slots, width)

        # A latent's keys are its values.
        make = partial(drawn, "bfloat16", *shapes[: 2 if kind == "latent" else 3])

        def run(name: str, q: Any, k: Any, v: Any = None) -> Any:
            at = Coordinates(*(jnp.full((rows, 1), n, jnp.int32) for n in (slots, 1)))
            key_at = Coordinates(*(jnp.broadcast_to(x, (rows, slots)) for x in (jnp.arange(slots), jnp.int32(1))))
            k, v = (x.swapaxes(1, 2) for x in (k, k if v is None else v))
            return attend(Operands(q, k, v, at, key_at, None), 0.1, implementation=name).result

        def one(name: str, work: float, program: Any, *operands: Any) -> Iterator[Row]:
            row = here.time(call_of(program, *operands), work, implementation=f"moezoo {name}", **{"pass": "decode"})
            read = sum(x.nbytes for x in operands[1:])
            speed = round(read / row["ms"] / 1e6, 3)
            yield row | {"gigabytes_per_second": speed, "peak_bytes": peak_bytes(program)}

        work = 2 * rows * kv * each * slots * 2 * width
        for name in ("one_query", "reference"):
            yield Unit(f"{kind} {name}", partial(one, name, work), Kernel("", partial(run, name), make))


def _models(here: Here, _: str) -> Iterator[Unit]:
    for preset in here.size.presets:
        yield Unit(preset, partial(agreement.models, preset))


UNITS: Mapping[str, Callable[[Here, str], Iterator[Unit]]] = {
    "env": _env,
    "right": _right,
    "ceilings": _ceilings,
    "products": _products,
    "attention": _attention,
    "delta_rule": _delta_rule,
    "torch": _torch,
    "tune": _tune,
    "layers": _layers,
    "step": _step,
    "olmoe": _olmoe,
    "decode": _decode,
    "models": _models,
}
# The passes that are timed: a backward pass alone would start from what another program keeps.
PASSED: tuple[Pass, ...] = ("forward", "both")
# What an error says after which a process can compute nothing more on a GPU.
_LOST = ("CUDA_ERROR", "illegal memory access", "unspecified launch failure", "misaligned address")


def child(text: str) -> None:
    """Measure the units of a part that are not done yet. `text` is JSON of `benchmarks.device`, or nothing."""
    if not text:
        return
    job = SimpleNamespace(**json.loads(text))
    os.environ.update(job.environment)
    with open(job.log, "ab") as log_file:
        os.dup2(log_file.fileno(), 2)

    def say(message: Row) -> None:  # what libraries print may end within a line
        print(f"\n{MARK}{json.dumps(message)}", flush=True)

    try:
        for module in job.kernels:
            importlib.import_module(module)
        devices = start(8 if job.rehearse else 1)  # interpreted kernels hold several threads while they wait
        if devices[0].platform == "cpu" and not job.rehearse:
            raise UserError("this machine has no accelerator; rehearse=gpu goes through all parts on a CPU, as a toy")
        if job.rehearse == "gpu":
            rehearsal.check_gpu()
    except (UserError, ImportError) as error:
        sys.exit(f"error: {error}")
    with rehearsal.interpreting(job.rehearse) as target:
        here = Here(
            target or device_target(devices[0]), SIZES["toy" if job.rehearse else "full"], job, Path(job.folder)
        )
        units = [unit for unit in UNITS[job.part](here, job.argument) if unit.name not in job.done]
        programs, several = Programs(), [unit for unit in units if unit.program and not here.lacks(unit)]
        # Interpreters belong to one thread. After a crash a new process compiles one program after the other.
        if several and not job.rehearse and not job.alone:
            units.insert(0, Unit(COMPILE, partial(programs.compile, several)))
        for unit in units:
            _run(unit, here, programs, say)


def _run(unit: Unit, here: Here, programs: Programs, say: Callable[[Row], None]) -> None:
    """Measure a unit, and say what it yields, or why it yields nothing."""
    say({"event": "begin", "unit": unit.name, "kernel": unit.about})
    began = time.perf_counter()
    labels: Row = {"unit": unit.name} | ({"kernel": unit.about} if unit.about else {})
    text, broken = "", here.keys.broken
    try:
        if reason := here.lacks(unit):
            raise LeftOutError(reason)
        for row in unit.measure(*programs.of(unit)):
            say({**labels, **row})
            if unit.about and row.get("agrees") is False:
                broken[unit.about] = "its results are wrong"
    except LeftOutError as reason:
        say({"unit": unit.name, "implementation": "", "left_out": str(reason)})
    except Exception as error:  # the next units do not depend on it
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        say({**labels, "implementation": "", "error": text})
        log(traceback.format_exc())
        if unit.about:
            broken[unit.about] = text
    say({"event": "end", "unit": unit.name, "seconds": round(time.perf_counter() - began, 2)})
    if any(word in text for word in _LOST):
        os._exit(9)
