"""NVFP4, as NVIDIA and others release models: 16 numbers share an e4m3 scale, and a matrix has one scale of scales.

| compressed-tensors | ModelOpt | what it has |
|---|---|---|
| `X.weight_packed` | `X.weight` | two FP4 numbers in a byte, [outputs, inputs / 2] |
| `X.weight_scale` | `X.weight_scale` | e4m3 scales [outputs, inputs / 16] |
| `X.weight_global_scale` | `X.weight_scale_2` | a float32 number: scales are divided by it, or multiplied |

Such weights are widened. No container has two scales, so they are not kept, and folders are not written in this format.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.formats.base import ADVICE, FewBitTensor, Format
from moezoo.hub.formats.compressed_tensors import read_weights
from moezoo.hub.tensors import Tensor
from moezoo.models.config_json import ConfigJson
from moezoo.nn.mxfp4 import MXFP4

_GROUP = 16
_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": _GROUP}


@dataclasses.dataclass(frozen=True)
class NVFP4Packed(Format):
    """NVFP4 of compressed-tensors.

    weight[o, i] = e2m1[o, i] * scale[o, i // 16], where the scale is that of the block and that of the matrix in one.
    Both products are rounded to float32, in the order in which compressed-tensors and ModelOpt compute them.
    """

    NAME = "nvfp4"
    CONTAINER = MXFP4
    VALUES = "_packed"
    SCALES = ("_scale",)
    FACTOR = "_global_scale"
    KIND = "U8"
    PER_ITEM = 2
    SCALE_KINDS = ("F8_E4M3",)
    SCALE_DTYPE = np.dtype(np.uint8)
    MULTIPLE = _GROUP

    @classmethod
    def read(cls, config: ConfigJson) -> "NVFP4Packed | None":
        groups = read_weights(config, "nvfp4-pack-quantized", _WEIGHTS, ignored=("input_activations",))
        return None if groups is None else cls()

    def write(self, modules: list[str]) -> dict[str, Any]:
        raise NotImplementedError(f"{self.NAME} is not written")

    @property
    def sizes(self) -> tuple[int, int]:
        return 1, _GROUP

    def tensor(self, tensor: Tensor, scale: str | None = None, others: Any = ()) -> FewBitTensor:
        if tensor.layout not in self.LAYOUTS:  # one factor of all experts, or one of each: releases differ
            raise UserError(f"{tensor.name}: {self.NAME} of all experts in one tensor is not read; {ADVICE}")
        return super().tensor(tensor, scale, others)

    def scales(self, stored: np.ndarray, factor: np.ndarray) -> np.ndarray:
        return stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / factor


@dataclasses.dataclass(frozen=True)
class NVFP4ModelOpt(NVFP4Packed):
    """NVFP4 of ModelOpt, which states it in a file of its own too."""

    NAME = "nvfp4 of ModelOpt"
    VALUES = ""
    FACTOR = "_scale_2"

    @classmethod
    def read(cls, config: ConfigJson) -> "NVFP4ModelOpt | None":
        if config.get("quant_method") != "modelopt" or config.get("quant_algo") != "NVFP4":
            return None
        # Modules in numbers, products and caches, which are computed without few bits; groups repeat the algorithm.
        for key in ("producer", "config_groups", "exclude_modules", "kv_cache_scheme", "kv_cache_quant_algo"):
            config.get(key)
        config.refuse_others({"quant_algo": ("NVFP4",), "group_size": (_GROUP,)})
        return cls()

    def scales(self, stored: np.ndarray, factor: np.ndarray) -> np.ndarray:
        return stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
