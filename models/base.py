"""The model of every family: `embed`, `layers`, `head`, and the call that composes them on any mesh."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from moezoo.errors import UserError, check_type
from moezoo.models.choice import choose_dispatch
from moezoo.models.config import ModelConfig
from moezoo.models.layers import Collect, LayersOutput, routing_rows, run_layers
from moezoo.moe.routing import Routing, RoutingConfig, reduce_routing
from moezoo.nn.cache import Cache
from moezoo.nn.linear import normal, project, project_rows
from moezoo.nn.norm import RMSNorm
from moezoo.nn.positions import Context, make_context
from moezoo.parallel.axes import Embedding, Stack, Weight
from moezoo.parallel.collectives import ALONE, InnerGroup
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.parallel.stored import Stored
from moezoo.parallel.weight_mover import WeightMover


class TokenEmbedding(eqx.Module):
    """A table with one vector per token of the vocabulary, and the factor of vectors, rounded to their dtype."""

    weight: Embedding[Array, "vocab embed"]
    factor: float = eqx.field(static=True)

    def __init__(self, vocab: int, embed: int, *, std: float, factor: float = 1.0, dtype: jnp.dtype, key: Array):
        self.weight, self.factor = normal(key, (vocab, embed), std, dtype), factor

    def __call__(self, tokens: Int[Array, "batch seq"], group: InnerGroup = ALONE) -> Float[Array, "batch seq embed"]:
        """Return the vector of each token: one psum over the `group` that shares the vocabulary."""
        found = self._look_up(tokens, group)
        return found if self.factor == 1 else found * jnp.asarray(self.factor, found.dtype)

    def _look_up(self, tokens: Int[Array, "batch seq"], group: InnerGroup) -> Float[Array, "batch seq embed"]:
        if not group.axes:
            return jnp.take(self.weight, tokens, axis=0, mode="clip")
        rows = self.weight.shape[0]
        at = jnp.clip(tokens, 0, rows * group.size - 1) - group.index * rows
        is_here = (at >= 0) & (at < rows)
        return group.leave(jnp.where(is_here[..., None], jnp.take(self.weight, at, axis=0, mode="clip"), 0))


class Unembedding(eqx.Module):
    """The final norm and the projection to logits: by a matrix of its own, or by the embedding's table, transposed.

    In a model with tied embeddings it has neither, so that the table is one array; `LanguageModel.readout` puts it in.
    With a `cap` logits are cap * tanh(logits / cap), which is less than it in magnitude.
    """

    norm: RMSNorm
    weight: Weight[Array, "embed -> vocab"] | None
    table: Embedding[Array, "vocab embed"] | None
    cap: float | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        vocab: int,
        *,
        epsilon: float,
        around_one: bool = False,
        cast_last: bool = False,
        std: float,
        tied: bool = False,
        cap: float | None = None,
        dtype: jnp.dtype,
        key: Array,
    ):
        self.norm = RMSNorm(embed, epsilon, around_one=around_one, cast_last=cast_last, dtype=dtype)
        self.weight = None if tied else normal(key, (embed, vocab), std, dtype)
        self.table, self.cap = None, cap

    @property
    def matrix(self) -> Float[Array, "embed vocab"] | Stored:
        """What the normalised activations are multiplied by."""
        if self.weight is not None:
            return self.weight
        assert self.table is not None, "call the readout of a model with tied embeddings"
        return self.table.T

    def __call__(self, hidden: Float[Array, "*dims embed"]) -> Float[Array, "*dims vocab"]:
        """Return float32 logits."""
        logits = self.before_cap(hidden)
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)

    def before_cap(self, hidden: Float[Array, "*dims embed"]) -> Float[Array, "*dims vocab"]:
        """Return float32 logits as the product makes them."""
        x, matrix = self.norm(hidden), self.matrix
        return project_rows(x, matrix) if x.ndim == 2 else project(x, matrix, dtype=jnp.float32)


class Output(NamedTuple):
    """The result of a model: `logits` [batch, seq, vocab] float32, and `routing` with a row per MoE layer.

    Logits are split over the devices that share the vocabulary, as the unembedding is.
    """

    logits: Float[Array, "batch seq vocab"]
    routing: Routing


@final
class LanguageModel(eqx.Module):
    """A token embedding, stacks of layers, and an unembedding. All leaves are arrays.

    Every layer is a `moezoo.models.block.Block`. A `moezoo.models.family.Family` makes models.
    """

    embedding: TokenEmbedding
    stacks: tuple[Stack, ...]
    unembedding: Unembedding
    config: ModelConfig = eqx.field(static=True)

    @property
    def routing_config(self) -> RoutingConfig:
        """The coefficients of the routing losses."""
        c = self.config
        return RoutingConfig(c.load_balance, c.z_loss, c.experts_per_token, c.load_balance_over)

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        return self.embedding.weight.shape[0]

    @property
    def readout(self) -> Unembedding:
        """The unembedding with the matrix that it multiplies by; that of tied embeddings is the embedding's table.

        Such a table is gathered twice, where tokens are looked up and where logits are made, and its gradient is the
        sum of both. So a step moves and gathers as much as without tying, and stores one matrix less.
        """
        if self.unembedding.weight is not None:
            return self.unembedding
        return eqx.tree_at(lambda u: u.table, self.unembedding, self.embedding.weight, is_leaf=lambda x: x is None)

    def after_step(self, load: Int[Array, "layer experts"]) -> "LanguageModel":
        """Return the model with its buffers moved by a training step's `load`, summed over devices and micro-steps."""
        model = self
        for (stack, kind), rows in routing_rows(self.stacks).items():
            mine = lambda m, stack=stack, kind=kind: m.stacks[stack].blocks[kind].feed_forward  # noqa: E731
            model = eqx.tree_at(mine, model, mine(model).after_step(load if len(rows) == len(load) else load[rows]))
        return model

    @jax.named_scope("embedding")
    def embed(self, tokens: Int[Array, "batch seq"], execution: MeshExecution) -> Float[Array, "batch seq embed"]:
        """Return the activations of tokens."""
        return WeightMover(execution).gather(self.embedding)(tokens, execution.inner_group("vocab"))

    @jax.named_scope("layers")
    def layers(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        execution: MeshExecution,
        cache: Cache | None = None,
        collect: Collect | None = None,
    ) -> LayersOutput:
        """Run all layers (`moezoo.models.layers.run_layers`)."""
        return run_layers(self.stacks, x, context, execution, cache, collect)

    @jax.named_scope("head")
    def head(
        self, hidden: Float[Array, "batch seq embed"], execution: MeshExecution
    ) -> Float[Array, "batch seq vocab"]:
        """Return the logits of activations, of this device's part of the vocabulary."""
        return WeightMover(execution).gather(self.readout)(hidden)

    def __call__(
        self,
        tokens: Int[Array | np.ndarray, "batch seq"],
        *,
        segments: Int[Array | np.ndarray, "batch seq"] | None = None,
        positions: Int[Array | np.ndarray, "batch seq"] | None = None,
        execution: Execution | None = None,
    ) -> Output:
        """Return logits and routing.

        The numbers in arrays are checked, except while JAX traces the call: there an id outside the vocabulary stands
        for the nearest one inside, and any position is rotated as it is.

        Args:
            tokens: Integers [batch, seq] from 0 to `vocab` - 1, the whole batch even on a mesh.
            segments: The number of each token's document in its row, from 1; 0 is padding. Default: all 1.
            positions: Each token's position in its document, below `config.longest`. Default: its index in the row.
            execution: How the model runs. Default: on one device. `dispatch=auto` counts no gradients here.

        Raises:
            UserError: An array is not integers [batch, seq], is empty, or has a number out of its range; a row without
                `positions` is longer than `config.longest`; or the mesh does not divide the batch or the sequence.
        """
        execution = Execution() if execution is None else execution
        check_type("execution", execution, Execution, "write execution=moezoo.execution(cfg)")
        tokens = as_integers("tokens", tokens)
        self._check_numbers(tokens, segments, positions)
        tokens = jnp.asarray(tokens, jnp.int32)
        here = on_mesh(execution.in_turn)
        check_tokens(tokens.shape[0], tokens.shape[1], here)
        here = choose_dispatch(self.stacks, tokens.shape[0], tokens.shape[1], here, "evaluate")
        order = "contiguous" if segments is None and positions is None else None
        segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        positions = jnp.asarray(positions, jnp.int32)

        def local(model: LanguageModel, tokens: Array, coordinates: Coordinates) -> Output:
            context = make_context(coordinates, here, order)
            out = model.layers(model.embed(tokens, here), context, here)
            assert out.sums is not None
            routing = reduce_routing(out.sums, model.routing_config, here.batch_axes, here.sequence_axes)
            return Output(model.head(out.x, here), routing)

        coordinates = Coordinates(positions, segments)
        split: Any = here.tokens_spec
        logits: Any = PartitionSpec(*split, here.inner_group("vocab").axes or None)
        specs = (here.specs(self), split, Coordinates(split, split))
        replicated: Any = PartitionSpec()
        return here.run(local, (self, tokens, coordinates), specs, Output(logits, replicated))

    def _check_numbers(self, tokens: Any, segments: Any, positions: Any) -> None:
        """Check the arrays of a call and the numbers that are known; at padding there may be any."""
        limit, read = self.config.longest, None
        if segments is not None and (read := known(as_integers("segments", segments, tokens))) is not None:
            check_inside("segments", read, 2**31, "0 is padding")
            read = read > 0
        if positions is not None:
            positions = known(as_integers("positions", positions, tokens))
        elif tokens.shape[1] > limit.tokens:
            raise UserError(f"tokens are {list(tokens.shape)}, longer than {limit}; shorten the rows")
        for name, numbers, size, why in (
            ("tokens", known(tokens), self.vocab, f"model.vocab={self.vocab}"),
            ("positions", positions, limit.tokens, str(limit)),
        ):
            if numbers is not None:
                check_inside(name, numbers if read is None else numbers[read], size, why)


def check_tokens(
    batch: int,
    length: int,
    execution: MeshExecution,
    *,
    batch_key: str = "batch",
    parts: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Raise `UserError` unless the mesh divides the rows of each part of a batch and their `length` tokens.

    Args:
        batch: The rows of the whole batch.
        length: The tokens of each.
        execution: How the model runs.
        batch_key: The name of the batch size in the message.
        parts: Key -> the number of parts that it cuts a batch into.
    """
    for key, size, axes, cuts in (
        (batch_key, batch, execution.batch_axes, parts),
        ("seq_len", length, execution.sequence_axes, {}),
    ):
        ways = math.prod(cuts.values()) * execution.ways(axes)
        if size % ways:
            factors = [f"{key}={number}" for key, number in cuts.items() if number > 1]
            factors += [f"mesh.{axis}={execution.sizes[axis]}" for axis in axes]
            raise UserError(
                f"{key}={size} is not divisible by {ways} ({' x '.join(factors)}); make it a multiple of {ways}"
            )


def as_integers(name: str, value: Any, like: Any = None) -> Array | np.ndarray:
    """Return the argument `name` as an array of integers [batch, seq], of the shape of the tokens `like` if given.

    Raises `UserError` for anything else, also for an array without entries.
    """
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:
        raise UserError(f"{name} have rows of different lengths; pad the shorter ones") from None
    if array.ndim != 2 or not array.size or not jnp.issubdtype(array.dtype, jnp.integer):
        hint = f"; for one text write {name}[None]" * (array.ndim == 1)
        hint = "; give at least one token" if array.ndim == 2 and not array.size else hint
        hint = "; encode texts with a tokenizer first" if array.dtype.kind in "US" else hint
        raise UserError(f"{name} are {array.dtype}{list(array.shape)}, expected integers [batch, seq]{hint}")
    if like is not None and array.shape != like.shape:
        raise UserError(f"{name} are {list(array.shape)} and tokens are {list(like.shape)}; give both the same shape")
    return array


def known(array: Any) -> np.ndarray | None:
    """Return the numbers of an array; None while it is traced, and where other processes hold a part of it."""
    if isinstance(array, jax.Array) and (isinstance(array, Tracer) or not array.is_fully_addressable):
        return None
    return np.asarray(array)


def check_inside(name: str, values: np.ndarray, limit: int, why: str) -> None:
    """Raise `UserError` unless all `values` are from 0 to `limit` - 1; `why` names the setting that limits them."""
    if (outside := values[(values < 0) | (values >= limit)]).size:
        raise UserError(f"{name} contains {outside[0]}, expected 0 to {limit - 1} ({why})")


def check_key(key: Any) -> None:
    """Raise `UserError` unless `key` is one random key."""
    try:
        jax.eval_shape(lambda key: jax.random.bits(key, (2,)), key)
    except (TypeError, ValueError) as error:
        raise UserError("key is not one random key; write key=jax.random.key(SEED)") from error
