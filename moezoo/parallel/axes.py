"""Annotations that declare a parameter: the type gives its role, the string its logical axes.

    class Experts(eqx.Module):
        gate: Weight[Array, "expert, expert_embed -> expert_mlp"]

declares one matrix per expert, from `expert_embed` to `expert_mlp`, stored as an array [expert, expert_embed,
expert_mlp].

- Axes before the comma number independent matrices. The arrow separates input axes from output axes.
- `Bias`, `Scale`, `Embedding` and `Buffer` take axes without an arrow: `Scale[Array, "norm"]`.
- A `Bias` with an arrow has only the axes after it, and is added to partial sums over those before it:
  `Bias[Array, "expert, expert_mlp -> expert_embed"]`. Devices that share these have the whole bias each.
- Inside a `Stack`, every array gains the leading axis `layer`.
- At run time each alias is jaxtyping's `Float[Array, "expert expert_embed expert_mlp"]`, so a type checker checks
  shapes. A `Weight` may also be a container that stands for the array (`moezoo.parallel.stored`).

Layouts (`moezoo.parallel.rules`), initial values, weight decay and the parameter table follow from this declaration.
"""

import dataclasses
import difflib
import functools
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PyTree

from moezoo.errors import UserError, nearest
from moezoo.parallel.roles import Axes as Axes
from moezoo.parallel.roles import Role as Role
from moezoo.parallel.stored import Stored
from moezoo.typed import show

_NEVER_TRAINED = (Role.FROZEN, Role.BASE)

# Logical axis -> the configuration key that sets its size, for messages. Every annotation adds its axes.
# `layer` is the number of stacked layers.
LOGICAL_AXES = {
    "layer": "model.layers",
    "expert": "model.experts",
    "expert_embed": "model.embed",
    "router": "model.experts",
    "norm": "the size of a norm",
}


def name_sizes(**keys: str) -> None:
    """State, for logical axes, the configuration keys that set their sizes, where these have other names than the axes.

    Call it above the annotations of these axes.
    """
    LOGICAL_AXES.update(keys)


def _parse(role: Role, text: str) -> Axes:
    stacked, _, matrix = text.rpartition(",")
    inputs, arrow, outputs = matrix.partition("->")
    if role is Role.WEIGHT and not arrow:
        raise TypeError(f"a Weight needs axes 'inputs -> outputs', found '{text}'")
    axes = Axes(role, *(tuple(part.split()) for part in (stacked, inputs, outputs)))
    for name in axes.names:
        LOGICAL_AXES.setdefault(name, f"model.{name}")
    return Axes(role, axes.stacked, axes.outputs, (), axes.names) if role is Role.BIAS and arrow else axes


class _Alias:
    """Turn `Scale[Array, "norm"]` into `Annotated[Float[Array, "norm"], Axes(...)]`; a `Weight` admits `Stored` too."""

    def __init__(self, role: Role):
        self._role = role

    def __getitem__(self, item: tuple[type, str]) -> Any:
        array, text = item
        axes = _parse(self._role, text)
        plain = Float[array, " ".join(axes.names)]
        return Annotated[plain | Stored if self._role is Role.WEIGHT else plain, axes]


if TYPE_CHECKING:  # a type checker reads Weight[Array, "..."] as Array
    from typing import Annotated as Bias
    from typing import Annotated as Buffer
    from typing import Annotated as Embedding
    from typing import Annotated as Scale
    from typing import Annotated as Weight
else:
    Weight = _Alias(Role.WEIGHT)
    Scale = _Alias(Role.SCALE)
    Bias = _Alias(Role.BIAS)
    Embedding = _Alias(Role.EMBEDDING)
    Buffer = _Alias(Role.BUFFER)


class Stack(eqx.Module):
    """`count` periods of layers that repeat one pattern; one scan runs them.

    Attributes:
        blocks: One module per layer of a period. Every array has a leading `layer` dimension of size `count`.
        count: The number of periods.
    """

    blocks: tuple[Any, ...]
    count: int = eqx.field(static=True)


@functools.cache
def _declared_axes(kind: type) -> dict[str, Axes]:
    """Return field name -> Axes of the annotated fields of a module class, optional fields included."""

    def find(hint: Any) -> Axes | None:
        if typing.get_origin(hint) is Annotated:
            return next((m for m in hint.__metadata__ if isinstance(m, Axes)), None)
        return next(filter(None, map(find, typing.get_args(hint))), None)

    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: axes for name, hint in hints.items() if (axes := find(hint)) is not None}


def _walk(node: Any, path: str, stacked: tuple[str, ...]) -> Iterator[tuple[str, Axes, Any]]:
    """Yield path, axes and value of every declared field."""
    if isinstance(node, eqx.Module):
        inside = (*stacked, "layer") if isinstance(node, Stack) else stacked
        declared = _declared_axes(type(node))
        for field in dataclasses.fields(node):
            where, value = f"{path}.{field.name}", getattr(node, field.name)
            if (axes := declared.get(field.name)) is not None:
                yield where, dataclasses.replace(axes, stacked=inside + axes.stacked), value
            else:
                yield from _walk(value, where, inside)
    elif isinstance(node, tuple | list):
        for index, child in enumerate(node):
            yield from _walk(child, f"{path}[{index}]", stacked)


def _arrays(path: str, axes: Axes, value: Any) -> Iterator[tuple[str, Axes]]:
    """Yield path and axes of every array of a declared field."""
    if isinstance(value, Stored):
        for name, inner in value.axes(axes).items():
            inner = dataclasses.replace(inner, within=axes.within or axes.names)
            yield from _arrays(f"{path}.{name}", inner, getattr(value, name))
    else:
        yield path, axes


def axes_of(module: PyTree) -> PyTree:
    """Return the tree of `module` with an `Axes` in place of every array.

    Args:
        module: A module of arrays, or of their shapes (`jax.ShapeDtypeStruct`).

    Raises:
        TypeError: The field of an array declares no axes.
    """
    declared = dict(array for field in _walk(module, "", ()) for array in _arrays(*field))
    return jax.tree_util.tree_map_with_path(functools.partial(_look_up, module, declared), module)


def _look_up(module: PyTree, declared: dict[str, Axes], path: Any, leaf: Any) -> Axes:
    name = jax.tree_util.keystr(path)
    if name not in declared:
        raise TypeError(f"{type(module).__name__}{name} has shape {leaf.shape} but declares no axes")
    return declared[name]


def is_stored(x: Any) -> bool:
    """Return whether `x` is a container; pass this as `is_leaf` to treat a container as one parameter."""
    return isinstance(x, Stored)


def parameter_table(module: PyTree) -> list[tuple[str, Axes, tuple[int, ...]]]:
    """List path, axes and shape of every parameter of `module`.

    A container is one entry: it has the axes and the shape of the array that it stands for.

    Raises:
        TypeError: The field of an array declares no axes.
    """
    declared = {path: axes for path, axes, _ in _walk(module, "", ())}
    leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_stored)
    return [
        (jax.tree_util.keystr(path), _look_up(module, declared, path, leaf), tuple(leaf.shape)) for path, leaf in leaves
    ]


def count_parameters(module: PyTree, experts_per_token: int) -> tuple[int, int]:
    """Return the number of all parameters of `module`, and of those that one token uses.

    Buffers are not counted. A container counts as the array that it stands for. A token uses `experts_per_token` of the
    experts and all other parameters.
    """
    total = active = 0
    for _, axes, shape in parameter_table(module):
        if axes.role is Role.BUFFER:
            continue
        size = math.prod(shape)
        num_experts = shape[axes.names.index("expert")] if "expert" in axes.names else 0
        total += size
        active += size * experts_per_token // num_experts if num_experts else size
    return total, active


def trainable_mask(module: PyTree, trained: Sequence[str] | None = None, frozen: Sequence[str] = ()) -> PyTree:
    """Return a tree of booleans: True for each array that is trained.

    Args:
        module: A module of arrays or of their shapes.
        trained: Patterns of paths, such as "*.attention.query" (`moezoo.parallel.axes`). A gradient moves what one
            of them matches, except buffers; the path of a container stands for its parts. None: all arrays except
            buffers and the parts of containers.
        frozen: Patterns of what is not trained, of the arrays that `trained` chooses.

    Raises:
        UserError: A pattern matches nothing, or only buffers. `trained` chooses a frozen part or an array of integers.
            Nothing is trained.
    """
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(module)}
    axes = dict(zip(leaves, jax.tree.leaves(axes_of(module)), strict=True))
    parts: dict[str, set[str]] = {}
    for path, stored in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_stored):
        name = jax.tree_util.keystr(path)
        parts[name] = {name + jax.tree_util.keystr(below) for below, _ in jax.tree_util.tree_leaves_with_path(stored)}
    if trained is None:
        learns = {path for path, its in axes.items() if its.role not in (Role.BUFFER, Role.PART, *_NEVER_TRAINED)}
    else:
        learns = _parameters("trained", trained, axes, parts)
    learns -= _parameters("frozen", frozen, axes, parts)
    for path in filter(learns.__contains__, leaves):
        is_frozen = (role := axes[path].role) in _NEVER_TRAINED
        if is_frozen or not jnp.issubdtype(leaves[path].dtype, jnp.floating):
            what = f"a {role.value}" if is_frozen else str(leaves[path].dtype)
            raise UserError(f"trained chooses {path}, which is {what}; choose only floating-point parameters")
    if not learns:
        given = f"trained={show(trained)} " * (trained is not None) + f"frozen={show(frozen)}" * bool(frozen)
        raise UserError(f"{given.strip()} leaves nothing to train; choose at least one, such as {next(iter(axes))}")
    return jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path) in learns, module)


def _parameters(key: str, patterns: Sequence[str], axes: Mapping[str, Axes], parts: Mapping[str, set[str]]) -> set[str]:
    """Return the paths that the patterns match, without those of buffers.

    `axes` has the axes of each path, and `parts` the paths of the arrays of each parameter, which a container has.
    """
    found = set[str]()
    for pattern in patterns:
        here = matching(key, [pattern], list({**parts, **axes}))
        here = here & axes.keys() | {path for name in here & parts.keys() for path in parts[name]}
        if all(axes[path].role is Role.BUFFER for path in here):
            what = f"{min(here)}, a buffer, which has no gradient"
            raise UserError(f"{key}: {show(pattern)} matches only {what}; leave the pattern out")
        found |= here
    return {path for path in found if axes[path].role is not Role.BUFFER}


def matching(key: str, patterns: Iterable[str], paths: Sequence[str]) -> set[str]:
    """Return the paths that any of the patterns matches as a whole.

    Raises `UserError` for a pattern that matches none; `key` is the setting that has the patterns.
    """
    found: set[str] = set()
    for pattern in patterns:
        here = matches(pattern, paths)
        if not here:
            raise UserError(f"{key}: {show(pattern)} matches no whole path of a parameter; {_advise(pattern, paths)}")
        found |= here
    return found


def pattern_of(path: str) -> str:
    """Return the pattern that matches a parameter in the blocks of all stacks: "*.attention.out"."""
    return re.sub(r"^\.stacks\[\d+\]\.blocks\[\d+\]", "*", path)


def _advise(pattern: str, paths: Sequence[str]) -> str:
    """Return what to write for a pattern that matches nothing: a wider one, or one with the nearest words."""
    words = {word for path in paths for word in re.findall(r"\w+", path)}

    def spell(match: re.Match[str]) -> str:
        return match[0] if match[0] in words else next(iter(difflib.get_close_matches(match[0], words, n=1)), match[0])

    spelled = re.sub(r"\w+", spell, pattern)
    for each in (pattern, spelled):
        for wider in (each, f"*{each.lstrip('*')}", f"*{each.strip('*')}*"):
            if matches(wider, paths):
                return f"write {show(wider)}" if each == pattern else f"did you mean '{show(wider)}'?"
    return nearest(pattern, map(pattern_of, paths))


def matches(pattern: str, paths: Sequence[str]) -> set[str]:
    """Return the paths that the pattern matches as a whole."""
    expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    return {path for path in paths if expression.fullmatch(path)}
