"""Reading and writing a Hugging Face config.json: what several families use."""

import itertools
import math
import operator
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from moezoo.errors import UserError
from moezoo.models.config import MAX_LAYERS
from moezoo.typed import ANY_NUMBER, Range, convert, show

REQUIRED: Any = object()
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})
_LARGEST = 2**31 - 1
_LARGEST_OF = {"num_hidden_layers": MAX_LAYERS}  # parts of a file list all layers while they are read
_ROOM = 240  # characters of a list in a message
Extension = Literal["default", "yarn", "llama3"]

# Keys that change nothing that moezoo computes, in every family: of files, of tokens, of what transformers returns, of
# other tasks, of sampling.
WITHOUT_EFFECT = frozenset(
    """
    model_type architectures auto_map name_or_path torch_dtype dtype transformers_version unsloth_fixed
    unsloth_version
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    return_dict output_hidden_states output_attentions output_router_logits use_cache attn_implementation torchscript
    use_bfloat16 tf_legacy_loss is_decoder chunk_size_feed_forward
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    temperature top_k top_p typical_p do_sample num_beams num_beam_groups diversity_penalty num_return_sequences
    max_length min_length early_stopping length_penalty repetition_penalty encoder_repetition_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty output_scores
    return_dict_in_generate
    """.split()  # noqa: SIM905 (a list of words has a line per word)
)

# Where transformers 4, and programs of its time, look for rotary settings. Without these keys they take defaults.
_OUTSIDE = ("rope_theta", "partial_rotary_factor")
OLDER_ROPE = (*_OUTSIDE, "rope_scaling")
# Settings of the same table for positions in images, which change nothing for text.
FOR_IMAGES = ("mrope_section", "mrope_interleaved", "interleaved")

# Older names of kinds of layers, which transformers reads as the newer ones.
_OLDER_KINDS: Mapping[str, str] = {
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}

# What is read with the tensors (`moezoo.hub.few_bits`), in every family.
_OF_TENSORS = frozenset(("quantization_config",))

# Keys that change what is computed, and their only values here, in every family. Null and a missing key are such a
# value too.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}


class Other(NamedTuple):
    """A key of config.json that is not read, its value, and the values that it may have; None for an unknown key."""

    key: str
    value: Any
    valid: tuple[Any, ...] | None


class ConfigJson:
    """The keys of a config.json, or of a table in it. `read` checks a value; `refuse_others` ends the reading.

    Every key changes what a model computes until the opposite is known. So one that is not read, and not in a list of
    keys without effect, is refused.
    """

    def __init__(self, mapping: Mapping[str, Any], table: str = ""):
        self._mapping, self._table, self._seen = mapping, table, set[str]()

    def read(self, key: str, kind: Any, default: Any = REQUIRED, *, least: int = 1) -> Any:
        """Return the value of `key`, or `default` where the key is missing.

        Args:
            key: The key.
            kind: The type, as for `moezoo.typed.convert`. Null is a value only if the type has None.
            default: The value of a missing key; without it the key is required.
            least: The smallest integer; the largest is that of int32, for layers `MAX_LAYERS`.

        Raises:
            UserError: The key is missing, or its value does not fit.
        """
        self._seen.add(key)
        if key in self._mapping:
            label = self._label(key)
            whole = kind is int or int in typing.get_args(kind)
            valid = Range(at_least=least, at_most=_LARGEST_OF.get(key, _LARGEST)) if whole else ANY_NUMBER
            return convert(kind, self._mapping[key], label, valid=valid)
        if default is REQUIRED:
            raise UserError(f"{self._label(key)} is missing; the folder has another kind of model, or is damaged")
        return default

    def get(self, key: str) -> Any:
        """Return the value of `key` as it is, which has no effect; None where the key is missing."""
        self._seen.add(key)
        return self._mapping.get(key)

    def read_either(self, keys: tuple[str, ...], kind: Any, default: Any = REQUIRED, *, least: int = 1) -> Any:
        """Return the value of one of `keys`, which are names of one setting. Raises `UserError` where two differ."""
        given = [key for key in keys if key in self._mapping] or [keys[0]]
        values = [self.read(key, kind, default, least=least) for key in given]
        if len(set(values)) > 1:
            both = " and ".join(f"{key}={value}" for key, value in zip(given, values, strict=True))
            raise UserError(f"config.json: {both} are one setting; delete the wrong one")
        return values[0]

    def table(self, key: str) -> "ConfigJson | None":
        """Return the table `key`, or None where it is missing, null or empty. Raises `UserError` for another value."""
        self._seen.add(key)
        found = self._mapping.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise UserError(f"{self._label(key)}={_show(found)}: expected a table with keys, or null")
        return ConfigJson(found, f"{self._table}{key}.") if found else None

    def read_layer_types(self, kinds: tuple[str, ...], layers: int) -> tuple[str, ...] | None:
        """Return the kind of each of `layers` layers by its newer name, or None where `layer_types` is missing or null.

        Raises `UserError` for another number of layers, and for a kind that is not one of `kinds`.
        """
        types = self.read("layer_types", tuple[str, ...] | None, None)
        if types is None:
            return None
        types = tuple(_OLDER_KINDS.get(kind, kind) for kind in types)
        if unknown := sorted({*types} - {*kinds}):
            raise UserError(f"config.json: layer_types names '{show(unknown[0])[:80]}': expected {' or '.join(kinds)}")
        if len(types) != layers:
            raise UserError(
                f"config.json: layer_types names {len(types)} layers, but num_hidden_layers={layers}; one of them is "
                "wrong"
            )
        return types

    def rope_table(self, missing: Mapping[str, Any] = _NOTHING) -> "ConfigJson":
        """Return the table of rotary settings, or `missing` where there is none.

        Raises `UserError` as `table` does, and where two places have another value, of which each reader takes one.
        """
        outside = ConfigJson({key: self._mapping[key] for key in _OUTSIDE if key in self._mapping})
        tables = [table for key in ("rope_scaling", "rope_parameters") if (table := self.table(key))]
        for one, other in itertools.combinations([outside, *tables], 2):
            for key, value in one._mapping.items():
                found = other._mapping.get(key)
                if None not in (value, found) and value != found:
                    raise UserError(
                        f"{one._label(key)}={_show(value)} and {other._table}{key}={_show(found)} are one setting; "
                        "delete the wrong one"
                    )
        return next(iter(tables), ConfigJson(missing, "rope_parameters."))

    def refuse_others(self, only: Mapping[str, tuple[Any, ...]] = _NOTHING, without_effect: Iterable[str] = ()) -> None:
        """Raise `UserError` for a key that was not read and may change what the model computes.

        Null and keys with `_` in front are without effect.

        Args:
            only: Keys, and the values that the family supports.
            without_effect: Keys that change nothing that moezoo computes.
        """
        if not (others := self.find_others(only, without_effect)):
            return
        first, *_ = others
        if first.valid is None:
            unknown = [f"{show(key)[:80]}={_show(value)}" for key, value, valid in others if valid is None]
            these, those = (
                ("this key", "the key if it does not") if len(unknown) == 1 else ("these keys", "those that do not")
            )
            raise UserError(
                f"{self._label(cut(unknown))}: moezoo does not know {these}, which may change what the model computes; "
                f"delete {those}"
            )
        valid = " or ".join(map(show, first.valid))
        way = f"supports only {valid}; load a folder with {first.key}={valid}"
        none = f"does not have it; load another version of the model, without {first.key}"
        shown = f"{self._label(show(first.key)[:80])}={_show(first.value)}"
        raise UserError(f"{shown}: this family {way if valid else none}")

    def find_others(
        self, only: Mapping[str, tuple[Any, ...]] = _NOTHING, without_effect: Iterable[str] = ()
    ) -> list["Other"]:
        """Return the keys that `refuse_others` refuses, in their order."""
        harmless = {*self._seen, *without_effect}
        if not self._table:
            only, harmless = {**_ONLY, **only}, harmless | WITHOUT_EFFECT | _OF_TENSORS
        found = []
        for key, value in self._mapping.items():
            if key in harmless or key.startswith("_") or value is None:
                continue
            valid = only.get(key)
            fits = valid and any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in valid)
            found += [] if fits else [Other(key, value, valid)]
        return found

    def _label(self, key: str) -> str:
        return f"config.json: {self._table}{key}"


def cut(texts: Sequence[str], room: int = _ROOM) -> str:
    """Return texts with commas in between: the first, and as many more as fit into `room` characters."""
    shown = texts[0] if texts else ""
    for number, text in enumerate(texts[1:], 1):
        if len(shown) + len(text) > room:
            return f"{shown} and {len(texts) - number} more"
        shown += f", {text}"
    return shown


def _show(value: Any) -> str:
    """Return a value of config.json in a few words."""
    return reprlib.repr(value) if isinstance(value, Mapping | list) else show(value)[:80]


def read_rope(
    config: ConfigJson,
    max_length: int,
    extensions: tuple[Extension, ...],
    base: float = 1e4,
    share: float | None = None,
    others: Iterable[str] = (),
    missing: Mapping[str, Any] = _NOTHING,
) -> tuple[float, dict[str, Any], float]:
    """Return the base of the rotary frequencies, the settings of the extension, and the rotated share of heads.

    They are under `rope_scaling`, else `rope_parameters`, or at the top. Null and 0 of `mscale` and `mscale_all_dim`
    mean the same, and null of `factor`, `beta_fast` and `beta_slow` is no value: transformers reads them so.

    Args:
        config: The keys of config.json.
        max_length: The value of `max_position_embeddings`.
        extensions: The values of `rope_type` that the family has; `default` is no extension, and has no settings.
        base: The base where no key has it.
        share: The share where no key has it; None where the family rotates whole heads, and refuses another share.
        others: Keys of the table that the caller reads, or that change nothing.
        missing: The table where there is none.

    Raises:
        UserError: A value does not fit, or the family does not have the extension.
    """
    rope = config.rope_table(missing)
    base = rope.read("rope_theta", float, config.read("rope_theta", float, base))
    kind = rope.read("rope_type", str, rope.read("type", str, "default"))
    if kind not in extensions:
        raise UserError(f"config.json: rope_type={_show(kind)}: this family supports only {' and '.join(extensions)}")
    if kind == "yarn" and base <= 1:
        raise UserError(f"config.json: rope_theta={base} must be greater than 1 with rope_type=yarn")
    if share is not None:
        key = "partial_rotary_factor"
        share = rope.read(key, float, config.read(key, float, share))
    attention_factor = rope.read("attention_factor", float | None if kind == "yarn" else Literal[None], None)
    length = rope.read("original_max_position_embeddings", int, max_length)
    length = config.read("original_max_position_embeddings", int, length)

    def number(key: str, default: float) -> float:
        found = rope.read(key, float | None, None)
        return default if found is None else found

    if kind == "llama3":
        found = {
            "factor": rope.read("factor", float),
            "length": length,
            "low": rope.read("low_freq_factor", float),
            "high": rope.read("high_freq_factor", float),
        }
    else:
        found = {
            "factor": number("factor", max_length / length),
            "length": length,
            "beta_fast": number("beta_fast", 32.0),
            "beta_slow": number("beta_slow", 1.0),
            "mscale": number("mscale", 0.0),
            "mscale_all": number("mscale_all_dim", 0.0),
            "attention_factor": attention_factor,
            "truncate": rope.read("truncate", bool, True),
        }
    rope.refuse_others({"partial_rotary_factor": (1,)}, others)
    return base, {} if kind == "default" else found, 1.0 if share is None else share


# The settings of extensions: ours, and the keys of config.json.
YARN_KEYS = {"yarn.factor": "factor", "yarn.length": "original_max_position_embeddings", "yarn.mscale": "mscale"}
YARN_KEYS |= {"yarn.beta_fast": "beta_fast", "yarn.beta_slow": "beta_slow", "yarn.mscale_all": "mscale_all_dim"}
YARN_KEYS |= {"yarn.truncate": "truncate", "yarn.attention_factor": "attention_factor"}
LLAMA3_KEYS = {"llama3.factor": "factor", "llama3.length": "original_max_position_embeddings"}
LLAMA3_KEYS |= {"llama3.low": "low_freq_factor", "llama3.high": "high_freq_factor"}
ROPE_KEYS: Mapping[Extension, Mapping[str, str]] = {"default": {}, "yarn": YARN_KEYS, "llama3": LLAMA3_KEYS}


def extension_keys(config: Any, extension: Extension) -> dict[str, Any]:
    """Return the keys of a configuration's extension."""
    keys = {key: operator.attrgetter(ours)(config) for ours, key in ROPE_KEYS[extension].items()}
    # 0 means that there is none, as a missing key does. vLLM and SGLang take the number 0 for a factor.
    optional = ("mscale", "mscale_all_dim", "attention_factor")
    return {key: value for key, value in keys.items() if value or key not in optional}


def write_rope(config: Any, extension: Extension) -> dict[str, Any]:
    """Return the rotary settings for a config.json, of a configuration with `rope_base` and this extension."""
    keys = extension_keys(config, extension)
    used = keys.get("factor", 1) != 1 or "attention_factor" in keys
    return {"rope_type": extension if used else "default", "rope_theta": config.rope_base, **(keys if used else {})}


def rotary_share(dims: int, head_dim: int) -> float:
    """Return the share of a head that `dims` dimensions are; transformers rounds its product with `head_dim` down."""
    exact = dims / head_dim
    return exact if int(head_dim * exact) == dims else math.nextafter(exact, 2)


def rope_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for a table of rotary settings: the table, and what transformers 4 reads."""
    outside = {key: table[key] for key in _OUTSIDE if key in table}
    scaling = {key: value for key, value in table.items() if key not in outside}
    return {"rope_parameters": table, **outside, "rope_scaling": None if table["rope_type"] == "default" else scaling}
