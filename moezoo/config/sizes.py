"""Which meshes can hold and divide the sizes of a configuration: parameters of all kinds, the batch and the sequence.

What memory here cannot hold is refused before anything is made. Bytes are lower bounds: what is accepted may still be
too large.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from moezoo.config.settings import TrainConfig
from moezoo.models import ModelConfig
from moezoo.models.working_set import stream
from moezoo.parallel.axes import axes_of, count_parameters
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.memory import check_devices
from moezoo.parallel.mesh import AXES, STAGE
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.sequence_order import SequenceOrder

Batches = Literal["configured", "any"]


class Limit(NamedTuple):
    """A size that the devices along mesh axes together must divide.

    With `shares` a multiple of the size will do too: several devices then share a head.
    """

    over: MeshAxes
    size: int
    shares: bool = False

    def holds(self, mesh: Mapping[str, int]) -> bool:
        """Return whether the mesh, axis -> number of devices, keeps the limit."""
        ways = math.prod(mesh[axis] for axis in self.over)
        return self.size % ways == 0 or (self.shares and ways % self.size == 0)


def sequence_order(cfg: TrainConfig) -> SequenceOrder:
    """Return the order of tokens where the sequence is split: as set, or else by what the model's layers see."""
    return cfg.execution.sequence_order or ("balanced" if cfg.model.sees_all else "contiguous")


def limits_of(cfg: TrainConfig, shapes: PyTree, batches: Batches) -> set[Limit]:
    """Return the limits that the `shapes` of a model and, if "configured", its batches set."""
    limits, everywhere = set(), dict.fromkeys(AXES, 2) | {STAGE: min(cfg.mesh.stage, 2)}
    for axes, array in zip(jax.tree.leaves(axes_of(shapes)), jax.tree.leaves(shapes), strict=True):
        stored = cfg.rules.placement(axes, everywhere).stored
        for logical, size, over in zip(axes.names, array.shape, stored, strict=True):
            shares = logical == "kv_heads" and bool(cfg.rules.kept(logical, everywhere))
            limits.add(Limit(over, size, shares))
    if batches == "configured":
        length, is_whole = cfg.seq_len, sequence_order(cfg) == "contiguous"
        places = length if is_whole else max(1, length // 2 * (1 - length % 2))
        limits |= {Limit(cfg.rules.sequence, places), Limit(cfg.rules.batch, cfg.batch_size // cfg.micro_batches)}
    return {limit for limit in limits if limit.over}


def dividing(cfg: TrainConfig, limits: set[Limit], devices: int) -> list[dict[str, int]]:
    """Return the meshes of so many devices, with the stages of `cfg`, that keep `limits`: axis -> size."""
    meshes = [dict.fromkeys(AXES, 1) | {STAGE: cfg.mesh.stage}]
    for axis in (axis for axis in AXES if axis in cfg.rules.mesh_axes and axis != STAGE):
        meshes = [mesh | {axis: n} for mesh in meshes for n in divisors(devices // math.prod(mesh.values()))]
        # What some axes do not divide, no more axes do, unless devices share heads.
        meshes = [mesh for mesh in meshes if all(limit.shares or limit.holds(mesh) for limit in limits)]
    whole = (mesh for mesh in meshes if math.prod(mesh.values()) == devices)
    return [mesh for mesh in whole if all(limit.holds(mesh) for limit in limits)]


def advise(cfg: TrainConfig, shapes: PyTree, mesh: Mesh | AbstractMesh, batches: Batches) -> str:
    """Return the end of the refusal of a mesh: the most similar one of as many devices that divides all sizes.

    Where none does, it names the most similar ones of the next fewer and the next more devices, up to twice as many,
    and one with another batch. They are found by divisors alone: no mesh is tried. The text is empty where sizes are
    not the reason, and for a mesh that Python made with axes of other names.
    """
    asked: dict[str, int] = {**dict.fromkeys(AXES, 1), **mesh.shape}
    limits = limits_of(cfg, shapes, batches)
    meshes = dividing(cfg, limits, mesh.size) if len(asked) == len(AXES) else [asked]
    if asked in meshes or (batches == "configured" and cfg.batch_size % cfg.micro_batches):
        return ""

    def distance(sizes: dict[str, int]) -> tuple[float, int, int]:
        ratios = [max(size, asked[axis]) / min(size, asked[axis]) for axis, size in sizes.items()]
        return math.prod(ratios), sum(ratio > 1 for ratio in ratios), math.prod(sizes[a] for a in cfg.rules.sequence)

    def words(sizes: dict[str, int]) -> list[str]:
        return [f"mesh.{axis}={size}" for axis, size in sizes.items() if {size, asked[axis]} != {1}]

    if meshes:
        return f"; {' '.join(words(min(meshes, key=distance)))} has as many devices and divides all sizes"
    near = list[str]()
    for counts in (range(mesh.size - 1, 0, -1), range(mesh.size + 1, 2 * mesh.size + 1)):
        fits = (some for devices in counts if (some := dividing(cfg, limits, devices)))
        near += [" ".join(words(min(some, key=distance))) for some in itertools.islice(fits, 1)]
    if batches == "configured":
        split = dataclasses.replace(cfg, batch_size=cfg.batch_size * mesh.size)  # by each mesh of as many devices
        for sizes in sorted(dividing(cfg, limits_of(split, shapes, batches), mesh.size), key=distance)[:1]:
            multiple = math.prod(sizes[axis] for axis in cfg.rules.batch) * cfg.micro_batches
            batch = max(1, round(cfg.batch_size / multiple)) * multiple
            near.append(" ".join([*words(sizes), f"batch_size={batch}"]))
    return f"; no mesh of {mesh.size} devices divides all sizes{'; nearest: ' * bool(near)}{', or '.join(near)}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def check_sizes(model: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuse sizes of which a few arrays do not fit at one byte per parameter, in no time: by a closed form."""
    least = model.least_parameters
    what = f"{_describe(model)} ({least:,} parameters or more)"
    check_devices(what, least // mesh.size, mesh, "choose smaller sizes")


def check_batch(cfg: TrainConfig, execution: MeshExecution) -> None:
    """Refuse a batch of which token ids, and the activations of one micro-step between two layers, do not fit.

    A stage has the activations of its micro-batches twice, of those that wait and of those that are done.
    """
    tokens = cfg.batch_size * cfg.seq_len // execution.ways(execution.token_axes)
    activations = stream(tokens // cfg.execution.microbatches, cfg.model.embed, execution)
    activations *= 2 if execution.stages > 1 else 1
    what = f"batch_size={cfg.batch_size} x seq_len={cfg.seq_len} in execution.microbatches={cfg.execution.microbatches}"
    advice = "choose a smaller batch_size or seq_len, or more execution.microbatches"
    # Tokens, labels, segments and positions are int32.
    check_devices(what, 4 * 4 * tokens + activations, execution.mesh, advice)


def check_arrays(cfg: TrainConfig, model: PyTree, needed: int, execution: MeshExecution | None, *more: str) -> None:
    """Refuse a model, arrays or shapes, that does not fit into the devices of `execution`, or into JAX's first one.

    `needed` are the bytes per device, and `more` is what they hold beside the parameters.
    """
    dtype = cfg.execution.param_dtype
    total, _ = count_parameters(model, cfg.model.experts_per_token)
    smaller = ", or execution.param_dtype=bfloat16" * (dtype == "float32")
    check_devices(
        f"{_describe(cfg.model)} ({', '.join((f'{total:,} parameters in {dtype}', *more))})",
        needed,
        None if execution is None else execution.mesh,
        f"choose a smaller model, a machine with more memory{smaller}",
    )


def _describe(model: ModelConfig) -> str:
    names = ("vocab", "embed", "layers", "experts", "expert_mlp")
    return " ".join(f"model.{name}={getattr(model, name)}" for name in names)
