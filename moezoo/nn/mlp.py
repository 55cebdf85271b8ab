"""The MLP, by default SwiGLU (Shazeer, 2020, arXiv:2002.05202), and the gated activations of MLPs and experts."""

import abc
import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.base import FeedForward, FeedForwardOutput
from moezoo.nn.linear import normal, project
from moezoo.nn.positions import Context
from moezoo.parallel.axes import Weight
from moezoo.parallel.mesh_execution import MeshExecution


class Activation(abc.ABC):
    """A gated activation. Each one is a frozen dataclass, because it is part of a program's identity.

    Attributes:
        is_gated: Whether gate and up are two products. If not, there is one, which is given twice.
    """

    is_gated: ClassVar[bool] = True

    @abc.abstractmethod
    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return the activation, number by number. It must be 0 where both products are 0, as in unused rows."""


@dataclasses.dataclass(frozen=True)
class SwiGLU(Activation):
    """silu(gate) * up (Shazeer, 2020, arXiv:2002.05202)."""

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return silu(gate) * up."""
        return jax.nn.silu(gate) * up


SWIGLU = SwiGLU()


@dataclasses.dataclass(frozen=True)
class GeGLU(Activation):
    """gelu(gate) * up (Shazeer, 2020, arXiv:2002.05202), with the approximation of gelu by tanh."""

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return gelu(gate) * up."""
        return jax.nn.gelu(gate, approximate=True) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU(Activation):
    """gate * sigmoid(alpha gate) * (up + 1), of products that are clamped first: that of gpt-oss (arXiv:2508.10925).

    Args:
        alpha: The slope inside the sigmoid.
        limit: The largest gate, and the largest magnitude of up.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return the activation."""
        limit = jnp.asarray(self.limit, up.dtype)
        gate, up = jnp.minimum(gate, self.limit), jax.lax.clamp(-limit, up, limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class SquaredReLU(Activation):
    """max(up, 0)^2 (So et al., 2021, arXiv:2109.08668), without a gate."""

    is_gated: ClassVar[bool] = False

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return max(gate, 0) * up, of twice the same array."""
        return jax.nn.relu(gate) * up


SQUARED_RELU = SquaredReLU()


class MLP(FeedForward):
    """y = down(activation(gate x, up x)); with a `token_gate`, times the sigmoid of its one number per token.

    Without a gate, y = down(activation(up x, up x)).
    """

    gate: Weight[Array, "embed -> mlp"] | None
    up: Weight[Array, "embed -> mlp"]
    down: Weight[Array, "mlp -> embed"]
    token_gate: Weight[Array, "embed -> token_gate"] | None
    activation: Activation = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        activation: Activation = SWIGLU,
        gated: bool = False,
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        keys = jax.random.split(key, 3)
        self.gate = normal(keys[0], (embed, mlp), embed**-0.5, dtype) if activation.is_gated else None
        self.up = normal(keys[1], (embed, mlp), embed**-0.5, dtype)
        self.down = normal(keys[2], (mlp, embed), out_std * mlp**-0.5, dtype)
        # Not one of `keys`, which are those of `fold_in` with 0 to 2.
        self.token_gate = normal(jax.random.fold_in(key, 3), (embed, 1), embed**-0.5, dtype) if gated else None
        self.activation = activation

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution
    ) -> FeedForwardOutput:
        """Apply the MLP to each token, padding included."""
        del context
        group = execution.inner_group("mlp")
        part = group.enter(x)
        gate = None if self.gate is None else project(part, self.gate)
        up = project(part, self.up)
        y = project(self.activation(up if gate is None else gate, up), self.down)
        if self.token_gate is not None:
            # Before the sum over devices, so that routed and shared experts are summed together.
            y = y * jax.nn.sigmoid(project(part, group.enter_parameters(self.token_gate)))
        return FeedForwardOutput(y)
