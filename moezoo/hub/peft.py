"""What PEFT 0.21 does with the adapters that are written here, with transformers 5.23 and 5.24.

transformers has all experts of a layer in one tensor. For some model types PEFT puts pairs of single experts together
for it, and for others it does not. Each rule here is what it was seen to do (`tests/hub/test_peft.py`).
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

_W = ("w1", "w3", "w2")
_PROJ = ("gate_proj", "up_proj", "down_proj")
# The types whose experts PEFT puts together, and the last words of the names of their gate, up and down. Every module
# with such a word in its name is one of experts to it.
_TOGETHER: Mapping[str, tuple[str, str, str]] = {
    **dict.fromkeys(("mixtral", "minimax_m2"), _W),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _PROJ),
    **dict.fromkeys(("dots1", "ernie4_5_moe", "olmoe", "qwen3_moe", "qwen3_next", "solar_open"), _PROJ),
    **dict.fromkeys(("exaone_moe", "afmoe"), _PROJ),
}
# The types whose experts it does not put together, with the modules that transformers names in another way.
_APART: Mapping[str, str | None] = {"gpt_oss": None, "hy_v3": ".shared_mlp.", "mistral4": None}
_APART |= {"kimi_linear": None, "lfm2_moe": None, "qwen3_5_moe_text": None, "gemma4_text": None}
_APART |= {"llama4_text": None, "mimo_v2_flash": None, "qwen2_moe": None, "sarvam_moe": ".attention."}
_APART |= {"nemotron_h": None}
KNOWN = frozenset({*_TOGETHER, *_APART})  # of others nothing is said


def describe_unread(model_type: str, adapted: Collection[str], odd: Collection[str]) -> str:
    """Return a sentence about the pairs that PEFT does not read; empty where it reads all.

    Args:
        model_type: That of config.json.
        adapted: The modules that have a pair.
        odd: Those whose rank or scale is not that of most.
    """
    if model_type not in KNOWN or not adapted:
        return ""
    if refused := _refused(model_type, adapted, odd):
        return f"PEFT 0.21 does not read this adapter, because {refused}{_REMEDY}"
    ignored = [f"{_short(names)}, because {why}" for names, why in _ignored(model_type, adapted) if names]
    return f"PEFT 0.21 ignores the pairs of {'; and of '.join(ignored)}{_REMEDY}" if ignored else ""


_REMEDY = "; for other libraries merge it: moezoo convert FOLDER NEW adapter=ADAPTER"


def _refused(model_type: str, adapted: Collection[str], odd: Collection[str]) -> str:
    if model_type == "nemotron_h" and (mamba := [name for name in adapted if _last(name) == "out_proj"]):
        return f"it has no pairs of the results of Mamba: {_short(mamba)}"
    if model_type not in _TOGETHER:
        routers = [name for name in adapted if _last(name) in ("gate", "router")]
        return f"it has no pairs of routers of {model_type}: {_short(routers)}" if routers else ""
    gate, up, _ = _TOGETHER[model_type]
    present = {_last(name) for name in adapted} & {gate, up}
    if len(present) == 1:
        return f"it joins {gate} and {up} of experts, and only {min(present)} has pairs"
    if some := [name for name in odd if _is_of_expert(name) and _last(name) in present]:
        return f"it joins {gate} and {up} of experts, whose rank and scale must be those of most: {_short(some)}"
    return ""


def _ignored(model_type: str, adapted: Collection[str]) -> Iterator[tuple[list[str], str]]:
    experts = [name for name in adapted if _is_of_expert(name)]
    if model_type not in _TOGETHER:
        yield experts, f"transformers has all experts of a layer of {model_type} in one tensor"
        renamed = _APART[model_type]
        yield [name for name in adapted if renamed and renamed in name], "transformers has another name for them"
        return
    names = _TOGETHER[model_type]
    others = [name for name in adapted if _last(name) in names and not _is_of_expert(name)]
    yield others, f"it takes each {', '.join(names)} of {model_type} for one of experts"
    if names[2] not in map(_last, adapted):
        yield experts, f"it reads those of experts only together with {names[2]}"


def _short(names: Sequence[str]) -> str:
    """Return names without the numbers of layers and experts, each once."""
    found: dict[str, dict[str, None]] = {}
    for name in names:
        above, _, end = re.sub(r"^(?:model|backbone)\.layers\.\d+\.|\.\d+(?=\.)", "", name).rpartition(".")
        found.setdefault(above, {})[end] = None
    last = lambda words: f"{{{', '.join(words)}}}" if len(words) > 1 else next(iter(words))  # noqa: E731
    return ", ".join(f"{above}.{last(words)}" for above, words in found.items())


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_of_expert(name: str) -> bool:
    return ".experts." in name
