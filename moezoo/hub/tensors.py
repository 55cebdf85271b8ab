"""Names and shapes of a family's parameters in a Hugging Face folder.

The family's file has tables of names. Shapes follow from our annotations, which name the input dimensions:

- a matrix is stored as [outputs, inputs], with all output (and input) dimensions flattened into one;
- a bias is stored as one dimension;
- each layer and each expert has its own tensor;
- where the name is `AsRow`, `OfExperts` or `Alternating` (`moezoo.models.base`), the tensor has that form.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from moezoo.models.base import Alternating, AsRow, Hub, OfExperts
from moezoo.models.layers import LayerPlace, layer_places
from moezoo.parallel.axes import Axes, Role, is_stored, parameter_table
from moezoo.parallel.stored import plain


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a folder, and the parts of our arrays that it holds.

    Attributes:
        name: the tensor's name.
        parts: for each part, the path of our array and the index of its layer and expert, if it has them. Parts are
            joined along the last dimension.
        axes: the axes of one part, without the indexed dimensions.
        shapes: the shape of each part.
        form: the class of its name: `str`, `AsRow`, `OfExperts` or `Alternating`.
        experts: how many experts' tensors are stacked in this one, where its form is `OfExperts`, or 0. `axes` and
            `shapes` are then those of one expert, and a part is that of all.
    """

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    axes: Axes
    shapes: tuple[tuple[int, ...], ...]
    form: type[str] = str
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in a file."""
        if self.form is OfExperts:
            return (self.experts, *self._of_one.shape)
        if self.form is Alternating:
            return (*self.shapes[0][:-1], len(self.shapes) * self.shapes[0][-1])
        if self.axes.role is Role.BIAS:
            return (sum(map(math.prod, self.shapes)),)
        if self.axes.role is not Role.WEIGHT:
            return (1,) * (self.form is AsRow) + self.shapes[0]
        first, inputs = self.shapes[0], len(self.axes.inputs)
        last = sum(shape[-1] for shape in self.shapes)
        outputs = math.prod((*first[inputs:-1], last))
        return outputs, math.prod(first[:inputs])

    def to_file(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join our arrays into the tensor."""
        if self.form is OfExperts:
            return np.stack([self._of_one.to_file(list(of_one)) for of_one in zip(*parts, strict=True)])
        if self.form is Alternating:
            return np.stack(parts, axis=-1).reshape(self.shape)
        whole = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        if self.axes.role is not Role.WEIGHT:
            return whole.reshape(self.shape)
        return np.ascontiguousarray(whole.reshape(self.shape[1], self.shape[0]).T)

    def from_file(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Split the tensor into our arrays."""
        if self.form is OfExperts:
            return [np.stack(part) for part in zip(*map(self._of_one.from_file, tensor), strict=True)]
        if self.form is Alternating:
            alternating = tensor.reshape(*self.shapes[0], len(self.parts))
            return [alternating[..., part] for part in range(len(self.parts))]
        if self.axes.role in (Role.WEIGHT, Role.BIAS):
            first = self.shapes[0]
            last = sum(shape[-1] for shape in self.shapes)
            tensor = tensor.T.reshape(*first[:-1], last)
        else:
            tensor = tensor.reshape(self.shapes[0])
        cuts = np.cumsum([shape[-1] for shape in self.shapes])[:-1]
        return np.split(tensor, cuts, axis=-1)

    @property
    def _of_one(self) -> "Tensor":
        return dataclasses.replace(self, form=str, experts=0)


def tensors(model: Any, hub: Hub) -> Iterator[Tensor]:
    """Yield every tensor in a folder of `model`, which may hold shapes in place of arrays."""
    table = {path.lstrip("."): (axes, shape) for path, axes, shape in parameter_table(model)}
    for ours, theirs in hub.NAMES.items():
        if ours == "unembedding.weight" and model.unembedding.weight is None:  # tied
            continue
        names = (ours,) if isinstance(ours, str) else ours
        axes, _ = table[names[0]]
        yield Tensor(theirs, tuple((n, ()) for n in names), axes, tuple(table[n][1] for n in names))
    layer_names = hub.layer_names(model.config)
    for place in layer_places(model.stacks):
        for ours, theirs in layer_names.items():
            names = tuple(f"{place.path}.{n}" for n in ((ours,) if isinstance(ours, str) else ours))
            if names[0] in table:
                yield from _layer_tensors(theirs, names, table, place)


def _layer_tensors(
    theirs: str, names: tuple[str, ...], table: Mapping[str, Any], place: LayerPlace
) -> Iterator[Tensor]:
    axes, shape = table[names[0]]
    form, one = type(theirs), dataclasses.replace(axes, stacked=())
    apart = () if form in (OfExperts, Alternating) else axes.stacked[1:]
    shapes = tuple(table[n][1][1 if form is Alternating else len(axes.stacked) :] for n in names)
    for index in np.ndindex(shape[1 : 1 + len(apart)]):
        name = theirs.format(layer=place.number, **dict(zip(apart, index, strict=True)))
        parts = tuple((n, (place.index, *index)) for n in names)
        yield Tensor(name, parts, one, shapes, form, shape[1] if form is OfExperts else 0)


def arrays_by_path(model: Any) -> dict[str, Any]:
    """Return a model's parameters (or shapes) by the paths that `Tensor.parts` uses."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_stored)
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


def require_names(arrays: Mapping[str, Any], plan: Iterable[Tensor]) -> None:
    """Assert that every array is in a tensor: one without a name would be lost, or hold anything, without a message."""
    nameless = sorted(arrays.keys() - {path for tensor in plan for path, _ in tensor.parts})
    assert not nameless, f"the family's tables have no tensor name for {nameless[0]}"


def read_part(parameter: Any, index: tuple[int, ...]) -> np.ndarray:
    """Return one part of a parameter at `index` of its stacked dimensions; a container gives what it stands for."""
    return np.asarray(plain(jax.tree.map(lambda array: array[index], parameter), parameter.dtype))
