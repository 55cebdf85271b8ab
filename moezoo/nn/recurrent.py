"""What mixers with a state in place of keys and values share: how a text is read, and what is kept of it.

A query, a key and a value of each token pass through short convolutions (`moezoo.nn.short_convolution`). The value is
written into a state at the key, and the state answers the query (`moezoo.kernels.delta_rule`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moezoo.kernels.delta_rule import Operands, Start, delta_rule, span_map
from moezoo.nn.cache import Kept, Past, State
from moezoo.nn.linear import draws_numbers
from moezoo.nn.positions import Context
from moezoo.nn.short_convolution import ShortConvolution, last
from moezoo.nn.split_text import SplitText
from moezoo.parallel.collectives import ATTENTION
from moezoo.parallel.kernels import KernelOrder
from moezoo.parallel.mesh_execution import MeshExecution

Convolutions = tuple[ShortConvolution, ShortConvolution, ShortConvolution]


class Inputs(NamedTuple):
    """The inputs of the convolutions of each token: what becomes its query, key and value."""

    query: Any
    key: Any
    value: Any


class Memory(State):
    """What a layer keeps of a text, whatever its length: the last inputs of the convolutions, and the states.

    The inputs are [batch, taps - 1, heads, dim] each; the state is float32 [batch, heads, key_dim, value_dim].
    """

    inputs: Inputs
    matrix: Any

    @classmethod
    def declare(cls, convolutions: Convolutions, key_heads: str, value_heads: str) -> "Memory":
        """Declare the inputs and the states of a mixer whose heads have these logical axes."""
        shapes = [each.weight.shape[-3:] for each in convolutions]
        inputs: Any = (
            Kept({"tap": taps - 1, heads: count, "head_dim": dim})
            for heads, (taps, count, dim) in zip((key_heads, key_heads, value_heads), shapes, strict=True)
        )
        _, (*_, key_dim), (_, heads, value_dim) = shapes
        matrix: Any = Kept({value_heads: heads, "key_dim": key_dim, "value_dim": value_dim}, "float32")
        return cls(0, Inputs(*inputs), matrix)

    def fill(self, kept: tuple[Inputs, Array]) -> "Memory":
        """Keep what the prompt left."""
        return Memory(0, *kept)

    def advance(self, fresh: tuple[Inputs, Array], column: Int[Array, ""]) -> "Memory":
        """Keep what the token left."""
        del column
        return Memory(0, *fresh)

    def last_inputs(self) -> dict[str, Any]:
        """Return the inputs by name, for `Mixer.chunk_sizes`."""
        return {f"last inputs of the {name}": kept for name, kept in zip(Inputs._fields, self.inputs, strict=True)}


class Written(NamedTuple):
    """What the kernel reads of some tokens, and what their results get besides, or None."""

    operands: Operands
    beside: Float[Array, "batch tokens key_heads group value_dim"] | None = None


class Read(NamedTuple):
    """The results of tokens, and what is kept of them for `Memory`."""

    result: Float[Array, "batch tokens heads value_dim"]
    kept: tuple[Inputs, Array]


def read(
    mixer: str,
    inputs: Inputs,
    others: PyTree,
    convolutions: Convolutions,
    write: Callable[[Inputs, Any, Array], Written],
    context: Context,
    execution: MeshExecution,
    order: KernelOrder,
    past: Past | None = None,
) -> Read:
    """Read these tokens, or with a `past` one token behind those before.

    On a split sequence (`moezoo.nn.split_text`) each device makes the map by which its tokens change states, all maps
    are gathered, and each device applies those of earlier tokens; of the convolutions' inputs the last ones travel.

    Args:
        mixer: The name of the mixer, for messages.
        inputs: The inputs of the convolutions, of this device's heads.
        others: What `write` needs of each token besides: arrays [batch, tokens, ...].
        convolutions: Those of queries, keys and values.
        write: `write(filtered, others, segment)` returns what tokens write, by the results of the convolutions.
        context: The coordinates of these tokens.
        execution: How the mixer runs.
        order: The backends of the kernel.
        past: The layer's past when generating, with a `Memory`.
    """
    segment, reach, text = context.queries.segment, convolutions[0].reach, None
    if past is None:
        text = SplitText.of(context, execution.sequence_group, mixer)
        inputs, others, segment = text.cut((inputs, others, segment))
        with jax.named_scope("convolution"):
            before = Inputs(*(text.last_before(x, reach) for x in inputs))
            segment_before = text.segments_before(context, reach)
    else:
        kept: Memory = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, past.layer, keepdims=False), past.state)
        before, segment_before = kept.inputs, jnp.broadcast_to(segment, (len(segment), reach))

    @jax.checkpoint
    def written(convolutions: Convolutions, inputs: Inputs, before: Inputs, others: PyTree) -> Written:
        filtered = (
            convolution(x, segment, old, segment_before)
            for convolution, x, old in zip(convolutions, inputs, before, strict=True)
        )
        return write(Inputs(*filtered), others, segment)

    made_of = convolutions, inputs, before, others
    with jax.named_scope("delta_rule"):
        if text is None:
            groups = inputs.key.shape[2]
            start = Start(segment[:, 0], rearrange(kept.matrix, "b (h g) k v -> b h g k v", h=groups))
        elif len(text.chunks) > 1:
            last_segment = text.segments_before(context, 1)[:, 0]
            start = Start(last_segment, text.states_before(span_map(written(*made_of).operands, last_segment, order)))
        else:
            start = None

    # The backward pass makes queries, keys and values again: until then only what they are made of is there, and the
    # states, which the rule names. Behind the rule it does so once more, so sums of taps are not there beside it.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(ATTENTION))
    def answers(*made_of: Any) -> tuple[Array, Array]:
        operands, beside = written(*made_of)
        with jax.named_scope("delta_rule"):
            result, state = delta_rule(operands, start, order)
        return result if beside is None else result + beside, state

    result, state = answers(*made_of)
    result = rearrange(result, "b s h g v -> b s (h g) v")
    left = Inputs(
        *(
            last(jnp.concatenate(pair, 1), jnp.concatenate([segment_before, segment], 1), reach)
            for pair in zip(before, inputs, strict=True)
        )
    )
    state = rearrange(state, "b h g k v -> b (h g) k v")
    return Read(result if text is None else text.join(result), (left, state))


def by_key(x: Array, key_heads: int) -> Array:
    """Take [batch, tokens, value heads, ...] to [batch, tokens, key heads, value heads of each, ...]."""
    return rearrange(x, "b s (h g) ... -> b s h g ...", h=key_heads)


def slow_bias(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Draw biases whose softplus is between 0.001 and 0.1, evenly in its logarithm (Gu and Dao, 2023, Mamba)."""
    if not draws_numbers.value:
        return jnp.zeros(shape, dtype)
    at = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(1e-1)))
    return (at + jnp.log(-jnp.expm1(-at))).astype(dtype)
