"""What the library reads of a family's configuration: the contract that every family's dataclass keeps."""

import abc
from typing import Literal

from moezoo.errors import UserError, check_not_negative, check_positive


class ModelConfig(abc.ABC):
    """Sizes of a model; each family's is a frozen dataclass with these fields, and with fields of its own.

    - `vocab`, `embed`, `layers`, `heads`: size of the vocabulary, width of the residual stream, layers, query heads;
    - `expert_mlp`, `experts`, `experts_per_token`: width of an expert, experts a layer, experts that a token goes to;
    - `max_length`: tokens that a text may have;
    - `norm_eps`: epsilon of the RMS norms;
    - `init_std`: standard deviation of the embeddings at the start; matrices start at 1 / sqrt(inputs), those that
      write to the residual stream at 1 / sqrt(2 layers) of it;
    - `load_balance`, `z_loss`: coefficients of the routing losses (`moezoo.moe.routing`); `load_balance_over` is what
      the balance is taken over.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    expert_mlp: int
    experts: int
    experts_per_token: int
    max_length: int
    norm_eps: float
    init_std: float
    load_balance: float
    load_balance_over: Literal["batch", "sequence"]
    z_loss: float

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all. A sliding window is a family's field."""
        return None

    @property
    @abc.abstractmethod
    def kept_dims(self) -> tuple[int, ...]:
        """How many numbers attention keeps of a token, array by array."""

    @property
    @abc.abstractmethod
    def dims_of_a_pair(self) -> int:
        """Products that a head makes for each query and key that see each other: of the score, and of the value."""

    def __post_init__(self):
        """Raise `UserError` where the sizes that every family has contradict; a family's own checks follow."""
        sizes = ("vocab", "embed", "layers", "heads", "expert_mlp", "experts", "experts_per_token", "max_length")
        check_positive("model", self, *sizes, "norm_eps", "init_std")
        check_not_negative("model", self, "load_balance", "z_loss")
        if self.experts_per_token > self.experts:
            raise UserError(
                f"model.experts_per_token={self.experts_per_token} exceeds model.experts={self.experts}; "
                f"choose at most {self.experts}"
            )


class GroupedAttentionConfig(ModelConfig):
    """Sizes of a model with grouped-query attention.

    - `kv_heads`: key-value heads, each of which serves as many query heads;
    - `head_dim`: numbers of a query, a key and a value, all of them rotated; `rope_base`: base of the frequencies.
    """

    kv_heads: int
    head_dim: int
    rope_base: float

    @property
    def kept_dims(self) -> tuple[int, ...]:
        """Its key and its value."""
        return (self.kv_heads * self.head_dim,) * 2

    @property
    def dims_of_a_pair(self) -> int:
        """Both of them."""
        return 2 * self.head_dim

    def __post_init__(self):
        super().__post_init__()
        check_positive("model", self, "kv_heads", "head_dim", "rope_base")
        if self.window is not None and self.window < 1:
            raise UserError(f"model.window={self.window} must be at least 1, or null for no window")
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}; "
                f"every key-value head serves as many heads, so choose a multiple of {self.kv_heads}"
            )
        check_rotary(self, "head_dim")


def check_rotary(config: ModelConfig, name: str) -> None:
    """Raise `UserError` unless rotary positions can turn pairs of this size of a model's `config`."""
    if getattr(config, name) % 2:
        raise UserError(f"model.{name}={getattr(config, name)} must be even: rotary positions turn pairs")
