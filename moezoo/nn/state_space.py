"""Mixers by state space duality, Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060).

    x, B, C = silu(convolution(value y)), silu(convolution(write y)), silu(convolution(read y))
    step = softplus(step y + step_bias);  decay = -exp(rate) step
    S <- exp(decay) S;  S <- S + B (step x)^T;  o = S^T C + skip x       # moezoo.kernels.delta_rule, without strengths
    result = out (norm(o * silu(gate y)))

of activations y. A head has one step, one rate and one skip. Each group has one B and one C, which its heads share,
and the norm is over the results of a group.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from moezoo.errors import UserError
from moezoo.kernels.delta_rule import Operands
from moezoo.nn.base import Mixer, MixerOutput, TokenFlops
from moezoo.nn.cache import Kept, Past
from moezoo.nn.linear import normal, project
from moezoo.nn.norm import normalise
from moezoo.nn.positions import Context
from moezoo.nn.recurrent import Convolutions, Inputs, Memory, Written, by_key, read, slow_bias
from moezoo.nn.short_convolution import ShortConvolution
from moezoo.parallel.axes import Bias, Scale, Weight, name_sizes
from moezoo.parallel.kernels import KernelName
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.typed import NotNegative, Positive, Size, check_fields

name_sizes(state_groups="model.mamba.groups", state_heads="model.mamba.heads")


@dataclasses.dataclass(frozen=True)
class StateSpaceSizes:
    """Sizes of a mixer by state space duality, and the range of its steps.

    | field | meaning |
    |---|---|
    | `heads`, `head_dim` | heads, and the size of a head's x |
    | `groups`, `state_dim` | groups of as many heads each, and the size of a group's B and C |
    | `taps` | the tokens that the convolutions see |
    | `bias` | whether the convolutions have biases |
    | `least_step`, `most_step` | what steps are clamped to, of each token alone or in a text; None: to nothing |

    Raises:
        UserError: A value has a wrong type, a number is out of its range, or `groups` does not divide `heads`.
    """

    heads: Size = 8
    head_dim: Size = 32
    groups: Size = 2
    state_dim: Size = 16
    taps: Size = 4
    bias: Literal["none", "convolution"] = "convolution"
    least_step: NotNegative = 0.0
    most_step: Positive | None = None

    def __post_init__(self):
        check_fields("model.mamba", self)
        if self.heads % self.groups:
            raise UserError(
                f"model.mamba.heads={self.heads} is not a multiple of model.mamba.groups={self.groups}: each group has "
                f"as many heads; choose a multiple of {self.groups}"
            )
        if self.most_step is not None and self.most_step < self.least_step:
            raise UserError(
                f"model.mamba.most_step={self.most_step} is below model.mamba.least_step={self.least_step}; choose a "
                "larger one, or null for no limit"
            )


class GatedGroupNorm(eqx.Module):
    """x * silu(gate), divided by its root mean square over the heads of a group, times a scale per channel; float32."""

    scale: Scale[Array, "state_heads head_dim"]
    epsilon: float = eqx.field(static=True)

    def __init__(self, heads: int, head_dim: int, epsilon: float, *, dtype: jnp.dtype):
        self.scale, self.epsilon = jnp.ones((heads, head_dim), dtype), epsilon

    def __call__(
        self,
        x: Float[Array, "batch seq heads head_dim"],
        gate: Float[Array, "batch seq heads head_dim"],
        groups: int,
        dtype: jnp.dtype,
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Return the result of the heads of this device, which are those of whole `groups`, in `dtype`."""
        gated = _wide(x) * jax.nn.silu(_wide(gate))
        by_group = gated.reshape(*gated.shape[:2], groups, -1)
        return (normalise(by_group, self.epsilon).reshape(gated.shape) * _wide(self.scale)[None, None]).astype(dtype)


class StateSpaceMixer(Mixer):
    """A mixer by state space duality. On a split sequence it reads as `moezoo.nn.recurrent` says."""

    splits_sequences: ClassVar[bool] = True
    kernel: ClassVar[KernelName] = "delta_rule"
    gate: Weight[Array, "embed -> state_heads head_dim"]
    value: Weight[Array, "embed -> state_heads head_dim"]
    write: Weight[Array, "embed -> state_groups head_dim"]
    read: Weight[Array, "embed -> state_groups head_dim"]
    step: Weight[Array, "embed -> state_heads"]
    convolutions: Convolutions
    step_bias: Bias[Array, "state_heads"]
    rate: Scale[Array, "state_heads"]
    skip: Scale[Array, "state_heads"]
    norm: GatedGroupNorm
    out: Weight[Array, "state_heads head_dim -> embed"]
    least_step: float = eqx.field(static=True)
    most_step: float | None = eqx.field(static=True)

    def __init__(
        self, embed: int, sizes: StateSpaceSizes, *, epsilon: float, out_std: float, dtype: jnp.dtype, key: Array
    ):
        s, keys = sizes, jax.random.split(key, 10)
        of_heads, of_groups = (s.heads, s.head_dim), (s.groups, s.state_dim)
        self.gate, self.value, self.write, self.read = (
            normal(one, (embed, *shape), embed**-0.5, dtype)
            for one, shape in zip(keys[:4], (of_heads, of_heads, of_groups, of_groups), strict=True)
        )
        self.step = normal(keys[4], (embed, s.heads), embed**-0.5, dtype)
        has_bias = s.bias == "convolution"
        first, second, third = (
            ShortConvolution(s.taps, *shape, has_bias=has_bias, dtype=dtype, key=one)
            for one, shape in zip(keys[5:8], (of_groups, of_groups, of_heads), strict=True)
        )
        self.convolutions = first, second, third
        self.step_bias = slow_bias(keys[8], (s.heads,), dtype)
        self.rate = jnp.log(jnp.arange(1, s.heads + 1, dtype=jnp.float32)).astype(dtype)
        self.skip = jnp.ones((s.heads,), dtype)
        self.norm = GatedGroupNorm(*of_heads, epsilon, dtype=dtype)
        self.out = normal(keys[9], (*of_heads, embed), out_std * math.prod(of_heads) ** -0.5, dtype)
        self.least_step, self.most_step = s.least_step, s.most_step

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution, past: Past | None = None
    ) -> MixerOutput:
        """Mix these tokens, or with a `past` one token with the state of those before."""
        heads, order = execution.inner_group("heads"), execution.kernel(self.kernel)
        x = heads.enter(x)
        inputs = Inputs(*(project(x, weight) for weight in (self.read, self.write, self.value)))
        step = jax.nn.softplus(project(x, self.step).astype(jnp.float32) + _wide(self.step_bias)[None, None])
        if self.least_step:
            step = jnp.maximum(step, self.least_step)
        if self.most_step is not None:
            step = jnp.minimum(step, self.most_step)
        groups = self.write.shape[-2]

        def write(filtered: Inputs, step: Array, segment: Array) -> Written:
            v = _wide(filtered.value)
            decay = -jnp.exp(_wide(self.rate))[None, None] * step
            beside = v * _wide(self.skip)[None, None, :, None]
            written, decay, beside = (by_key(one, groups) for one in (v * step[..., None], decay, beside))
            return Written(Operands(filtered.query, filtered.key, written, decay, None, segment), beside)

        name = type(self).__name__
        result, kept = read(name, inputs, step, self.convolutions, write, context, execution, order, past)
        y = self.norm(result, project(x, self.gate), groups, x.dtype)
        return MixerOutput(project(y, self.out, inputs=2), kept)

    def prepare(self, context: Context) -> PyTree:
        """Return None: nothing depends on coordinates alone."""
        del context

    def state(self, length: int) -> Memory:
        """Declare the inputs and the states, whatever the length."""
        del length
        return Memory.declare(self.convolutions, "state_groups", "state_heads")

    def least_chunk(self) -> int:
        """Return the tokens that a filter reads of the chunk before."""
        return max(1, self.convolutions[0].reach)

    def chunk_sizes(self) -> dict[str, Kept]:
        """Return both arrays of the map of states, and the last inputs of the convolutions."""
        state = self.state(0)
        decays = Kept({"state_heads": self.value.shape[-2]}, "float32")
        return {"states of a chunk": state.matrix, "decays over a chunk": decays, **state.last_inputs()}

    def token_flops(self) -> TokenFlops:
        """Return two per tap and channel; and 4 state_dim head_dim per head: what is written, and the answer.

        A factor on each number of a state is no product.
        """
        *_, heads, head_dim = self.value.shape
        filters = sum(math.prod(each.weight.shape[-3:]) for each in self.convolutions)
        return TokenFlops(2 * filters, 4 * heads * self.write.shape[-1] * head_dim)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)
