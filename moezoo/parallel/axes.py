"""Annotations as the only declaration of a parameter: its role by type, its logical axes by string.

    class Experts(eqx.Module):
        gate: Weight[Array, "expert, expert_embed -> expert_mlp"]

reads: one matrix an expert, from `expert_embed` to `expert_mlp`, stored as an array [expert, expert_embed, expert_mlp].
Axes before the comma number independent matrices; the arrow parts inputs from outputs. Each alias is jaxtyping's
`Float[Array, "expert expert_embed expert_mlp"]` underneath, so a run-time type checker still checks the shape; a
`Weight` may also be a container that stands for such an array (`moezoo.parallel.stored`). From the same string come the
layout (`moezoo.parallel.rules`), the decay mask and the parameter table.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PyTree

from moezoo.errors import UserError
from moezoo.parallel.roles import Axes as Axes
from moezoo.parallel.roles import Role as Role
from moezoo.parallel.stored import Stored

# Logical axes and the configuration key that sets each one's size; `layer` is the number of stacked layers.
LOGICAL_AXES = {
    "layer": "model.layers",
    "vocab": "model.vocab",
    "embed": "model.embed",
    "heads": "model.heads",
    "kv_heads": "model.kv_heads",
    "head_dim": "model.head_dim",
    "mlp": "model.mlp",
    "nope_dim": "model.nope_dim",
    "value_dim": "model.value_dim",
    "q_lora": "model.q_lora",
    "q_lora_out": "model.q_lora",
    "kv_lora": "model.kv_lora",
    "kv_lora_out": "model.kv_lora + model.rope_dim",
    "expert": "model.experts",
    "expert_embed": "model.embed",
    "expert_mlp": "model.expert_mlp",
    "router": "model.experts",
    "norm": "the size of a norm",
}


def _parse(role: Role, text: str) -> Axes:
    stacked, comma, matrix = text.rpartition(",")
    inputs, arrow, outputs = matrix.partition("->")
    if role is Role.WEIGHT and not arrow:
        raise TypeError(f"a weight says 'inputs -> outputs', got '{text}'")
    del comma
    return Axes(role, tuple(stacked.split()), tuple(inputs.split()), tuple(outputs.split()))


class _Alias:
    """`Scale[Array, "norm"]` is `Annotated[Float[Array, "norm"], Axes(...)]`; a `Weight` may be `Stored` too."""

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
    """`count` periods of layers that repeat one pattern, run by one scan.

    `blocks` has a module for each layer of a period; every array has a leading `layer` dimension of `count`. `numbers`:
    a tuple of numbers for each layer in order, where layers differ by numbers; None where they are alike.
    """

    blocks: tuple[Any, ...]
    count: int = eqx.field(static=True)
    numbers: tuple[Any, ...] | None = eqx.field(static=True, default=None)


@functools.cache
def _declared_axes(kind: type) -> dict[str, Axes]:
    """Field name -> Axes of the annotated fields of a module class; an optional field's annotation is looked into."""

    def find(hint: Any) -> Axes | None:
        if typing.get_origin(hint) is Annotated:
            return next((m for m in hint.__metadata__ if isinstance(m, Axes)), None)
        return next(filter(None, map(find, typing.get_args(hint))), None)

    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: axes for name, hint in hints.items() if (axes := find(hint)) is not None}


def _walk(node: Any, path: str, stacked: tuple[str, ...]) -> Iterator[tuple[str, Axes, Any]]:
    """Path, axes and value of every declared field."""
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
    """Path and axes of every array of a declared field."""
    if isinstance(value, Stored):
        for name, inner in value.axes(axes).items():
            yield from _arrays(f"{path}.{name}", inner, getattr(value, name))
    else:
        yield path, axes


def axes_of(module: PyTree) -> PyTree:
    """The tree of `module`'s arrays (or their shapes) with an `Axes` at every leaf.

    Raises `TypeError` for an array whose field declares no axes.
    """
    declared = dict(array for field in _walk(module, "", ()) for array in _arrays(*field))
    return jax.tree_util.tree_map_with_path(functools.partial(_look_up, module, declared), module)


def _look_up(module: PyTree, declared: dict[str, Axes], path: Any, leaf: Any) -> Axes:
    name = jax.tree_util.keystr(path)
    if name not in declared:
        raise TypeError(f"{type(module).__name__}{name} has shape {leaf.shape} but declares no axes")
    return declared[name]


def is_stored(x: Any) -> bool:
    """Whether `x` is a container that stands for an array: `is_leaf` of trees whose leaves are parameters."""
    return isinstance(x, Stored)


def parameter_table(module: PyTree) -> list[tuple[str, Axes, tuple[int, ...]]]:
    """Every parameter of `module`: its path, axes and shape; of a container those of the array that it stands for."""
    declared = {path: axes for path, axes, _ in _walk(module, "", ())}
    leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_stored)
    return [
        (jax.tree_util.keystr(path), _look_up(module, declared, path, leaf), tuple(leaf.shape)) for path, leaf in leaves
    ]


def count_parameters(module: PyTree, experts_per_token: int) -> tuple[int, int]:
    """All parameters of `module`, and those that one token uses; buffers count in neither.

    A container counts as the numbers that it stands for.
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


def trainable_mask(module: PyTree, trained: Callable[[str], bool] | None = None) -> PyTree:
    """A tree of booleans, false at arrays that no gradient or optimiser touches.

    `trained` says it of each array, given its path, such as ".stacks[0].blocks[0].attention.query"; None trains all
    but buffers and the parts of containers. Raises `UserError` where it trains nothing, a buffer, or integers.
    """

    def leaf(path: Any, x: Any, axes: Axes) -> bool:
        if trained is None:
            return axes.role not in (Role.BUFFER, Role.PART)
        name = jax.tree_util.keystr(path)
        chosen = bool(trained(name))
        if chosen and (axes.role is Role.BUFFER or not jnp.issubdtype(x.dtype, jnp.floating)):
            what = "a buffer" if axes.role is Role.BUFFER else str(x.dtype)
            raise UserError(f"trained chooses {name}, which is {what}; choose floating-point parameters alone")
        return chosen

    mask = jax.tree_util.tree_map_with_path(leaf, module, axes_of(module))
    if trained is not None and not any(jax.tree.leaves(mask)):
        first = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(module)[0][0])
        raise UserError(f"trained chooses no parameter; it is given paths such as {first}")
    return mask
