"""Folders whose tensors are named otherwise than the family's rows say, and what is read of them, for all families.

A form that is not read yet is a new row of a table here:

| table | what differs |
|---|---|
| `NESTED` | the text model is inside a model for images: its keys of config.json are in the table `text_config` there |
| `WRAPPERS` | parts of names, which programs add that wrap modules |
| `WAYS` | what the names of a model begin with |
| `FORMS` | which tensors hold the same arrays |
| `STRANGERS` | everything: names of other libraries, which are refused with what to do |
"""

import dataclasses
import re
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from moezoo.errors import UserError
from moezoo.hub.few_bits import FORMATS
from moezoo.hub.tensors import list_names
from moezoo.hub.weight_files import StoredTensor, WeightFiles
from moezoo.models import ModelConfig
from moezoo.models.base import LanguageModel
from moezoo.models.config_json import WITHOUT_EFFECT, ConfigJson
from moezoo.models.hub import Hub
from moezoo.models.names import ATTENTION, LAYER, MLP, MOE, SPARSE, SWIGLU, Rows, rows
from moezoo.nn.rotary import Rotary, frequencies
from moezoo.typed import show

TEXT, TIED = "text_config", "tie_word_embeddings"
FREQUENCIES = "rotary frequencies"  # which follow from config.json


def begin(layers: str, rest: str, head: str) -> dict[str, str]:
    """Return what names of a text model begin with -> what they begin with in the folder; the first that fits holds."""
    return {"model.layers.": layers, "model.": rest, "lm_head.": head}


# Published folders have the first way; the second is that of the models in transformers' memory.
INSIDE = begin("language_model.model.layers.", "language_model.model.", "language_model.lm_head.")
BESIDE = begin("model.language_model.layers.", "model.language_model.", "lm_head.")
# So transformers 5.23 writes it: it takes text layers for those of the vision tower, which have that name in folders.
_BLOCKS = begin("language_model.model.blocks.", "language_model.model.", "language_model.lm_head.")


class Outer(NamedTuple):
    """A `model_type` around a text model.

    Attributes:
        ways: How folders name the text model's tensors.
        parts: What the names of its other tensors begin with, perhaps after `model.`.
        without_effect: Keys of config.json that do not change the text model, with spaces in between.
        tied: Whether embeddings are tied where no key says so.
        tables: The tables of config.json, one inside the other, of which the last has the text model's keys.
        purpose: What the other tensors are for.
    """

    ways: tuple[Mapping[str, str], ...]
    parts: tuple[str, ...]
    without_effect: str
    tied: bool = False
    tables: tuple[str, ...] = (TEXT,)
    purpose: str = "images"

    @property
    def path(self) -> str:
        """The tables with dots in between, as messages name them."""
        return ".".join(self.tables)


_FOR_IMAGES = "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id"
NESTED = {
    "kimi_k25": Outer(
        (INSIDE, BESIDE, _BLOCKS),
        ("vision_tower.", "mm_projector."),
        f"{_FOR_IMAGES} projection_hidden_size projection_layer_norm_eps media_placeholder_token_id video_placeholder "
        "use_unified_vision_chunk ignore_index",
    ),
    "mistral3": Outer(
        (INSIDE, BESIDE),
        ("vision_tower.", "multi_modal_projector."),
        "vision_config image_token_id video_token_id image_token_index projector_hidden_act vision_feature_layer "
        "multimodal_projector_bias spatial_merge_size",
    ),
    "gemma4": Outer(
        (BESIDE, INSIDE),
        ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
        "vision_config audio_config image_token_id video_token_id audio_token_id boi_token_id eoi_token_id "
        "boa_token_id eoa_token_id eoa_token_index initializer_range vision_soft_tokens_per_image",
        tied=True,
    ),
    "qwen3_vl_moe": Outer((BESIDE, INSIDE), ("visual.",), _FOR_IMAGES),
    "llama4": Outer(
        (INSIDE,),
        ("vision_model.", "multi_modal_projector."),
        "vision_config image_token_index boi_token_index eoi_token_index image_token_id boi_token_id eoi_token_id",
    ),
    # It thinks in text, and a second model of text, the talker, makes sound of that.
    "qwen3_omni_moe": Outer(
        (
            begin("thinker.model.layers.", "thinker.model.", "thinker.lm_head."),
            begin("thinker.model.language_model.layers.", "thinker.model.language_model.", "thinker.lm_head."),
        ),
        (
            *("thinker.visual.", "thinker.audio_tower.", "thinker.model.visual.", "thinker.model.audio_tower."),
            *("talker.", "code2wav."),
        ),
        f"{_FOR_IMAGES} audio_config audio_token_id audio_start_token_id audio_end_token_id position_id_per_seconds "
        "seconds_per_chunk user_token_id initializer_range talker_config code2wav_config enable_audio_output "
        "im_start_token_id im_end_token_id tts_pad_token_id tts_bos_token_id tts_eos_token_id system_token_id "
        "assistant_token_id",
        tables=("thinker_config", TEXT),
        purpose="images and sound",
    ),
    # Layers for multi-token prediction are beside both models.
    "qwen3_5_moe": Outer((BESIDE | {"mtp.": "mtp."},), ("visual.",), _FOR_IMAGES),
}


class Nesting(NamedTuple):
    """Where a folder has its text model.

    Attributes:
        table: What the keys of config.json have in front: "text_config." or nothing.
        names: What the names of the text model begin with -> what they begin with in the folder; {} if they are equal.
        parts: What names of tensors for something else begin with.
        purpose: What that is.
    """

    table: str = ""
    names: Mapping[str, str] = types.MappingProxyType({})
    parts: tuple[str, ...] = ()
    purpose: str = "images"

    def to_folder(self, name: str) -> str:
        """Return the name in the folder of a tensor or module of the text model."""
        for ours, theirs in self.names.items():
            if f"{name}.".startswith(ours):
                return theirs + name.removeprefix(ours) if name.startswith(ours) else theirs[:-1]
        return name

    def to_text(self, name: str) -> str | None:
        """Return the text model's name of a tensor in the folder, or None for one outside of the text model."""
        for ours, theirs in self.names.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return None if self.names else name

    def find_unused(self, hub: Hub, left: Iterable[str], expected: Iterable[str]) -> dict[str, str]:
        """Return those of the `left` tensors of the folder that may be ignored, and what each is for."""
        inside = {text: name for name in left if (text := self.to_text(name)) is not None}
        texts = {text for name in expected if (text := self.to_text(name)) is not None}
        found = {inside[text]: purpose for text, purpose in hub.find_unused(set(inside), texts).items()}
        found |= {name: FREQUENCIES for text, name in inside.items() if text.endswith(".rotary_emb.inv_freq")}
        return found | {name: self.purpose for name in left if name.removeprefix("model.").startswith(self.parts)}


def text_config(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the text model: all, or those of the table that an outer model has for it.

    Whether embeddings are tied is said beside that table, as in transformers, with the default of the outer model where
    there is no such key.

    Raises:
        UserError: An outer model has no such table, or a key that may change the text model.
    """
    kind = mapping.get("model_type")
    if not isinstance(kind, str) or kind not in NESTED:
        return mapping
    outer, config, tied = NESTED[kind], ConfigJson(mapping), None
    for depth, key in enumerate(outer.tables, 1):
        if (inner := config.table(key)) is None:
            path = ".".join(outer.tables[:depth])
            raise UserError(f"config.json: {path} is missing; model_type={kind} has its language model there")
        tied = config.read(TIED, bool | None, None)
        config.refuse_others({}, WITHOUT_EFFECT.union(outer.without_effect.split()))
        config, mapping = inner, mapping[key]
    return {**mapping, TIED: outer.tied if tied is None else tied}


def table_of_text(mapping: Mapping[str, Any]) -> str:
    """Return the name of the table that an outer model has for the keys of its text model; empty for a text model."""
    kind = mapping.get("model_type")
    return NESTED[kind].path if isinstance(kind, str) and kind in NESTED else ""


def find_nesting(mapping: Mapping[str, Any], names: Collection[str], folder: Path) -> Nesting:
    """Return where a folder with the config.json of an outer model and tensors of these names has its text model.

    Raises `UserError` where it has tensors named in two ways.
    """
    outer = NESTED[mapping["model_type"]]
    found = [way for way in outer.ways if any(name.startswith(way["model.layers."]) for name in names)]
    if len(found) > 1:
        both = " and ".join(way["model.layers."] for way in found)
        raise UserError(f"{folder} has tensors below {both}, two ways to name one model; download it again")
    return Nesting(f"{outer.path}.", (found or outer.ways)[0], outer.parts, outer.purpose)


class Wrapper(NamedTuple):
    """A program that adds a `part`, between dots, to names in what it wraps: in any module, or in the whole model."""

    part: str
    by: str
    around: Literal["a module", "the model"] = "a module"


WRAPPERS = (
    Wrapper("_orig_mod", "torch.compile"),
    Wrapper("_fsdp_wrapped_module", "FullyShardedDataParallel"),
    Wrapper("_checkpoint_wrapped_module", "checkpoint_wrapper"),
    Wrapper("module", "DistributedDataParallel and DeepSpeed", "the model"),
)

# Where the config.json is that of the text model alone. The first that fits holds, after that of the rows. A way is for
# families whose rows have the first of these names.
WAYS = (
    INSIDE,  # the text model was cut out of a model for images, and has kept the names
    BESIDE,
    begin("language_model.layers.", "language_model.", "lm_head."),
    # The model without its unembedding, as transformers' AutoModel has it, or with it.
    {f"model.{part}.": f"{part}." for part in ("layers", "embed_tokens", "norm", "embedding_norm", "rotary_emb")},
    {"backbone.layers.": "model.layers.", "backbone.": "model."},  # transformers 5, nemotron_h
)


class Form(NamedTuple):
    """Rows in place of those of the same arrays in a family. They hold where a folder has all of these and no other.

    `shapes`: the dimensions of each tensor, where they tell this form from a later one with the same names: E experts,
    d the width of the model, I that of an expert. At most one tensor may have the same shape in both: of gate and up
    d = 2I leaves it open, of down d = I.
    """

    by: str
    rows: Rows
    shapes: tuple[str, ...] = ()


_JOINED, _EXPERTS = "gate+up=gate_up_proj down=down_proj", (f"{MOE}experts.", f"{MLP}experts.")
FORMS = (
    Form("qwen3_vl_moe as released", rows(*_EXPERTS, _JOINED, "transposed"), ("E d 2I", "E I d")),
    # What transformers 5 has in memory: in raw state dicts, and saved with save_original_format=False.
    Form("transformers 5", rows(*_EXPERTS, _JOINED, "of_experts")),
    Form(
        "transformers 5, nemotron_h",
        rows(f"{MOE}experts.", "backbone.layers.{layer}.mixer.experts.", "up=up_proj down=down_proj", "of_experts"),
    ),
    Form("transformers 5, mimo_v2_flash", rows("attention.", ATTENTION, "sinks=sinks")),
    Form("transformers 5, sarvam_moe", rows("", "model.", "embedding.weight=embed_tokens.weight")),
    Form(
        "transformers 5, sarvam_moe",
        rows(
            "attention.",
            ATTENTION,
            "query=q_proj.weight key=k_proj.weight value=v_proj.weight out=o_proj.weight "
            "query_norm.scale=q_norm.weight key_norm.scale=k_norm.weight",
        ),
    ),
    Form("transformers 5, lfm2_moe", rows(f"{MOE}experts.", f"{LAYER}feed_forward.experts.", _JOINED, "of_experts")),
    Form("transformers 5, mixtral, minimax_m2 and hy_v3", rows(f"{MOE}router.", MLP, "weight=gate.weight")),
    Form("transformers 5, minimax_m2 and hy_v3", rows(f"{MOE}router.", MLP, "choice_bias=e_score_correction_bias")),
    Form(
        "transformers 5, ernie4_5_moe",
        rows(f"{MOE}router.", f"{MLP}gate.moe_statics.", "choice_bias=e_score_correction_bias", "row"),
    ),
    Form("transformers 5, hy_v3", rows(f"{MOE}shared.", f"{MLP}shared_experts.", SWIGLU)),
    # As it saves it by default; the others are of its memory.
    Form("transformers 5, kimi_linear", rows(MOE, SPARSE, SWIGLU)),
    Form("transformers 5, kimi_linear", rows(f"{MOE}router.", f"{MLP}gate.", "choice_bias=e_score_correction_bias")),
    Form(
        "transformers 5, kimi_linear",
        rows("attention.convolutions", ATTENTION, "[0].weight+[1].weight+[2].weight=conv1d.weight", "filters"),
    ),
    Form(
        "transformers 5, kimi_linear",
        rows("attention.decay.", f"{ATTENTION}forget_gate.", "down=f_a_proj.weight up=f_b_proj.weight bias=dt_bias"),
    ),
    Form("transformers 5, kimi_linear", rows("attention.decay.", f"{ATTENTION}forget_gate.", "rate=A_log", "inner")),
    # Of the experts of Gemma 4, which it takes out of the tensors of all.
    Form("ModelOpt, gemma4", rows(f"{MOE}experts.", f"{LAYER}experts.{{expert}}.", SWIGLU)),
    Form("VeOmni", rows(*_EXPERTS, "gate=gate_proj up=up_proj down=down_proj", "of_experts")),
)

# What a name begins with, and what such a folder is.
STRANGERS = {
    "base_model.model.": "PEFT wraps the model: merge_and_unload() and save it, or save its pairs alone with "
    "save_pretrained and pass that folder as adapter= beside the base",
    "decoder.layers.": "these are Megatron's names; export a Hugging Face folder, such as with Megatron Bridge",
    "tok_embeddings.": "these are the names of Meta's and Mistral's own files; download the Hugging Face ones",
}


def find_names(names: Collection[str], rows: Rows, is_nested: bool, folder: Path) -> dict[str, str]:
    """Return what the tensors of a folder are called without wrappers and other beginnings, and their names there.

    `rows` are those of its type. `is_nested`: whether config.json is that of a model for images, whose beginnings
    `find_nesting` knows.

    Raises `UserError` where two tensors become one.
    """
    home = next(row.name for row in rows if "{layer}" in row.name).partition("{layer}")[0]
    anywhere = {each.part for each in WRAPPERS if each.around == "a module"}
    found = {name: ".".join(part for part in name.split(".") if part not in anywhere) for name in names}
    for part in [each.part for each in WRAPPERS if each.around == "the model"]:
        while all(text.startswith(f"{part}.") for text in found.values()):
            found = {name: text.removeprefix(f"{part}.") for name, text in found.items()}
    ways = (way for way in WAYS if home in way and _begins(found.values(), way[home]))
    if not (is_nested or _begins(found.values(), home)) and (way := next(ways, None)):
        found = {name: Nesting(names=way).to_text(text) or text for name, text in found.items()}
    ours: dict[str, str] = {}
    for name, text in found.items():
        if (other := ours.setdefault(text, name)) != name:
            both = " and ".join(map(show, sorted((name, other))))
            raise UserError(f"{folder} has {both}, two names of one tensor; take one out")
    return ours


def _begins(texts: Iterable[str], with_this: str) -> bool:
    return any(text.startswith(with_this) for text in texts)


def find_rows(hub: Hub, config: ModelConfig, nesting: Nesting, tensors: Mapping[str, StoredTensor]) -> Hub:
    """Return a family's mapping with the rows that a folder of these tensors has."""
    texts = ((nesting.to_text(name), name) for name in tensors)
    examples = {re.sub(r"\.\d+(?=\.)", ".{}", text): name for text, name in texts if text is not None}
    sizes = {"E": config.experts, "d": config.embed, "I": config.expert_mlp, "2I": 2 * config.expert_mlp}
    kind = hub.type_of(config)
    found = hub.types[kind].rows
    for form in FORMS:
        arrays = {path for row in form.rows for path in row.ours}
        usual = [row for row in found if arrays & {*row.ours}]
        if not usual or any(_examples(row.name, examples) for row in usual):
            continue
        there = [_examples(row.name, examples) for row in form.rows]
        wanted = [tuple(sizes[letter] for letter in shape.split()) for shape in form.shapes]
        if all(there) and all(tensors[a[0]].shape == b for a, b in zip(there, wanted, strict=False)):
            found = (*(row for row in found if row not in usual), *form.rows)
    return dataclasses.replace(hub, types={**hub.types, kind: dataclasses.replace(hub.types[kind], rows=found)})


def _examples(row: str, examples: Mapping[str, str]) -> list[str]:
    """Return tensors of a row; the names of those of few bits have an ending."""
    pattern = re.sub(r"\{\w+\}", "{}", row)
    return [examples[pattern + end] for end in sorted({form.VALUES for form in FORMATS}) if pattern + end in examples]


def describe_names(found: Collection[str], left: Collection[str]) -> str:
    """Return what tensors a folder has, of which `left` are unknown, for the end of a message."""
    ends = [f"; {what}" for begins, what in STRANGERS.items() if _begins(found, begins)]
    some = f"{len(left)} of them unknown: {list_names(sorted(left), 5)}" if left else f"such as {list_names(found, 5)}"
    return f"the files have {len(found)} tensors, {some}{ends[0] if ends else ''}"


def check_frequencies(files: WeightFiles, names: Iterable[str], model: LanguageModel) -> None:
    """Raise `UserError` where rotary frequencies of a folder, the tensors `names`, are not those of config.json.

    They may be those before the extension to longer texts. Some released folders have frequencies for another number
    of dimensions than rotate, which no reader uses; these are not compared.
    """
    parts = (vars(block.attention).values() for stack in model.stacks for block in stack.blocks)
    rotaries = {part for some in parts for part in some if isinstance(part, Rotary)}
    ways = [way for r in rotaries for way in (r.scaling.frequencies(r.dims, r.base), frequencies(r.dims, r.base))]
    for name in names:
        files.check(name, files.tensors[name].shape)
        stored = files.read(name)
        about = ml_dtypes.finfo(stored.dtype)
        rtol, atol = max(1e-4, float(about.eps)), float(about.smallest_subnormal)
        same = [np.asarray(way) for way in ways if way.shape == stored.shape]
        if same and not any(np.allclose(stored.astype(np.float32), way, rtol, atol) for way in same):
            has, wants = (show(numbers[:4].tolist()) for numbers in (stored, same[0]))
            raise UserError(
                f"{files.folder}: {name} begins with {has}, expected {wants} by the rotary settings of config.json; "
                "correct these, or take the tensor out of the files"
            )
