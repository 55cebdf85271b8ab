"""What every family's model is: `embed`, `trunk`, `head`, and the call that composes them, on a mesh or on none."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from moezoo.axes import Embedding, Stack, Weight
from moezoo.errors import UserError
from moezoo.execution import Execution
from moezoo.moe.routing import LayerSums, Routing, RoutingConfig, reduce_routing
from moezoo.nn.attention import Place, place_keys
from moezoo.nn.linear import normal, project
from moezoo.nn.norm import RMSNorm


class TokenEmbedding(eqx.Module):
    """A vector for each token."""

    weight: Embedding[Array, "vocab embed"]

    def __init__(self, vocab: int, embed: int, *, std: float, dtype: jnp.dtype, key: Array):
        self.weight = normal(key, (vocab, embed), std, dtype)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Look tokens up."""
        return jnp.take(self.weight, tokens, axis=0, mode="clip")


class Unembedding(eqx.Module):
    """The last norm and the projection to logits."""

    norm: RMSNorm
    weight: Weight[Array, "embed -> vocab"]

    def __init__(self, embed: int, vocab: int, *, epsilon: float, std: float, dtype: jnp.dtype, key: Array):
        self.norm = RMSNorm(embed, epsilon, dtype=dtype)
        self.weight = normal(key, (embed, vocab), std, dtype)

    def __call__(self, hidden: Float[Array, "*dims embed"]) -> Float[Array, "*dims vocab"]:
        """Logits, float32."""
        return project(self.norm(hidden), self.weight, dtype=jnp.float32)


class Output(NamedTuple):
    """`logits` [batch, seq, vocab] float32 and what is told of `routing`, layer by layer."""

    logits: Float[Array, "batch seq vocab"]
    routing: Routing


class LayerOutput(NamedTuple):
    """A layer's activations; its routing sums, None where it routes nothing; what its attention keeps."""

    x: Float[Array, "batch seq embed"]
    sums: LayerSums | None
    kept: PyTree


class TrunkOutput(NamedTuple):
    """Activations after the last layer, and each MoE layer's routing sums over this device's tokens."""

    hidden: Float[Array, "batch seq embed"]
    sums: LayerSums


class LanguageModel(eqx.Module):
    """A family's model: a token embedding, runs of layers, an unembedding; its only leaves are arrays.

    A layer is called as `layer(x, context, run, past=None)` with its weights whole and returns a `LayerOutput`.
    """

    embedding: eqx.AbstractVar[TokenEmbedding]
    stacks: eqx.AbstractVar[tuple[Stack, ...]]
    unembedding: eqx.AbstractVar[Unembedding]
    config: eqx.AbstractVar[Any]

    @property
    def routing_config(self) -> RoutingConfig:
        """Coefficients of the routing losses."""
        c = self.config
        return RoutingConfig(c.load_balance, c.z_loss, c.experts_per_token, c.load_balance_over)

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.unembedding.weight.shape[-1]

    def slots(self, length: int) -> int:
        """Of how many tokens of a text of that length the layers keep something: what later ones may look back on."""
        return length

    def after_step(self, load: Int[Array, "layer experts"]) -> "LanguageModel":
        """The model with its buffers moved by a training step's `load`, over all devices and micro-steps.

        A family without such buffers has nothing to do.
        """
        del load
        return self

    def embed(self, tokens: Int[Array, "batch seq"], run: Execution) -> Float[Array, "batch seq embed"]:
        """Tokens to activations."""
        return run.whole(self.embedding)(tokens)

    def trunk(self, x: Float[Array, "batch seq embed"], place: Place, run: Execution) -> TrunkOutput:
        """All layers: one scan a run of layers; weights are gathered inside, where a layer is about to run."""
        context = place_keys(place, run)

        def step(x: Array, layer: Any) -> tuple[Array, LayerSums | None]:
            out = run.whole(layer)(x, context, run)
            return out.x, out.sums

        sums = []
        for stack in self.stacks:
            x, one = jax.lax.scan(run.checkpoint(step), x, stack.layer)
            if one is not None:
                sums.append(one)
        return TrunkOutput(x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *sums))

    def head(self, hidden: Float[Array, "batch seq embed"], run: Execution) -> Float[Array, "batch seq vocab"]:
        """Activations to logits."""
        return run.whole(self.unembedding)(hidden)

    def __call__(
        self,
        tokens: Int[Array | np.ndarray, "batch seq"],
        *,
        segments: Int[Array | np.ndarray, "batch seq"] | None = None,
        positions: Int[Array | np.ndarray, "batch seq"] | None = None,
        run: Execution | None = None,
    ) -> Output:
        """Logits and routing of whole arrays of tokens, computed as `run` says (default: one device).

        `segments` numbers the documents of a row from 1, 0 being padding; default: each row is one document.
        `positions` counts within a document; default: from the start of the row. Raises `UserError` when tokens are
        not integers [batch, seq], or the mesh splits the batch or the sequence into parts that are not whole.
        """
        run = run or Execution()
        if jnp.ndim(tokens) != 2 or not jnp.issubdtype(jnp.result_type(tokens), jnp.integer):
            raise UserError(
                f"tokens are {jnp.result_type(tokens)}{list(jnp.shape(tokens))}, expected integers [batch, seq]; "
                "for one sequence write tokens[None]"
            )
        tokens = jnp.asarray(tokens, jnp.int32)
        check_tokens(tokens.shape[0], tokens.shape[1], run)
        segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        positions = jnp.asarray(positions, jnp.int32)

        def local(model: LanguageModel, tokens: Array, place: Place) -> Output:
            hidden, sums = model.trunk(model.embed(tokens, run), place, run)
            routing, _ = reduce_routing(sums, model.routing_config, run.batch_axes, run.sequence_axes, ())
            return Output(model.head(hidden, run), routing)

        place = Place(positions, segments)
        if run.mesh is None:
            return local(self, tokens, place)
        split: Any = run.tokens_spec
        specs = (run.specs(self), split, Place(split, split))
        replicated: Any = PartitionSpec()
        out = Output(split, replicated)
        return jax.shard_map(local, mesh=run.mesh, in_specs=specs, out_specs=out)(self, tokens, place)


def check_tokens(batch: int, length: int, run: Execution, *, batch_key: str = "batch", micro_steps: int = 1) -> None:
    """Raise `UserError` unless the mesh splits each micro-step's rows of `length` tokens evenly."""
    for key, size, axes, parts in (
        (batch_key, batch, run.batch_axes, micro_steps),
        ("seq_len", length, run.sequence_axes, 1),
    ):
        ways = parts * run.ways(axes)
        if size % ways:
            factors = [f"execution.microbatches={parts}"] if parts > 1 else []
            factors += [f"mesh.{axis}={run.sizes[axis]}" for axis in axes]
            raise UserError(
                f"{key}={size} is not divisible by {ways} ({' x '.join(factors)}); make it a multiple of {ways}"
            )
