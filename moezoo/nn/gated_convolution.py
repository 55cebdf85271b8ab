"""A mixer that keeps a few tokens: the gated short convolution of LFM2 (Liquid AI, 2025, arXiv:2511.23404).

    y = out (output_gate(x) * convolution(input_gate(x) * value(x)))

The convolution reads a token and the `taps` - 1 before it in its document, one filter per channel. No part is followed
by an activation function.
"""

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moezoo.nn.base import Mixer, MixerOutput, TokenFlops
from moezoo.nn.cache import Kept, Past, State
from moezoo.nn.linear import normal, project
from moezoo.nn.positions import Context
from moezoo.nn.short_convolution import convolve, last
from moezoo.nn.split_text import SplitText
from moezoo.parallel.axes import Bias, Scale, Weight, name_sizes
from moezoo.parallel.mesh_execution import MeshExecution

name_sizes(channels="model.embed")


class LastInputs(State):
    """What a layer keeps of a text, whatever its length: the last inputs of its convolution.

    They are [batch, taps - 1, channels].
    """

    inputs: Any

    def fill(self, kept: Float[Array, "..."]) -> "LastInputs":
        """Keep what the prompt left."""
        return LastInputs(0, kept)

    def advance(self, fresh: Float[Array, "..."], column: Int[Array, ""]) -> "LastInputs":
        """Keep what the token left."""
        del column
        return LastInputs(0, fresh)


class GatedConvolution(Mixer):
    """A gated short convolution with as many channels as the residual stream. Channels are split as heads are.

    On a split sequence (`moezoo.nn.split_text`) the last inputs of the convolution of each chunk travel.
    """

    splits_sequences: ClassVar[bool] = True
    input_gate: Weight[Array, "embed -> channels"]
    output_gate: Weight[Array, "embed -> channels"]
    value: Weight[Array, "embed -> channels"]
    filters: Scale[Array, "tap channels"]
    out: Weight[Array, "channels -> embed"]
    input_gate_bias: Bias[Array, "channels"] | None
    output_gate_bias: Bias[Array, "channels"] | None
    value_bias: Bias[Array, "channels"] | None
    filter_bias: Bias[Array, "channels"] | None
    out_bias: Bias[Array, "embed"] | None

    def __init__(
        self,
        embed: int,
        taps: int,
        *,
        biases: Literal["none", "all"] = "none",
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        keys, std = jax.random.split(key, 5), embed**-0.5
        self.input_gate, self.output_gate, self.value = (normal(one, (embed, embed), std, dtype) for one in keys[:3])
        self.filters = normal(keys[3], (taps, embed), taps**-0.5, dtype)
        self.out = normal(keys[4], (embed, embed), out_std * std, dtype)
        fresh = [None if biases == "none" else jnp.zeros((embed,), dtype) for _ in range(5)]
        self.input_gate_bias, self.output_gate_bias, self.value_bias, self.filter_bias, self.out_bias = fresh

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution, past: Past | None = None
    ) -> MixerOutput:
        """Mix these tokens, or with a `past` one token with the last ones before it."""
        segment, x, text = context.queries.segment, execution.inner_group("heads").enter(x), None
        inputs = _project(x, self.input_gate, self.input_gate_bias) * _project(x, self.value, self.value_bias)
        if past is None:
            text = SplitText.of(context, execution.sequence_group, type(self).__name__)
            inputs, segment = text.cut((inputs, segment))
            with jax.named_scope("convolution"):
                before = text.last_before(inputs, self._reach)
                segment_before = text.segments_before(context, self._reach)
        else:
            before = lax.dynamic_index_in_dim(past.state.inputs, past.layer, keepdims=False)
            segment_before = jnp.broadcast_to(segment, (len(segment), self._reach))
        y = convolve(self.filters, inputs, segment, before, segment_before)
        if self.filter_bias is not None:
            y = y + self.filter_bias.astype(jnp.float32)[None, None]
        y = y.astype(x.dtype)
        y = _project(x, self.output_gate, self.output_gate_bias) * (y if text is None else text.join(y))
        whole = jnp.concatenate([before, inputs], axis=1), jnp.concatenate([segment_before, segment], axis=1)
        return MixerOutput(project(y, self.out), last(*whole, self._reach), self.out_bias)

    def prepare(self, context: Context) -> PyTree:
        """Return None: nothing depends on coordinates alone."""
        del context

    def state(self, length: int) -> LastInputs:
        """Declare the last inputs, whatever the length."""
        del length
        inputs: Any = Kept({"tap": self._reach, "channels": self.filters.shape[-1]})
        return LastInputs(0, inputs)

    def least_chunk(self) -> int:
        """Return the tokens that a filter reads of the chunk before."""
        return max(1, self._reach)

    def chunk_sizes(self) -> dict[str, Kept]:
        """Return the last inputs of the convolution."""
        return {"last inputs of the convolution": self.state(0).inputs}

    def token_flops(self) -> TokenFlops:
        """Return two per tap and channel."""
        return TokenFlops(2 * math.prod(self.filters.shape[-2:]))

    @property
    def _reach(self) -> int:
        """The number of tokens before a token that the convolution reads."""
        return self.filters.shape[-2] - 1


def _project(x: Array, weight: Array, bias: Array | None) -> Array:
    y = project(x, weight)
    return y if bias is None else y + bias[None, None]
