"""Adapters: a few trained numbers beside the frozen weights of a model."""

import abc
import dataclasses
import math
import zlib
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError, nearest
from moezoo.models.base import LanguageModel
from moezoo.nn.linear import draws_numbers
from moezoo.parallel.axes import Axes, Role, is_stored, matches, matching, parameter_table
from moezoo.parallel.low_rank import LowRank, drops, pairs_by_path
from moezoo.typed import Positive, Range, Size, check_fields, show

# A short word for the weights of a kind of part, and the patterns of their paths.
WORDS = {
    "attention": ("*.attention.*",),
    "experts": ("*.feed_forward.experts.*",),
    "shared": tuple(f"*.feed_forward.shared.{name}" for name in ("gate", "up", "down")),
    "mlp": ("*.feed_forward.gate", "*.feed_forward.up", "*.feed_forward.down"),
}
_ALL = "all"


class Adapter(abc.ABC):
    """What is trained in place of a model's weights; each entry of the group `adapter` is a frozen dataclass.

    Attributes:
        rate_factor: The factor on the learning rate of a run that starts from weights, unless the rate is set.
        init_from: The folder of an adapter to start from; None for a fresh one.
        dropout: The probability with which training drops an input of what is trained.
    """

    rate_factor: ClassVar[float] = 1

    init_from: str | None = None
    dropout: float = 0

    @abc.abstractmethod
    def adapt(self, model: LanguageModel, key: Array) -> LanguageModel:
        """Return the model with what is trained beside its weights.

        Raises:
            UserError: The model has no such weights, or they are too small.
        """

    @abc.abstractmethod
    def trained(self, model: LanguageModel) -> tuple[str, ...] | None:
        """Return the paths of what is trained in an adapted model; None for the model's own parameters."""


@dataclasses.dataclass(frozen=True)
class NoAdapter(Adapter):
    """None: the parameters themselves are trained."""

    def adapt(self, model: LanguageModel, key: Array) -> LanguageModel:
        """Return the model."""
        del key
        return model

    def trained(self, model: LanguageModel) -> None:
        """Return None."""
        del model


@dataclasses.dataclass(frozen=True)
class Lora(Adapter):
    """LoRA (Hu et al., 2021, arXiv:2106.09685): W + scale * A B beside each chosen weight W, with A and B trained.

    A is drawn from a normal distribution of variance 1 / inputs, from a key that depends on its path alone, and B is
    zero. So a fresh adapter changes no result. Both are float32. Each expert has its own pair.

    Attributes:
        rank: The number of columns of A.
        alpha: What the scale is made of; None for a scale of 1.
        scale: `alpha/rank`, or `alpha/sqrt(rank)` (Kalajdzievski, 2023, arXiv:2312.03732).
        targets: Words of `WORDS`, `all` for all of these, or patterns of the paths of weights.
        dropout: The probability with which a step drops each input of A (`moezoo.parallel.dropout`), but of experts.
        init_from: A folder with pairs of these ranks, scale and targets to start from, as PEFT and moezoo write them.
    """

    rate_factor: ClassVar[float] = 10
    rank: Size = 16
    alpha: Positive | None = None
    scale: Literal["alpha/rank", "alpha/sqrt(rank)"] = "alpha/rank"
    targets: tuple[str, ...] = (_ALL,)
    dropout: Annotated[float, Range(at_least=0, below=1)] = 0
    init_from: str | None = None

    def __post_init__(self):
        check_fields("adapter", self)
        if not self.targets:
            raise UserError(f"adapter.targets=[] leaves nothing to adapt; name some of {', '.join((*WORDS, _ALL))}")

    @property
    def factor(self) -> float:
        """The factor of the product of a pair."""
        return (
            1.0
            if self.alpha is None
            else self.alpha / (self.rank if self.scale == "alpha/rank" else math.sqrt(self.rank))
        )

    def chosen(self, model: LanguageModel) -> dict[str, Axes]:
        """Return the path and the axes of each weight that gets a pair, in a model without pairs."""
        table = {path: axes for path, axes, _ in parameter_table(model)}
        weights = [path for path, axes in table.items() if axes.role is Role.WEIGHT]
        in_words = {
            word: set().union(*(matches(pattern, weights) for pattern in patterns)) for word, patterns in WORDS.items()
        }
        in_words[_ALL] = set().union(*in_words.values())
        found: set[str] = set()
        for target in self.targets:
            here = in_words.get(target)
            if here is None and target.isidentifier():
                raise UserError(f"adapter.targets={show(target)}: no such word; {nearest(target, in_words)}")
            if here is None:
                here = matching("adapter.targets", [target], list(table))
                if odd := sorted(here - {*weights}):
                    raise UserError(
                        f"adapter.targets: {show(target)} matches {odd[0]}, of role {table[odd[0]].role.value}, "
                        "which has no pair; leave it out, or train it whole with trained"
                    )
                if self.dropout and (outside := [path for path in sorted(here) if ".stacks" not in path]):
                    raise UserError(
                        f"adapter.dropout={self.dropout:g} is for pairs of layers, and adapter.targets has "
                        f"{outside[0]}; set adapter.dropout=0, or leave it out"
                    )
            elif not here:
                has = ", ".join(word for word, paths in in_words.items() if paths)
                raise UserError(f"adapter.targets: this model has no weights of {target}; it has {has}")
            found |= here
        if self.dropout and not any(drops(table[path]) for path in found):
            raise UserError(
                f"adapter.dropout={self.dropout:g} is for all pairs but those of experts, and adapter.targets="
                f"{show(list(self.targets))} has no others; set adapter.dropout=0"
            )
        return {path: table[path] for path in table if path in found}

    def adapt(self, model: LanguageModel, key: Array) -> LanguageModel:
        """Return the model with a pair beside each chosen weight. Raises as `Adapter.adapt` does."""
        chosen = self.chosen(model)

        def put(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path)
            return self._pair(name, leaf, chosen[name], key) if name in chosen else leaf

        return jax.tree_util.tree_map_with_path(put, model, is_leaf=is_stored)

    def _pair(self, path: str, base: Any, axes: Axes, key: Array) -> LowRank:
        first, cut = len(axes.stacked), len(axes.stacked) + len(axes.inputs)
        shape = tuple(base.shape)
        inputs, outputs = math.prod(shape[first:cut]), math.prod(shape[cut:])
        if self.rank > min(inputs, outputs):
            raise UserError(
                f"adapter.rank={self.rank} but {path} is a matrix of {inputs} x {outputs}; choose at most "
                f"{min(inputs, outputs)}, or leave it out of adapter.targets"
            )
        return LowRank(
            base=base,
            a=_normal(jax.random.fold_in(key, zlib.crc32(path.encode())), (*shape[:cut], self.rank), inputs**-0.5),
            b=jnp.zeros((*shape[:first], self.rank, *shape[cut:]), jnp.float32),
            scale=self.factor,
            inputs=len(axes.inputs),
            dtype=base.dtype,
        )

    def trained(self, model: LanguageModel) -> tuple[str, ...]:
        """Return the paths of all pairs."""
        return tuple(f"{path}.{part}" for path, _ in pairs_by_path(model) for part in "ab")


def _normal(key: Array, shape: tuple[int, ...], std: float) -> Array:
    if not draws_numbers.value:
        return jnp.zeros(shape, jnp.float32)
    return std * jax.random.normal(key, shape, jnp.float32)


# What the group `adapter` of a configuration can name.
ADAPTERS: dict[str, type[Adapter]] = {"none": NoAdapter, "lora": Lora}
