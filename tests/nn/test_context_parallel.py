"""Attention on a split sequence, with all-gathers and with parts passed around, against one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from moezoo.kernels.attention import Operands, attend, chunked, join
from moezoo.nn.attention import Attention
from moezoo.nn.context_parallel import GatherKept, context_parallel
from moezoo.nn.latent_attention import LatentAttention, LatentSizes
from moezoo.nn.positions import make_context
from moezoo.nn.ring_attention import RotateKept
from moezoo.nn.rotary import Rotary
from moezoo.parallel.context_parallel import (
    BothCoordinates,
    ContextParallel,
    Coordinates,
    Scoring,
    SplitOperands,
    Stretches,
)
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh import MeshShape, make_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.rules import Rules
from moezoo.parallel.sequence_order import balanced_order
from moezoo.parallel.traces import collective_traffic

BATCH, SEQ, EMBED = 2, 12, 6
# Averages of values of order one under weights from scores of order ten: some 50 roundings to float32.
PRECISION = 50 * 2.0**-24
OPTIONS = {"out_std": 1.0, "dtype": jnp.dtype("float32"), "key": jax.random.key(0)}
LAYERS = {
    "grouped": Attention(EMBED, 4, 2, 4, rotary=Rotary(4, 100.0), window=5, **OPTIONS),
    "latent": LatentAttention(EMBED, LatentSizes(3, None, 5, 3, 2, 4), rotary=Rotary(2, 100.0), **OPTIONS),
}
# On three devices of four tokens, one document is on all of them, so each hop brings keys that a query sees.
AT = Coordinates(
    jnp.asarray([[*range(3), *range(9)], [*range(8), *range(4)]], jnp.int32),
    jnp.asarray([[1] * 3 + [2] * 9, [1] * 8 + [0] * 4], jnp.int32),
)


@dataclasses.dataclass(frozen=True)
class PassAround(ContextParallel):
    """Pass what tokens keep around the group, and join partial results."""

    def coordinates(self, queries, group):
        return BothCoordinates(queries, queries)

    def attend(self, operands, group):
        q, kept, weights, expand, coordinates, scoring, *_ = operands
        around = [(i, (i + 1) % group.size) for i in range(group.size)]
        travelling, parts = (kept, coordinates.keys), []
        for _ in range(group.size):
            keys, values = expand(weights, travelling[0])
            part = Operands(q, keys, values, coordinates.queries, travelling[1], scoring.window)
            parts.append(attend(part, scoring.scale, implementation=scoring.order))
            travelling = jax.tree.map(lambda x: lax.ppermute(x, group.axes, around), travelling)
        return functools.reduce(join, parts).result

    def place_exchanges(self, tokens, group):
        raise NotImplementedError

    def exchanges(self, numbers, dtype, tokens, window, group):
        raise NotImplementedError


def layer_and_gradients(execution, order, layer, x, at, cotangent):
    """Return the value of the layer and its gradients by weights and input."""
    value, pull = jax.vjp(lambda layer, x: layer(x, make_context(at, execution, order), execution).y, layer, x)
    return value, *pull(cotangent)


def inputs():
    """Return activations, their coordinates, and a cotangent that is 0 at padding."""
    x, cotangent = np.random.default_rng(0).standard_normal((2, BATCH, SEQ, EMBED), np.float32)
    return x, AT, cotangent * (np.asarray(AT.segment) > 0)[:, :, None]


@functools.cache
def on_one_device(name):
    """Return value and gradients without a mesh."""
    return jax.jit(functools.partial(layer_and_gradients, on_mesh(Execution()), None))(LAYERS[name], *inputs())


@pytest.mark.parametrize("value", [GatherKept(), RotateKept(), PassAround()], ids=["gather", "ring", "pass around"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_split_sequence_changes_nothing(name, value):
    """The output, and gradients by the input and every weight, also those that make keys from latents."""
    compare(name, value, None)


@pytest.mark.parametrize("order", ["contiguous", "balanced"])
@pytest.mark.parametrize("value", [GatherKept(), RotateKept()], ids=["gather", "ring"])
def test_keys_in_a_known_order(value, order):
    """Kernels get the keys that each query sees as intervals, of all keys or of those that a hop brings."""
    seen = []
    jax.clear_caches()  # traces of the kernel for equal types would not call it again
    with pytest.MonkeyPatch.context() as patch:
        plan = chunked._places
        patch.setattr(chunked, "BLOCKS", (2, 2))
        patch.setattr(chunked, "_places", lambda operands, blocks: seen.append(operands.seen) or plan(operands, blocks))
        compare("grouped", value, order)
    assert seen
    assert all(each is not None for each in seen)


def compare(name, value, order):
    """Compare a layer on two rows of three devices with the layer on one device, without a known order of keys."""
    rules = Rules("mine", {}, {}, ("data",), ("context",))
    mesh = make_mesh(MeshShape(data=2, context=3))
    options: Any = {"kernels": Kernels(attention=("chunked",)), "sequence_order": order} if order else {}
    execution = on_mesh(Execution(mesh=mesh, rules=rules, context_parallel=value, **options))
    lies = execution.token_order(SEQ) if order else np.arange(SEQ)
    split, whole = execution.tokens_spec, PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(layer_and_gradients, execution, order),
        mesh=mesh,
        in_specs=(whole, split, split, split),
        out_specs=(split, whole, split),
    )
    found = jax.jit(mapped)(LAYERS[name], *jax.tree.map(lambda x: x[:, lies], inputs()))
    back = np.argsort(lies)
    found, wanted = (found[0][:, back], found[1], found[2][:, back]), on_one_device(name)
    valid = np.asarray(AT.segment) > 0
    np.testing.assert_allclose(np.asarray(found[0])[valid], np.asarray(wanted[0])[valid], rtol=0, atol=PRECISION)
    for result, want in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(wanted[1:]), strict=True):
        np.testing.assert_allclose(result, want, rtol=0, atol=PRECISION * max(1, np.abs(want).max()))


def test_the_default_gathers():
    assert context_parallel(on_mesh(Execution())) == GatherKept()


# Sixteen tokens on four devices: two documents, cut at odd places, and a device with nothing but padding.
DOCUMENTS = Coordinates(
    jnp.asarray([[*range(5), *range(6), *range(5)], list(range(16))], jnp.int32),
    jnp.asarray([[1] * 5 + [2] * 6 + [0] * 5, [1] * 16], jnp.int32),
)


def expand_pair(weights, kept):
    """Return the keys and values that tokens keep."""
    del weights
    return kept


def ring_and_one_device(window: Any, sinks: Any = None, order: Any = "contiguous", scale: float = 0.7) -> Any:
    """Return value and gradients by q, k, v and sinks of a ring of four and of one device; and the number of hops."""
    rng = np.random.default_rng(1)
    q, cotangent = rng.standard_normal((2, 2, 16, 2, 3, 4)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 16, 2, 4)).astype(np.float32)
    cotangent = cotangent * (np.asarray(DOCUMENTS.segment) > 0)[:, :, None, None, None]
    tokens = balanced_order(16, 4) if order == "balanced" else np.arange(16)
    rules = Rules("mine", {}, {}, (), ("context",))
    mesh = make_mesh(MeshShape(context=4))
    execution = on_mesh(Execution(mesh=mesh, rules=rules, context_parallel=RotateKept(), sequence_order=order))
    arrays = jax.tree.map(lambda x: x[:, tokens], (q, (k, v), DOCUMENTS, cotangent))

    def run(group, q, kept, at, cotangent, sinks):
        def attend_to(q, kept, sinks):
            coordinates, scoring = RotateKept().coordinates(at, group), Scoring(scale, window, sinks)
            return RotateKept().attend(SplitOperands(q, kept, None, expand_pair, coordinates, scoring), group)

        value, pull = jax.vjp(attend_to, q, kept, sinks)
        return value, *pull(cotangent)

    split, whole = PartitionSpec(None, "context"), PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(run, execution.sequence_group),
        mesh=mesh,
        in_specs=(split, split, split, split, whole),
        out_specs=(split, split, split, whole),
    )
    found = jax.jit(mapped)(*arrays, sinks)
    hops = collective_traffic(jax.make_jaxpr(mapped)(*arrays, sinks)).by("collective")[("ppermute",)].count

    def alone(q, kept, sinks):
        operands = Operands(q, kept[0], kept[1], arrays[2], arrays[2], window)
        return attend(operands, scale, sinks=sinks, implementation="reference").result

    value, pull = jax.vjp(alone, *arrays[:2], sinks)
    return found, (value, *pull(arrays[3])), hops


def assert_near(found, wanted):
    """All arrays are equal within the rounding to float32 of numbers as large as the largest of each."""
    for result, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(result, want, rtol=0, atol=PRECISION * max(1, np.abs(want).max()))


@pytest.mark.parametrize(("window", "hops"), [(2, 1), (5, 1), (6, 2), (9, 2), (10, 3), (None, 3), (Stretches(6), 2)])
def test_windows_end_the_ring(window, hops):
    """In contiguous order no hop brings only keys that no query sees; a device has four tokens."""
    found, wanted, count = ring_and_one_device(window)
    assert_near(found, wanted)
    arrays = 2  # keys and values
    assert count == arrays * (hops + hops + (hops > 1) + hops)  # forward; backward; gradients


@pytest.mark.parametrize("window", [None, 6, Stretches(6)])
def test_any_order_of_tokens(window):
    found, wanted, _ = ring_and_one_device(window, order="balanced")
    assert_near(found, wanted)


def test_sinks_count_once():
    sinks = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3)), jnp.float32)
    found, wanted, _ = ring_and_one_device(None, sinks)
    assert_near(found, wanted)
    assert np.abs(wanted[3]).min() > 0.01


def test_weights_of_large_scores_sum_to_one():
    """Scores of 1e7, where float32 has steps of 1: their log-sum-exp would be too rounded to join parts by."""
    found, wanted, _ = ring_and_one_device(None, scale=3e6)
    np.testing.assert_allclose(found[0], wanted[0], atol=PRECISION * 4)
