"""A family's mapping to Hugging Face folders: its model types, each with keys of config.json and names of tensors."""

import contextlib
import dataclasses
import operator
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moezoo.errors import UserError
from moezoo.models.config_json import (
    REQUIRED,
    ROPE_KEYS,
    ConfigJson,
    Extension,
    Other,
    read_rope,
    rope_keys,
    write_rope,
)
from moezoo.models.names import Rows
from moezoo.typed import convert, show, types_of

# Our settings by their names, those of sections as `router.NAME`.
Found = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of config.json that holds one setting of ours.

    Attributes:
        names: Its names, with spaces in between. transformers reads all, and the first is written.
        default: The value of a missing key; without it the key is required.
        words: What false and true mean, for a setting that is one of two words.
        null: What null means: a value, or a function of the settings that were read before. Without it null is refused,
            or is a value of the setting.
        least: The smallest whole number.
    """

    names: str
    default: Any = REQUIRED
    words: tuple[str, str] | None = None
    null: Any = REQUIRED
    least: int = 1

    @property
    def name(self) -> str:
        """The name that is written."""
        return self.names.split()[0]

    def read(self, config: ConfigJson, found: Found, kind: Any) -> Any:
        """Return the value of a setting of type `kind`. Raises as `ConfigJson.read_either` does."""
        kind = bool if self.words else kind if self.null is REQUIRED else kind | None
        value = config.read_either(tuple(self.names.split()), kind, self.default, least=self.least)
        if value is None and self.null is not REQUIRED:
            return self.null(found) if callable(self.null) else self.null
        return self.words[bool(value)] if self.words else value

    def write(self, value: Any, kind: Any) -> Any:
        """Return the value of the key. Numbers get their declared type, as transformers refuses 1 for 1.0."""
        if self.words:
            return value != self.words[0]
        return float(value) if float in (kind, *typing.get_args(kind)) and value is not None else value


@dataclasses.dataclass(frozen=True)
class Part:
    """Settings that keys hold in another form.

    Attributes:
        read: `read(config, found)` returns settings. Raises `UserError` for values that do not fit.
        write: `write(config)` returns keys of config.json.
        keys: Our settings and their keys, for messages.
        forms: Those of the settings that are read back in another form, although the model is the same.
    """

    read: Callable[[ConfigJson, Found], Found] = lambda config, found: {}
    write: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    forms: tuple[str, ...] = ()


# By the name of the setting, or, for a part, by any name.
Settings = dict[str, Key | Part]


def required(names: str) -> Settings:
    """Return the required settings of each `ours=key` in `names`."""
    return {ours: Key(key) for ours, key in (pair.split("=") for pair in names.split())}


def fixed(settings: Found | None = None, **keys: Any) -> Part:
    """Return a part without a choice: settings that every folder of the type has, and keys that are always written."""
    return Part(lambda config, found: settings or {}, lambda config: keys)


def common(max_length: int, init_std: float = 0.02, norm_eps: Any = REQUIRED, tied: bool = False) -> Settings:
    """Return the settings that have the same keys in every family, with the values of missing keys."""
    return {
        **required("vocab=vocab_size embed=hidden_size layers=num_hidden_layers heads=num_attention_heads"),
        "experts_per_token": Key("num_experts_per_tok"),
        "max_length": Key("max_position_embeddings", max_length),
        "norm_eps": Key("rms_norm_eps", norm_eps),
        "init_std": Key("initializer_range", init_std),
        "tied_embeddings": Key("tie_word_embeddings", tied),
        "z_loss": fixed({"z_loss": 0.0}),  # transformers has none
    }


def common_dense(max_length: int, kv_heads: int | None) -> Settings:
    """Return the settings that have the same keys in all dense models that become mixtures of experts.

    `max_length` and `kv_heads` are the values of missing keys; without key-value heads there are as many as heads.
    """
    settings = common(max_length, norm_eps=1e-6) | {
        "kv_heads": Key("num_key_value_heads", kv_heads, null=lambda found: found["heads"]),
        "expert_mlp": Key("intermediate_size"),
    }
    return {ours: entry for ours, entry in settings.items() if ours != "experts_per_token"}


def head_dim(found: Found) -> int:
    """Return the size of a head where no key has it."""
    return found["embed"] // found["heads"]


def rope(extension: Extension = "default", base: float = 1e4, missing: Mapping[str, Any] | None = None) -> Part:
    """Return the rotary settings, with a setting named as the extension that the family has.

    `base`: where no key has it; `missing`: their table where there is none.
    """
    has = extension != "default"
    extensions: tuple[Extension, ...] = ("default", extension) if has else ("default",)

    def read(config: ConfigJson, found: Found) -> Found:
        rope_base, settings, _ = read_rope(config, found["max_length"], extensions, base, missing=missing or {})
        return {"rope_base": rope_base} | ({extension: settings} if has else {})

    def write(config: Any) -> Mapping[str, Any]:
        return rope_keys(write_rope(config, extension))

    return Part(read, write, {"rope_base": "rope_theta", **ROPE_KEYS[extension]})


SILU = fixed(hidden_act="silu")


@dataclasses.dataclass(frozen=True)
class ModelType:
    """A value of `model_type` in config.json.

    Attributes:
        architecture: The name of its class in transformers, without `ForCausalLM`.
        settings: Our settings, in the order in which they are read and written. Those that are in none of the two have
            the defaults of the configuration.
        further: More of them, which are read and written after the model type.
        rows: The names of its tensors.
        only: Keys that change what is computed, and the values that the family supports: a tuple, or a function of the
            settings that returns the one value.
        without_effect: Keys that change nothing here, besides those of every family, with spaces in between.
    """

    architecture: str
    settings: Settings
    further: Settings
    rows: Rows
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without_effect: str = ""


class Differing(NamedTuple):
    """How a config.json differs from those of a model type.

    `others`: the keys that this refuses; `missing`: required keys that are not there; `absent`: the number of settings
    without a key there, required or not.
    """

    others: list[Other]
    missing: list[str]
    absent: int


@dataclasses.dataclass(frozen=True)
class Hub:
    """The model types of a family, by their names.

    Attributes:
        about: What distinguishes each.
        types: What each has in its folders.
        type_of: `type_of(config)` returns the type that a configuration is written as. Raises `UserError` where there
            is none.
        check: `check(config, mapping)` raises `UserError` where `mapping`, which was made of the configuration,
            describes another model.
        find_unused: `find_unused(left, expected)` returns those of the `left` tensors, which no parameter has, that may
            be ignored, and what each is for. `expected`: all others.
    """

    about: Mapping[str, str]
    types: Mapping[str, ModelType]
    type_of: Callable[[Any], str]
    check: Callable[[Any, Mapping[str, Any]], None] = lambda config, mapping: None
    find_unused: Callable[[set[str], set[str]], Mapping[str, str]] = lambda left, expected: {}

    def rows(self, config: Any) -> Rows:
        """Return the tensor names of a configuration. Raises as `type_of` does."""
        return self.types[self.type_of(config)].rows

    def keys(self, model_type: str) -> dict[str, str]:
        """Return our settings and the keys that hold their values, for messages."""
        t, found = self.types[model_type], {}
        for ours, entry in (t.settings | t.further).items():
            found |= entry.keys if isinstance(entry, Part) else {} if entry.words else {ours: entry.name}
        return found

    def read(self, kind: type, mapping: Mapping[str, Any]) -> Any:
        """Return the configuration, of class `kind`, that a config.json describes.

        Raises `UserError` for keys and values that the family does not have.
        """
        config, t, kinds = ConfigJson(mapping), self.types[mapping["model_type"]], settings_of(kind)
        found = {name: mapping[name] for name in ("model_type",) if name in kinds}
        for ours, entry in (t.settings | t.further).items():
            is_part = isinstance(entry, Part)
            found |= entry.read(config, found) if is_part else {ours: entry.read(config, found, kinds[ours])}
        only = {key: (valid(found),) if callable(valid) else valid for key, valid in t.only.items()}
        config.refuse_others(only, t.without_effect.split())
        nested: dict[str, Any] = {}
        for ours, value in found.items():
            section, _, name = ours.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = value
        return convert(kind, nested, "model")

    def differing(self, kind: type, model_type: str, mapping: Mapping[str, Any]) -> "Differing":
        """Return how a config.json of an unknown type differs from those of a type, of which `kind` is the class.

        A key with a value that does not fit counts as known: what reads it may need other keys, which are not there.
        """
        config, t, kinds, found = ConfigJson(mapping), self.types[model_type], settings_of(kind), dict[str, Any]()
        absent = []
        for ours, entry in (t.settings | t.further).items():
            is_part = isinstance(entry, Part)
            if not is_part and mapping.keys().isdisjoint(entry.names.split()):
                absent.append(entry)
            with contextlib.suppress(UserError, LookupError, TypeError, ValueError):
                found |= entry.read(config, found) if is_part else {ours: entry.read(config, found, kinds[ours])}
        only, known = dict[str, Any](), t.without_effect.split()
        for key, valid in t.only.items():
            try:
                only[key] = (valid(found),) if callable(valid) else valid
            except LookupError:
                known.append(key)
        missing = [entry.name for entry in absent if entry.default is REQUIRED]
        return Differing(config.find_others(only, known), missing, len(absent))

    def write(self, config: Any) -> dict[str, Any]:
        """Return the config.json of a configuration, without the dtype.

        Raises `UserError` for settings that no folder has.
        """
        name, kinds, mapping = self.type_of(config), settings_of(type(config)), {}
        t = self.types[name]
        header = {"type": fixed(architectures=[f"{t.architecture}ForCausalLM"], model_type=name)}
        for ours, entry in (t.settings | header | t.further).items():
            if isinstance(entry, Part):
                mapping |= entry.write(config)
            else:
                mapping[entry.name] = entry.write(operator.attrgetter(ours)(config), kinds[ours])
        self.check(config, mapping)
        return mapping

    def lost(self, config: Any) -> dict[str, tuple[Any, Any]]:
        """Return the settings of a configuration that no key holds: by name, the value and the one that is read back.

        Settings that are read back in another form, such as layers by their kinds, are in a key or change keys.
        """
        mapping, found = self.write(config), {}
        read, t = self.read(type(config), mapping), self.types[self.type_of(config)]
        entries = (t.settings | t.further).values()
        forms = {ours for entry in entries if isinstance(entry, Part) for ours in entry.forms}
        for ours, kind in settings_of(type(config)).items():
            value, other = map(operator.attrgetter(ours), (config, read))
            if not dataclasses.is_dataclass(kind) and ours not in forms and value != other:
                with contextlib.suppress(UserError):  # the other value does not fit the rest, which has keys
                    if self.write(_replace(config, ours, other)) == self.write(_replace(read, ours, value)) == mapping:
                        found[ours] = (value, other)
        return found


def _replace(config: Any, ours: str, value: Any) -> Any:
    """Return the configuration with another value of one setting, which may be in a section."""
    name, _, rest = ours.partition(".")
    return dataclasses.replace(config, **{name: _replace(getattr(config, name), rest, value) if rest else value})


def check_only(config: Any, whose: str, only: Mapping[str, Any]) -> None:
    """Raise `UserError` where a setting, which may be in a section, has another value than folders of `whose` have."""
    for name, value in only.items():
        if (given := operator.attrgetter(name)(config)) != value:
            raise UserError(f"model.{name}={show(given)}: {whose} in transformers has only {show(value)}")


def settings_of(config: type, section: str = "") -> dict[str, Any]:
    """Return our settings, those of sections included, and their types."""
    found = {}
    for name, kind in types_of(config).items():
        found |= {section + name: kind} | (
            settings_of(kind, f"{name}.") if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {}
        )
    return found
