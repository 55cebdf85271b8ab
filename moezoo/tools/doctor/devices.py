"""What `moezoo doctor` finds out in a process of its own, because it starts JAX, which may crash or wait forever.

The process prints a line of JSON when a part begins, and one for each entry.
"""

import importlib.metadata
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from moezoo.host import driver_files, in_gib, in_units
from moezoo.kernels import blocks
from moezoo.kernels.attention import api as attention
from moezoo.kernels.grouped_matmul import api as grouped_matmul
from moezoo.kernels.grouped_matmul import few
from moezoo.moe.dispatch import ExpertGroup
from moezoo.moe.dispatch.ragged import GPU_FLAG, Ragged
from moezoo.parallel import distributed
from moezoo.parallel.cache import SETTINGS, use_cache, use_none
from moezoo.parallel.kernels import Target, device_target
from moezoo.parallel.mesh import MeshShape, mesh_of, start
from moezoo.parallel.stacked import InStack
from moezoo.parallel.threads import describe_threads
from moezoo.tools.apart import compiler_error
from moezoo.tools.doctor import trial
from moezoo.tools.doctor.entries import DEVICES, MARK, ON_DEVICES, Entry, Part, facts, note, problem
from moezoo.tools.doctor.installed import installed

# The virtual CPU devices of a machine without accelerators: enough for collectives over two axes.
_CPU_DEVICES = 4
_MUCH_CACHE = 10**8  # bytes of programs that may be outdated, from which a note mentions them
_DTYPES = ("bfloat16", "float32")
_LENGTHS = (32, 128, 1024, 8192)  # tokens of a row
# Whose devices -> moezoo's extra for them, and the distributions by which JAX finds them.
_DRIVEN = {"NVIDIA": ("cuda", ("jax-cuda13-plugin", "jax-cuda12-plugin")), "TPU": ("tpu", ("libtpu",))}
_COMPILERS = {"libtpu": "v5p", "jax-cuda13-plugin": "h100"}


def find_devices() -> Iterator[Entry]:
    """Start JAX, and yield its devices and their memory, and settings of JAX that change results or speed."""
    devices = start(_CPU_DEVICES)
    kinds: dict[tuple[str, str], list[Any]] = {}
    for device in jax.local_devices():
        kinds.setdefault((device.device_kind, " ".join(filter(None, device_target(device)))), []).append(device)
    for (kind, target), alike in kinds.items():
        found = {(device.memory_stats() or {}).get("bytes_limit") for device in alike}
        memory = " or ".join("memory not reported" if each is None else f"{in_gib(each)} each" for each in found)
        if target == "cpu":
            share = "a run makes as many as its mesh has, which share processors and memory"
            yield from facts(DEVICES, f"{len(alike)} virtual CPU devices: {share}")
            if threads := describe_threads():
                yield from facts(DEVICES, threads)
        else:
            yield from facts(DEVICES, f"{len(alike)} x {kind} ({target}), {memory}")
    if jax.process_count() > 1:
        yield from facts(
            DEVICES, f"process {jax.process_index()} of {jax.process_count()}, {len(devices)} devices in all"
        )
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() and (version := re.search(r"\d+\.\d+(\.\d+)?", driver.read_text())):
        yield from facts(DEVICES, f"NVIDIA driver {version[0]}")
    yield from _compare_drivers(devices[0].platform)
    for name, wrong, effect in _SETTINGS:
        if getattr(jax.config, name, None) == wrong:
            yield note(DEVICES, f"{name.upper()} is set: {effect}")


_SETTINGS = (
    ("jax_enable_x64", True, "arrays would have 64 bits, which moezoo refuses; unset it"),
    ("jax_disable_jit", True, "operations run one by one, and a step takes minutes; unset it"),
    ("jax_debug_nans", True, "every program is checked for NaN, and runs again if one is found; unset it for speed"),
    ("jax_check_tracer_leaks", True, "tracing is slow; unset it for speed"),
)


def _compare_drivers(platform: str) -> Iterator[Entry]:
    """Yield why JAX does not use accelerators whose drivers are here."""
    files = driver_files()
    if not files or platform != "cpu":
        return
    shown = ", ".join(f"{file} ({maker})" for file, maker in files.items())
    if SETTINGS.jax_platforms:
        yield note(DEVICES, f"{shown}, but JAX_PLATFORMS={SETTINGS.jax_platforms} keeps JAX on the CPU; unset it")
        return
    extra, plugins = _DRIVEN.get(next(iter(files.values())), ("", ()))
    advice = f"pip install 'moezoo[{extra}]'" if extra else "install JAX for this platform"
    if plugins := [name for name in plugins if installed(name)]:
        advice = f"{' and '.join(plugins)} found no device: are the versions above equal, and the driver new enough?"
    if all(maker == "TPU" and "vfio" in file for file, maker in files.items()):  # other devices have such files too
        yield note(DEVICES, f"{shown} may be a TPU, and JAX runs on the CPU; {advice}")
        return
    yield problem(DEVICES, f"this machine has {shown}, but JAX runs on the CPU; {advice}")


def find_kernels() -> Iterator[Entry]:
    """Yield the backend that a run would take of each kernel, by the functions that choose it in a run."""
    target = device_target(start(_CPU_DEVICES)[0])
    yield from facts(
        "kernels",
        f"on {' '.join(filter(None, target))}, unless execution.attention or execution.grouped_matmul name others",
    )
    yield from _by_dtype("attention", {dtype: _describe_attention(target, dtype) for dtype in _DTYPES})
    yield from _by_dtype("grouped_matmul", {dtype: _describe_product(target, dtype) for dtype in _DTYPES})
    yield from facts("kernels", "permute: gathers; the only backend")
    if target.is_gpu:
        measured = target.capability in blocks.read()
        yield from facts(
            "kernels",
            "sizes of blocks: "
            + (
                "measured on this kind of GPU"
                if measured
                else "not measured on this kind of GPU (docs/benchmarks.md of the repository)"
            ),
        )
        why = Ragged().refusal(ExpertGroup(("expert",), 8, 8, target=target))
        yield from facts("kernels", f"dispatch=ragged: {why or f'allowed by {GPU_FLAG}'}; dispatch=auto leaves it out")


def _by_dtype(kernel: str, chosen: dict[str, str]) -> list[Entry]:
    if len(set(chosen.values())) == 1:
        return facts("kernels", f"{kernel}: {chosen[_DTYPES[0]]}")
    return facts("kernels", *(f"{kernel} in {dtype}: {text}" for dtype, text in chosen.items()))


def _describe_attention(target: Target, dtype: str) -> str:
    lengths: dict[str, list[str]] = {}
    why: dict[str, None] = {}
    for length in _LENGTHS:
        backend = attention.chosen_backend(target, length, length, dtype=dtype)
        lengths.setdefault(backend, []).append(f"{length:,}")
        why |= dict.fromkeys(attention.reasons(backend, target, (), dtype))
    # Keys of a cache have no order.
    alone = attention.chosen_backend(target, 1, _LENGTHS[-1], dtype=dtype, is_sorted=False)
    shown = [f"{alone} for one query, as in generation"]
    shown += [f"{backend} for rows of {', '.join(each)} tokens" for backend, each in lengths.items()]
    return "; ".join(shown) + f" ({', '.join(why)})" * bool(why)


def _describe_product(target: Target, dtype: str) -> str:
    backend = grouped_matmul.chosen_backend(target, dtype=dtype)
    why = grouped_matmul.reasons(backend, target, (), dtype)
    shown = f"{backend} for any number of rows" + f" ({', '.join(why)})" * bool(why)
    layers = InStack(stack=jnp.zeros((1, 8, 16, 16), dtype), layer=jnp.int32(0), dtype=jnp.dtype(dtype))
    if target.platform == "cpu" and few.suits(few.ROWS_PER_GROUP * 8, layers):
        shown += f"; in generation, up to {few.ROWS_PER_GROUP} rows per expert are multiplied one by one"
    return shown


def find_cache() -> Iterator[Entry]:
    """Yield where compiled programs are kept, as a run on one device and on all of them decides it."""
    devices = start(_CPU_DEVICES)
    answers = {
        len(mesh): use_cache("auto", mesh_of(MeshShape(fsdp=len(mesh)), mesh)) for mesh in (devices[:1], devices)
    }
    if len(set(answers.values())) == 1:
        yield from facts("cache", next(iter(answers.values())))
    else:
        yield from facts(
            "cache", *(f"{count} device{'s' * (count > 1)}: {answer}" for count, answer in answers.items())
        )
    folder = Path(SETTINGS.jax_compilation_cache_dir or "")
    if not SETTINGS.jax_compilation_cache_dir or not folder.is_dir():
        return
    programs = [each.stat() for each in folder.glob("*-cache")]
    since = _installed_since("jaxlib")
    old = [each for each in programs if each.st_mtime < since]
    yield from facts("cache", f"{len(programs)} programs, {in_units(sum(each.st_size for each in programs))}")
    size = sum(each.st_size for each in old)
    if size >= _MUCH_CACHE:
        text = f"{len(old)} programs ({in_units(size)}) in {folder} were made before jaxlib was installed here"
        yield note("cache", f"{text}; those of other versions are never loaded again, and you may remove the folder")


def _installed_since(name: str) -> float:
    """Return when a distribution was installed, in seconds as files have them; 0 where that is not known."""
    files = importlib.metadata.distribution(name).files or []
    record = next((each for each in files if each.name == "RECORD"), None)
    path = None if record is None else Path(str(record.locate()))
    return path.stat().st_mtime if path is not None and path.exists() else 0.0


def find_processes() -> Iterator[Entry]:
    """Yield what `distributed=auto` would join; nothing is started."""
    found = distributed.detect()
    if found is None:
        yield from facts("distributed", "nothing describes other processes: distributed=auto would be refused")
    elif found.processes is None:
        yield from facts("distributed", f"distributed=auto would join the processes of {found.name}")
    else:
        yield from facts(
            "distributed",
            f"distributed=auto would join {found.name} as process {found.process} of {found.processes}; this report "
            "is of one process",
        )


def find_compilers() -> Iterator[Entry]:
    """Yield whether programs for devices that are not here can be compiled, as `moezoo plan` does."""
    for name, topology in _COMPILERS.items():
        what = f"for {'TPUs' if topology == 'v5p' else 'GPUs'}"
        if (version := installed(name)) is None:
            yield from facts(
                "compilers", f"{what}: no {name}, so moezoo plan needs --estimate; pip install 'moezoo[plan]'"
            )
        elif error := compiler_error(topology):
            yield note("compilers", f"{what}: {error}")
        else:
            yield from facts("compilers", f"{what}: {name} {version} compiles for {topology}")


def find_steps() -> Iterator[Entry]:
    """Train two steps of a tiny model on all devices, after comparing its logits with a naive computation."""
    # A run that loads its step would not show whether it can be compiled.
    use_none()
    start(_CPU_DEVICES)
    tried = trial.prepare(jax.local_devices())
    compared, limit = trial.compare_naively(tried), tried.sizes.limit
    text = f"logits differ from a naive computation on one {compared.platform} device by {compared.error:.1e}"
    if compared.error <= limit:  # not so if it is NaN
        yield from facts("two steps", f"{text} of their size; up to {limit:g} is rounding")
    else:
        yield problem(
            "two steps",
            f"{text} of their size, of which rounding explains {limit:g}: these devices compute something else",
        )
    done = trial.run_steps(tried)
    losses, seconds = (
        ", ".join(format(each, form) for each in them)
        for them, form in ((done.losses, ".4f"), (done.step_seconds, ".3f"))
    )
    yield from facts("two steps", f"{tried.parameters:,} parameters on {tried.description}: losses {losses}")
    yield from facts("two steps", f"{done.compile_seconds:.1f} s to compile the step, {seconds} s to run it")
    if not all(map(jnp.isfinite, done.losses)):
        yield problem("two steps", f"the losses are {losses}, and must be finite: these devices compute something else")


FINDERS = {
    DEVICES: find_devices,
    "kernels": find_kernels,
    "cache": find_cache,
    "distributed": find_processes,
    "two steps": find_steps,
    "compilers": find_compilers,
}


def child(titles: Sequence[str]) -> None:
    """Run parts by their titles, and print what they find; after devices that do not start, no other part."""

    def write(message: Any) -> None:
        print(f"\n{MARK}{json.dumps(message)}", flush=True)

    for title in titles:
        write({"begin": title})
        has_facts = False
        for entry in Part(title, FINDERS[title], ON_DEVICES[title]).entries():
            has_facts |= entry.kind == "fact"
            write({"entry": entry})
        if title == DEVICES and not has_facts:
            return
        write({"end": title})
