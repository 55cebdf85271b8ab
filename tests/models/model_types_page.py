"""`docs/model_types.md`: the model types of transformers that have experts, and which of them moezoo reads.

What is read is that of the registry. `python tests/models/model_types_page.py` rewrites the file.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from moezoo.hub.other_names import NESTED
from moezoo.models import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "model_types.md"
TRANSFORMERS = "5.24"
_HEAD = """
# Is my model type read, and if not, what is missing?

A Hugging Face folder is read by `model_type` in its `config.json`. transformers {version} has {count} packages of
models with experts; the table has each, with the `model_type` that a folder of it has. moezoo reads {read} of them. It
also reads types that transformers lacks, or that are the text model of another one, or around one:
{others}.
[Families](families.md) has what distinguishes the types that are read, and which published files were tried.

What is missing is what moezoo would need first; a model may need more. A folder of another type is refused, and the
message names the keys of its `config.json` that no type of moezoo has. To write another name into `model_type` is no
way around: what such a model computes is something else, also where its keys are the same.

`python tests/models/model_types_page.py` makes this page. "Read" follows from the registry, and a test compares the
list of types with transformers.

| `model_type` | read | what is missing |
|---|---|---|
"""
_AROUND, _HYBRID = "its text model is in `text_config`", "layers of"
# Each package of transformers with experts, by its name -> what is missing; nothing where its type is read.
MISSING = {
    "afmoe": "",
    "aria": f"{_AROUND}; gates by softmax over the chosen experts beside shared ones, keys of its own",
    "axk1": "a norm after the experts of a layer; otherwise as `glm4_moe_lite`",
    "axk2": "gates on norms, sparse attention",
    "bailing_hybrid": "gates on heads of latent attention; the delta attention is that of `kimi_linear`",
    "beam": "gates on attention, windows in some layers, a soft cap on logits",
    "cohere2_moe": "attention and experts side by side, LayerNorm, a scale on logits, windows in some layers",
    "dbrx": "LayerNorm, joined and clipped queries, keys and values, experts' keys in a table of their own",
    "deepseek_ocr2": f"{_AROUND}; heads as in Llama beside the softmax router and shared experts of `deepseek_v2`",
    "deepseek_v2": "",
    "deepseek_v3": "",
    "deepseek_v32": "",
    "deepseek_v4": "hyper-connections, compressed and sparse attention, experts chosen by a hash of tokens",
    "diffusion_gemma": "text by diffusion: an encoder and a decoder that sees both ways",
    "doge": "attention with a dynamic mask, experts found by product keys",
    "dots1": "",
    "dots3_note": f"{_AROUND}; windows and sparse attention in latent attention, shared experts of another width",
    "ernie4_5_moe": "",
    "ernie4_5_vl_moe": f"{_AROUND}; experts for images apart from those for text, positions in three parts",
    "exaone_moe": "",
    "flex_olmo": "norms after each part instead of before",
    "flint": "windows in some layers, shared experts in a model like `qwen3_moe`",
    "gemma4": "",
    "glm4_moe": "",
    "glm4_moe_lite": "",
    "glm4v_moe": f"{_AROUND}; positions in three parts",
    "glm5_next": "sparse attention and hyper-connections beside delta attention as in `kimi_linear`",
    "glm_moe_dsa": "",
    "gpt_oss": "",
    "granitemoe": "multipliers of embeddings, attention, residuals and logits",
    "granitemoe_swa": "the multipliers of `granitemoe`, shared experts, a base of rotation for each layer",
    "granitemoehybrid": "the multipliers of `granitemoe`; the layers of Mamba 2 are those of `nemotron_h`",
    "granitemoeshared": "the multipliers of `granitemoe`, shared experts",
    "hunyuan_v1_moe": "norms of queries and keys after rotation, numbers of experts for each layer",
    "hy_v3": "",
    "hy_v4": "hyper-connections, sparse attention, sinks in latent attention",
    "hy_v4_vl": f"{_AROUND}; as `hy_v4`",
    "inkling": "positions by relative logits, short convolutions, windows with other numbers of heads",
    "inkling2": "as `inkling`; attention over residuals, soft caps",
    "inkling2_loop": "as `inkling2`; layers that run several times",
    "jamba": f"{_HYBRID} Mamba, experts in every other layer",
    "jetmoe": "heads of attention that a router chooses",
    "kimi_linear": "",
    "kolibri1": "norms around each part, windows in some layers, shared experts in a model like `qwen3_moe`",
    "laguna": "gates on attention, a number of heads for each layer, windows in some layers",
    "lara_mini": "windows in some layers, layers without rotation; the gated delta rule is that of `qwen3_next`",
    "lfm2_moe": "",
    "llama4": "",
    "longcat_flash": "two attentions and two MLPs in a layer, experts that compute nothing",
    "mellum": "windows in some layers, with another base of rotation",
    "mimo_v2_flash": "",
    "minimax": f"{_HYBRID} lightning attention, factors on residuals",
    "minimax_m2": "",
    "minimax_m3_vl": f"{_AROUND}; sparse attention by blocks, shared experts",
    "mistral4": "",
    "mistral_large4": f"{_AROUND}; sparse attention, keys shared by layers, layers without rotation, soft caps",
    "mixtral": "",
    "muse_spark": f"{_AROUND}; gates on residuals, experts in a narrower space, soft caps",
    "nemotron_h": "",
    "nllb_moe": "an encoder beside the decoder",
    "olmoe": "",
    "openai_privacy_filter": "a classifier of tokens, with attention both ways",
    "phimoe": "LayerNorm, a router that draws by SparseMixer, biases",
    "qwen2_moe": "",
    "qwen3_5_moe": "",
    "qwen3_moe": "",
    "qwen3_next": "",
    "qwen3_omni_moe": "",
    "qwen3_vl_moe": "",
    "qwen4_exp": f"{_AROUND}; sparse attention, hyper-connections, embeddings of several tokens",
    "sarvam_mla": "only its keys and defaults; the layers are those of `deepseek_v3`",
    "sarvam_moe": "",
    "solar_open": "",
    "step3p7": f"{_AROUND}; windows with another number of heads, gates on heads, clamped experts",
    "switch_transformers": "an encoder beside the decoder",
    "unlimited_ocr": f"{_AROUND}; as `deepseek_ocr2`, with windows that keep what a text refers to",
    "vitpose_backbone": "it is a model for images alone",
    "zaya": "attention in a compressed space with convolutions, a router with layers of its own",
}
# Packages whose folders have another `model_type` than the package's name.
_NAMED = {"nllb_moe": "nllb-moe"}
_OF_EXPERTS = re.compile(r"(^|_)experts?(_|$)|^moe_")


def known() -> set[str]:
    """Return the model types that moezoo reads, without those of dense models."""
    return {*NESTED, *(kind for family in FAMILIES.values() for kind in family.hub.types)}


def render() -> str:
    """Return the page."""
    types, rows = known(), []
    for package, missing in MISSING.items():
        kind = _NAMED.get(package, package)
        assert (kind in types) != bool(missing), f"MISSING has what {package} lacks, and nothing where it is read"
        rows.append(f"| `{kind}` | yes | |" if kind in types else f"| `{kind}` | no | {missing} |")
    others = sorted(types - MISSING.keys())
    numbers = {"count": len(rows), "read": sum("| yes |" in row for row in rows), "version": TRANSFORMERS}
    head = _HEAD.strip().format(**numbers, others=", ".join(f"`{kind}`" for kind in others))
    return "\n".join([head, *rows]) + "\n"


def packages(models: Path) -> Iterator[str]:
    """Yield the packages below transformers' folder `models` that have a configuration with keys for experts."""
    for file in sorted(models.glob("*/configuration_*.py")):
        classes = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
        if any(_OF_EXPERTS.search(name) for node in classes for name in _fields(node)):
            yield file.parent.name


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields of a configuration: annotated ones, or arguments of `__init__`."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            yield from (argument.arg for argument in each.args.args)


if __name__ == "__main__":
    PAGE.write_text(render())
