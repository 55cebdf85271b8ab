"""The contract of a family's configuration: the fields that the library reads."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from moezoo.errors import UserError
from moezoo.nn.rotary import Yarn
from moezoo.typed import AtMost, Even, MayChange, NotNegative, Positive, Range, Size, check_fields, show, to_plain

# The deepest transformers that were published have 1,000 layers, and released models fewer than 130. Each kind of layer
# is planned in Python, so a number without a limit could take hours before anything is refused.
MAX_LAYERS = 10_000
LossFactor = Annotated[NotNegative, MayChange(at_start=0.0)]
Window = Annotated[Size, MayChange()]


class Limit(NamedTuple):
    """The most tokens that a text may have, and the setting that says so.

    Attributes:
        key: The setting, such as `model.max_length`.
        tokens: Its value.
        why: What forbids a larger value; "" where nothing does.
    """

    key: str
    tokens: int
    why: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.tokens}" + (f" ({self.why})" if self.why else "")


def extended(max_length: int, yarn: Yarn) -> Limit:
    """Return the limit of a model with YaRN: folders whose `max_length` is that of training may have a larger reach."""
    if yarn.reach > max_length:
        return Limit("model.yarn.factor x model.yarn.length", yarn.reach)
    return Limit("model.max_length", max_length)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The settings of a model. A family's configuration is a frozen dataclass with these fields and others.

    The defaults are those of a laptop size; a family repeats fields whose default is another.

    | field | meaning |
    |---|---|
    | `vocab`, `embed`, `heads` | vocabulary size, width of the residual stream, query heads |
    | `layers` | the number of layers, at most 10,000 |
    | `expert_mlp`, `experts`, `experts_per_token` | width of an expert, experts per layer, experts per token |
    | `max_length` | the most tokens that a text may have; with `yarn` at least `yarn.factor` x `yarn.length` |
    | `norm_eps` | epsilon of the RMS norms |
    | `init_std` | standard deviation of the initial embeddings |
    | `unembedding_std` | the same of an untied unembedding; None: the smaller of `init_std` and 1.137 / sqrt(`embed`) |
    | `tied_embeddings` | whether the unembedding is the embedding's table, transposed; else it is a matrix of its own |
    | `load_balance`, `z_loss` | coefficients of the routing losses (`moezoo.moe.routing`) |
    | `load_balance_over` | what the load-balance loss is computed over: the batch or each sequence |

    Matrices start with standard deviation 1 / sqrt(inputs), those that write to the residual stream with
    1 / sqrt(2 `layers` inputs). Values beyond two of these deviations are drawn again, so the actual deviation is 0.88
    times as large. That of the first logits is sqrt(`embed`) times the unembedding's, so by default at most 1.

    The ranges here, and which settings the same weights may have with another value (`moezoo.typed.MayChange`), also
    hold for the fields of a family that have another default.

    Raises:
        UserError: A value has a wrong type, a number is out of its range, or sizes contradict each other.
    """

    vocab: Size = 256
    embed: Size = 128
    layers: Annotated[int, Range(at_least=1, at_most=MAX_LAYERS)] = 4
    heads: Size = 4
    expert_mlp: Size = 128
    experts: Size = 16
    experts_per_token: Annotated[Size, AtMost("experts")] = 4
    max_length: Annotated[Size, MayChange()] = 4096
    norm_eps: Positive = 1e-5
    init_std: Positive = 0.1
    unembedding_std: NotNegative | None = None
    tied_embeddings: bool = False
    load_balance: LossFactor = 0.01
    load_balance_over: Annotated[Literal["batch", "sequence"], MayChange()] = "batch"
    z_loss: LossFactor = 0.0

    @property
    def longest(self) -> Limit:
        """The most tokens that a text may have, its prompt and new tokens together. A family may have a lower limit."""
        return Limit("model.max_length", self.max_length)

    @property
    def window(self) -> int | None:
        """The tokens that a query sees, itself included, in layers with a window; None: all. May be a field."""
        return None

    @property
    def sees_all(self) -> bool:
        """Whether the queries of some layer see all tokens up to themselves."""
        return self.window is None

    @property
    def variant(self) -> str:
        """Which model of its family it is, where settings of one family make several; else empty."""
        return ""

    @property
    def norms_around_one(self) -> bool:
        """Whether norms multiply by 1 + scale (`moezoo.nn.norm`); those inside mixers may differ."""
        return False

    @property
    def norms_cast_last(self) -> bool:
        """Whether norms multiply by the scale before they cast the result (`moezoo.nn.norm`)."""
        return False

    @property
    def embedding_factor(self) -> float:
        """The factor of embeddings where tokens are looked up."""
        return 1.0

    @property
    def logit_cap(self) -> float | None:
        """What logits stay below in magnitude (`moezoo.models.base.Unembedding`); None: no cap. May be a field."""
        return None

    @property
    def looked_up(self) -> int:
        """The number of parameters that are in no product: the embedding's, unless it is tied."""
        return 0 if self.tied_embeddings else self.vocab * self.embed

    @property
    def least_parameters(self) -> int:
        """A lower bound of the number of parameters, in closed form: one table, all norms, one layer's experts.

        It needs neither time nor memory, so sizes that nothing can hold are refused before anything is built.
        """
        return self.embed * (self.vocab + 2 * self.layers + 3 * self.experts * self.expert_mlp)

    def __post_init__(self):
        """Check each field alone, then those that every family has together. A family's checks follow."""
        check_fields("model", self)
        if self.tied_embeddings and self.unembedding_std is not None:
            raise UserError(
                f"model.unembedding_std={self.unembedding_std} has no effect with model.tied_embeddings=true, where "
                "embedding and unembedding are one table; set model.init_std"
            )


@dataclasses.dataclass(frozen=True)
class KeyValueHeadsConfig(ModelConfig):
    """The settings of a model with grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245).

    | field | meaning |
    |---|---|
    | `kv_heads` | key-value heads; each serves `heads` / `kv_heads` query heads |
    | `head_dim` | size of a head's query, key and value |
    """

    kv_heads: Size = 2
    head_dim: Size = 32

    def __post_init__(self):
        super().__post_init__()
        check_heads(self, "kv_heads")


@dataclasses.dataclass(frozen=True)
class GroupedAttentionConfig(KeyValueHeadsConfig):
    """The same with rotary positions; `rope_base` is the base of their frequencies."""

    head_dim: Even = 32  # rotary positions turn pairs
    rope_base: Positive = 1e4


def check_heads(config: KeyValueHeadsConfig, name: str) -> None:
    """Raise `UserError` unless the setting `name`, a number of key-value heads, divides that of heads."""
    if config.heads % (heads := getattr(config, name)):
        raise UserError(
            f"model.heads={config.heads} is not divisible by model.{name}={heads}; choose a multiple of {heads}, "
            "because every key-value head serves the same number of heads"
        )


def differing_settings(ours: ModelConfig, whose: str, theirs: ModelConfig) -> str:
    """Return the settings in which the configuration of `whose`, such as "the model", is not that of cfg, or ""."""
    if type(ours) is not type(theirs):
        return f"{whose} has a {type(ours).__name__}, cfg.model is a {type(theirs).__name__}"
    names = [field.name for field in dataclasses.fields(ours)]
    values = ((name, to_plain(getattr(ours, name)), to_plain(getattr(theirs, name))) for name in names)
    return "; ".join(f"model.{k}={show(x)} in {whose}, {show(y)} in cfg" for k, x, y in values if x != y)


def check_layers(config: ModelConfig, name: str) -> None:
    """Raise `UserError` unless the setting `name`, numbers of layers from 0 or None, names layers that there are."""
    if outside := [i for i in getattr(config, name) or () if not 0 <= i < config.layers]:
        there = f"model.layers={config.layers} has layers 0 to {config.layers - 1}"
        raise UserError(f"model.{name} names layer {outside[0]}, but {there}")


def with_experts(layers: int, moe_every: int, mlp_layers: Sequence[int]) -> frozenset[int]:
    """Return the layers with experts: `moe_every` divides their numbers from 1; `mlp_layers` has others, from 0."""
    return frozenset(range(moe_every - 1, layers, moe_every)) - frozenset(mlp_layers)


def check_experts(config: ModelConfig, moe_every: int, mlp_layers: Sequence[int]) -> None:
    """Raise `UserError` unless some layer has experts by these settings."""
    if not with_experts(config.layers, moe_every, mlp_layers):
        raise UserError(
            f"model.moe_every={moe_every} and model.mlp_layers={list(mlp_layers)} leave no layer of "
            f"model.layers={config.layers} with experts; lower moe_every or name fewer layers"
        )
