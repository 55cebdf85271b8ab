"""Annotations as the only declaration of a parameter: its role by type, its logical axes by string.

    class Experts(eqx.Module):
        gate: Weight[Array, "expert, expert_embed -> expert_mlp"]

reads: one matrix an expert, from `expert_embed` to `expert_mlp`, stored as an array [expert, expert_embed, expert_mlp].
Axes before the comma number independent matrices; the arrow parts inputs from outputs. Each alias is jaxtyping's
`Float[Array, "expert expert_embed expert_mlp"]` underneath, so a run-time type checker still checks the shape. From the
same string come the layout (`moezoo.parallel.rules`), the decay mask and the parameter table.
"""

import dataclasses
import enum
import functools
import math
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import equinox as eqx
import jax
from jaxtyping import Float, PyTree

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


class Role(enum.Enum):
    """What a parameter is for: decay, casting, initial values and reduction follow from it."""

    WEIGHT = "weight"
    SCALE = "scale"
    BIAS = "bias"  # trained and counted, never decayed; starts at zero
    EMBEDDING = "embedding"
    BUFFER = "buffer"  # saved and reduced, but never trained, decayed, cast below float32 or counted


@dataclasses.dataclass(frozen=True)
class Axes:
    """A parameter's role and logical axes: `stacked` ones number independent matrices from `inputs` to `outputs`."""

    role: Role
    stacked: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Logical axes in the order of the array's dimensions."""
        return self.stacked + self.inputs + self.outputs


def _parse(role: Role, text: str) -> Axes:
    stacked, comma, matrix = text.rpartition(",")
    inputs, arrow, outputs = matrix.partition("->")
    if role is Role.WEIGHT and not arrow:
        raise TypeError(f"a weight says 'inputs -> outputs', got '{text}'")
    del comma
    return Axes(role, tuple(stacked.split()), tuple(inputs.split()), tuple(outputs.split()))


class _Alias:
    """`Weight[Array, "embed -> mlp"]` is `Annotated[Float[Array, "embed mlp"], Axes(...)]`."""

    def __init__(self, role: Role):
        self._role = role

    def __getitem__(self, item: tuple[type, str]) -> Any:
        array, text = item
        axes = _parse(self._role, text)
        return Annotated[Float[array, " ".join(axes.names)], axes]


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


def _walk(node: Any, path: str, stacked: tuple[str, ...]) -> Iterator[tuple[str, Axes]]:
    if isinstance(node, eqx.Module):
        inside = (*stacked, "layer") if isinstance(node, Stack) else stacked
        declared = _declared_axes(type(node))
        for field in dataclasses.fields(node):
            if (axes := declared.get(field.name)) is not None:
                yield f"{path}.{field.name}", dataclasses.replace(axes, stacked=inside + axes.stacked)
            else:
                yield from _walk(getattr(node, field.name), f"{path}.{field.name}", inside)
    elif isinstance(node, tuple | list):
        for index, child in enumerate(node):
            yield from _walk(child, f"{path}[{index}]", stacked)


def axes_of(module: PyTree) -> PyTree:
    """The tree of `module`'s arrays (or their shapes) with an `Axes` at every leaf.

    Raises `TypeError` for an array whose field declares no axes.
    """
    declared = dict(_walk(module, "", ()))

    def look_up(path: Any, leaf: Any) -> Axes:
        name = jax.tree_util.keystr(path)
        if name not in declared:
            raise TypeError(f"{type(module).__name__}{name} has shape {leaf.shape} but declares no axes")
        return declared[name]

    return jax.tree_util.tree_map_with_path(look_up, module)


def parameter_table(module: PyTree) -> list[tuple[str, Axes, tuple[int, ...]]]:
    """Every array of `module`: its path, axes and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(module)
    axes = jax.tree.leaves(axes_of(module), is_leaf=lambda x: isinstance(x, Axes))
    return [(jax.tree_util.keystr(path), a, tuple(leaf.shape)) for (path, leaf), a in zip(leaves, axes, strict=True)]


def count_parameters(module: PyTree, experts_per_token: int) -> tuple[int, int]:
    """All parameters of `module`, and those that one token uses; buffers count in neither."""
    total = active = 0
    for _, axes, shape in parameter_table(module):
        if axes.role is Role.BUFFER:
            continue
        size = math.prod(shape)
        num_experts = shape[axes.names.index("expert")] if "expert" in axes.names else 0
        total += size
        active += size * experts_per_token // num_experts if num_experts else size
    return total, active


def trainable_mask(module: PyTree) -> PyTree:
    """A tree of booleans: false at buffers, which no gradient or optimiser touches."""
    return jax.tree.map(lambda axes: axes.role is not Role.BUFFER, axes_of(module))
