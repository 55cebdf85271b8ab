"""Upcycling: a dense model becomes a mixture of experts, each a copy of its MLP.

Komatsuzaki et al., 2022, "Sparse Upcycling", arXiv:2212.05055.

In the families that dense models become, the gates of a token's experts sum to 1. So equal experts compute what the MLP
computes, whatever the router chooses, and the mixture starts with the logits of the dense model.
"""

import dataclasses
import functools
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from moezoo.errors import UserError
from moezoo.hub.arrays import Boxes, Target
from moezoo.hub.holdings import Holding
from moezoo.hub.regions import Box
from moezoo.hub.tensors import arrays_by_path
from moezoo.models import ModelConfig
from moezoo.models.base import LanguageModel
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import is_stored
from moezoo.typed import Count, NotNegative, Size, check_fields


@dataclasses.dataclass(frozen=True)
class Upcycle:
    """How a dense model becomes a mixture of experts.

    Args:
        experts: The experts per layer, each a copy of the layer's MLP; 0 for a model that has experts, or is random.
        per_token: The experts per token.
        noise: The standard deviation of what is added to each expert, as a fraction of that of the copied matrix. With
            noise the model does not start with the logits of the dense model.
        seed: What routers and noise are drawn from. A router is that of `build_model` with `jax.random.key(seed)`.

    Raises:
        UserError: A value has a wrong type, a number is out of its range, `per_token` exceeds `experts`, or others are
            set without `experts`.
    """

    experts: Count = 0
    per_token: Size = 2
    noise: NotNegative = 0.0
    seed: Count = 0

    def __post_init__(self):
        check_fields("upcycle", self)
        if not self.experts:
            for field in dataclasses.fields(self):
                if (value := getattr(self, field.name)) != field.default:
                    key = f"upcycle.{field.name}={value}"
                    raise UserError(f"{key} but upcycle.experts=0, which copies no MLP; write upcycle.experts=8")
        elif self.per_token > self.experts:
            raise UserError(
                f"upcycle.per_token={self.per_token} exceeds upcycle.experts={self.experts}; choose at most "
                f"{self.experts}"
            )

    def widen(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration with these experts."""
        return dataclasses.replace(config, experts=self.experts, experts_per_token=self.per_token)

    def draws(self, path: str) -> bool:
        """Return whether the array at a path is a router's, which no dense model has."""
        return self.experts > 0 and ".router." in path


NOT_UPCYCLED = Upcycle()


def spread(arrays: Mapping[str, Boxes]) -> dict[str, Boxes]:
    """Return `arrays`, with those of experts [layer, expert, ...] as [layer, 1, ...], which fill all experts."""
    found = dict(arrays)
    for path in filter(_is_of_experts, arrays):
        layers, _, *rest = arrays[path].shape
        boxes: dict[Box, _Each] = {}
        for (of_layers, (first, last), *inner), target in arrays[path].boxes.items():
            each = boxes.setdefault((of_layers, (0, 1), *inner), _Each([]))
            each.targets.extend((expert, target) for expert in range(last - first))
        found[path] = Boxes((layers, 1, *rest), boxes)
    return found


def _is_of_experts(path: str) -> bool:
    return ".experts." in path


class _Each(NamedTuple):
    """The numbers of one expert, which go to each of these experts of a box."""

    targets: list[tuple[int, Target]]

    def write(self, values: np.ndarray, at: tuple[int, ...]) -> bool:
        """Write the values to every expert; return whether they fit."""
        values = np.ascontiguousarray(values)  # once for all
        layer, _, *inner = at
        return all([target.write(values, (layer, expert, *inner)) for expert, target in self.targets])


def deviations(holdings: Iterable[Holding], arrays: Container[str], upcycle: Upcycle) -> dict[str, dict[int, float]]:
    """Return the standard deviation of the noise of each array of experts, by its path and layer; {} without noise.

    They are those of the numbers in the files, so that they are the same on every mesh. `arrays` are the paths of the
    arrays that are filled. Raises `UserError` for weights that stay in few bits.
    """
    found: dict[str, dict[int, float]] = {}
    for holding in holdings if upcycle.noise else ():
        path, index = holding.tensor.parts[0]
        if not _is_of_experts(path):
            continue
        if path not in arrays:  # but those of its container
            raise UserError(
                f"upcycle.noise={upcycle.noise}: {holding.names[0]} stays in few bits, which no noise can be added to; "
                "widen them with dtype=bfloat16, in a run execution.param_dtype=bfloat16, or leave the noise out"
            )
        x = holding.read(np.dtype(np.float32))
        square = np.einsum("ij,ij->", x, x, dtype=np.float64) / x.size
        found.setdefault(path, {})[index[0]] = upcycle.noise * max(square - x.mean(dtype=np.float64) ** 2, 0) ** 0.5
    return found


def complete(model: LanguageModel, upcycle: Upcycle, noise: Mapping[str, Mapping[int, float]]) -> LanguageModel:
    """Return a loaded model with routers in place of their shapes, and with noise on its experts.

    All is drawn where it stays, and is the same on every mesh. With several processes all of them call this.

    Args:
        model: The model, perhaps with None in place of some arrays; the shapes have shardings.
        upcycle: What the seed is of.
        noise: The result of `deviations`.
    """
    key, arrays = jax.random.key(upcycle.seed), arrays_by_path(model)
    shardings = {path: x.sharding for path, x in arrays.items() if isinstance(x, jax.ShapeDtypeStruct)}

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        fresh = arrays_by_path(Blueprint(model.config).make(key))
        return {path: fresh[path].astype(arrays[path].dtype) for path in shardings}

    made = jax.jit(draw, out_shardings=shardings)(key)
    for path, by_layer in noise.items():
        x = arrays[path]
        scale = np.array([by_layer[layer] for layer in range(len(x))], np.float32)
        # The path makes the noise of each array another one; `draw` uses small numbers in this place.
        own = jax.random.split(jax.random.fold_in(key, np.uint32(zlib.crc32(path.encode()))), len(x))
        made[path] = _add_noise(x, own, scale, x.sharding)

    def put(path: tuple, x: jax.Array) -> jax.Array:
        return made.get(jax.tree_util.keystr(path).lstrip("."), x)

    return jax.tree_util.tree_map_with_path(put, model, is_leaf=is_stored)


@functools.partial(jax.jit, static_argnums=3)
def _add_noise(x: jax.Array, keys: jax.Array, scale: np.ndarray, sharding: Sharding) -> jax.Array:
    """Return experts [layer, expert, inputs, outputs] with noise, made layer by layer, so that little memory is needed.

    Each layer has its own of `keys` [layer] and of `scale` [layer].
    """

    def add(layer: Sequence[jax.Array]) -> jax.Array:
        x, key, scale = layer
        noise = jax.random.normal(key, x.shape, jnp.float32)
        if isinstance(sharding, NamedSharding):
            one = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
            noise = jax.lax.with_sharding_constraint(noise, one)
        return (x.astype(jnp.float32) + scale * noise).astype(x.dtype)

    return jax.lax.with_sharding_constraint(jax.lax.map(add, (x, keys, scale)), sharding)
