"""FP8 with a scale per output, as GLM-4.5-FP8 is released (compressed-tensors `float-quantized`, strategy `channel`).

| tensor | what it has |
|---|---|
| `X.weight` | e4m3 numbers [outputs, inputs] |
| `X.weight_scale` | scales [outputs, 1] |

compressed-tensors multiplies in the dtype of the scales, moezoo in float32, and each rounds the product once. So moezoo
has its bits in every dtype where scales are float32. Where they are bfloat16, it has them in bfloat16; in float32
compressed-tensors still has products rounded to bfloat16, and moezoo has them as they are.
"""

import dataclasses
from typing import Any

import numpy as np

from moezoo.hub.formats.base import Format, refuse
from moezoo.hub.formats.compressed_tensors import read_weights, write_table
from moezoo.models.config_json import ConfigJson
from moezoo.nn.block_fp8 import BlockFP8

_KIND = "float-quantized"
_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_WEIGHTS |= {"group_size": None, "block_structure": None}
# How scales were found. They are read as they are.
_WITHOUT_EFFECT = ("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclasses.dataclass(frozen=True)
class FP8Channels(Format):
    """FP8 in which all inputs of an output share a scale."""

    NAME = "fp8_channels"
    CONTAINER = BlockFP8
    SCALES = ("_scale",)
    KIND = "F8_E4M3"
    SCALE_KINDS = ("F32", "BF16")
    SCALE_DTYPE = np.dtype(np.float32)

    @classmethod
    def read(cls, config: ConfigJson) -> "FP8Channels | None":
        # Weights are widened, and products computed without rounded activations.
        tables = read_weights(config, _KIND, _WEIGHTS, ignored=("input_activations", "output_activations"))
        if tables is None:
            return None
        if not tables:
            raise refuse(".config_groups has no group")
        for weights in tables:
            weights.refuse_others(without_effect=_WITHOUT_EFFECT)
        return cls()

    def write(self, modules: list[str]) -> dict[str, Any]:
        return write_table(_KIND, _WEIGHTS, modules)

    @property
    def sizes(self) -> tuple[int, None]:
        return 1, None
