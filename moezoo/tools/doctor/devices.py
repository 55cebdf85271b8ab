"""The parts of `moezoo doctor` that start JAX: its devices, and two training steps on one device and on all."""

import collections
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import KERNELS
from moezoo.data import Batch
from moezoo.host.machine import driver_files, in_gib, installed
from moezoo.parallel.cache import SETTINGS, use_none
from moezoo.parallel.kernels import device_target
from moezoo.parallel.mesh import mesh_of, start
from moezoo.tools.doctor.command import DEVICES, MARK, STEPS, Entry, guarded
from moezoo.training.build import build_state, build_step

_CPU_DEVICES = 4  # of a machine without accelerators: enough for collectives over two axes
# Whose devices -> moezoo's extra for them, and the distributions by which JAX finds them.
_DRIVEN = {"NVIDIA": ("cuda", ("jax-cuda13-plugin", "jax-cuda12-plugin")), "TPU": ("tpu", ("libtpu",))}
# In float32 sums are made in another order, and most errors are below 1e-6; the second is for chips' own kernels.
_LIMITS = {"float32": 1e-4, "bfloat16": 0.05}


def find_devices() -> Iterator[Entry]:
    """Start JAX, and yield its devices and their memory, and what keeps it from being right or fast."""
    devices = start(_CPU_DEVICES)
    kinds = collections.Counter(map(_describe, jax.local_devices()))
    yield from (Entry("fact", DEVICES, f"{count} x {kind}") for kind, count in kinds.items())
    if devices[0].platform == "cpu" and (files := driver_files()):
        yield from _explain_unused(files)


def _describe(device: Any) -> str:
    target = " ".join(filter(None, device_target(device)))
    limit = (device.memory_stats() or {}).get("bytes_limit")
    memory = "memory not reported" if limit is None else f"{in_gib(limit)} each"
    return "virtual CPU devices" if target == "cpu" else f"{device.device_kind} ({target}), {memory}"


def _explain_unused(files: dict[str, str]) -> Iterator[Entry]:
    """Yield why JAX does not use accelerators whose drivers are here."""
    shown = ", ".join(f"{file} ({maker})" for file, maker in files.items())
    if SETTINGS.jax_platforms:
        text = f"{shown}, but JAX_PLATFORMS={SETTINGS.jax_platforms} keeps JAX on the CPU; unset it"
        yield Entry("note", DEVICES, text)
        return
    extra, plugins = _DRIVEN.get(next(iter(files.values())), ("", ()))
    advice = f"pip install 'moezoo[{extra}]'" if extra else "install JAX for this platform"
    if plugins := [name for name in plugins if installed(name)]:
        advice = f"{' and '.join(plugins)} found no device: are the versions above equal, and the driver new enough?"
    # Other devices have such files too.
    is_sure = not all(maker == "TPU" and "vfio" in file for file, maker in files.items())
    yield Entry("problem" if is_sure else "note", DEVICES, f"{shown}, but JAX runs on the CPU; {advice}")


class Trial(NamedTuple):
    """What two steps gave: their mesh, the logits before them, and their losses."""

    mesh: str
    logits: Float[np.ndarray, "rows seq vocab"]
    losses: list[float]


def find_steps() -> Iterator[Entry]:
    """Train two steps of a tiny model on all devices and, with naive kernels in float32, on one, and compare them."""
    use_none()  # a run that loads its step would not show whether it can be compiled
    start(_CPU_DEVICES)
    devices = jax.local_devices()
    dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    try:
        one = jax.local_devices(backend="cpu")[:1]
    except RuntimeError:  # JAX_PLATFORMS names accelerators alone
        one = devices[:1]
    sizes = len(devices), 32 if dtype == "float32" else 256  # which a chip's own kernels take
    ours = train(devices, *sizes, dtype)
    kernels = (f"execution.{name}=[reference]" for name in KERNELS)
    naive = train(one, *sizes, "float32", "dispatch=dense", *kernels)
    limit, error = _LIMITS[dtype], measure_error(ours.logits, naive.logits)
    shown = (f"{', '.join(f'{loss:.4f}' for loss in each.losses)} on {each.mesh}" for each in (ours, naive))
    yield Entry("fact", STEPS, f"losses {', and naively '.join(shown)}")
    apart = float(np.max(np.abs(np.divide(ours.losses, naive.losses) - 1)))
    text = (
        f"logits differ by {error:.1e} of their size and losses by {apart:.1e}; rounding in {dtype} explains {limit:g}"
    )
    if error <= limit and apart <= limit:  # not so if one is NaN
        yield Entry("fact", STEPS, text)
    else:
        yield Entry("problem", STEPS, f"{text}: these devices compute something else")


def measure_error(ours: Float[np.ndarray, "rows seq vocab"], theirs: Float[np.ndarray, "rows seq vocab"]) -> float:
    """Return the largest error of all rows, so that one device of many counts, relative to the size of `theirs`.

    That of a row is the median of its tokens, because a token near a tie between experts may take another one.
    """
    errors = np.sqrt(np.square(ours - theirs).mean(-1) / np.square(theirs).mean(-1))
    return float(np.median(errors, axis=1).max())


def train(devices: list[Any], count: int, width: int, dtype: str, *words: str) -> Trial:
    """Train two steps on one batch, of the model and the batch for `count` devices; `words` are further overrides.

    Experts are split over all `devices` or, if their number is even and above 2, over halves.
    """
    fsdp = 2 if len(devices) % 2 == 0 and len(devices) > 2 else 1
    size = math.lcm(width, count)
    cfg = compose(
        *("model=mixtral", "model.layers=1", f"model.vocab={size}", f"model.embed={size}", f"model.expert_mlp={size}"),
        *("model.heads=2", "model.kv_heads=1", f"model.head_dim={width // 2}", f"model.experts={math.lcm(8, count)}"),
        *(f"seq_len={width}", f"batch_size={count}", f"execution.dtype={dtype}", "steps=2"),
        *(f"mesh.fsdp={fsdp}", f"mesh.expert={len(devices) // fsdp}", "schedule=constant", "schedule.warmup_steps=0"),
        *("optimizer.learning_rate=0.01", *words),
    )
    execution = build_execution(cfg, mesh_of(cfg.mesh, devices))
    step = build_step(cfg, execution)
    state = jax.block_until_ready(build_state(cfg, execution, step))
    ids = np.random.default_rng(0).integers(0, size, (1, count, width + 1), np.int32)
    tokens, labels = ids[..., :-1], ids[..., 1:]
    logits = np.asarray(jax.jit(lambda m, t: m(t, execution=execution).logits)(state.model, tokens[0]))
    run = step.compile()
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    batch, losses = step.feed()(Batch(tokens, labels, np.ones_like(tokens), positions)), []
    for _ in range(2):
        state, metrics = jax.block_until_ready(run(state, batch))
        losses.append(float(metrics.loss))
    mesh = " ".join(f"{axis}={n}" for axis, n in cfg.mesh.sizes.items() if n > 1) or f"one {devices[0].platform}"
    return Trial(mesh, logits, losses)


def child(title: str) -> None:
    """Run a part, and print a line of JSON for its begin and for each entry."""
    print(f"\n{MARK}null", flush=True)
    for entry in guarded(title, {DEVICES: find_devices, STEPS: find_steps}[title]):
        print(f"\n{MARK}{json.dumps(entry)}", flush=True)
