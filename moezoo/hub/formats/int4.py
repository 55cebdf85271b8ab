"""INT4, as Kimi K2 Thinking is released (compressed-tensors `pack-quantized`): groups of integers share a scale.

| tensor | what it has |
|---|---|
| `X.weight_packed` | eight integers in an int32, [outputs, inputs / 8] |
| `X.weight_scale` | scales of groups [outputs, inputs / group] |
| `X.weight_shape` | outputs and inputs |
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from moezoo.hub.formats.base import Format, refuse
from moezoo.hub.formats.compressed_tensors import read_weights, write_table
from moezoo.models.config_json import ConfigJson
from moezoo.nn.int4 import GROUP, PackedInt4

_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


@dataclasses.dataclass(frozen=True)
class Int4Groups(Format):
    """INT4. `group` is the number of inputs that share a scale."""

    group: int = GROUP

    NAME = "int4"
    CONTAINER = PackedInt4
    VALUES = "_packed"
    SCALES = ("_scale",)
    SHAPES = ("_shape",)
    KIND = "I32"
    PER_ITEM = 8
    SCALE_KINDS = ("BF16", "F16", "F32")
    SCALE_DTYPE = np.dtype(ml_dtypes.bfloat16)
    MULTIPLE = 8
    OF_EXPERTS = True

    @classmethod
    def read(cls, config: ConfigJson) -> "Int4Groups | None":
        if (tables := read_weights(config, "pack-quantized", _WEIGHTS)) is None:
            return None
        sizes = {weights.read("group_size", int, GROUP) for weights in tables}
        if len(sizes) != 1:
            raise refuse(f".config_groups has {len(sizes)} sizes of groups")
        return cls(sizes.pop())

    def write(self, modules: list[str]) -> dict[str, Any]:
        return write_table("pack-quantized", _WEIGHTS | {"group_size": self.group}, modules)

    @classmethod
    def stating(cls, block: tuple[int, int], matrix: tuple[int, int]) -> tuple[Format, ...]:
        del matrix
        return (cls(block[1]),) if block[0] == 1 else ()

    @property
    def sizes(self) -> tuple[int, int]:
        return 1, self.group
