"""FP8 with a scale per block, as DeepSeek-V3, Kimi K2, Qwen3 and others are released (`quant_method: fp8`).

| tensor | what it has |
|---|---|
| `X.weight` | e4m3 numbers [outputs, inputs] |
| `X.weight_scale_inv`, `X.scale` or `X.qscale_weight` | scales of blocks, or one where `weight_block_size` is null |
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from moezoo.errors import UserError
from moezoo.hub.formats.base import CONFIG, FewBitTensor, Format
from moezoo.hub.tensors import list_names
from moezoo.models.config_json import ConfigJson
from moezoo.nn.block_fp8 import BlockFP8
from moezoo.typed import show


@dataclasses.dataclass(frozen=True)
class FP8Blocks(Format):
    """FP8 in blocks. `block` is their size along outputs and inputs; None for one block per matrix."""

    block: tuple[int, int] | None = (128, 128)

    NAME = "fp8"
    CONTAINER = BlockFP8
    SCALES = ("_scale_inv", ".scale", ".qscale_weight")
    KIND = "F8_E4M3"
    SCALE_KINDS = ("F32", "BF16", "F8_E8M0", "U8")
    SCALE_DTYPE = np.dtype(np.float32)
    LAYOUTS = ("plain", "flat", "of_experts")
    ROUNDS = True

    @classmethod
    def read(cls, config: ConfigJson) -> "FP8Blocks | None":
        if config.get("quant_method") != "fp8":
            return None
        for key in ("activation_scheme", "scale_fmt", "ignored_layers", "is_checkpoint_fp8_serialized"):
            config.get(key)
        block = config.read("weight_block_size", tuple[int, ...] | None, (128, 128))
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise UserError(
                f"config.json: {CONFIG}.weight_block_size={show(config.get('weight_block_size'))[:80]}: expected two "
                "sizes of at least 1, of outputs and inputs, or null"
            )
        config.refuse_others({"fmt": ("e4m3", "float8_e4m3fn")})
        return cls(block and (block[0], block[1]))

    def write(self, modules: list[str]) -> dict[str, Any]:
        block = None if self.block is None else list(self.block)
        table = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
        return table | {"modules_to_not_convert": modules}

    @classmethod
    def stating(cls, block: tuple[int, int], matrix: tuple[int, int]) -> tuple[Format, ...]:
        return cls(block), *((cls(None),) if block == matrix else ())

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return self.block or (None, None)

    @property
    def has_blocks(self) -> bool:
        return self.block is not None

    def unread(self, weights: Collection[FewBitTensor]) -> Iterator[str]:
        joined = [one.values for one in weights if one.lead]
        cut = [one.values for one in weights if any(n % size for n, size in zip(one.matrix, one.block, strict=True))]
        for names, why in ((joined, "have all experts of a layer"), (cut, "have blocks that are not whole")):
            if names:
                yield f"transformers 5.23 and 5.24 do not read FP8 weights that {why}: {list_names(names)}"
