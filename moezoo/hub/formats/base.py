"""What formats of few bits have in common: a weight in one, and the tensors of a folder that hold it.

A weight `X.weight`, or `X` where a tensor has all experts, has other tensors in its place or beside it: one with the
numbers, one with the scales of blocks, and perhaps some that change nothing. They are the `values` and the `scale` of
the container of each array that has a part of the weight (`moezoo.nn.few_bits`).
"""

import abc
import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from moezoo.errors import UserError
from moezoo.hub.regions import Box
from moezoo.hub.tensors import Tensor
from moezoo.models.config_json import ConfigJson
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.axes import Role

CONFIG = "quantization_config"
ADVICE = "load another version of the model, or convert this one to bfloat16 first"
READ = (
    "moezoo reads fp8, mxfp4, nvfp4, and compressed-tensors with pack-quantized integers of 4 bits or FP8 per channel"
)


def refuse(what: str) -> UserError:
    """Return the error of a table of config.json, in which `what` is not read: a key below it, and its value."""
    return UserError(f"config.json: {CONFIG}{what}: {READ}; {ADVICE}")


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """A format of few bits as a config.json states it: fields are what differs between folders.

    Attributes:
        NAME: Its name in messages and in configurations of runs.
        CONTAINER: The container that keeps it.
        VALUES: What the name of the numbers has behind that of the weight.
        SCALES: The same for the scales, in all spellings; one with a `.` replaces the ending `.weight`.
        FACTOR: The same for one float32 number that changes all scales, which is then widened and neither kept nor
            written; empty for none.
        SHAPES: The same for tensors with outputs and inputs, which change nothing.
        KIND: The dtype of the numbers in safetensors' words.
        PER_ITEM: The numbers in one stored item.
        SCALE_KINDS: The dtypes that scales may have, in safetensors' words; the most usual first, of codes too.
        SCALE_DTYPE: The dtype that containers usually have for them.
        LAYOUTS: How tensors hold weights (`moezoo.models.names`) that folders have in this format.
        MULTIPLE: What divides their number of inputs.
        ROUNDS: Whether arrays are rounded to the format.
        OF_EXPERTS: Whether released folders have only experts in it.
    """

    NAME: ClassVar[str]
    CONTAINER: ClassVar[type[FewBits]]
    VALUES: ClassVar[str] = ""
    SCALES: ClassVar[tuple[str, ...]]
    FACTOR: ClassVar[str] = ""
    SHAPES: ClassVar[tuple[str, ...]] = ()
    KIND: ClassVar[str]
    PER_ITEM: ClassVar[int] = 1
    SCALE_KINDS: ClassVar[tuple[str, ...]]
    SCALE_DTYPE: ClassVar[np.dtype]
    LAYOUTS: ClassVar[tuple[str, ...]] = ("plain", "flat")
    MULTIPLE: ClassVar[int] = 1
    ROUNDS: ClassVar[bool] = False
    OF_EXPERTS: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def read(cls, config: ConfigJson) -> "Format | None":
        """Return what the table `quantization_config` states, of which `quant_method` is read; None for another format.

        Raises `UserError` for a scheme that is not read.
        """

    @abc.abstractmethod
    def write(self, modules: list[str]) -> dict[str, Any]:
        """Return the table `quantization_config`, beside `modules` in numbers."""

    @property
    @abc.abstractmethod
    def sizes(self) -> tuple[int | None, int | None]:
        """The size of a block along outputs and inputs; None for all of them."""

    @classmethod
    def stating(cls, block: tuple[int, int], matrix: tuple[int, int]) -> "tuple[Format, ...]":
        """Return the ways to state a matrix [outputs, inputs] in blocks of this size, the most usual first."""
        return (cls(),) if cls().block_of(matrix) == block else ()

    def block_of(self, matrix: tuple[int, int]) -> tuple[int, int]:
        """Return the size of a block along outputs and inputs, of a matrix [outputs, inputs]."""
        return self.sizes[0] or matrix[0], self.sizes[1] or matrix[1]

    @property
    def has_blocks(self) -> bool:
        """Whether scales are an array, and not one number for each matrix."""
        return True

    def row(self, items: int) -> tuple[int, ...]:
        """Return the shape of a row of stored items."""
        return (items,)

    def scales(self, stored: np.ndarray, factor: np.ndarray) -> np.ndarray:
        """Return the scales that numbers are multiplied with, from stored ones and the factor of this format."""
        del factor
        return stored

    def are_finite(self, items: np.ndarray) -> bool:
        """Return whether stored numbers are finite: e4m3 has a code of NaN, the others have none."""
        return self.KIND != "F8_E4M3" or not ((items & 127) == 127).any()

    def unread(self, weights: "Collection[FewBitTensor]") -> Iterator[str]:
        """Yield which of the weights transformers does not read as they are written."""
        del weights
        return iter(())

    def names(self, name: str) -> tuple[str, list[str], list[str]]:
        """Return how the tensors of a weight are named: numbers, scales by all their spellings, and shapes."""
        stem = name.removesuffix(".weight")
        spellings = [stem + end if end.startswith(".") else name + end for end in self.SCALES]
        return name + self.VALUES, spellings, [name + end for end in self.SHAPES]

    def has(self, tensor: Tensor) -> bool:
        """Return whether folders have such a tensor in this format."""
        if tensor.axes.role is not Role.WEIGHT or tensor.layout not in self.LAYOUTS:
            return False
        return outputs_first(tensor).shape[-1] % self.MULTIPLE == 0

    def tensor(self, tensor: Tensor, scale: str | None = None, others: Iterable[str] = ()) -> "FewBitTensor":
        """Return a weight in this format. `scale` and `others` are names of tensors, by default the usual ones."""
        if tensor.layout == "transposed":
            raise UserError(f"{tensor.name}: {self.NAME} with inputs before outputs is not read; {ADVICE}")
        values, spellings, _ = self.names(tensor.name)
        factor = tensor.name + self.FACTOR if self.FACTOR else None
        return FewBitTensor(outputs_first(tensor), self, values, scale or spellings[0], tuple(others), factor)


def outputs_first(tensor: Tensor) -> Tensor:
    """Return a tensor with outputs before inputs, as all formats have it."""
    return dataclasses.replace(tensor, layout="alternating_outputs") if tensor.layout == "alternating" else tensor


@dataclasses.dataclass(frozen=True)
class FewBitTensor:
    """How a folder holds one weight in few bits.

    Attributes:
        tensor: The weight as a tensor [experts, outputs, inputs] or [outputs, inputs].
        format: The format.
        values: The name of the tensor with the numbers.
        scale: The name of the tensor with the scales.
        others: Those of tensors that change nothing.
        factor: The name of the tensor with the number that changes all scales; None where there is none.
    """

    tensor: Tensor
    format: Format
    values: str
    scale: str
    others: tuple[str, ...]
    factor: str | None = None

    @property
    def plain(self) -> Tensor:
        """The weight as folders have it in numbers."""
        if self.tensor.layout == "alternating_outputs":
            return dataclasses.replace(self.tensor, layout="alternating")
        return self.tensor

    @property
    def matrix(self) -> tuple[int, int]:
        """Outputs and inputs."""
        *_, rows, columns = self.tensor.shape
        return rows, columns

    @property
    def block(self) -> tuple[int, int]:
        """The size of a block along outputs and inputs."""
        return self.format.block_of(self.matrix)

    @property
    def lead(self) -> tuple[int, ...]:
        """The number of experts, or nothing."""
        return self.tensor.shape[:-2]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales: [experts, blocks along outputs, blocks along inputs]."""
        return (*self.lead, *(math.ceil(n / size) for n, size in zip(self.matrix, self.block, strict=True)))

    @property
    def values_shape(self) -> tuple[int, ...]:
        """The shape of the tensor with the numbers."""
        *lead, columns = self.tensor.shape
        return (*lead, *self.format.row(columns // self.format.PER_ITEM))

    @property
    def kept_values(self) -> Tensor:
        """The tensor of numbers as bytes, whose parts are the `values` of containers."""
        last, per = self.tensor.split[1] - 1, self.format.CONTAINER.PER_BYTE
        shapes = tuple((*shape[:last], shape[last] // per, *shape[last + 1 :]) for shape in self.tensor.shapes)
        return dataclasses.replace(self.tensor, name=self.values, parts=self._parts_below("values"), shapes=shapes)

    @property
    def kept_scale(self) -> "ScaleTensor":
        """The tensor of scales, whose parts are the `scale` of containers."""
        t = self.tensor
        return ScaleTensor(self.scale, self._parts_below("scale"), t.axes, t.shapes, t.layout, self)

    def _parts_below(self, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the parts of the tensor that has the arrays of this name in containers."""
        return tuple((f"{path}.{name}", index) for path, index in self.tensor.parts)

    def part_blocks(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the block of each output [*outputs] and of each input [*inputs] of a part."""
        first, cut = self.tensor.split
        columns = np.arange(self.matrix[1]).reshape(self.tensor.shapes[part][first:cut])
        return self.tensor.places(part) // self.block[0], columns // self.block[1]

    def piece_blocks(self, part: int, shape: tuple[int, ...], box: Box) -> tuple[np.ndarray, np.ndarray]:
        """Return the block along outputs [*outputs] and along inputs [*inputs] of each piece of a part in a box.

        Args:
            part: The number of the part.
            shape: The shape of all pieces of the part, [*experts, *inputs, *outputs].
            box: The pieces.
        """
        first, cut = self.tensor.split
        found = []
        for blocks, begin, end in zip(self.part_blocks(part), (cut, first), (len(shape), cut), strict=True):
            steps = (n // pieces for n, pieces in zip(blocks.shape, shape[begin:end], strict=True))
            spans = tuple(slice(a * step, b * step, step) for (a, b), step in zip(box[begin:end], steps, strict=True))
            found.append(blocks[spans])
        return found[0], found[1]


@dataclasses.dataclass(frozen=True)
class ScaleTensor(Tensor):
    """The scales of a weight of few bits. Its parts have one for each piece, and the folder one for each block."""

    few: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in a file."""
        return self.few.scale_shape

    def to_file(self, parts: list[np.ndarray]) -> np.ndarray:
        """Return the scales of blocks.

        Raises `UserError` where pieces of one block have different scales: the container was not read from a folder.
        """
        grid = np.zeros(self.shape, parts[0].dtype)
        lead, read = len(self.few.lead), np.zeros(self.shape[-2:], bool)
        for part, pieces in enumerate(parts):
            of_rows, of_columns = self.few.piece_blocks(part, pieces.shape, tuple((0, n) for n in pieces.shape))
            at = of_rows.reshape(-1)[:, None], of_columns.reshape(-1)
            scales = pieces.reshape(*pieces.shape[:lead], of_columns.size, of_rows.size).swapaxes(-1, -2)
            before = np.where(read[at], grid[..., *at], scales)
            grid[..., *at] = scales
            read[at] = True
            if not (np.array_equal(grid[..., *at], scales) and np.array_equal(before, scales)):
                raise UserError(
                    f"{self.name}: numbers of one block have different scales, so the format {self.few.format.NAME} "
                    "cannot hold them; save moezoo.nn.containers.as_arrays(model), which has arrays instead"
                )
        return grid
