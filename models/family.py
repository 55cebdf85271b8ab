"""A family: a configuration, and how a model is made of it."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from moezoo.models.base import LanguageModel, TokenEmbedding, Unembedding
from moezoo.models.block import Block
from moezoo.models.config import ModelConfig
from moezoo.models.hub import Hub
from moezoo.models.layers import make_stacks


def alike(config: ModelConfig) -> Sequence[Sequence[None]]:
    """Return the `kinds` of a family whose layers are of one kind."""
    return [[None] * config.layers]


# The family of each class of configurations. The newest holds, as for a notebook's cell that runs again.
MADE: dict[type[ModelConfig], "Family"] = {}


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that differ in their settings only. `family(config, dtype=, key=)` makes one.

    It is found by the class of its configurations, which should be the family's own.

    Attributes:
        name: The name in `FAMILIES`, and under `family` in a file of `conf/model/`.
        config: The class of its configurations.
        kinds: `kinds(config)` returns runs of layers, each a list with the kind of each layer. Layers of one kind have
            the same structure. Each run draws its initial values from a key of its own.
        make_block: `make_block(kind, config, dtype, key)` returns one layer.
        hub: Its mapping to Hugging Face folders.
        dense: The same for dense models, whose MLPs become its experts (`moezoo.hub.upcycling`). It writes nothing, and
            in every configuration that it reads the gates of a token's experts sum to 1.
    """

    name: str
    config: type[ModelConfig]
    kinds: Callable[[Any], Sequence[Sequence[Hashable]]]
    make_block: Callable[[Any, Any, jnp.dtype, Array], Block]
    hub: Hub
    dense: Hub | None = None

    def __post_init__(self):
        MADE[self.config] = self

    def __call__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, key: Array) -> LanguageModel:
        """Return a model with random parameters in `dtype` drawn from `key`."""
        c, dtype, runs = config, jnp.dtype(dtype), self.kinds(config)
        for_embedding, *for_runs, for_head = jax.random.split(key, 2 + len(runs))
        keys = [jax.random.split(for_run, len(run)) for for_run, run in zip(for_runs, runs, strict=True)]
        stacks = make_stacks(
            [kind for run in runs for kind in run],
            lambda kind, key: self.make_block(kind, c, dtype, key),
            jnp.concatenate(keys),
        )
        std = c.unembedding_std
        if std is None:
            # Logits of normalised activations have sqrt(embed) times the deviation of the matrix, from which truncation
            # takes a factor of 1.137. So theirs is at most 1, and the first loss at most 1/2 above ln(vocab).
            std = min(c.init_std, 1.137 / c.embed**0.5)
        return LanguageModel(
            TokenEmbedding(c.vocab, c.embed, std=c.init_std, factor=c.embedding_factor, dtype=dtype, key=for_embedding),
            stacks,
            Unembedding(
                c.embed,
                c.vocab,
                epsilon=c.norm_eps,
                around_one=c.norms_around_one,
                cast_last=c.norms_cast_last,
                std=std,
                tied=c.tied_embeddings,
                cap=c.logit_cap,
                dtype=dtype,
                key=for_head,
            ),
            c,
        )
