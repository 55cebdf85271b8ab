"""The router: which experts a token goes to, and how much each counts."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moezoo.axes import Weight
from moezoo.moe.dispatch import Assignment
from moezoo.moe.routing import LayerSums
from moezoo.nn.linear import normal, project


class Routed(NamedTuple):
    """Each token's experts, and the layer's sums (drops still zero)."""

    assignment: Assignment
    sums: LayerSums


class Router(eqx.Module):
    """Softmax over all experts, the K largest kept and renormalised to sum to one (Jiang et al., 2024, section 2.1)."""

    weight: Weight[Array, "embed -> router"]
    k: int = eqx.field(static=True)

    def __init__(self, embed: int, experts: int, k: int, *, dtype: jnp.dtype, key: Array):
        self.weight = normal(key, (embed, experts), embed**-0.5, dtype)
        self.k = k

    def __call__(self, x: Float[Array, "batch seq embed"], valid: Bool[Array, "batch seq"]) -> Routed:
        """Route tokens; scores are float32. Where not `valid` (padding) a token goes nowhere and is not counted."""
        experts = self.weight.shape[1]
        logits = project(x, self.weight, dtype=jnp.float32)
        probabilities = jax.nn.softmax(logits)
        # Which experts are chosen has no gradient; how much they count has. Picking by comparison instead of by index
        # keeps a scatter-add out of the backward pass.
        _, chosen = jax.lax.top_k(jax.lax.stop_gradient(probabilities), self.k)
        is_chosen = jax.nn.one_hot(chosen, experts, dtype=jnp.bool)  # [B, S, K, E]
        weights = jnp.where(is_chosen, probabilities[..., None, :], 0).sum(-1)
        weights = weights / weights.sum(-1, keepdims=True)

        counted = valid[..., None]
        assignment = Assignment(
            jnp.where(counted, chosen, experts).reshape(-1, self.k),
            jnp.where(counted, weights, 0).reshape(-1, self.k),
        )
        sums = LayerSums(
            counts=(is_chosen & counted[..., None]).sum((1, 2), dtype=jnp.int32),
            probabilities=jnp.where(counted, probabilities, 0).sum(1),
            tokens=valid.sum(1, dtype=jnp.int32),
            z=jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0).sum(),
            dropped=jnp.zeros((), jnp.int32),
        )
        return Routed(assignment, sums)
