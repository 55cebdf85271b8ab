"""The router: it chooses the experts of each token and computes their gates."""

import dataclasses
from typing import Annotated, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from moezoo.errors import UserError
from moezoo.moe.dispatch import Assignment
from moezoo.moe.routing import LayerSums
from moezoo.nn.linear import normal, project
from moezoo.nn.norm import normalise
from moezoo.parallel.axes import Bias, Buffer, Scale, Weight
from moezoo.parallel.collectives import varying_axes
from moezoo.parallel.execution import RoutingChoice
from moezoo.parallel.stored import materialise
from moezoo.typed import AtMost, MayChange, NotNegative, Positive, Size, check_fields


class Routed(NamedTuple):
    """The assignment of each token, and the routing sums of the layer. `sums.dropped` is still 0."""

    assignment: Assignment
    sums: LayerSums


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a router chooses the experts of a token and computes their gates.

    With scores s (float32) and choice bias b, a token goes to the K experts with the largest s + b among the kept
    groups. Its gates are scale * s, or scale * s / (sum(s) + added_to_sum), with the sum over the chosen experts; with
    `least_sum` they are scale * s / max(sum(s), least_sum). The defaults are Mixtral's (Jiang et al., 2024, section
    2.1).

    Args:
        score: `softmax` over all experts, or `sigmoid` of each expert alone.
        groups: The number of equal runs that the experts are divided into (DeepSeek-AI, 2024, DeepSeek-V2, section
            2.2.2).
        kept_groups: The number of groups, the best of each token, that its experts come from.
        group_score: A group's score is its best expert's (`max`) or the sum of its two best (`sum_of_top2`).
        gates: `scores` as they are, or `renormalised` to sum to 1.
        scale: The factor of the gates.
        choice_bias: `learned` adds a bias to the scores for the choice only (Wang et al., 2024, arXiv:2408.15664).
        bias_rate: How far a training step moves the choice bias.
        least_sum: Renormalised gates divide by at least this, so they sum to less where the scores do.
        added_to_sum: What is added to the sum that renormalised gates divide by, without `least_sum`.

    Raises:
        UserError: A value has a wrong type, a number is out of its range, or `kept_groups` exceeds `groups`.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: Size = 1
    kept_groups: Annotated[Size, AtMost("groups")] = 1
    group_score: Literal["max", "sum_of_top2"] = "max"
    gates: Literal["renormalised", "scores"] = "renormalised"
    scale: Positive = 1.0
    choice_bias: Literal["none", "learned"] = "none"
    bias_rate: Annotated[NotNegative, MayChange(0.0, without_effect=("choice_bias", "none"))] = 0.001
    least_sum: NotNegative = 0.0
    added_to_sum: Positive = 1e-20

    def __post_init__(self):
        check_fields("model.router", self)

    def check(self, num_experts: int, k: int) -> None:
        """Raise `UserError` unless `k` of `num_experts` experts can be chosen with these settings."""
        if num_experts % self.groups:
            raise UserError(
                f"model.experts={num_experts} is not divisible by model.router.groups={self.groups}; choose a divisor"
            )
        if self.groups > 1 and self.group_score == "sum_of_top2" and num_experts == self.groups:
            raise UserError(
                f"model.router.group_score=sum_of_top2 needs two experts per group, but model.experts={num_experts} in "
                f"model.router.groups={self.groups} has one; choose fewer groups or model.router.group_score=max"
            )
        eligible = num_experts // self.groups * self.kept_groups
        if k > eligible:
            raise UserError(
                f"model.experts_per_token={k} exceeds the {eligible} experts of "
                f"model.router.kept_groups={self.kept_groups} groups; choose at most {eligible}"
            )


class Router(eqx.Module):
    """Scores of all experts for each token, and the choice of `k` of them.

    Logits are x W + `bias`; `bias` is trained. `choice_bias` is not part of the scores: it receives no gradient, and
    `rebalance` moves it. With `input_scale` the router reads x / rms(x) * `input_scale` / sqrt(embed) in place of x;
    gates are multiplied by the `expert_scale` of their experts, after they are renormalised (Gemma 4; Google, 2026).
    """

    weight: Weight[Array, "embed -> router"]
    bias: Bias[Array, "router"] | None
    choice_bias: Buffer[Array, "router"] | None
    input_scale: Scale[Array, "norm"] | None
    expert_scale: Scale[Array, "router"] | None
    k: int = eqx.field(static=True)
    choice: Choice = eqx.field(static=True)
    input_epsilon: float = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        num_experts: int,
        k: int,
        choice: Choice,
        *,
        bias: Literal["none", "trained"] = "none",
        scales: Literal["none", "trained"] = "none",
        norm_eps: float = 1e-6,
        dtype: jnp.dtype,
        key: Array,
    ):
        self.weight = normal(key, (embed, num_experts), embed**-0.5, dtype)
        self.bias = jnp.zeros((num_experts,), dtype) if bias == "trained" else None
        self.choice_bias = jnp.zeros((num_experts,), jnp.float32) if choice.choice_bias == "learned" else None
        self.input_scale = self.expert_scale = None
        if scales == "trained":
            self.input_scale, self.expert_scale = jnp.ones((embed,), dtype), jnp.ones((num_experts,), dtype)
        self.k, self.choice, self.input_epsilon = k, choice, norm_eps

    def __call__(
        self, x: Float[Array, "batch seq embed"], valid: Bool[Array, "batch seq"], routing: RoutingChoice = "learned"
    ) -> Routed:
        """Return the assignment of B S tokens and the routing sums of the layer. Scores are float32.

        Args:
            x: The activations.
            valid: False at padding, which goes to no expert and is not counted.
            routing: With `random` or `balanced`, scores give the gates but do not choose the experts.
        """
        c, num_experts = self.choice, self.weight.shape[1]
        if self.input_scale is not None:
            x = normalise(x, self.input_epsilon) * self.input_scale.astype(x.dtype)[None, None]
            x = (x.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)
        logits = project(x, self.weight, dtype=jnp.float32)
        if self.bias is not None:
            logits = logits + self.bias.astype(jnp.float32)[None, None]
        if c.score == "softmax":
            scores = probabilities = jax.nn.softmax(logits)
        else:
            scores = jax.nn.sigmoid(logits)
            probabilities = scores / scores.sum(-1, keepdims=True)
        # The choice has no gradient; the gates have one. Picking scores by comparison instead of by index keeps a
        # scatter-add out of the backward pass.
        if routing == "learned":
            expert_ids = self._choose(jax.lax.stop_gradient(scores), self.choice_bias)
        elif routing == "random":
            expert_ids = self._choose(self._noise(scores), None)
        else:
            expert_ids = self._round_robin(*x.shape[:2])
        is_chosen = jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.bool)  # [B, S, K, E]
        gates = jnp.where(is_chosen, scores[..., None, :], 0).sum(-1)
        if c.gates == "renormalised":
            total = gates.sum(-1, keepdims=True)
            gates = gates / (jnp.maximum(total, c.least_sum) if c.least_sum else total + c.added_to_sum)
        gates = gates * c.scale
        if self.expert_scale is not None:
            scales = self.expert_scale.astype(jnp.float32)[None, None, None]
            gates = gates * jnp.where(is_chosen, scales, 0).sum(-1)

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
        """Return random scores. They differ by layer, and by device where tokens differ."""
        key = jax.random.key(0)
        # Four weights identify the layer; one alone, rounded to bfloat16, may be the same in another layer.
        for weight in materialise(self.weight, jnp.float32).reshape(-1)[:4].astype(jnp.float32):
            key = jax.random.fold_in(key, jax.lax.bitcast_convert_type(weight, jnp.uint32))
        if axes := tuple(sorted(varying_axes(scores))):
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        return jax.random.uniform(key, scores.shape)

    def _round_robin(self, batch: int, seq: int) -> Int[Array, "batch seq k"]:
        """Return experts in turn. Every expert has the same load after E tokens.

        The experts of one token are as far apart as the kept groups allow.
        """
        c, token = self.choice, jnp.arange(batch * seq)[:, None]
        size, each = self.weight.shape[1] // c.groups, -(-self.k // c.kept_groups)
        nth = jnp.arange(self.k)[None]
        group = (token + nth % c.kept_groups) % c.groups
        expert = (token // c.groups + nth // c.kept_groups * (size // each)) % size
        return (group * size + expert).reshape(batch, seq, self.k)

    def rebalance(self, load: Int[Array, "*layer experts"]) -> "Router":
        """Return the router with a choice bias that favours the experts with less than the mean load.

        b_e + bias_rate * sign(mean - load_e) (DeepSeek-AI, 2024, DeepSeek-V3, section 2.1.2). `load` counts the tokens
        of a training step over all devices, so the result is the same on every mesh.
        """
        if self.choice_bias is None or not self.choice.bias_rate:
            return self
        num_experts = load.shape[-1]
        total = load.sum(-1, keepdims=True, dtype=jnp.int32)
        # sign(total - num_experts * load), without the product, which may overflow int32.
        below = load < -(-total // num_experts)
        above = load > total // num_experts
        step = below.astype(jnp.float32) - above.astype(jnp.float32)
        return eqx.tree_at(lambda r: r.choice_bias, self, self.choice_bias + self.choice.bias_rate * step)
