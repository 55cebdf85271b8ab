"""Dispatch strategies between expert weights and experts, and the loop over tokens and choices they must equal."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from meshes import auto_mesh

from moezoo.moe.dispatch import STRATEGIES, Assignment, Dispatch, ExpertGroup, Replicated
from moezoo.moe.experts import Experts
from moezoo.parallel.collectives import gather_weight, psum, varying_axes

EMBED, MLP = 4, 3


class Layout(NamedTuple):
    """The axes of a mesh, and those that experts are split over."""

    shape: dict[str, int]
    axes: tuple[str, ...]


# By the size of the expert group. 1 has no mesh; 4 spans two mesh axes, next to a batch axis, and stores two of eight
# experts per device; 8 stores one.
LAYOUTS = {
    1: Layout({}, ()),
    4: Layout({"fsdp": 2, "expert": 2, "context": 2}, ("expert", "context")),
    8: Layout({"expert": 8}, ("expert",)),
}


# The option that bounds the rows of a strategy.
BOUNDS = {"capacity": "capacity_factor", "ragged": "buffer_factor", "ring": "buffer_factor"}


class Case(NamedTuple):
    """`tokens` on the whole mesh, `split` over the expert group too, or `replicated`: the same on its devices."""

    strategy: str
    group: int
    spread: str
    tokens: int
    experts: int
    k: int
    factor: float | None = None

    @property
    def dispatch(self) -> Dispatch:
        """The strategy with the bound `factor`; without a factor it drops nothing."""
        if self.factor is None:
            return STRATEGIES[self.strategy]().exact
        bound: dict[str, Any] = {BOUNDS[self.strategy]: self.factor}
        return STRATEGIES[self.strategy](**bound)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split tokens."""
        axes = LAYOUTS[self.group].shape
        return tuple(a for a in axes if self.spread == "split" or a not in LAYOUTS[self.group].axes)


def expert_layer(case, tokens, experts, gates, mlp):
    """Return what an MoE layer does after its router: the result, and (drops, used rows)."""
    axes = LAYOUTS[case.group].axes
    group = ExpertGroup(axes, case.group, case.experts)
    strategy = case.dispatch
    if not set(axes) <= varying_axes(tokens):
        strategy = Replicated(strategy)
    if case.dispatch.moves == "weights":
        mlp = jax.tree.map(lambda x: gather_weight(x, (axes, *[()] * (x.ndim - 1)), axes, x.dtype, x.dtype), mlp)
    there = strategy.dispatch(tokens, Assignment(experts, gates), group)
    sums = mlp(there.tokens, there.gates, there.plan, implementation=None)
    back = strategy.combine(sums, there.state, group)
    dropped = psum(there.dropped, tuple(sorted(varying_axes(there.dropped))))
    return back, (dropped, psum(there.plan.group_sizes.sum(dtype=jnp.int32), tuple(LAYOUTS[case.group].shape)))


@functools.cache
def compiled(case):
    """Return the program that computes the output, counts, and gradients of tokens, gates and expert weights."""
    shape, axes = LAYOUTS[case.group]

    def local(tokens, experts, gates, mlp, cotangent):
        layer = functools.partial(expert_layer, case)
        output, pull, counts = jax.vjp(lambda t, w, m: layer(t, experts, w, m), tokens, gates, mlp, has_aux=True)
        # By its type, the output differs over the axes that split tokens, and over no other.
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
    """Return the output by its definition and the gradients by the chain rule, in float64."""
    tokens, gates, cotangent = (np.asarray(x, np.float64) for x in (tokens, gates, cotangent))
    gate, up, down, *biases = (np.asarray(x, np.float64) for x in parameters(mlp))
    gate_bias, up_bias, down_bias = biases
    output, by_tokens, by_gates = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(gates)
    by_gate, by_up, by_down = np.zeros_like(gate), np.zeros_like(up), np.zeros_like(down)
    by_biases = [np.zeros_like(bias) for bias in biases]
    for (t, c), e in np.ndenumerate(experts):
        if e == len(gate):
            continue
        x, g, u = tokens[t], tokens[t] @ gate[e] + gate_bias[e], tokens[t] @ up[e] + up_bias[e]
        sigmoid = 1 / (1 + np.exp(-g))
        hidden = g * sigmoid * u
        output[t] += gates[t, c] * (hidden @ down[e] + down_bias[e])

        by_gates[t, c] = cotangent[t] @ (hidden @ down[e] + down_bias[e])
        back = gates[t, c] * cotangent[t]
        by_hidden = down[e] @ back
        by_g, by_u = by_hidden * u * sigmoid * (1 + g * (1 - sigmoid)), by_hidden * g * sigmoid
        by_down[e] += np.outer(hidden, back)
        by_gate[e] += np.outer(x, by_g)
        by_up[e] += np.outer(x, by_u)
        by_tokens[t] += gate[e] @ by_g + up[e] @ by_u
        for sums, one in zip(by_biases, (by_g, by_u, back), strict=True):
            sums[e] += one
    return output, by_tokens, by_gates, by_gate, by_up, by_down, *by_biases


@functools.cache
def mlp(experts):
    """Return experts with weights and biases of order one."""
    made = Experts(experts, EMBED, MLP, biases="all", out_std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x if x.ndim > 2 else jnp.asarray(rng.standard_normal(x.shape), x.dtype), made)


def parameters(mlp):
    """Return the arrays of experts."""
    return mlp.gate, mlp.up, mlp.down, mlp.gate_bias, mlp.up_bias, mlp.down_bias


def assign(case, allowed, padding, seed):
    """Return K distinct experts of `allowed` per token in random order; E in choices left over and padding tokens."""
    rng = np.random.default_rng(seed)
    experts = np.full((case.tokens, case.k), case.experts, np.int32)
    for token in np.flatnonzero(rng.random(case.tokens) >= padding):
        chosen = rng.permutation(sorted(allowed))[: case.k]
        experts[token, : len(chosen)] = chosen
    return rng.permuted(experts, axis=1)


def compare(case, allowed, padding, seed, drops=None):
    """Run one routing with the strategy and with the loop. `drops(case, experts)` marks assignments to be dropped."""
    rng = np.random.default_rng(seed + 100)
    experts = assign(case, [e % case.experts for e in allowed], padding, seed)
    tokens, cotangent = rng.standard_normal((2, case.tokens, EMBED), np.float32)
    gates = rng.standard_normal(experts.shape, np.float32)
    output, (dropped, used), by_tokens, by_gates, by_mlp = compiled(case)(
        tokens, experts, gates, mlp(case.experts), cotangent
    )
    results = output, by_tokens, by_gates, *parameters(by_mlp)
    lost = np.zeros(experts.shape, bool) if drops is None else drops(case, experts)
    asked, experts = (experts < case.experts).sum(), np.where(lost, case.experts, experts)
    wanted = loop(tokens, experts, gates, mlp(case.experts), cotangent)
    for result, want in zip(results, wanted, strict=True):
        # A chain of three products and a sum over at most 40 tokens: some 50 roundings to float32, relative to the
        # largest entries that were summed.
        np.testing.assert_allclose(result, want, rtol=0, atol=50 * 2.0**-24 * max(np.abs(want).max(), 1))
        # Experts without tokens, and tokens without experts: zero to the bit.
        assert not np.asarray(result)[want == 0].any()
    assert dropped == lost.sum() == asked - (experts < case.experts).sum()
    # A choice that goes nowhere takes no row, nor does what fills up a share of tokens; `dense` runs all
    # on all, `capacity` all places.
    assert used == (experts < case.experts).sum() or case.strategy in ("capacity", "dense")
    return output, by_tokens, by_gates
