"""Every dispatch strategy alone, between expert weights and the expert MLP, against a loop over tokens and choices."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh

from moezoo.moe.dispatch import STRATEGIES, Assignment, Dispatch, ExpertGroup, Replicated
from moezoo.moe.experts import Experts
from moezoo.parallel.collectives import gather_weight, psum, varying_axes

EMBED, MLP = 4, 3


class Layout(NamedTuple):
    """A mesh: its axes, and the ones that the experts are split over."""

    shape: dict[str, int]
    axes: tuple[str, ...]


# By the size of the expert group. One device has no mesh; 2 has a batch axis beside; 4 spans two mesh axes.
LAYOUTS = {
    1: Layout({}, ()),
    2: Layout({"fsdp": 2, "expert": 2}, ("expert",)),
    4: Layout({"expert": 2, "context": 2}, ("expert", "context")),
    8: Layout({"expert": 8}, ("expert",)),
}


# What bounds the strategies that can drop.
BOUNDS = {"capacity": "capacity_factor", "ragged": "buffer_factor", "ring": "buffer_factor"}


class Case(NamedTuple):
    """`tokens` over the whole mesh, split over the expert group too or the same on all its devices."""

    strategy: str
    group: int
    placed: str
    tokens: int
    experts: int
    k: int
    factor: float | None = None

    @property
    def dispatch(self) -> Dispatch:
        """The strategy; without a factor one that drops nothing."""
        if self.factor is None:
            return STRATEGIES[self.strategy]().exact
        bound: dict[str, Any] = {BOUNDS[self.strategy]: self.factor}
        return STRATEGIES[self.strategy](**bound)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split tokens."""
        axes = LAYOUTS[self.group].shape
        return tuple(a for a in axes if self.placed == "split" or a not in LAYOUTS[self.group].axes)


# 26 replicated tokens (13 a batch shard) divide by no group; the corners have one token a device, or one in all, and
# every expert chosen by each.
CASES = [Case(name, size, "split", 24, 8, 2) for name in STRATEGIES for size in LAYOUTS]
CASES += [Case(name, size, "replicated", 26, 8, 2) for name in STRATEGIES for size in LAYOUTS if size > 1]
CORNERS = [Case(name, 4, "split", 4, 4, 4) for name in STRATEGIES]
CORNERS += [Case(name, 4, "replicated", 1, 4, 4) for name in STRATEGIES]


def expert_layer(case, tokens, experts, gates, mlp):
    """What the MoE block does between router and residual stream: what comes back, and (drops, rows in use)."""
    axes = LAYOUTS[case.group].axes
    group = ExpertGroup(axes, case.group, case.experts)
    strategy = case.dispatch
    if not set(axes) <= varying_axes(tokens):
        strategy = Replicated(strategy)
    if case.dispatch.moves == "weights":
        mlp = jax.tree.map(lambda x: gather_weight(x, (axes, (), ()), axes, x.dtype, x.dtype), mlp)
    there = strategy.dispatch(tokens, Assignment(experts, gates), group)
    back = strategy.combine(mlp(there.rows, there.group_sizes, "reference"), there.state, group)
    dropped = psum(there.dropped, tuple(sorted(varying_axes(there.dropped))))
    return back, (dropped, psum(there.group_sizes.sum(dtype=jnp.int32), tuple(LAYOUTS[case.group].shape)))


@functools.cache
def compiled(case):
    """Output, counts and the gradients of tokens, gates and expert weights, as one program for the case's mesh."""
    shape, axes = LAYOUTS[case.group]

    def local(tokens, experts, gates, mlp, cotangent):
        layer = functools.partial(expert_layer, case)
        output, pull, counts = jax.vjp(lambda t, w, m: layer(t, experts, w, m), tokens, gates, mlp, has_aux=True)
        # Types say which axes a value is the same on: the mesh's batch axes only for what tokens hold.
        assert varying_axes(output) == set(case.batch_axes)
        return output, counts, *pull(cotangent)

    if not shape:
        return jax.jit(local)
    mesh = auto_mesh(**shape)
    split, owned = PartitionSpec(case.batch_axes or None), PartitionSpec(axes)
    outs = (split, PartitionSpec(), split, split, owned)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, split, split, owned, split), out_specs=outs)
    return jax.jit(mapped)


def loop(tokens, experts, gates, mlp, cotangent):
    """The layer by its definition, and its gradients by the chain rule, in float64."""
    tokens, gates, cotangent = (np.asarray(x, np.float64) for x in (tokens, gates, cotangent))
    gate, up, down = (np.asarray(x, np.float64) for x in (mlp.gate, mlp.up, mlp.down))
    output, by_tokens, by_gates = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(gates)
    by_gate, by_up, by_down = np.zeros_like(gate), np.zeros_like(up), np.zeros_like(down)
    for (t, c), e in np.ndenumerate(experts):
        if e == len(gate):
            continue
        x, g, u = tokens[t], tokens[t] @ gate[e], tokens[t] @ up[e]
        sigmoid = 1 / (1 + np.exp(-g))
        hidden = g * sigmoid * u
        output[t] += gates[t, c] * (hidden @ down[e])

        by_gates[t, c] = cotangent[t] @ (hidden @ down[e])
        back = gates[t, c] * cotangent[t]
        by_hidden = down[e] @ back
        by_g, by_u = by_hidden * u * sigmoid * (1 + g * (1 - sigmoid)), by_hidden * g * sigmoid
        by_down[e] += np.outer(hidden, back)
        by_gate[e] += np.outer(x, by_g)
        by_up[e] += np.outer(x, by_u)
        by_tokens[t] += gate[e] @ by_g + up[e] @ by_u
    return output, by_tokens, by_gates, by_gate, by_up, by_down


@functools.cache
def mlp(experts):
    """Experts with weights of order one."""
    return Experts(experts, EMBED, MLP, out_std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0))


def assign(case, allowed, padding, seed):
    """K distinct experts of `allowed` a token, in random order; choices too many and padding tokens go nowhere."""
    rng = np.random.default_rng(seed)
    experts = np.full((case.tokens, case.k), case.experts, np.int32)
    for token in np.flatnonzero(rng.random(case.tokens) >= padding):
        chosen = rng.permutation(sorted(allowed))[: case.k]
        experts[token, : len(chosen)] = chosen
    return rng.permuted(experts, axis=1)


def compare(case, allowed, padding, seed, drops=None):
    """One routing through the strategy and through the loop; `drops` says which assignments the strategy must drop."""
    rng = np.random.default_rng(seed + 100)
    experts = assign(case, [e % case.experts for e in allowed], padding, seed)
    tokens, cotangent = rng.standard_normal((2, case.tokens, EMBED), np.float32)
    gates = rng.standard_normal(experts.shape, np.float32)
    output, (dropped, used), by_tokens, by_gates, by_mlp = compiled(case)(
        tokens, experts, gates, mlp(case.experts), cotangent
    )
    results = output, by_tokens, by_gates, by_mlp.gate, by_mlp.up, by_mlp.down
    lost = np.zeros(experts.shape, bool) if drops is None else drops(case, experts)
    asked, experts = (experts < case.experts).sum(), np.where(lost, case.experts, experts)
    wanted = loop(tokens, experts, gates, mlp(case.experts), cotangent)
    for result, want in zip(results, wanted, strict=True):
        # A chain of three products and a sum over at most 26 tokens: some 50 roundings to float32, relative to the
        # largest entries that were summed.
        np.testing.assert_allclose(result, want, rtol=0, atol=50 * 2.0**-24 * max(np.abs(want).max(), 1))
        # Experts without tokens, and tokens without experts: zero to the bit.
        assert not np.asarray(result)[want == 0].any()
    assert dropped == lost.sum() == asked - (experts < case.experts).sum()
    # A choice that goes nowhere takes no row, nor does what fills up a share of tokens; `dense` runs all
    # on all, `capacity` all places.
    assert used == (experts < case.experts).sum() or case.strategy in ("capacity", "dense")
    return output, by_tokens, by_gates


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}-{case.placed}-{case.group}")
def test_equals_the_loop(case):
    @settings(max_examples=12)
    @given(
        allowed=st.sets(st.integers(0, case.experts - 1), min_size=1),
        padding=st.sampled_from([0.0, 0.3, 1.0]),
        seed=st.integers(0, 99),
    )
    @example(allowed={5}, padding=0.0, seed=0)  # all tokens on one expert
    @example(allowed=set(range(8)), padding=0.0, seed=0)
    def examples(allowed, padding, seed):
        compare(case, allowed, padding, seed)

    examples()


@pytest.mark.parametrize("case", CORNERS, ids=lambda case: f"{case.strategy}-{case.placed}")
def test_few_tokens_that_choose_all_experts(case):
    for allowed, padding in (({0, 1, 2, 3}, 0.0), ({3}, 0.0), ({0, 1, 2, 3}, 1.0)):
        compare(case, allowed, padding, seed=0)


@pytest.mark.parametrize("placed", ["split", "replicated"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padding_tokens_come_out_zero(strategy, placed):
    case = next(c for c in CASES if (c.strategy, c.group, c.placed) == (strategy, 4, placed))
    padded = (assign(case, range(case.experts), 0.5, seed=3) == case.experts).all(axis=1)
    assert 0 < padded.sum() < case.tokens
    for result in compare(case, range(case.experts), 0.5, seed=3):
        result = np.asarray(result)
        assert not result[padded].any()
        assert result[~padded].any(axis=1).all()
