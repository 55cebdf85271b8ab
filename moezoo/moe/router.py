"""The router: which experts a token goes to, and the gate of each."""

import dataclasses
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from moezoo.errors import UserError, check_not_negative, check_positive
from moezoo.moe.dispatch import Assignment
from moezoo.moe.routing import LayerSums
from moezoo.nn.linear import normal, project
from moezoo.parallel.axes import Bias, Buffer, Weight
from moezoo.parallel.collectives import varying_axes

# Who chooses: the router; or, to measure speed, chance or turns, whatever the router has learned.
RoutedBy = Literal["learned", "random", "balanced"]


class Routed(NamedTuple):
    """Each token's experts, and the layer's sums (drops still zero)."""

    assignment: Assignment
    sums: LayerSums


@dataclasses.dataclass(frozen=True)
class Choice:
    """How each token's experts are chosen, and how their gates follow from the scores. Raises `UserError`.

    - `score`: of each expert, `softmax` over all or `sigmoid` of each by itself, float32;
    - `groups`, `kept_groups`, `group_score`: experts in `groups` equal runs, of which the best `kept_groups` take part;
      a group is as good as its best expert (`max`) or its two best together (`sum_of_top2`);
    - `gates`: the chosen scores themselves, or `renormalised` to sum to one; times `scale`;
    - `choice_bias`: whether a bias is added to the scores for the choice alone (Wang et al., 2024); a step moves it by
      `bias_rate`.

    The default is Mixtral's (Jiang et al., 2024, section 2.1).
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "sum_of_top2"] = "max"
    gates: Literal["renormalised", "scores"] = "renormalised"
    scale: float = 1.0
    choice_bias: Literal["none", "learned"] = "none"
    bias_rate: float = 0.001

    def __post_init__(self):
        check_positive("model.router", self, "groups", "kept_groups", "scale")
        check_not_negative("model.router", self, "bias_rate")
        if self.kept_groups > self.groups:
            raise UserError(
                f"model.router.kept_groups={self.kept_groups} exceeds model.router.groups={self.groups}; "
                f"choose at most {self.groups}"
            )

    def check(self, num_experts: int, k: int) -> None:
        """Raise `UserError` unless `k` of so many experts can be chosen in this way."""
        if num_experts % self.groups:
            raise UserError(
                f"model.experts={num_experts} is not divisible by model.router.groups={self.groups}; choose a divisor"
            )
        if self.groups > 1 and self.group_score == "sum_of_top2" and num_experts == self.groups:
            raise UserError(
                f"model.router.group_score=sum_of_top2 needs two experts a group but model.experts={num_experts} in "
                f"model.router.groups={self.groups} have one; choose fewer groups or model.router.group_score=max"
            )
        eligible = num_experts // self.groups * self.kept_groups
        if k > eligible:
            raise UserError(
                f"model.experts_per_token={k} exceeds the {eligible} experts of "
                f"model.router.kept_groups={self.kept_groups} groups; choose at most {eligible}"
            )


class Router(eqx.Module):
    """Scores every expert for every token, and chooses `k`.

    `bias` is trained and added to the logits. `choice_bias` is no part of the scores: no gradient reaches it, and
    `rebalance` moves it.
    """

    weight: Weight[Array, "embed -> router"]
    bias: Bias[Array, "router"] | None
    choice_bias: Buffer[Array, "router"] | None
    k: int = eqx.field(static=True)
    choice: Choice = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        num_experts: int,
        k: int,
        choice: Choice,
        *,
        bias: Literal["none", "trained"] = "none",
        dtype: jnp.dtype,
        key: Array,
    ):
        self.weight = normal(key, (embed, num_experts), embed**-0.5, dtype)
        self.bias = jnp.zeros((num_experts,), dtype) if bias == "trained" else None
        self.choice_bias = jnp.zeros((num_experts,), jnp.float32) if choice.choice_bias == "learned" else None
        self.k, self.choice = k, choice

    def __call__(
        self, x: Float[Array, "batch seq embed"], valid: Bool[Array, "batch seq"], routing: RoutedBy = "learned"
    ) -> Routed:
        """Route tokens; scores are float32. Where not `valid` (padding) a token goes nowhere and is not counted.

        With `routing` other than `learned` scores give the gates but do not choose the experts.
        """
        c, num_experts = self.choice, self.weight.shape[1]
        logits = project(x, self.weight, dtype=jnp.float32)
        if self.bias is not None:
            logits = logits + self.bias.astype(jnp.float32)[None, None]
        if c.score == "softmax":
            scores = probabilities = jax.nn.softmax(logits)
        else:
            scores = jax.nn.sigmoid(logits)
            probabilities = scores / scores.sum(-1, keepdims=True)
        # Which experts are chosen has no gradient; how much they count has. Picking by comparison instead of by index
        # keeps a scatter-add out of the backward pass.
        if routing == "learned":
            expert_ids = self._choose(jax.lax.stop_gradient(scores), self.choice_bias)
        elif routing == "random":
            expert_ids = self._choose(self._noise(scores), None)
        else:
            expert_ids = self._round_robin(*x.shape[:2])
        is_chosen = jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.bool)  # [B, S, K, E]
        gates = jnp.where(is_chosen, scores[..., None, :], 0).sum(-1)
        if c.gates == "renormalised":
            gates = gates / (gates.sum(-1, keepdims=True) + 1e-20)
        gates = gates * c.scale

        counted = valid[..., None]
        assignment = Assignment(
            jnp.where(counted, expert_ids, num_experts).reshape(-1, self.k),
            jnp.where(counted, gates, 0).reshape(-1, self.k),
        )
        sums = LayerSums(
            counts=(is_chosen & counted[..., None]).sum((1, 2), dtype=jnp.int32),
            probabilities=jnp.where(counted, probabilities, 0).sum(1),
            tokens=valid.sum(1, dtype=jnp.int32),
            z=jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0).sum(),
            dropped=jnp.zeros((), jnp.int32),
        )
        return Routed(assignment, sums)

    def _choose(self, scores: Float[Array, "batch seq experts"], bias: Array | None) -> Int[Array, "batch seq k"]:
        c = self.choice
        if bias is not None:
            scores = scores + bias[None, None]
        if c.groups > 1:
            grouped = rearrange(scores, "b s (g e) -> b s g e", g=c.groups)
            best, _ = jax.lax.top_k(grouped, 1 if c.group_score == "max" else 2)
            _, kept = jax.lax.top_k(best.sum(-1), c.kept_groups)
            is_kept = jax.nn.one_hot(kept, c.groups, dtype=jnp.bool).any(-2)
            scores = rearrange(jnp.where(is_kept[..., None], grouped, -jnp.inf), "b s g e -> b s (g e)")
        return jax.lax.top_k(scores, self.k)[1]

    def _noise(self, scores: Float[Array, "batch seq experts"]) -> Float[Array, "batch seq experts"]:
        """Scores drawn at random: other ones in every layer, and on every device whose tokens are others."""
        key = jax.random.key(0)
        # Several weights of the layer: one, rounded to bfloat16, another layer may have too.
        for weight in jax.tree.leaves(self.weight)[0].reshape(-1)[:4].astype(jnp.float32):
            key = jax.random.fold_in(key, jax.lax.bitcast_convert_type(weight, jnp.uint32))
        if axes := tuple(sorted(varying_axes(scores))):
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        return jax.random.uniform(key, scores.shape)

    def _round_robin(self, batch: int, seq: int) -> Int[Array, "batch seq k"]:
        """Experts by turns, a token's own as far apart as its groups allow: all the same load after E tokens."""
        c, token = self.choice, jnp.arange(batch * seq)[:, None]
        size, each = self.weight.shape[1] // c.groups, -(-self.k // c.kept_groups)
        nth = jnp.arange(self.k)[None]
        group = (token + nth % c.kept_groups) % c.groups
        expert = (token // c.groups + nth // c.kept_groups * (size // each)) % size
        return (group * size + expert).reshape(batch, seq, self.k)

    def rebalance(self, load: Int[Array, "*layer experts"]) -> "Router":
        """With the choice bias moved by `bias_rate` towards experts with less than the mean load of a step.

        bias_e + bias_rate * sign(mean - load_e), from counts over all devices, so that it is the same on every
        mesh; a load equal to the mean moves nothing (DeepSeek-AI, 2024, DeepSeek-V3, section 2.1.2).
        """
        if self.choice_bias is None:
            return self
        num_experts = load.shape[-1]
        total = load.sum(-1, keepdims=True, dtype=jnp.int32)
        # sign(total - num_experts * load) without a product that int32 could not hold.
        below = load < -(-total // num_experts)
        above = load > total // num_experts
        step = below.astype(jnp.float32) - above.astype(jnp.float32)
        return eqx.tree_at(lambda r: r.choice_bias, self, self.choice_bias + self.choice.bias_rate * step)
