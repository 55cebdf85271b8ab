"""The contract of a family's configuration: the fields that the library reads."""

import abc
from typing import Literal

from moezoo.errors import UserError, check_not_negative, check_numbers, check_positive


class ModelConfig(abc.ABC):
    """The settings of a model. A family's configuration is a frozen dataclass with these fields and others.

    | field | meaning |
    |---|---|
    | `vocab`, `embed`, `layers`, `heads` | vocabulary size, width of the residual stream, layers, query heads |
    | `expert_mlp`, `experts`, `experts_per_token` | width of an expert, experts per layer, experts per token |
    | `max_length` | the most tokens that a text may have |
    | `norm_eps` | epsilon of the RMS norms |
    | `init_std` | standard deviation of the initial embeddings and unembeddings |
    | `load_balance`, `z_loss` | coefficients of the routing losses (`moezoo.moe.routing`) |
    | `load_balance_over` | what the load-balance loss is computed over: the batch or each sequence |

    Matrices start with standard deviation 1 / sqrt(inputs), those that write to the residual stream with
    1 / sqrt(2 `layers` inputs).

    Raises:
        UserError: a number is not finite or out of its range, or sizes contradict each other.
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
        """The number of tokens that a query sees, itself included; None for all. A family may make it a field."""
        return None

    @property
    @abc.abstractmethod
    def kept_dims(self) -> tuple[int, ...]:
        """The numbers that attention keeps per token and layer, one entry per array."""

    @property
    @abc.abstractmethod
    def dims_of_a_pair(self) -> int:
        """The multiplications per head for each query and key that see each other: for the score and for the value."""

    @property
    def least_parameters(self) -> int:
        """A lower bound of the number of parameters, in closed form: one table, all norms, one layer's experts.

        It needs neither time nor memory, so sizes that nothing can hold are refused before anything is built.
        """
        return self.embed * (self.vocab + 2 * self.layers + 3 * self.experts * self.expert_mlp)

    def __post_init__(self):
        """Check the fields that every family has. A family's checks follow."""
        check_numbers("model", self)
        sizes = ("vocab", "embed", "layers", "heads", "expert_mlp", "experts", "experts_per_token", "max_length")
        check_positive("model", self, *sizes, "norm_eps", "init_std")
        check_not_negative("model", self, "load_balance", "z_loss")
        if self.experts_per_token > self.experts:
            raise UserError(
                f"model.experts_per_token={self.experts_per_token} exceeds model.experts={self.experts}; "
                f"choose at most {self.experts}"
            )


class GroupedAttentionConfig(ModelConfig):
    """The settings of a model with grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245).

    | field | meaning |
    |---|---|
    | `kv_heads` | key-value heads; each serves `heads` / `kv_heads` query heads |
    | `head_dim` | size of a head's query, key and value |
    | `rope_base` | base of the rotary frequencies |
    """

    kv_heads: int
    head_dim: int
    rope_base: float

    @property
    def kept_dims(self) -> tuple[int, ...]:
        """Keys and values."""
        return (self.kv_heads * self.head_dim,) * 2

    @property
    def dims_of_a_pair(self) -> int:
        """`head_dim` for the score and `head_dim` for the value."""
        return 2 * self.head_dim

    def __post_init__(self):
        super().__post_init__()
        check_positive("model", self, "kv_heads", "head_dim", "rope_base")
        if self.window is not None and self.window < 1:
            raise UserError(f"model.window={self.window} must be at least 1, or null for no window")
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}; "
                f"choose a multiple of {self.kv_heads}, because every key-value head serves the same number of heads"
            )
        check_rotary(self, "head_dim")


def check_rotary(config: ModelConfig, name: str) -> None:
    """Raise `UserError` unless the setting `name`, a size that rotary positions turn in pairs, is even."""
    if getattr(config, name) % 2:
        raise UserError(f"model.{name}={getattr(config, name)} must be even, because rotary positions turn pairs")
