"""The MoE block with its tokens in chunks: the same numbers, weights gathered once, work while rows travel."""

import dataclasses
import functools
from collections import Counter
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import context_of
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from programs import count_collectives

from moezoo import Execution, Rules
from moezoo.moe.dispatch import STRATEGIES, Capacity, Dispatch, Ragged, Ring
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.mlp import MLP
from moezoo.parallel.collectives import psum, varying_axes
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.parallel.traces import equations
from moezoo.parallel.weight_mover import WeightMover

EXPERTS, EMBED, ROWS, LENGTH = 8, 6, 4, 5
F32 = jnp.dtype("float32")
X, COTANGENT = np.random.default_rng(1).standard_normal((2, ROWS, LENGTH, EMBED), np.float32)
# The last three tokens are padding.
VALID = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) < ROWS * LENGTH - 3


class Results(NamedTuple):
    """The result of a block, its part from routed experts, the number of drops, and gradients by block and tokens."""

    y: jax.Array
    routed: jax.Array
    dropped: jax.Array
    gradients: tuple[Any, jax.Array]


@functools.cache
def block() -> MoE:
    """A block of eight experts, two per token, and a shared MLP."""
    keys = jax.random.split(jax.random.key(0), 3)
    router = Router(EMBED, EXPERTS, 2, Choice(), dtype=F32, key=keys[0])
    experts = Experts(EXPERTS, EMBED, 5, out_std=1.0, dtype=F32, key=keys[1])
    return MoE(router, experts, MLP(EMBED, 9, out_std=1.0, dtype=F32, key=keys[2]))


def make_execution(strategy: Dispatch, split: bool = True) -> MeshExecution:
    """A mesh of 2 x 2 devices: experts are split over the second axis, and tokens too unless not `split`."""
    mesh = auto_mesh(fsdp=2, expert=2)
    rules = Rules("r", {"expert": ("expert",)}, {"expert": ("expert",)}, ("fsdp", "expert")[: 1 + split], ())
    # The plain backend gives the smallest program.
    return on_mesh(Execution(mesh, rules, strategy, kernels=Kernels(grouped_matmul=("reference",))))


def mapped(function: Any, execution: MeshExecution, out: Any) -> Any:
    """`function(block, x, valid, ...)`, with arrays split as tokens are, as a function of whole arrays."""
    split = execution.tokens_spec

    def mapped(moe: MoE, *arrays: Any) -> Any:
        specs = (execution.specs(moe), *(split,) * len(arrays))
        return jax.shard_map(function, mesh=execution.mesh, in_specs=specs, out_specs=out)(moe, *arrays)

    return mapped


def value_and_gradients(strategy: Dispatch, split: bool) -> Results:
    """Results of one batch on the whole mesh."""
    execution = make_execution(strategy, split)

    def local(moe: MoE, x: Any, valid: Any, cotangent: Any) -> Results:
        def objective(moe: MoE, x: Any) -> Any:
            y, sums, routed = WeightMover(execution).gather(moe)(x, context_of(valid), execution)
            return y, (routed, sums.dropped)

        y, pull, (routed, dropped) = jax.vjp(objective, moe, x, has_aux=True)
        return Results(y, routed, psum(dropped, tuple(sorted(varying_axes(dropped)))), pull(cotangent))

    tokens, specs_like = execution.tokens_spec, cast(Any, Results)
    out = specs_like(tokens, tokens, PartitionSpec(), (execution.specs(block()), tokens))
    return jax.device_get(jax.jit(mapped(local, execution, out))(block(), X, VALID, COTANGENT))


@functools.cache
def whole() -> Results:
    """The results without chunks."""
    return value_and_gradients(STRATEGIES["gather"](), True)


# A device has 5 tokens, which it shares with none, or 10, which it shares: chunks of two sizes; and more chunks than
# tokens. Sharing is a wrapper around the strategy, so one strategy that moves tokens and one that moves weights do.
CASES = [(name, True, 2) for name in STRATEGIES] + [("ring", True, 50), ("ragged", False, 3), ("gather", False, 3)]


@pytest.mark.parametrize(("name", "split", "chunks"), CASES)
def test_same_numbers(name, split, chunks):
    """Output, drops and gradients in chunks equal those without chunks."""
    cut = value_and_gradients(STRATEGIES[name](chunks=chunks).exact, split)
    assert whole().dropped == cut.dropped == 0
    for want, got in zip(jax.tree.leaves(whole()), jax.tree.leaves(cut), strict=True):
        # A weight's gradient is a sum over chunks: some 20 roundings in another order.
        np.testing.assert_allclose(got, want, rtol=0, atol=30 * 2.0**-24 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("strategy", [Capacity(0.5), Ragged(0.3), Ring(0.3)], ids=lambda s: type(s).__name__)
def test_a_bound_is_one_of_each_chunk(strategy):
    """Two chunks drop what two batches, the halves, drop one after the other."""

    def make_program(strategy: Dispatch) -> Any:
        execution = make_execution(strategy)

        def local(moe: MoE, x: Any, valid: Any) -> Any:
            _, sums, routed = WeightMover(execution).gather(moe)(x, context_of(valid), execution)
            return routed, psum(sums.dropped, ("fsdp", "expert"))

        return jax.jit(mapped(local, execution, (execution.tokens_spec, PartitionSpec())))

    x = np.random.default_rng(2).standard_normal((ROWS, 8, EMBED), np.float32)
    valid, of_half = np.ones((ROWS, 4), bool), make_program(strategy)
    first, lost = of_half(block(), x[:, :4], valid)
    second, lost_later = of_half(block(), x[:, 4:], valid)
    both, lost_in_chunks = make_program(dataclasses.replace(strategy, chunks=2))(block(), x, np.ones((ROWS, 8), bool))
    assert lost_in_chunks == lost + lost_later > 0
    np.testing.assert_allclose(both, np.concatenate([first, second], 1), rtol=0, atol=1e-6)


# For one chunk: collectives that send rows, and the one that returns results.
SENDS = {
    "capacity": (["all_to_all"], "all_to_all"),
    "ragged": (["all_gather", "ragged_all_to_all"], "ragged_all_to_all"),
    "ring": (["all_gather"] * 2, "reduce_scatter"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_runs_between_sending_and_results(name):
    """Weights are gathered once, chunks travel one by one; the next chunk is sent before results return.

    The shared MLP runs after the first chunk is sent. A barrier keeps compilers, which have an order of their own, from
    changing that.
    """
    execution = make_execution(STRATEGIES[name](chunks=2))

    def local(moe: MoE, x: Any, valid: Any) -> Any:
        return WeightMover(execution).gather(moe)(x, context_of(valid), execution).y

    program = jax.make_jaxpr(mapped(local, execution, execution.tokens_spec))(block(), X, VALID)
    if name not in SENDS:
        assert count_collectives(program) == Counter({("all_gather", ("expert",)): 3})
        return
    sent, back = SENDS[name]
    assert count_collectives(program) == Counter((kind, ("expert",)) for kind in 2 * [*sent, back])
    order, wide = [], 9  # only the shared MLP has this width
    for equation, *_ in equations(program, "tpu"):
        kind = equation.primitive.name
        if kind == "optimization_barrier":
            order.append((kind, len(equation.invars)))
        elif kind in {*sent, back}:
            order.append(kind)
        elif kind == "dot_general" and wide in getattr(equation.invars[1].aval, "shape", ()):
            order.append("shared")
    # The first results wait for the shared MLP and for the second chunk, the second ones for the shared MLP.
    waits = [("optimization_barrier", 3), back, ("optimization_barrier", 2), back]
    assert order == [*sent, *["shared"] * 3, *sent, *waits]
