"""The layouts that a plan compares: meshes of a slice, rules and strategies, as overrides of a configuration."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from moezoo.config.build import blueprint_of
from moezoo.config.compose import compose_described
from moezoo.config.overrides import groups
from moezoo.config.sizes import dividing, limits_of
from moezoo.errors import UserError
from moezoo.parallel.mesh import AXES
from moezoo.parallel.traffic import CallName
from moezoo.tools.plan.hardware import Slice

# The short names of axes in `mesh=fsdp16_ep4`, as in conf/mesh.
_SHORT = {"ep": "expert", "cp": "context", "tp": "tensor", "dp": "data"}
# A search tries no more devices per layer's width, and splits sequences only from so many tokens on.
_MOST_TENSOR, _LONG = 8, 16384
# Rules in the order in which a search tries them; `serve` is for generation.
_TRAINING = ("fsdp_ep", "pure_fsdp", "shard_exp_on_fsdp", "ep_as_dp", "tensor", "ep_as_cp", "cp_as_ep")
_GENERATION = ("serve", "fsdp_ep", "tensor")


def mesh_words(name: str) -> tuple[str, ...]:
    """Return the overrides of a mesh: axes and sizes as in `fsdp16_ep4`, or an entry of conf/mesh.

    Raises:
        UserError: The name is neither.
    """
    words = []
    for part in name.split("_"):
        found = re.fullmatch(r"([a-z]+)([1-9]\d*)", part)
        axis = _SHORT.get(found[1], found[1]) if found else ""
        if found is None or axis not in AXES:
            break
        words.append(f"mesh.{axis}={found[2]}")
    else:
        return tuple(words)
    if name in groups()["mesh"]:
        return (f"mesh={name}",)
    raise UserError(f"mesh={name}: expected axes and sizes such as fsdp16_ep4, or {', '.join(groups()['mesh'])}")


def mesh_name(mesh: Mapping[str, int]) -> str:
    """Return the name of a mesh as `mesh_words` reads it."""
    short = {axis: name for name, axis in _SHORT.items()}
    return "_".join(f"{short.get(axis, axis)}{size}" for axis, size in mesh.items() if size > 1) or "single"


def check_mesh(words: Sequence[str], where: Slice) -> None:
    """Refuse a mesh that is not the size of the slice; the message has the nearest one that is."""
    sizes = compose_described(*words).mesh.sizes
    if -1 in sizes.values() or (have := math.prod(sizes.values())) == where.devices:
        return
    axis = max(sizes, key=lambda each: sizes[each] if each in ("fsdp", "data") else 0)
    rest = math.prod(size for each, size in sizes.items() if each != axis)
    if where.devices % rest == 0:
        nearest = mesh_name(sizes | {axis: where.devices // rest})
    else:
        nearest = mesh_name({"fsdp": where.devices})
    raise UserError(
        f"mesh={mesh_name(sizes)} has {have} devices and topology={where} has {where.devices}; write mesh={nearest}"
    )


def fill(words: Sequence[str], where: Slice) -> tuple[str, ...]:
    """Return `words` with the size of the slice in place of a mesh axis of -1."""
    sizes = compose_described(*words).mesh.sizes
    rest = [axis for axis, size in sizes.items() if size == -1]
    if not rest:
        return tuple(words)
    others = math.prod(size for size in sizes.values() if size > 0)
    if where.devices % others:
        raise UserError(
            f"mesh.{rest[0]}=-1: the other axes have {others} devices, which do not divide the {where.devices} of "
            f"topology={where}; change one of them"
        )
    return (*words, f"mesh.{rest[0]}={where.devices // others}")


def listed(
    words: Sequence[str], meshes: Sequence[str], rules: Sequence[str], strategies: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each combination of what was listed; an empty list keeps what `words` say."""
    parts = [
        [mesh_words(name) for name in meshes] or [()],
        [(f"rules={name}",) for name in rules] or [()],
        [(f"dispatch={name}",) for name in strategies] or [()],
    ]
    for chosen in itertools.product(*parts):
        yield (*words, *itertools.chain(*chosen))


def searched(words: Sequence[str], where: Slice, call: CallName) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of layouts that divide all sizes, those that usually suit first.

    Rules take turns. Each has its meshes by the devices that share a layer's width or a sequence, few first, then by
    how far the expert axis is from 8. Tokens or weights move (`ragged`, on GPUs `ring`; `gather`). None has pipeline
    stages (`limits_of`): what they gain depends on settings that a search does not try.
    """
    turns = [_of_rules((*words, f"rules={name}"), where, call) for name in _TRAINING if call in ("train", "evaluate")]
    turns += [_of_rules((*words, f"rules={name}"), where, call) for name in _GENERATION if not turns]
    seen = set()
    for row in itertools.chain.from_iterable(itertools.zip_longest(*turns)):
        if row is not None and row not in seen:
            seen.add(row)
            yield row


def _of_rules(words: tuple[str, ...], where: Slice, call: CallName) -> Iterator[tuple[str, ...]]:
    cfg = compose_described(*words)
    batches = "configured" if call in ("train", "evaluate") else "any"
    limits = limits_of(cfg, blueprint_of(cfg).shapes, batches)
    usual = [each for each in dividing(cfg, limits, where.devices) if _is_usual(each, cfg.seq_len)]
    order = lambda each: (each["tensor"] * each["context"], each["data"], abs(math.log2(each["expert"] / 8)))  # noqa: E731
    for mesh in sorted(usual, key=order):
        sizes = tuple(f"mesh.{axis}={mesh[axis]}" for axis in AXES if mesh[axis] > 1)
        tokens_move = "ring" if where.chip.is_gpu else "ragged"
        strategies = (tokens_move, "gather") if mesh["expert"] * mesh["context"] > 1 else ("gather",)
        for strategy in strategies:
            yield (*words, *sizes, f"dispatch={strategy}")


def _is_usual(mesh: Mapping[str, int], length: int) -> bool:
    return mesh["tensor"] <= _MOST_TENSOR and (length >= _LONG or mesh["context"] == 1)
