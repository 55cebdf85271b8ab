"""Mixers with a state in place of keys and values: the gated delta rule (Yang et al., 2024, arXiv:2412.06464).

    q, k, v = silu(convolution(query x)), silu(convolution(key x)), silu(convolution(value x))
    S <- exp(decay(x)) S;  S <- S + k (strength (v - S^T k))^T;  o = S^T q          # moezoo.kernels.delta_rule
    y = out (norm(o) * gate(x))

with q and k divided by their norms and q by sqrt(head_dim) as well. Each key head serves the next `group` value heads.

| | decay | gate |
|---|---|---|
| Gated DeltaNet | one per value head | silu of a projection |
| Kimi Delta Attention (Kimi Team, 2025, arXiv:2510.26692) | one per channel of a key, low rank | sigmoid, low rank |
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from moezoo.errors import UserError
from moezoo.kernels.delta_rule import Operands
from moezoo.nn.base import Mixer, MixerOutput, TokenFlops
from moezoo.nn.cache import Kept, Past
from moezoo.nn.linear import draws_numbers, normal, project
from moezoo.nn.norm import RMSNorm
from moezoo.nn.positions import Context
from moezoo.nn.recurrent import Convolutions, Inputs, Memory, Written, by_key, read, slow_bias
from moezoo.nn.short_convolution import ShortConvolution
from moezoo.parallel.axes import Bias, Scale, Weight, name_sizes
from moezoo.parallel.collectives import InnerGroup
from moezoo.parallel.kernels import KernelName
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.typed import Size, check_fields

name_sizes(key_heads="model.delta.key_heads", value_heads="model.delta.value_heads")

# Below the root of the norms of queries and keys.
_TINY = 1e-6


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a mixer by the delta rule: heads of keys and of values, their dimensions, and the convolution's taps.

    Queries have the heads of keys.

    Raises:
        UserError: A value has a wrong type, a number is out of its range, or `key_heads` does not divide `value_heads`.
    """

    key_heads: Size = 2
    value_heads: Size = 4
    key_dim: Size = 32
    value_dim: Size = 32
    taps: Size = 4

    def __post_init__(self):
        check_fields("model.delta", self)
        if self.value_heads % self.key_heads:
            raise UserError(
                f"model.delta.value_heads={self.value_heads} is not a multiple of "
                f"model.delta.key_heads={self.key_heads}: each key head serves as many value heads; choose a multiple "
                f"of {self.key_heads}"
            )


class Activations(NamedTuple):
    """The activations, the same on all devices that share heads: as they are, and as they meet weights split by heads.

    They enter once, so that the backward pass sums their gradient once.
    """

    whole: Float[Array, "batch seq embed"]
    entered: Float[Array, "batch seq embed"]


class HeadDecay(eqx.Module):
    """One decay per value head: -exp(rate) softplus(weight x + bias), in float32 behind the product."""

    weight: Weight[Array, "embed -> value_heads"]
    rate: Scale[Array, "value_heads"]
    bias: Bias[Array, "value_heads"]

    def __init__(self, embed: int, sizes: DeltaSizes, *, dtype: jnp.dtype, key: Array):
        first, second = jax.random.split(key)
        self.weight = normal(first, (embed, sizes.value_heads), embed**-0.5, dtype)
        self.rate, self.bias = _rates(second, sizes, dtype), jnp.ones((sizes.value_heads,), dtype)

    def __call__(self, x: Activations, group: InnerGroup) -> Float[Array, "batch seq heads"]:
        """Return the logarithms of factors."""
        del group
        at = project(x.entered, self.weight).astype(jnp.float32) + _wide(self.bias)[None, None]
        return -jnp.exp(_wide(self.rate))[None, None] * jax.nn.softplus(at)


class ChannelDecay(eqx.Module):
    """One decay per channel of the key, of low rank, in float32 behind the products.

    -exp(rate) softplus(up down x + bias); with `lowest`, which bounds it, lowest sigmoid(exp(rate) (up down x + bias)).
    """

    down: Weight[Array, "embed -> decay_lora"]
    up: Weight[Array, "decay_lora -> value_heads head_dim"]
    rate: Scale[Array, "value_heads"]
    bias: Bias[Array, "value_heads head_dim"]
    lowest: float | None = eqx.field(static=True)

    def __init__(
        self, embed: int, sizes: DeltaSizes, *, rank: int, lowest: float | None = None, dtype: jnp.dtype, key: Array
    ):
        keys = jax.random.split(key, 3)
        heads, dim = sizes.value_heads, sizes.key_dim
        self.down = normal(keys[0], (embed, rank), embed**-0.5, dtype)
        self.up = normal(keys[1], (rank, heads, dim), rank**-0.5, dtype)
        for_rate, for_bias = jax.random.split(keys[2])
        self.rate, self.bias = _rates(for_rate, sizes, dtype), slow_bias(for_bias, (heads, dim), dtype)
        self.lowest = lowest

    def __call__(self, x: Activations, group: InnerGroup) -> Float[Array, "batch seq heads head_dim"]:
        """Return the logarithms of factors."""
        low = group.enter(project(x.whole, self.down))
        at = project(low, self.up).astype(jnp.float32) + _wide(self.bias)[None, None]
        rate = jnp.exp(_wide(self.rate))[None, None, :, None]
        return -rate * jax.nn.softplus(at) if self.lowest is None else self.lowest * jax.nn.sigmoid(rate * at)


class FullGate(eqx.Module):
    """silu(weight x), float32."""

    weight: Weight[Array, "embed -> value_heads head_dim"]

    def __init__(self, embed: int, sizes: DeltaSizes, *, dtype: jnp.dtype, key: Array):
        self.weight = normal(key, (embed, sizes.value_heads, sizes.value_dim), embed**-0.5, dtype)

    def __call__(self, x: Activations, group: InnerGroup) -> Float[Array, "batch seq heads head_dim"]:
        """Return the factors of results."""
        del group
        return jax.nn.silu(project(x.entered, self.weight).astype(jnp.float32))


class LowRankGate(eqx.Module):
    """sigmoid(up down x), float32."""

    down: Weight[Array, "embed -> gate_lora"]
    up: Weight[Array, "gate_lora -> value_heads head_dim"]

    def __init__(self, embed: int, sizes: DeltaSizes, *, rank: int, dtype: jnp.dtype, key: Array):
        first, second = jax.random.split(key)
        self.down = normal(first, (embed, rank), embed**-0.5, dtype)
        self.up = normal(second, (rank, sizes.value_heads, sizes.value_dim), rank**-0.5, dtype)

    def __call__(self, x: Activations, group: InnerGroup) -> Float[Array, "batch seq heads head_dim"]:
        """Return the factors of results."""
        return jax.nn.sigmoid(project(group.enter(project(x.whole, self.down)), self.up).astype(jnp.float32))


def _rates(key: Array, sizes: DeltaSizes, dtype: jnp.dtype) -> Array:
    """Draw exp(rate) between 0.01 and 16, evenly."""
    if not draws_numbers.value:
        return jnp.zeros((sizes.value_heads,), dtype)
    return jnp.log(jax.random.uniform(key, (sizes.value_heads,), minval=0.01, maxval=16.0)).astype(dtype)


def _unit(x: Float[Array, "*dims head_dim"]) -> Float[Array, "*dims head_dim"]:
    """Divide each vector by its norm, in float32."""
    wide = _wide(x)
    return wide * lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + _TINY)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


class KeyConvolution(ShortConvolution):
    """The convolution of queries or keys."""

    weight: Scale[Array, "tap key_heads head_dim"]
    bias: Bias[Array, "key_heads head_dim"] | None
    __init__ = ShortConvolution.__init__


class ValueConvolution(ShortConvolution):
    """The convolution of values."""

    weight: Scale[Array, "tap value_heads head_dim"]
    bias: Bias[Array, "value_heads head_dim"] | None
    __init__ = ShortConvolution.__init__


class DeltaMixer(Mixer):
    """A mixer by the gated delta rule. On a split sequence it reads as `moezoo.nn.recurrent` says."""

    splits_sequences: ClassVar[bool] = True
    kernel: ClassVar[KernelName] = "delta_rule"
    query: Weight[Array, "embed -> key_heads head_dim"]
    key: Weight[Array, "embed -> key_heads head_dim"]
    value: Weight[Array, "embed -> value_heads head_dim"]
    convolutions: Convolutions
    decay: HeadDecay | ChannelDecay
    strength: Weight[Array, "embed -> value_heads"]
    gate: FullGate | LowRankGate
    norm: RMSNorm
    out: Weight[Array, "value_heads head_dim -> embed"]

    def __init__(
        self,
        embed: int,
        sizes: DeltaSizes,
        decay: HeadDecay | ChannelDecay,
        gate: FullGate | LowRankGate,
        *,
        epsilon: float,
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        keys = jax.random.split(key, 8)
        s = sizes
        shapes = (s.key_heads, s.key_dim), (s.key_heads, s.key_dim), (s.value_heads, s.value_dim)
        self.query, self.key, self.value = (
            normal(one, (embed, *shape), embed**-0.5, dtype) for one, shape in zip(keys, shapes, strict=False)
        )
        self.convolutions = (
            KeyConvolution(s.taps, s.key_heads, s.key_dim, dtype=dtype, key=keys[3]),
            KeyConvolution(s.taps, s.key_heads, s.key_dim, dtype=dtype, key=keys[4]),
            ValueConvolution(s.taps, s.value_heads, s.value_dim, dtype=dtype, key=keys[5]),
        )
        self.decay, self.gate = decay, gate
        self.strength = normal(keys[6], (embed, s.value_heads), embed**-0.5, dtype)
        self.norm = RMSNorm(s.value_dim, epsilon, dtype=dtype)
        wide = s.value_heads * s.value_dim
        self.out = normal(keys[7], (s.value_heads, s.value_dim, embed), out_std * wide**-0.5, dtype)

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution, past: Past | None = None
    ) -> MixerOutput:
        """Mix these tokens, or with a `past` one token with the state of those before."""
        heads, order = execution.inner_group("heads"), execution.kernel(self.kernel)
        wide = heads.enter(x)
        activations = Activations(x, wide)
        inputs = Inputs(*(project(wide, weight) for weight in (self.query, self.key, self.value)))
        strength = jax.nn.sigmoid(project(wide, self.strength).astype(jnp.float32))
        others = self.decay(activations, heads), strength

        def write(filtered: Inputs, others: tuple[Array, Array], segment: Array) -> Written:
            q, k, v = filtered
            v, decay, strength = (by_key(x, k.shape[2]) for x in (v, *others))
            return Written(Operands(_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, decay, strength, segment))

        name = type(self).__name__
        result, kept = read(name, inputs, others, self.convolutions, write, context, execution, order, past)
        y = heads.enter_parameters(self.norm)(result)
        y = (y.astype(jnp.float32) * self.gate(activations, heads)).astype(x.dtype)
        return MixerOutput(project(y, self.out, inputs=2), kept)

    def prepare(self, context: Context) -> PyTree:
        """Return None: nothing depends on coordinates alone."""
        del context

    def state(self, length: int) -> Memory:
        """Declare the inputs and the states, whatever the length."""
        del length
        return Memory.declare(self.convolutions, "key_heads", "value_heads")

    def least_chunk(self) -> int:
        """Return the tokens that a filter reads of the chunk before."""
        return max(1, self.convolutions[0].reach)

    def chunk_sizes(self) -> dict[str, Kept]:
        """Return the map of states, both its arrays side by side, and the last inputs of the convolutions."""
        dims = self.key.shape[-1], self.value.shape[-1]
        of_states = Kept({"value_heads": self.value.shape[-2], "key_dim": dims[0], "columns": sum(dims)}, "float32")
        return {"map of states": of_states, **self.state(0).last_inputs()}

    def memory_seen(self) -> Mapping[str, float]:
        """Return what was seen with a decay per channel, whose products of tokens a CPU makes many of at once."""
        return {"cpu": 2.6} if isinstance(self.decay, ChannelDecay) else {}

    def token_flops(self) -> TokenFlops:
        """Return two per tap and channel; and 6 key_dim value_dim per value head: error, what is written, the answer.

        A factor on each number of a state is no product.
        """
        *_, heads, value_dim = self.value.shape
        filters = sum(math.prod(each.weight.shape[-3:]) for each in self.convolutions)
        return TokenFlops(2 * filters, 6 * heads * self.key.shape[-1] * value_dim)
