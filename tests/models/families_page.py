"""`docs/families.md`, made from the registry of families and from the folder `conf/model`.

`python tests/models/families_page.py` rewrites the file.
"""

import importlib
import textwrap
from collections.abc import Iterable
from pathlib import Path

from moezoo.config.overrides import CONF, PACKAGE, read_yaml
from moezoo.hub.other_names import NESTED
from moezoo.models import FAMILIES, Family
from moezoo.models.config_json import WITHOUT_EFFECT
from moezoo.models.hub import ModelType

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
_HEAD = """
# Which models are there, and how do they differ?

A **family** is a file of `models/`: a configuration, layers, and the names of a Hugging Face folder. `model=NAME` takes
a laptop size, which trains in minutes on eight virtual CPU devices, or a released size. A Hugging Face folder is read
by its `model_type` in `config.json`; some model types have no size under `model=`. The class of a family's
configuration describes its settings, such as `moezoo.models.GroupedConfig`.

Of a model for images ({nested}) the text model is read, which is in `text_config` of its `config.json`. Active
parameters include the whole embedding, of which a token reads one row.
`python tests/models/families_page.py` makes this page.
"""
_TRIED = """
## Which published files were tried

`python tests/hub/published.py FOLDER` reads every config.json below a folder, and counts parameters with transformers
too. The published files of the models in the middle were read so, with the same number of parameters in both
(2026-11-27, transformers 5.24, which counts Kimi K2 as the equal `deepseek_v3`, and without the index of sparse
attention). The models on the right follow the definitions of their papers and of transformers; no published file of
theirs was tried.

| `model_type` | config tried | by definition only |
|---|---|---|
"""
# Model type -> the models whose published config.json was tried, and those that were not.
_MODELS = {
    "deepseek_v2": ("DeepSeek-V2.5, V2-Lite", "DeepSeek-V2"),
    "deepseek_v3": ("DeepSeek-V3, R1", "DeepSeek-V3.1, Moonlight"),
    "kimi_k2": ("Kimi K2", "Kimi K2 Thinking"),
    "kimi_k25": ("Kimi K2.5", "later ones"),
    "glm4_moe_lite": ("", "GLM-4.7-Flash"),
    "mistral4": ("", "Mistral Small 4"),
    "mistral3": ("", "Mistral Small 4"),
    "deepseek_v32": ("DeepSeek-V3.2", ""),
    "glm_moe_dsa": ("GLM-5, 5.1 and 5.2, also in FP8", ""),
    "mixtral": ("Mixtral 8x7B, 8x22B", ""),
    "mistral": ("", "Mistral 7B, Nemo"),
    "llama": ("Llama 3.1 8B, 70B and 405B", "Llama 2, 3, 3.2 and 3.3, SmolLM2"),
    "olmoe": ("", "OLMoE"),
    "qwen3_moe": ("Qwen3-30B-A3B and 235B-A22B, also in FP8, Qwen3-Coder-480B-A35B", ""),
    "qwen3_vl_moe": ("Qwen3-VL-235B-A22B", "Qwen3-VL-30B-A3B"),
    "qwen3_vl_moe_text": ("the same", ""),
    "qwen3_omni_moe": ("", "Qwen3-Omni-30B-A3B"),
    "qwen3_omni_moe_text": ("", "the same"),
    "qwen2_moe": ("", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
    "sarvam_moe": ("", "Sarvam-30B"),
    "glm4_moe": ("GLM-4.5", "GLM-4.5-Air, 4.6 and 4.7"),
    "minimax_m2": ("MiniMax-M2.5, M2.7", "MiniMax-M2"),
    "hy_v3": ("", "Hunyuan 3"),
    "dots1": ("", "dots.llm1"),
    "solar_open": ("", "Solar Open 100B"),
    "ernie4_5_moe": ("", "ERNIE 4.5"),
    "qwen3": ("Qwen3-0.6B, 1.7B, 8B and 32B", "others"),
    "gpt_oss": ("gpt-oss-20b, 120b", ""),
    "qwen3_next": ("", "Qwen3-Next-80B-A3B"),
    "qwen3_5_moe": ("Qwen3.5-122B-A10B", "Qwen3.5-35B-A3B and 397B-A17B, Qwen3.6-35B-A3B"),
    "qwen3_5_moe_text": ("Qwen3.5-122B-A10B", "the same"),
    "kimi_linear": ("", "Kimi-Linear-48B-A3B"),
    "nemotron_h": ("", "Nemotron 3 Nano, Super and Ultra, Nemotron 3.5 Lightning"),
    "llama4": ("", "Llama 4 Scout, Maverick"),
    "llama4_text": ("", "the same"),
    "lfm2_moe": ("", "LFM2-8B-A1B"),
    "gemma4": ("Gemma 4 26B-A4B, also in NVFP4", ""),
    "gemma4_text": ("the same", ""),
    "mimo_v2_flash": ("MiMo-V2-Flash", ""),
    "exaone_moe": ("", "K-EXAONE-236B-A23B"),
    "afmoe": ("", "Trinity Mini and Nano"),
}
_LISTED = """
## What is ignored

### Tensors

Tensors that no parameter has are refused by name, except these, which `moezoo.from_pretrained` names in a warning: the
layers of multi-token prediction, which follow the last layer; the index of sparse attention; `rotary_emb.inv_freq`, if
it is [what config.json says](folders.md#tensors-named-otherwise); and in a folder of a model for images, everything
outside the text model. `moezoo.save_pretrained(model, FOLDER, like=SOURCE)` carries them.

### Keys of config.json

A key that moezoo does not know is refused by name, because it may change what the model computes.
These keys are known to change nothing that moezoo computes. Every model type ignores
"""


def render() -> str:
    """Return the page."""
    lines = [_HEAD.strip().format(nested=_code(sorted(NESTED))), ""]
    for name, family in FAMILIES.items():
        module = family.config.__module__.rpartition(".")[2]
        entries = {path.stem: path for path in sorted((CONF / "model").glob("*.yaml"))}
        mine = {entry: path for entry, path in entries.items() if _family_of(path) == name}
        laptop = [entry for entry, path in mine.items() if not path.read_text().startswith(PACKAGE)]
        lines += [f"## {name}", "", _wrap(f"{_about(family.config.__module__)} File: `models/{module}.py`."), ""]
        lines += ["| `model_type` | what distinguishes it |", "|---|---|"]
        lines += [f"| `{kind}` | {text} |" for kind, text in family.hub.about.items()]
        if family.dense is not None:
            others = "; ".join(f"`{kind}`, {text}" for kind, text in family.dense.about.items())
            lines += [
                "",
                _wrap(f"Dense folders that [upcycling](folders.md#upcycling) makes such models of: {others}."),
            ]
        lines += ["", f"Laptop: {_code(laptop)}. As released:"]
        lines += ["", "| `model=` | size |", "|---|---|"]
        lines += [f"| `{entry}` | {_size(path)} |" for entry, path in mine.items() if entry not in laptop]
        lines.append("")
    kinds = {*NESTED, *(kind for family in FAMILIES.values() for kind in _types(family))}
    assert kinds == _MODELS.keys(), "each model type has an entry in _MODELS"
    lines += _TRIED.strip().splitlines()
    lines += [f"| `{kind}` | {' | '.join(names)} |".replace("  ", " ") for kind, names in _MODELS.items()]
    lines.append("")
    lines += [_LISTED.strip(), _wrap(_code(sorted(WITHOUT_EFFECT)) + "."), "", "Besides these:", ""]
    for family in FAMILIES.values():
        for kind, each in _types(family).items():
            keys = each.without_effect.split()
            lines += [_wrap(f"- `{kind}`: {_code(sorted(keys))}.", "  ")] * bool(keys)
    return "\n".join(lines) + "\n"


def _types(family: Family) -> dict[str, ModelType]:
    """Return the model types of a family, also those of dense models."""
    return {**family.hub.types, **({} if family.dense is None else family.dense.types)}


def _family_of(path: Path) -> str:
    mapping = read_yaml(path)
    return mapping.get("family") or mapping["model"]["family"]


def _size(path: Path) -> str:
    """Return the sentence about sizes in the comment of an entry."""
    return path.read_text().splitlines()[1].removeprefix("# ").removesuffix(".")


def _about(module: str) -> str:
    """Return the first paragraph of a module's docstring."""
    text = importlib.import_module(module).__doc__ or ""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(render())
