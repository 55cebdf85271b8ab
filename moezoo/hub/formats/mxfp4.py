"""MXFP4, as gpt-oss is released (`quant_method: mxfp4`): 32 numbers share a power of two.

| tensor | what it has |
|---|---|
| `X_blocks` | two FP4 numbers in a byte, [experts, outputs, inputs / 32, 16] |
| `X_scales` | E8M0 codes [experts, outputs, inputs / 32] |
"""

import dataclasses
from typing import Any

import numpy as np

from moezoo.hub.formats.base import Format
from moezoo.models.config_json import ConfigJson
from moezoo.nn.mxfp4 import GROUP, MXFP4


@dataclasses.dataclass(frozen=True)
class MXFP4Groups(Format):
    """MXFP4."""

    NAME = "mxfp4"
    CONTAINER = MXFP4
    VALUES = "_blocks"
    SCALES = ("_scales",)
    KIND = "U8"
    PER_ITEM = 2
    SCALE_KINDS = ("U8", "F8_E8M0")
    SCALE_DTYPE = np.dtype(np.uint8)
    LAYOUTS = ("alternating",)
    MULTIPLE = GROUP
    ROUNDS = True

    @classmethod
    def read(cls, config: ConfigJson) -> "MXFP4Groups | None":
        if config.get("quant_method") != "mxfp4":
            return None
        config.refuse_others({})
        return cls()

    def write(self, modules: list[str]) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": modules}

    @property
    def sizes(self) -> tuple[int, int]:
        return 1, GROUP

    def row(self, items: int) -> tuple[int, ...]:
        return items // 16, 16
