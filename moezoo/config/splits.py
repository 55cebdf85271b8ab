"""Which meshes split all sizes of a configuration evenly: parameters of all kinds, the batch and the sequence."""

import math
from collections.abc import Mapping
from typing import Literal

import jax
from jaxtyping import PyTree

from moezoo.config.settings import TrainConfig
from moezoo.parallel.axes import LOGICAL_AXES, axes_of
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.mesh import AXES, STAGE
from moezoo.parallel.rules import Rules
from moezoo.parallel.sequence_order import SequenceOrder

Batches = Literal["configured", "any"]
# Mesh axes -> the sizes that the devices along all of them together must divide, by what messages call them.
Limits = Mapping[MeshAxes, Mapping[str, int]]


def sequence_order(cfg: TrainConfig) -> SequenceOrder:
    """Return the order of tokens where the sequence is split: as set, or else by what the model's layers see."""
    return cfg.execution.sequence_order or ("balanced" if cfg.model.sees_all else "contiguous")


def limits_of(cfg: TrainConfig, shapes: PyTree, batches: Batches) -> Limits:
    """Return the limits that the `shapes` of a model and, if "configured", its batches set.

    Of stages they are known where `cfg` has some; nobody else is advised to take a pipeline.

    Key-value heads set none, because devices may share one.
    """
    limits: dict[MeshAxes, dict[str, int]] = {}
    split: dict[str, int] = {axis: 2 for axis in AXES if axis != STAGE or cfg.mesh.stage > 1}
    for axes, array in zip(jax.tree.leaves(axes_of(shapes)), jax.tree.leaves(shapes), strict=True):
        stored = cfg.rules.placement(axes, split, shared=("kv_heads",)).stored
        for logical, size, over in zip(axes.names, array.shape, stored, strict=True):
            limits.setdefault(over, {})[f"{LOGICAL_AXES[logical]}={size}"] = size
    if batches == "configured":
        size, length, micro_steps, stages = cfg.batch_size, cfg.seq_len, cfg.execution.microbatches, cfg.mesh.stage
        parts = f" / execution.microbatches={micro_steps}" * (micro_steps > 1)
        parts += f" / execution.pipeline.microbatches={cfg.execution.pipeline.count(stages)}" if stages > 1 else ""
        rows = 1 if size % cfg.micro_batches else size // cfg.micro_batches
        limits.setdefault(cfg.rules.batch, {})[f"batch_size={size}{parts}"] = rows
        halves = sequence_order(cfg) == "balanced"
        places = (1 if length % 2 else length // 2) if halves else length
        limits.setdefault(cfg.rules.sequence, {})[f"{'half of ' * halves}seq_len={length}"] = places
    limits.pop((), None)
    return limits


def meshes_within(rules: Rules, limits: Limits, devices: int) -> list[dict[str, int]]:
    """Return the sizes of all meshes that keep `limits`, of any number of devices.

    An axis that the rules name and no limit has a divisor of `devices`, except stages: without a limit there is one.
    """
    bounds = {over: math.gcd(*sizes.values()) for over, sizes in limits.items()}
    meshes: list[dict[str, int]] = [{}]
    for axis in AXES:
        bound = math.gcd(*(bound for over, bound in bounds.items() if axis in over)) or (
            1 if axis == STAGE else devices
        )
        choices = divisors(bound if axis in rules.mesh_axes else 1)
        meshes = [
            sizes
            for sizes in (shorter | {axis: size} for shorter in meshes for size in choices)
            if not any(bound % math.prod(sizes.get(a, 1) for a in over) for over, bound in bounds.items())
        ]
    return meshes


def describe_blocking(rules: Rules, limits: Limits, devices: int) -> str:
    """Name the limits of which each alone keeps all meshes from having so many devices; all limits if none does."""

    def reached(without: MeshAxes) -> bool:
        rest = {over: sizes for over, sizes in limits.items() if over != without}
        return any(math.prod(sizes.values()) == devices for sizes in meshes_within(rules, rest, devices))

    lines = []
    for over in [over for over in limits if reached(over)] or limits:
        if names := sorted(name for name, size in limits[over].items() if size % devices):
            lines.append(f"{' x '.join(over)} must divide {', '.join(names)}")
    return " and ".join(lines)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
