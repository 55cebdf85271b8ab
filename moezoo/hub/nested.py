"""Folders whose text model is inside another one, for images: its keys of config.json and the names of its tensors.

Such a folder has the keys of the text model in the table `text_config`, and its tensors behind a prefix. A new outer
model is an entry of `NESTED`.
"""

import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.errors import UserError
from moezoo.models.config_json import ConfigJson
from moezoo.models.hub import Hub

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
        parts: What the names of its other tensors begin with, perhaps after `model.`; they are for images.
        without_effect: Keys of config.json that do not change the text model, with spaces in between.
    """

    ways: tuple[Mapping[str, str], ...]
    parts: tuple[str, ...]
    without_effect: str


NESTED = {
    "kimi_k25": Outer(
        (INSIDE, BESIDE, _BLOCKS),
        ("vision_tower.", "mm_projector."),
        "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id projection_hidden_size "
        "projection_layer_norm_eps media_placeholder_token_id video_placeholder use_unified_vision_chunk ignore_index",
    ),
    "mistral3": Outer(
        (INSIDE, BESIDE),
        ("vision_tower.", "multi_modal_projector."),
        "vision_config image_token_id video_token_id image_token_index projector_hidden_act vision_feature_layer "
        "multimodal_projector_bias spatial_merge_size",
    ),
}


class Nesting(NamedTuple):
    """Where a folder has its text model.

    Attributes:
        table: What the keys of config.json have in front: "text_config." or nothing.
        names: What the names of the text model begin with -> what they begin with in the folder; {} if they are equal.
        parts: What names of tensors for images begin with.
    """

    table: str = ""
    names: Mapping[str, str] = types.MappingProxyType({})
    parts: tuple[str, ...] = ()

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
        return found | {name: "images" for name in left if name.removeprefix("model.").startswith(self.parts)}


def text_config(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the text model: all, or those of the table `text_config`.

    Whether embeddings are tied is the outer model's, as in transformers, with false where it has no such key.

    Raises:
        UserError: An outer model has no such table, or a key that may change the text model.
    """
    kind = mapping.get("model_type")
    if not isinstance(kind, str) or kind not in NESTED:
        return mapping
    outer = ConfigJson(mapping)
    if outer.table(TEXT) is None:
        raise UserError(f"config.json: {TEXT} is missing; model_type={kind} has its language model there")
    tied = outer.read(TIED, bool | None, None)
    outer.refuse_others({}, NESTED[kind].without_effect.split())
    return {**mapping[TEXT], TIED: tied or False}


def find_nesting(mapping: Mapping[str, Any], names: Collection[str], folder: Path) -> Nesting:
    """Return where a folder with the config.json of an outer model and tensors of these names has its text model.

    Raises `UserError` where it has tensors named in two ways.
    """
    ways, parts, _ = NESTED[mapping["model_type"]]
    found = [way for way in ways if any(name.startswith(way["model.layers."]) for name in names)]
    if len(found) > 1:
        both = " and ".join(way["model.layers."] for way in found)
        raise UserError(f"{folder} has tensors below {both}, two ways to name one model; download it again")
    return Nesting(f"{TEXT}.", (found or ways)[0], parts)
