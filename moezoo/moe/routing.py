"""Statistics of routing: the sums that each layer returns, and the losses and figures that follow from them.

| loss | formula | source |
|---|---|---|
| load balance | alpha * E * sum_e f_e P_e; alpha where balanced | Fedus et al., 2021, arXiv:2101.03961, equation 4 |
| z | beta * mean_t(logsumexp(logits_t) ** 2) | Zoph et al., 2022, arXiv:2202.08906, equation 5 |

f_e is the share of the K T assignments that went to expert e; P_e is the mean router probability of e over T tokens.
T counts the tokens of one micro-step over all devices. With `over="sequence"` it counts the tokens of one row of the
batch, and the loss is averaged over rows. Padding is never counted.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from moezoo.parallel.collectives import MeshAxes, psum


class LayerSums(NamedTuple):
    """Sums of one layer over the tokens of this device, per row of the batch. A scan adds a leading layer dimension."""

    counts: Int[Array, "*layer batch experts"]  # assignments per expert
    probabilities: Float[Array, "*layer batch experts"]
    tokens: Int[Array, "*layer batch"]
    z: Float[Array, "*layer"]  # squared logsumexp
    dropped: Int[Array, "*layer"]


class RoutingConfig(NamedTuple):
    """alpha (`load_balance`), beta (`z_loss`), K, and `over`: what the load-balance loss is computed over."""

    load_balance: float
    z_loss: float
    experts_per_token: int
    over: Literal["batch", "sequence"]


class Routing(NamedTuple):
    """Routing of each MoE layer over all tokens of the batch. It is the same on every device.

    | field | shape, dtype | meaning |
    |---|---|---|
    | `load` | [layer, experts] int32 | assignments per expert, drops included |
    | `entropy` | [layer] float32 | entropy of the load's distribution in nats; log(E) when balanced |
    | `max_violation` | [layer] float32 | largest load / mean load - 1; 0 when balanced |
    | `dropped` | [layer] int32 | assignments that no expert computed |
    | `load_balance_loss`, `z_loss` | [layer] float32 | with their coefficients; a model's is the mean over layers |
    """

    load: Int[Array, "layer experts"]
    entropy: Float[Array, " layer"]
    max_violation: Float[Array, " layer"]
    dropped: Int[Array, " layer"]
    load_balance_loss: Float[Array, " layer"]
    z_loss: Float[Array, " layer"]


class Balance(NamedTuple):
    """How evenly a step's assignments use the experts: five float32 numbers for any number of layers and experts.

    | field | meaning |
    |---|---|
    | `mean_entropy`, `lowest_entropy` | of the layers' `entropy` / log(experts); 1 when balanced |
    | `mean_violation`, `max_violation` | of the layers' `max_violation`; 0 when balanced |
    | `experts_in_use` | share of the experts of all layers that have an assignment |

    A layer of one expert has entropy 1. Without any token the entropies and `experts_in_use` are 0, and violations -1.
    """

    mean_entropy: Float[Array, ""]
    lowest_entropy: Float[Array, ""]
    mean_violation: Float[Array, ""]
    max_violation: Float[Array, ""]
    experts_in_use: Float[Array, ""]


def balance_of(load: Num[Array, "layer experts"]) -> Balance:
    """Return the figures of a step, or of a text, from its assignments per layer and expert, of any dtype."""
    entropy, violation = evenness(load)
    experts = load.shape[1]
    entropy = entropy / math.log(experts) if experts > 1 else (load.sum(1) > 0).astype(jnp.float32)
    in_use = (load > 0).mean(dtype=jnp.float32)
    return Balance(entropy.mean(), entropy.min(), violation.mean(), violation.max(), in_use)


def evenness(load: Array) -> tuple[Array, Array]:
    """Return the entropy of each layer's load, in nats, and largest load / mean load - 1; without tokens 0 and -1."""
    mean = jnp.maximum(load.sum(1), 1).astype(jnp.float32) / load.shape[1]
    share = load.astype(jnp.float32) / (mean * load.shape[1])[:, None]
    entropy = 0 - jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0).sum(1)  # not -0.0
    return entropy, load.max(1).astype(jnp.float32) / mean - 1


def _balance_loss(counts: Array, probabilities: Array, tokens: Array, k: int) -> Array:
    """Return E * sum_e f_e P_e over the last dimension; 0 without tokens."""
    total = jnp.maximum(tokens, 1).astype(jnp.float32)[..., None]
    share = jax.lax.stop_gradient(counts.astype(jnp.float32)) / (k * total)
    return counts.shape[-1] * (share * probabilities / total).sum(-1)


@jax.named_scope("routing")
def reduce_routing(sums: LayerSums, config: RoutingConfig, batch_axes: MeshAxes, sequence_axes: MeshAxes) -> Routing:
    """Return losses and figures of all layers from their sums on each device. Differentiable.

    Sums are added over `batch_axes` and `sequence_axes`, the mesh axes that split rows and sequences.
    """
    k = config.experts_per_token
    if config.over == "sequence":
        # f * P is not linear in the tokens, so the sums of split rows are added before they are multiplied.
        sums = psum(sums, sequence_axes)
        by_row = _balance_loss(sums.counts, sums.probabilities, sums.tokens, k=k)
        local = (by_row.sum(1), (sums.tokens > 0).sum(1, dtype=jnp.int32), sums.counts.sum(1), sums.tokens.sum(1))
        (balance, rows, load, tokens), z, dropped = psum((local, sums.z, sums.dropped), batch_axes)
        balance = balance / jnp.maximum(rows, 1).astype(jnp.float32)
    else:
        local = (sums.counts.sum(1), sums.probabilities.sum(1), sums.tokens.sum(1), sums.z, sums.dropped)
        load, probabilities, tokens, z, dropped = psum(local, batch_axes + sequence_axes)
        balance = _balance_loss(load, probabilities, tokens, k=k)
    entropy, violation = evenness(load)
    return Routing(
        load=load,
        entropy=entropy,
        max_violation=violation,
        dropped=dropped,
        load_balance_loss=config.load_balance * balance,
        z_loss=config.z_loss * z / jnp.maximum(tokens, 1).astype(jnp.float32),
    )
