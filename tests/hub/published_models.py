"""Tries a published config.json, or the index of its tensors, against transformers."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from tries import Try, attempt, read_text

from moezoo.errors import UserError
from moezoo.hub.opening import Described, read_config
from moezoo.hub.other_names import Nesting, find_nesting
from moezoo.hub.tensors import tensors
from moezoo.hub.upcycling import Upcycle
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import count_parameters, parameter_table

_AS = {"kimi_k2": "deepseek_v3"}  # types that transformers lacks, and equal ones
_DENSE = Upcycle(experts=1, per_token=1)


def try_config(path: Path, work: Path) -> Try:
    """Yield the model type, whether moezoo reads it, and how many parameters both count."""
    yield "model_type", str(json.loads(read_text(path)).get("model_type"))
    found, fault = attempt(_describe, path, work)
    if found is None:
        yield from (("read", "refused"), ("", fault.replace(f"{work}/", "")))
        return
    config, upcycle = found.config, found.upcycle
    yield "read", "upcycled" if upcycle.experts else "yes"
    shapes = Blueprint(config, "bfloat16").shapes
    total, active = count_parameters(shapes, config.experts_per_token)
    if upcycle.experts:  # the dense model has no routers
        total -= sum(torch.Size(shape).numel() for name, _, shape in parameter_table(shapes) if ".router." in name)
        active = total
    yield from (("parameters", f"{total:,}"), ("active", f"{active:,}"))
    theirs, fault = attempt(_count_theirs, work)
    yield "transformers", f"{theirs:,}" if theirs else "refused"
    yield "same", "" if theirs is None else "=" if theirs == total else f"{total - theirs:+,}"
    if fault:
        yield "", f"transformers: {fault}"


def _describe(path: Path, work: Path) -> Described:
    """Return what a config.json describes; a dense model with one expert."""
    (work / "config.json").write_text(read_text(path))
    try:
        return read_config(work)
    except UserError as error:
        if "a dense model" not in str(error):
            raise
        return read_config(work, _DENSE)


def _count_theirs(work: Path) -> int:
    """Return the number of parameters of transformers' model that moezoo counts too.

    Choice biases are buffers in moezoo, which has no index for sparse attention.
    """
    mapping: dict[str, Any] = json.loads((work / "config.json").read_text())
    mapping = mapping.get("text_config", mapping)
    for key in ("quantization_config", "auto_map"):
        mapping.pop(key, None)
    mapping["model_type"] = _AS.get(mapping["model_type"], mapping["model_type"])
    (work / "config.json").write_text(json.dumps(mapping))
    config = transformers.AutoConfig.from_pretrained(work, trust_remote_code=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    apart = re.compile(r"score_correction_bias$|\.indexer\.")
    return sum(each.numel() for name, each in model.named_parameters() if not apart.search(name))


def try_index(path: Path, work: Path) -> Try:
    """Yield how many tensors there are, and which names are not those of the model.

    The config.json is beside the index, or in the folder `configs` under the same name.
    """
    index = json.loads(read_text(path))
    names = set(index["weight_map"])
    yield from (("tensors", str(len(names))), ("total_size", str((index.get("metadata") or {}).get("total_size"))))
    stem = path.name.split(".json")[0].removesuffix(".safetensors.index")
    choices = [path.with_name("config.json"), *path.parents[1].glob(f"configs/{stem}.json*")]
    config = next((each for each in choices if each.exists()), None)
    if config is None:
        yield "names", "no config"
        return
    found = _describe(config, work)
    nesting = find_nesting(found.mapping, names, work) if found.is_nested else Nesting()
    plan = tensors(Blueprint(found.config, "bfloat16").shapes, found.hub)
    needed = [each for each in plan if not found.upcycle.draws(each.parts[0][0])]
    expected = {nesting.to_folder(each.name) for each in needed}
    # Weights of few bits have other names that begin with theirs, such as those of scales.
    stems = {name.removesuffix(".weight"): name for name in expected}
    begins = {name: _longest(name, stems) for name in names - expected}
    left = {name for name, stem in begins.items() if stem is None}
    unused = nesting.find_unused(found.hub, left, expected)
    missing = sorted(expected - names - {stems[stem] for stem in begins.values() if stem})
    unknown = sorted(left - set(unused))
    yield "names", f"{len(missing)} missing, {len(unknown)} unknown" if missing or unknown else "="
    yield "unused", str(len(unused))
    yield from [("", f"missing: {', '.join(missing[:3])}")] * bool(missing)
    yield from [("", f"unknown: {', '.join(unknown[:3])}")] * bool(unknown)


def _longest(name: str, stems: dict[str, str]) -> str | None:
    """Return the longest of `stems` that a name begins with, before a dot or an underscore; None if there is none."""
    cuts = [name[: found.start()] for found in re.finditer(r"[._]", name)]
    return next((cut for cut in reversed(cuts) if cut in stems), None)
