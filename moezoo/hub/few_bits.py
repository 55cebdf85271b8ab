"""Weights of few bits in Hugging Face folders: what config.json states of them, and which tensors hold one of ours.

A weight `X.weight`, or `X` where a tensor has all experts, has other tensors in its place or beside it:

| format | numbers | scales | others |
|---|---|---|---|
| `fp8` | `X.weight` | `X.weight_scale_inv`, `X.scale` or `X.qscale_weight` | |
| `mxfp4` | `X_blocks` | `X_scales` | |
| `int4` | `X.weight_packed` | `X.weight_scale` | `X.weight_shape` |

Which weights have few bits follows from these tensors. config.json names the format and the size of blocks.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.regions import Box
from moezoo.hub.tensors import Tensor
from moezoo.hub.weight_files import StoredTensor
from moezoo.models.config_json import ConfigJson
from moezoo.nn.block_fp8 import BlockFP8, FP8Encoding
from moezoo.nn.few_bits import Encoding, FewBits
from moezoo.nn.int4 import GROUP, Int4Encoding, PackedInt4
from moezoo.nn.mxfp4 import MXFP4, MXFP4Encoding
from moezoo.parallel.axes import Role
from moezoo.typed import show

CONFIG = "quantization_config"
_ADVICE = "load another version of the model, or convert this one to bfloat16 first"
_READ = "moezoo reads fp8, mxfp4, and compressed-tensors with pack-quantized integers of 4 bits"
# Tensors of FP8 folders that scale activations. Products are computed in the dtype of `execution`, without them.
ACTIVATION_SCALES = (".activation_scale", ".input_scale", ".qscale_act")


class Quantization(NamedTuple):
    """What config.json states of weights of few bits.

    Attributes:
        format: The name of a format; None where it states nothing.
        block: The size of its blocks along outputs and inputs; None for one block per matrix.
    """

    format: str | None = None
    block: tuple[int, int] | None = None


def read_quantization(mapping: Mapping[str, Any]) -> Quantization:
    """Return what a table of config.json states. Raises `UserError` for a scheme that is not read."""
    config = ConfigJson(mapping).table(CONFIG)
    if config is None:
        return Quantization()
    method = config.read("quant_method", str)
    for key in ("modules_to_not_convert", "ignore", "dequantize", "version"):
        config.get(key)
    if method == "fp8":
        for key in ("activation_scheme", "scale_fmt", "ignored_layers", "is_checkpoint_fp8_serialized"):
            config.get(key)
        block = config.read("weight_block_size", tuple[int, ...] | None, (128, 128))
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise UserError(
                f"config.json: {CONFIG}.weight_block_size={show(mapping[CONFIG]['weight_block_size'])[:80]}: expected "
                "two sizes of at least 1, of outputs and inputs, or null"
            )
        found, only = Quantization("fp8", block and (block[0], block[1])), {"fmt": ("e4m3", "float8_e4m3fn")}
    elif method == "mxfp4":
        found, only = Quantization("mxfp4", (1, 32)), {}
    elif method == "compressed-tensors":
        found, only = Quantization("int4", (1, _read_group(config, mapping[CONFIG]))), {}
    else:
        raise UserError(f"config.json: {CONFIG}.quant_method={show(method)[:80]}: {_READ}; {_ADVICE}")
    config.refuse_others(only)
    return found


def _read_group(config: ConfigJson, mapping: Mapping[str, Any]) -> int:
    """Return the size of groups in a table of compressed-tensors. Raises `UserError` for other schemes."""

    def refuse(what: str) -> UserError:
        return UserError(f"config.json: {CONFIG}{what}: {_READ}; {_ADVICE}")

    if (kind := config.read("format", str)) != "pack-quantized":
        raise refuse(f".format={show(kind)[:80]}")
    for key in ("quantization_status", "global_compression_ratio"):
        config.get(key)
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key):
            raise refuse(f".{key}={show(mapping[key])[:80]}")
    groups = config.get("config_groups")
    sizes = set()
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        where, weights = f".config_groups.{show(name)[:80]}", group.get("weights") if isinstance(group, Mapping) else 0
        if not isinstance(weights, Mapping):
            raise refuse(f"{where} has no weights")
        fixed = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
        for key, value in fixed.items():
            if weights.get(key) != value:
                raise refuse(f"{where}.weights.{key}={show(weights.get(key))[:80]}")
        for key in ("input_activations", "output_activations"):
            if group.get(key):
                raise refuse(f"{where}.{key}={show(group[key])[:80]}")
        sizes.add(ConfigJson(weights, f"{CONFIG}{where}.weights.").read("group_size", int, GROUP))
    if len(sizes) != 1:
        raise refuse(f".config_groups has {len(sizes)} sizes of groups")
    return sizes.pop()


class Format(NamedTuple):
    """A format of few bits.

    Attributes:
        name: Its name in `Quantization`.
        container: The container that keeps it.
        encoding: Its encoding of one matrix: `encoding(name, shape, scale, block)`.
        values: What the name of the numbers has behind that of the weight.
        scales: The same for the scales, in all spellings; one with a `.` replaces the ending `.weight`.
        others: The same for tensors that change nothing.
        kind: The dtype of the numbers in safetensors' words.
        per_item: The numbers in one stored item.
        scale_kinds: The dtypes that scales may have, in safetensors' words; the most usual first, of codes too.
        scale_dtype: The dtype that containers usually have for them.
        block: The usual size of blocks along outputs and inputs.
        layouts: How tensors hold weights (`moezoo.models.names`) that folders have in this format.
        multiple: What divides their number of inputs.
        rounds: Whether arrays are rounded to the format.
        row: The shape of a row of `n` stored items.
    """

    name: str
    container: type[FewBits]
    encoding: Callable[[str, tuple[int, int], np.ndarray, tuple[int, int]], Encoding]
    values: str
    scales: tuple[str, ...]
    kind: str
    per_item: int
    scale_kinds: tuple[str, ...]
    scale_dtype: np.dtype
    block: tuple[int, int]
    layouts: tuple[str, ...]
    multiple: int
    rounds: bool = False
    others: tuple[str, ...] = ()
    row: Callable[[int], tuple[int, ...]] = lambda n: (n,)

    def are_finite(self, items: np.ndarray) -> bool:
        """Return whether stored numbers are finite: e4m3 has a code of NaN, the others have none."""
        return self.kind != "F8_E4M3" or not ((items & 127) == 127).any()

    def has(self, tensor: Tensor) -> bool:
        """Return whether folders have such a tensor in this format."""
        if tensor.axes.role is not Role.WEIGHT or tensor.layout not in self.layouts:
            return False
        return self._encoded(tensor).shape[-1] % self.multiple == 0

    @staticmethod
    def _encoded(tensor: Tensor) -> Tensor:
        """Return a tensor with outputs before inputs, as all formats have it."""
        return dataclasses.replace(tensor, layout="alternating_outputs") if tensor.layout == "alternating" else tensor

    def tensor(
        self, tensor: Tensor, block: tuple[int, int] | None, scale: str | None = None, others: Iterable[str] = ()
    ) -> "FewBitTensor":
        """Return a weight in this format. `block`: None for the whole matrix. `scale`: by default the usual name."""
        values, spellings, _ = self.names(tensor.name)
        encoded = self._encoded(tensor)
        *_, rows, columns = encoded.shape
        scale, size = scale or spellings[0], block or (rows, columns)
        return FewBitTensor(encoded, self, values, scale, tuple(others), size, block is not None)

    def names(self, name: str) -> tuple[str, list[str], list[str]]:
        """Return how the tensors of a weight are named: numbers, scales by all their spellings, and others."""
        stem = name.removesuffix(".weight")
        spellings = [stem + end if end.startswith(".") else name + end for end in self.scales]
        return name + self.values, spellings, [name + end for end in self.others]


FORMATS = (
    Format(
        name="fp8",
        container=BlockFP8,
        encoding=lambda name, shape, scale, block: FP8Encoding(name, shape, scale, block),
        values="",
        scales=("_scale_inv", ".scale", ".qscale_weight"),
        kind="F8_E4M3",
        per_item=1,
        scale_kinds=("F32", "BF16", "F8_E8M0", "U8"),
        scale_dtype=np.dtype(np.float32),
        block=(128, 128),
        layouts=("plain", "of_experts"),
        multiple=1,
        rounds=True,
    ),
    Format(
        name="mxfp4",
        container=MXFP4,
        encoding=lambda name, shape, scale, block: MXFP4Encoding(name, shape, scale),
        values="_blocks",
        scales=("_scales",),
        kind="U8",
        per_item=2,
        scale_kinds=("U8", "F8_E8M0"),
        scale_dtype=np.dtype(np.uint8),
        block=(1, 32),
        layouts=("alternating",),
        multiple=32,
        rounds=True,
        row=lambda n: (n // 16, 16),
    ),
    Format(
        name="int4",
        container=PackedInt4,
        encoding=lambda name, shape, scale, block: Int4Encoding(name, shape, scale, block[1]),
        values="_packed",
        scales=("_scale",),
        others=("_shape",),
        kind="I32",
        per_item=8,
        scale_kinds=("BF16", "F16", "F32"),
        scale_dtype=np.dtype(ml_dtypes.bfloat16),
        block=(1, GROUP),
        layouts=("plain",),
        multiple=8,
    ),
)
_ONE_BYTE = ("F8_E4M3", "F8_E5M2", "U8", "I8")
_REFUSED = {
    "_zero_point": "integers with a zero point",
    "_global_scale": "numbers of NVFP4",
    "_scale_2": "numbers of NVFP4",
    "_g_idx": "integers in another order",
}


@dataclasses.dataclass(frozen=True)
class FewBitTensor:
    """How a folder holds one weight in few bits.

    Attributes:
        tensor: The weight as a tensor [experts, outputs, inputs] or [outputs, inputs].
        format: The format.
        values: The name of the tensor with the numbers.
        scale: The name of the tensor with the scales.
        others: Those of tensors that change nothing.
        block: The size of a block along outputs and inputs.
        has_blocks: Whether the scales are an array, and not one number.
    """

    tensor: Tensor
    format: Format
    values: str
    scale: str
    others: tuple[str, ...]
    block: tuple[int, int]
    has_blocks: bool

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
        return (*lead, *self.format.row(columns // self.format.per_item))

    @property
    def kind(self) -> tuple[str, tuple[int, int] | None]:
        """What config.json states of it: the format and the size of blocks, None for one scale per matrix."""
        return self.format.name, self.block if self.has_blocks else None

    def encoding(self, scale: np.ndarray) -> Encoding:
        """Return the encoding of one matrix, given its scales."""
        return self.format.encoding(self.values, self.matrix, scale, self.block)

    @property
    def kept_values(self) -> "ValuesTensor":
        """The tensor of numbers as bytes, whose parts are the `values` of containers."""
        last, per = self.tensor.split[1] - 1, self.format.container.PER_BYTE
        shapes = tuple((*shape[:last], shape[last] // per, *shape[last + 1 :]) for shape in self.tensor.shapes)
        parts = tuple((f"{path}.values", index) for path, index in self.tensor.parts)
        t = self.tensor
        return ValuesTensor(self.values, parts, t.axes, shapes, t.layout, self)

    @property
    def kept_scale(self) -> "ScaleTensor":
        """The tensor of scales, whose parts are the `scale` of containers."""
        parts = tuple((f"{path}.scale", index) for path, index in self.tensor.parts)
        t = self.tensor
        return ScaleTensor(self.scale, parts, t.axes, t.shapes, t.layout, self)

    def part_blocks(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the block of each output [*outputs] and of each input [*inputs] of a part."""
        t, (first, cut) = self.tensor, self.tensor.split
        inputs, outputs, (rows, columns) = t.shapes[part][first:cut], t.shapes[part][cut:], self.matrix
        if t.layout == "alternating_outputs":
            of_rows = np.arange(rows).reshape(*outputs, len(t.parts))[..., part]
        else:
            before = sum(shape[-1] for shape in t.shapes[:part])
            of_rows = np.arange(rows).reshape(*outputs[:-1], -1)[..., before : before + outputs[-1]]
        return of_rows // self.block[0], np.arange(columns).reshape(inputs) // self.block[1]

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
class ValuesTensor(Tensor):
    """The numbers of a weight of few bits, as bytes."""

    few: Any = None


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
                    f"{self.name}: numbers of one block have different scales, so the format {self.few.format.name} "
                    "cannot hold them; save moezoo.nn.containers.as_arrays(model), which has arrays instead"
                )
        return grid


def format_argument(name: str | None) -> Format | None:
    """Return the format that the user asked to round to. Raises `UserError` for another name."""
    forms = {form.name: form for form in FORMATS if form.rounds}
    if name is not None and name not in forms:
        raise UserError(f"format={show(name)[:80]}: expected one of {', '.join(forms)}")
    return None if name is None else forms[name]


def find_few_bits(
    tensor: Tensor, tensors: Mapping[str, StoredTensor], quantization: Quantization
) -> FewBitTensor | None:
    """Return how a folder of these tensors holds a weight in few bits; None where it has the weight, or nothing of it.

    Raises `UserError` for a part without the other, and for a format that config.json does not name.
    """
    name = tensor.name
    kind = tensors[name].dtype if name in tensors else None
    for end, what in _REFUSED.items():
        if name + end in tensors:
            raise UserError(f"{name + end}: {what} are not read; {_READ}; {_ADVICE}")
    for form in FORMATS:
        values, spellings, others = form.names(name)
        scales = [spelling for spelling in spellings if spelling in tensors]
        if not scales and (values not in tensors or (form.values == "" and kind not in _ONE_BYTE)):
            continue
        if len(scales) != 1:
            have = " and ".join(scales) or "no scales"
            raise UserError(f"{values} has {have} beside it, expected one of {', '.join(spellings)}; {_ADVICE}")
        if values not in tensors:
            raise UserError(f"{scales[0]}: {values} is missing beside it; download the folder again")
        if tensor.axes.role is not Role.WEIGHT:
            raise UserError(f"{values} with {scales[0]}: only weights of products may have few bits; {_ADVICE}")
        if quantization.format != form.name:
            stated = f"names {quantization.format}" if quantization.format else f"has no {CONFIG}"
            raise UserError(
                f"{values} with {scales[0]} is in the format {form.name}, but config.json {stated}; the files belong "
                "to different models"
            )
        found = (other for other in others if other in tensors)
        return form.tensor(tensor, quantization.block, scales[0], found)
    return None


def write_quantization(form: Format, few: Iterable[FewBitTensor], numbers: Iterable[str]) -> dict[str, Any]:
    """Return the table of config.json for weights of one format, beside modules of these names in numbers."""
    some = list(few)
    others = sorted(numbers)
    if form.name == "fp8":
        block = list(some[0].block) if any(one.has_blocks for one in some) else None
        table = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
        return table | {"modules_to_not_convert": others}
    if form.name == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": others}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": some[0].block[1]}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": others,
    }
