"""Names and shapes of a family's parameters in a Hugging Face folder.

The family's file has rows of names. Shapes follow from our annotations, which name the input dimensions:

- a matrix is stored as [outputs, inputs], with all output (and input) dimensions flattened into one;
- a bias is stored as one dimension;
- each layer and each expert has its own tensor, the expert only if its number is in the name;
- where a row has another layout (`moezoo.models.names`), the tensor has that one.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from moezoo.hub.regions import Box
from moezoo.models.hub import Hub
from moezoo.models.layers import layer_addresses
from moezoo.models.names import Layout
from moezoo.parallel.axes import Axes, Role, is_stored, parameter_table
from moezoo.typed import show

# Dimensions of size one around an array.
_ONES = {"row": (1, 0), "inner": (2, 1)}
_AS_OURS = ("transposed", "alternating")  # layouts with inputs before outputs, as our arrays have them


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a folder, and the parts of our arrays that it holds.

    Attributes:
        name: The tensor's name.
        parts: For each part, the path of our array and the index of its layer and expert, if it has them. Parts are
            joined along the last dimension.
        axes: The axes of one part, without the indexed dimensions.
        shapes: The shape of each part. In the layouts `of_experts`, `transposed` and those that alternate a part is
            that of all experts.
        layout: The layout of its row, or `alternating_outputs`, which weights of few bits have instead of
            `alternating`: [experts, outputs, inputs], in which outputs of the parts alternate.
    """

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    axes: Axes
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout | Literal["alternating_outputs"] = "plain"

    @property
    def _joined(self) -> tuple[int, ...]:
        """The shape of all parts, joined."""
        return (*self.shapes[0][:-1], sum(shape[-1] for shape in self.shapes))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in a file."""
        if self.layout in _AS_OURS:
            return self._joined
        if self.axes.role is Role.BIAS:
            return (math.prod(self._joined),)
        if self.axes.role is not Role.WEIGHT:
            before, after = _ONES.get(self.layout, (0, 0))
            return (1,) * before + self._joined + (1,) * after
        first, cut = self.split
        return (*self._joined[:first], math.prod(self._joined[cut:]), math.prod(self._joined[first:cut]))

    @property
    def split(self) -> tuple[int, int]:
        """Where inputs and outputs of a weight begin among its dimensions."""
        first = 1 if self.layout in ("of_experts", "alternating_outputs", *_AS_OURS) else 0
        return first, first + len(self.axes.inputs)

    @property
    def _alternates_at(self) -> int | None:
        """The dimension of `dims` whose index is the number of the part; None where parts do not alternate."""
        first, cut = self.split
        ends = {"alternating": len(self.shapes[0]), "alternating_outputs": first + len(self.shapes[0]) - cut}
        return ends.get(self.layout)

    def to_file(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join our arrays into the tensor."""
        at = self._alternates_at
        whole = np.concatenate(parts, axis=-1) if at is None and len(parts) > 1 else parts[0]
        if at is not None:
            whole = np.stack([part.transpose(np.argsort(self.order)) for part in parts], axis=at)
        elif self.axes.role is Role.WEIGHT:
            whole = whole.transpose(np.argsort(self.order))
        return np.ascontiguousarray(whole).reshape(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape in a file with one dimension for each of ours, before some of them are flattened into one."""
        if (at := self._alternates_at) is not None:
            one = [self.shapes[0][dim] for dim in np.argsort(self.order)]
            return (*one[:at], len(self.parts), *one[at:])
        return tuple(self._joined[dim] for dim in np.argsort(self.order))

    @property
    def order(self) -> tuple[int, ...]:
        """For each dimension of a part, its number in `dims`, parts not counted: outputs come before inputs."""
        own = range(len(self.shapes[0]))
        if self.axes.role is not Role.WEIGHT or self.layout in _AS_OURS:
            return tuple(own)
        first, cut = self.split
        return tuple(int(dim) for dim in np.argsort((*own[:first], *own[cut:], *own[first:cut])))

    def in_file(self, part: int, box: Box) -> Box:
        """Return where a box of a part lies in the tensor, of shape `dims`."""
        at, before = self._alternates_at, sum(shape[-1] for shape in self.shapes[:part])
        if at is None and box:
            box = (*box[:-1], (before + box[-1][0], before + box[-1][1]))
        moved = tuple(box[dim] for dim in np.argsort(self.order))
        return moved if at is None else (*moved[:at], (part, part + 1), *moved[at:])

    def in_part(self, part: int, box: Box) -> Box:
        """Return where a box of the tensor, of shape `dims`, lies in a part: the inverse of `in_file`."""
        if (at := self._alternates_at) is not None:
            box = (*box[:at], *box[at + 1 :])
        ours = tuple(box[dim] for dim in self.order)
        if at is not None or not ours:
            return ours
        before = sum(shape[-1] for shape in self.shapes[:part])
        return (*ours[:-1], (ours[-1][0] - before, ours[-1][1] - before))

    def from_file(self, numbers: np.ndarray, part: int = 0) -> np.ndarray:
        """Return numbers of a part, which were read as a box of `dims`, with our dimensions."""
        del part  # all have as many
        at = self._alternates_at
        return (numbers if at is None else numbers.squeeze(at)).transpose(self.order)

    def cells(self, part: int, box: Box) -> Iterator[Box]:
        """Yield boxes that make up a box of a part, each of which is a box of the tensor too."""
        del part
        yield box

    def places(self, part: int) -> np.ndarray:
        """Return which of the outputs in the file, counted over all dimensions, each output of a part is [*outputs]."""
        outputs = self.shapes[part][self.split[1] :]
        if self._alternates_at is not None:
            return np.arange(math.prod(outputs) * len(self.parts)).reshape(*outputs, -1)[..., part]
        before = sum(shape[-1] for shape in self.shapes[:part])
        rows = np.arange(math.prod(self._joined[self.split[1] :])).reshape(*outputs[:-1], -1)
        return rows[..., before : before + outputs[-1]]


@dataclasses.dataclass(frozen=True)
class FlatTensor(Tensor):
    """A tensor in the layout `flat` or `filters`. In a file it has `dims` [groups, outputs of a group, *inputs].

    `groups`: the equal groups that the outputs of each part are in.
    """

    groups: int = 1

    @property
    def split(self) -> tuple[int, int]:
        """Where inputs and outputs of a weight, or taps and channels of filters, begin among its dimensions."""
        if self.layout == "filters":
            return 0, 1
        return 0, len(self.axes.inputs) if self.axes.role is Role.WEIGHT else 0

    @property
    def _sizes(self) -> list[int]:
        """The outputs of each part in a group."""
        return [math.prod(shape[self.split[1] :]) // self.groups for shape in self.shapes]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in a file."""
        groups, outputs, *inputs = self.dims
        if self.axes.role is not Role.WEIGHT and self.layout == "flat":
            return (groups * outputs,)
        return (groups * outputs, *(1,) * (self.layout == "filters"), math.prod(inputs))

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape in a file before some of its dimensions are flattened into one."""
        return (self.groups, sum(self._sizes), *self.shapes[0][: self.split[1]])

    def cells(self, part: int, box: Box) -> Iterator[Box]:
        """Yield boxes of neighbours along the last output dimension, in one group each."""
        cut, of_last, size = self.split[1], self.shapes[part][-1], self._sizes[part]
        for at in itertools.product(*(range(*interval) for interval in box[cut:-1])):
            before = self._number(part, at) * of_last
            first, end = (before + x for x in box[-1])
            ends = [first, *range((first // size + 1) * size, end, size), end]
            for start, stop in itertools.pairwise(ends):
                yield (*box[:cut], *((i, i + 1) for i in at), (start - before, stop - before))

    def _number(self, part: int, at: tuple[int, ...]) -> int:
        """Return the number of an index of the output dimensions but the last."""
        return int(np.ravel_multi_index(at, self.shapes[part][self.split[1] : -1])) if at else 0

    def in_file(self, part: int, box: Box) -> Box:
        """Return where a cell of a part lies in the tensor, of shape `dims`."""
        cut, sizes, (first, end) = self.split[1], self._sizes, box[-1]
        number = self._number(part, tuple(start for start, _ in box[cut:-1])) * self.shapes[part][-1] + first
        group, place = divmod(number, sizes[part])
        place += sum(sizes[:part])
        return ((group, group + 1), (place, place + end - first), *box[:cut])

    def in_part(self, part: int, box: Box) -> Box:
        """Return where a box of the tensor, inside a cell, lies in a part: the inverse of `in_file`."""
        (group, _), (first, end), *inputs = box
        number = group * self._sizes[part] + first - sum(self._sizes[:part])
        before, start = divmod(number, self.shapes[part][-1])
        outer = self.shapes[part][self.split[1] : -1]
        at = np.unravel_index(before, outer) if outer else ()
        return (*inputs, *((int(i), int(i) + 1) for i in at), (start, start + end - first))

    def from_file(self, numbers: np.ndarray, part: int = 0) -> np.ndarray:
        """Return numbers of a part, which were read as a box inside a cell, with our dimensions."""
        _, outputs, *inputs = numbers.shape
        outer = (1,) * (len(self.shapes[part]) - self.split[1] - 1)
        return np.moveaxis(numbers[0], 0, -1).reshape(*inputs, *outer, outputs)

    def places(self, part: int) -> np.ndarray:
        """Return which of the outputs in the file, counted over all groups, each output of a part is [*outputs]."""
        first, (groups, outputs, *_) = sum(self._sizes[:part]), self.dims
        rows = np.arange(groups * outputs).reshape(groups, outputs)[:, first : first + self._sizes[part]]
        return rows.reshape(self.shapes[part][self.split[1] :])

    def to_file(self, parts: list[np.ndarray]) -> np.ndarray:
        """Join our arrays into the tensor."""
        whole = np.empty((self.shape[0], math.prod(self.dims[2:])), parts[0].dtype)
        for part, array in enumerate(parts):
            places = self.places(part).reshape(-1)
            whole[places] = array.reshape(-1, len(places)).T
        return whole.reshape(self.shape)


def tensors(model: Any, hub: Hub) -> Iterator[Tensor]:
    """Yield every tensor in a folder of `model`, which may hold shapes in place of arrays."""
    table = {path.lstrip("."): (axes, shape) for path, axes, shape in parameter_table(model)}
    rows = hub.rows(model.config)
    for layer in (None, *layer_addresses(model.stacks)):
        below, number, at = ("", None, ()) if layer is None else (f"{layer.path}.", layer.number, (layer.index,))
        for row in rows:
            paths = [f"{below}{path}" for path in row.ours]
            needed = (paths[0], f"{below}{row.beside}") if row.beside else paths[:1]
            if ("{layer}" in row.name) != (layer is not None) or not all(path in table for path in needed):
                continue
            axes, shape = table[paths[0]]
            apart = () if row.layout in ("of_experts", *_AS_OURS) else axes.stacked[1:]
            shapes = tuple(table[path][1][len(at) + len(apart) :] for path in paths)
            sizes = shape[len(at) : len(at) + len(apart)] if "{expert}" in row.name else (1,) * len(apart)
            for index in np.ndindex(sizes):
                name = row.name.format(layer=number, **dict(zip(apart, index, strict=True)))
                parts = tuple((path, (*at, *index)) for path in paths)
                about = name, parts, dataclasses.replace(axes, stacked=()), shapes, row.layout
                if row.layout not in ("flat", "filters"):
                    yield Tensor(*about)
                    continue
                by = row.groups and below + row.groups
                outputs = table[by][1][len(at) + len(table[by][0].inputs) :] if by else (1,)
                yield FlatTensor(*about, outputs[0])


def arrays_by_path(model: Any) -> dict[str, Any]:
    """Return a model's parameters (or shapes) by the paths that `Tensor.parts` uses."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_stored)
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


def is_of_products(tensor: Tensor) -> bool:
    """Return whether a weight is in a layer, and not in a router: these have few bits in released folders."""
    path, index = tensor.parts[0]
    return bool(index) and ".router." not in path


def require_names(arrays: Mapping[str, Any], plan: Iterable[Tensor]) -> None:
    """Assert that every array is in a tensor: one without a name would be lost, or hold anything, without a message."""
    nameless = sorted(arrays.keys() - {path for tensor in plan for path, _ in tensor.parts})
    assert not nameless, f"the family's tables have no tensor name for {nameless[0]}"


_MOST_NAMES = 60  # in a message; a layer of any family has fewer


def count(names: Sequence[str]) -> str:
    """Return the beginning of a sentence about so many tensors."""
    return f"{len(names)} tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def list_names(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Return names in one line. Names that differ only by layer and expert numbers become one, with their count.

    At most `most` of these are named.
    """
    alike: dict[tuple[str | None, ...], list[list[str]]] = {}
    for name in sorted(names):
        parts = name.split(".")
        is_number = [part.isdecimal() and len(part) < 10 for part in parts]
        pattern = tuple(None if number else part for number, part in zip(is_number, parts, strict=True))
        alike.setdefault(pattern, []).append(parts)
    shown = []
    for pattern, group in alike.items():
        columns = zip(pattern, zip(*group, strict=True), strict=True)
        text = ".".join(_range(column) if part is None else part for part, column in columns)
        shown.append(show(text)[:200] + (f" ({len(group)})" if len(group) > 1 else ""))
    more = [f"and {len(shown) - most} more"] if len(shown) > most else []
    return ", ".join(shown[:most] + more)


def _range(numbers: Sequence[str]) -> str:
    lowest, highest = min(map(int, numbers)), max(map(int, numbers))
    return f"{lowest}" if lowest == highest else f"{lowest}-{highest}"
