"""Weights of few bits in Hugging Face folders: which formats there are, and which tensors hold one of our weights.

Which weights have few bits follows from tensors. config.json states the format, and what differs between folders of it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moezoo.errors import UserError
from moezoo.host.files import read_json
from moezoo.hub.formats.base import ADVICE, CONFIG, READ, FewBitTensor, Format, refuse
from moezoo.hub.formats.compressed_tensors import METHOD
from moezoo.hub.formats.fp8 import FP8Blocks
from moezoo.hub.formats.fp8_channels import FP8Channels
from moezoo.hub.formats.int4 import Int4Groups
from moezoo.hub.formats.mxfp4 import MXFP4Groups
from moezoo.hub.formats.nvfp4 import NVFP4ModelOpt, NVFP4Packed
from moezoo.hub.tensors import Tensor
from moezoo.hub.weight_files import StoredTensor
from moezoo.models.config_json import ConfigJson
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.axes import Role
from moezoo.typed import show

FORMATS: tuple[type[Format], ...] = (
    FP8Channels,
    FP8Blocks,
    MXFP4Groups,
    Int4Groups,
    NVFP4Packed,
    NVFP4ModelOpt,
)
BY_NAME = {form.NAME: form for form in FORMATS if not form.FACTOR}
_USUAL = tuple(form() for form in BY_NAME.values())
# Tensors that scale activations. Products are computed in the dtype of `execution`, without them.
ACTIVATION_SCALES = (".activation_scale", ".input_scale", ".input_global_scale", ".qscale_act")
# The same of keys and values in caches.
CACHE_SCALES = (".k_proj.k_scale", ".v_proj.v_scale")
# Where ModelOpt states the format, in this table; newer versions copy it into config.json.
MODELOPT_FILE, _TABLE = "hf_quant_config.json", "quantization"
# The key of a table that names the scheme of one of these methods.
_SCHEMES = {METHOD: "format", "modelopt": "quant_algo"}
_ONE_BYTE = ("F8_E4M3", "F8_E5M2", "U8", "I8")
_REFUSED = {
    "_zero_point": "integers with a zero point",
    "_g_idx": "integers in another order",
}


def read_quantization(mapping: Mapping[str, Any]) -> Format | None:
    """Return the format that a table of config.json states; None for none. Raises `UserError` for one not read."""
    config = ConfigJson(mapping).table(CONFIG)
    if config is None:
        return None
    method = config.read("quant_method", str)
    for key in ("modules_to_not_convert", "ignore", "dequantize", "version"):
        config.get(key)
    for form in FORMATS:
        if (found := form.read(config)) is not None:
            return found
    key = _SCHEMES.get(method, "quant_method")
    raise refuse(f".{key}={show(config.get(key))[:80]}")


def read_modelopt_file(folder: Path) -> Format | None:
    """Return the format that ModelOpt's file beside config.json states; None where there is no file, or no format.

    Raises `UserError` for a format that is not read, and for a file that is damaged.
    """
    if not (folder / MODELOPT_FILE).exists():
        return None
    table = read_json(folder / MODELOPT_FILE).get(_TABLE)
    if not isinstance(table, Mapping):
        raise UserError(f"{folder / MODELOPT_FILE} has no table {_TABLE}; download it again")
    if table.get("quant_algo") is None:
        return None
    try:
        return read_quantization({CONFIG: {**table, "quant_method": "modelopt"}})
    except UserError as error:
        words = str(error).replace(f"config.json: {CONFIG}", f"{folder / MODELOPT_FILE}: {_TABLE}")
        raise UserError(words) from error


def format_argument(name: str | None) -> Format | None:
    """Return the format that the user asked to round to. Raises `UserError` for another name."""
    forms = {form.NAME: form for form in FORMATS if form.ROUNDS}
    if name is not None and name not in forms:
        raise UserError(f"format={show(name)[:80]}: expected one of {', '.join(forms)}")
    return None if name is None else forms[name]()


def stating(container: FewBits, matrix: tuple[int, int]) -> Iterator[Format]:
    """Yield the ways in which folders have a container of a matrix [outputs, inputs], the most usual first."""
    is_code = container.scale.dtype == np.uint8
    for form in FORMATS:
        if form.CONTAINER is type(container) and (not is_code or "U8" in form.SCALE_KINDS):
            yield from form.stating(container.block, matrix)


def find_few_bits(tensor: Tensor, tensors: Mapping[str, StoredTensor], stated: Format | None) -> FewBitTensor | None:
    """Return how a folder of these tensors holds a weight in few bits; None where it has the weight, or nothing of it.

    Raises `UserError` for a part without the other, and for a format that is not the one that config.json has `stated`.
    """
    name = tensor.name
    for end, what in _REFUSED.items():
        if name + end in tensors:
            raise UserError(f"{name + end}: {what} are not read; {READ}; {ADVICE}")
    names = f"names {stated.NAME}" if stated else f"has no {CONFIG}"
    for form in FORMATS:
        if form.FACTOR and name + form.FACTOR in tensors and type(stated) is not form:
            raise UserError(
                f"{name + form.FACTOR} is in the format {form.NAME}, but config.json {names}; the files belong to "
                "different models"
            )

    def is_part(form: Format) -> bool:
        values, scales, _ = form.names(name)
        return values not in tensors or tensors.keys().isdisjoint(scales)

    # Formats may share one of their names, so those of which all is there are looked at first.
    others = sorted((form for form in _USUAL if type(form) is not type(stated)), key=is_part)
    for form in others if stated is None else (stated, *others):
        values, spellings, shapes = form.names(name)
        scales = [spelling for spelling in spellings if spelling in tensors]
        is_numbers = form.VALUES == "" and values in tensors and tensors[values].dtype not in _ONE_BYTE
        if not scales and (values not in tensors or is_numbers):
            continue
        if len(scales) != 1:
            have = " and ".join(scales) or "no scales"
            raise UserError(f"{values} has {have} beside it, expected one of {', '.join(spellings)}; {ADVICE}")
        if values not in tensors:
            raise UserError(f"{scales[0]}: {values} is missing beside it; download the folder again")
        if tensor.axes.role is not Role.WEIGHT:
            raise UserError(f"{values} with {scales[0]}: only weights of products may have few bits; {ADVICE}")
        if form is not stated:
            raise UserError(
                f"{values} with {scales[0]} is in the format {form.NAME}, but config.json {names}; the files belong "
                "to different models"
            )
        if form.FACTOR and name + form.FACTOR not in tensors:
            raise UserError(f"{values}: {name + form.FACTOR} is missing beside it; download the folder again")
        return form.tensor(tensor, scales[0], (shape for shape in shapes if shape in tensors))
    return None
