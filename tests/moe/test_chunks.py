"""The MoE block with its tokens in chunks: same numbers, weights gathered once, work between sending and results."""

import dataclasses
import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from meshes import auto_mesh

from moezoo import Execution, Rules
from moezoo.errors import UserError
from moezoo.moe.dispatch import STRATEGIES, Capacity, Dispatch, Ragged, Ring
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.mlp import MLP
from moezoo.parallel.collectives import psum, varying_axes
from moezoo.parallel.traces import count_collectives, equations

EXPERTS, EMBED, ROWS, LENGTH = 8, 6, 4, 7
F32 = jnp.dtype("float32")


class Results(NamedTuple):
    """A block's results: all of it, what the experts gave, drops, and gradients by block and tokens."""

    y: jax.Array
    routed: jax.Array
    dropped: jax.Array
    gradients: tuple[Any, jax.Array]


@functools.cache
def block() -> MoE:
    """A block of eight experts, two a token, and a shared MLP."""
    keys = jax.random.split(jax.random.key(0), 3)
    router = Router(EMBED, EXPERTS, 2, Choice(), dtype=F32, key=keys[0])
    experts = Experts(EXPERTS, EMBED, 5, out_std=1.0, dtype=F32, key=keys[1])
    return MoE(router, experts, MLP(EMBED, 9, out_std=1.0, dtype=F32, key=keys[2]))


def make_execution(strategy: Dispatch, split: bool) -> Execution:
    """Two devices with tokens of their own times two that share experts, and tokens too unless `split`."""
    mesh = auto_mesh(fsdp=2, expert=2)
    rules = Rules("r", {"expert": ("expert",)}, {"expert": ("expert",)}, ("fsdp", "expert")[: 1 + split], ())
    return Execution(mesh, rules, strategy)


def layer(execution: Execution) -> Any:
    """`(block, x, valid, cotangent) -> Results` on the whole mesh."""

    def local(moe: MoE, x: Any, valid: Any, cotangent: Any) -> Results:
        def objective(moe: MoE, x: Any) -> Any:
            y, sums, routed = execution.whole(moe)(x, valid, execution)
            return y, (routed, sums.dropped)

        y, pull, (routed, dropped) = jax.vjp(objective, moe, x, has_aux=True)
        return Results(y, routed, psum(dropped, tuple(sorted(varying_axes(dropped)))), pull(cotangent))

    split, whole = execution.tokens_spec, PartitionSpec()
    specs = execution.specs(block())
    specs_like: Any = Results  # of what it holds
    out = specs_like(split, split, whole, (specs, split))
    return jax.shard_map(local, mesh=execution.mesh, in_specs=(specs, split, split, split), out_specs=out)


@functools.cache
def compiled(strategy: Dispatch, split: bool) -> Any:
    """The layer as a program; tiny ones gain nothing from an optimised backend."""
    return jax.jit(layer(make_execution(strategy, split)))


@functools.cache
def results(strategy: Dispatch, split: bool) -> Results:
    """Of one batch, whose last tokens are padding."""
    x, cotangent = np.random.default_rng(1).standard_normal((2, ROWS, LENGTH, EMBED), np.float32)
    valid = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) < ROWS * LENGTH - 3
    return jax.device_get(compiled(strategy, split)(block(), x, valid, cotangent))


# A device has 7 tokens of its own, or 14 that it shares: chunks of two sizes, and, once, more chunks than tokens.
CASES = [(name, split, 3) for name in STRATEGIES for split in (True, False)] + [("ring", True, 50)]


@pytest.mark.parametrize(("name", "split", "chunks"), CASES)
def test_same_numbers(name, split, chunks):
    whole = results(STRATEGIES[name]().exact, split)
    cut = results(STRATEGIES[name](chunks=chunks).exact, split)
    assert whole.dropped == cut.dropped == 0
    for want, got in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        # A weight's gradient adds its chunks' one after the other: some 28 roundings in another order.
        np.testing.assert_allclose(got, want, rtol=0, atol=30 * 2.0**-24 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("strategy", [Capacity(0.5), Ragged(0.3), Ring(0.3)], ids=lambda s: type(s).__name__)
def test_a_bound_is_one_of_each_chunk(strategy):
    """Cutting a batch in chunks drops what running its parts one after the other does."""
    whole_chunk, cut = compiled(strategy, True), compiled(dataclasses.replace(strategy, chunks=2), True)
    x, cotangent = np.random.default_rng(2).standard_normal((2, ROWS, 8, EMBED), np.float32)
    valid = np.ones((ROWS, 8), bool)
    first, second = (
        whole_chunk(block(), x[:, part], valid[:, part], cotangent[:, part]) for part in (slice(0, 4), slice(4, 8))
    )
    both = cut(block(), x, valid, cotangent)
    assert both.dropped == first.dropped + second.dropped > 0
    np.testing.assert_allclose(both.routed, np.concatenate([first.routed, second.routed], 1), rtol=0, atol=1e-6)


FORWARD = {
    "capacity": {("all_to_all", ("expert",)): 2},
    "ragged": {("all_gather", ("expert",)): 1, ("ragged_all_to_all", ("expert",)): 2},
    "ring": {("all_gather", ("expert",)): 2, ("reduce_scatter", ("expert",)): 1},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_are_gathered_once_and_chunks_travel_by_themselves(name):
    execution = make_execution(STRATEGIES[name](chunks=3), True)
    shapes = jax.eval_shape(lambda: (block(), jnp.zeros((ROWS, LENGTH, EMBED)), jnp.zeros((ROWS, LENGTH), bool)))

    def local(moe: MoE, x: Any, valid: Any) -> Any:
        return execution.whole(moe)(x, valid, execution).y

    split = execution.tokens_spec
    specs = (execution.specs(block()), split, split)
    program = jax.make_jaxpr(jax.shard_map(local, mesh=execution.mesh, in_specs=specs, out_specs=split))(*shapes)
    once = FORWARD.get(name)
    expected = {("all_gather", ("expert",)): 3} if once is None else {key: 3 * n for key, n in once.items()}
    assert count_collectives(program) == Counter(expected)


@pytest.mark.parametrize("name", FORWARD)
def test_shared_experts_run_between_sending_and_results(name):
    """In the program's order, and for compilers, which have their own: results wait for it."""
    execution = make_execution(STRATEGIES[name](), True)
    shapes = jax.eval_shape(lambda: (block(), jnp.zeros((ROWS, LENGTH, EMBED)), jnp.zeros((ROWS, LENGTH), bool)))
    wide = 9  # the shared MLP's width, which nothing else has

    def local(moe: MoE, x: Any, valid: Any) -> Any:
        return execution.whole(moe)(x, valid, execution).y

    split = execution.tokens_spec
    specs = (execution.specs(block()), split, split)
    program = jax.make_jaxpr(jax.shard_map(local, mesh=execution.mesh, in_specs=specs, out_specs=split))(*shapes)
    order = []
    for equation, *_ in equations(program, "tpu"):
        kind = equation.primitive.name
        if kind in ("all_to_all", "ragged_all_to_all", "reduce_scatter", "optimization_barrier") or (
            kind == "all_gather" and name == "ring"
        ):
            order.append(kind)
        elif kind == "dot_general" and wide in getattr(equation.invars[1].aval, "shape", ()):
            order.append("shared")
    sent, back = {"ring": (["all_gather"] * 2, "reduce_scatter")}.get(name, ([order[0]], order[0]))
    assert order == [*sent, "shared", "shared", "shared", "optimization_barrier", back]


@pytest.mark.parametrize("chunks", [0, -1])
def test_no_chunk_is_refused(chunks):
    with pytest.raises(UserError, match=f"^dispatch.chunks={chunks} must be at least 1$"):
        Ring(chunks=chunks)
