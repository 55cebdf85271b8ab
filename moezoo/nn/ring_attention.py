"""Context parallelism that passes what tokens keep from device to device (Liu et al., 2023, arXiv:2310.01889).

With n devices, `kept` makes n - 1 hops along the ring, or fewer if windows end before. For n = 4, where k0 is what the
tokens of device 0 keep:

    hop   device 0   device 1   device 2   device 3
    0     k0         k1         k2         k3          each device attends to its own
    1     k3         k0         k1         k2          and then to what has arrived from the device before it
    2     k2         k3         k0         k1
    3     k1         k2         k3         k0

Each hop is sent off before attention works on what is already there, so the two can overlap. The backward pass rotates
`kept` again: nothing but a device's own `kept` is stored. There a second ring carries the gradients by `kept`, in
float32. It starts at hop 1: the gradient by k3 begins on device 0 and travels with k3, and each device adds its share.
After the last hop it is on device 2, and one more send takes it home to device 3, which has its own share of hop 0.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from moezoo.kernels.attention import FLOOR, Operands, Softmax, attend_part, join_softmax, part_gradients
from moezoo.parallel.collectives import ATTENTION, vary_like
from moezoo.parallel.context_parallel import (
    BothCoordinates,
    Chunks,
    ContextParallel,
    Coordinates,
    Expand,
    Interval,
    Reach,
    SequenceGroup,
    SplitOperands,
    most_seen,
)
from moezoo.parallel.kernels import KernelOrder


@dataclasses.dataclass(frozen=True)
class RotateKept(ContextParallel):
    """Attend to the tokens of one device at a time, while those of the next are on their way."""

    def attend(self, operands: SplitOperands, group: SequenceGroup) -> Array:
        """Join the parts in float32, with the sinks once."""
        q, kept, weights, expand, coordinates, (scale, window, sinks, order), seen, chunks = operands
        q = (q.astype(jnp.float32) * scale).astype(q.dtype)
        learned, rest = eqx.partition(weights, eqx.is_inexact_array)
        inputs = _Inputs(q, kept, learned, rest, coordinates, sinks, seen)
        alike = jax.tree.leaves(inputs)
        inputs = jax.tree.map(lambda x: vary_like(x, *alike), inputs)
        return _attend(_Options(expand, group, window, order, chunks), inputs)


class _Options(NamedTuple):
    """What is known when the program is traced."""

    expand: Expand
    group: SequenceGroup
    window: Reach
    order: KernelOrder
    chunks: Chunks


class _Inputs(NamedTuple):
    """What both passes need. `learned` and `rest` are the weights with and without a gradient."""

    q: Array
    kept: PyTree
    learned: PyTree
    rest: PyTree
    coordinates: BothCoordinates
    sinks: Array | None
    seen: Interval | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, inputs: _Inputs) -> Array:
    return _forward(options, inputs)[0]


def _forward(options: _Options, inputs: _Inputs) -> tuple[Array, tuple[_Inputs, Softmax]]:
    hops = _count_hops(options.group, inputs.q.shape[1], options.window)

    def part(kept: PyTree, hop: Any) -> Softmax:
        keys, values = options.expand(eqx.combine(inputs.learned, inputs.rest), kept)
        return attend_part(_operands(options, inputs, keys, values, hop), options.order)

    def step(carry: tuple[PyTree, Softmax], hop: Any) -> tuple[tuple[PyTree, Softmax], None]:
        kept, before = carry
        # Whatever uses the part waits for the hop too. Otherwise a compiler may overlap the hop with what follows
        # attention, and start it only after attention.
        arriving, here = lax.optimization_barrier((_send(kept, options), part(kept, hop)))
        return (arriving, join_softmax(before, here)), None

    kept, whole = inputs.kept, _of_sinks(options, inputs)
    if hops:
        (kept, whole), _ = lax.scan(step, (kept, whole), jnp.arange(hops))
    last = part(kept, hops)
    whole = join_softmax(whole, last)
    whole = whole._replace(result=whole.result.astype(last.result.dtype))
    # Named, so that a policy of rematerialisation may save them: then no hop of the forward pass runs twice.
    whole = Softmax(*(checkpoint_name(x, ATTENTION) for x in whole))
    return whole.result, (inputs, whole)


def _backward(options: _Options, residuals: tuple[_Inputs, Softmax], back: Array) -> tuple[_Inputs]:
    inputs, whole = residuals
    hops = _count_hops(options.group, inputs.q.shape[1], options.window)

    def gradients(kept: PyTree, hop: Any, sent: PyTree) -> tuple[PyTree, tuple[Array, PyTree, PyTree]]:
        """Return `sent` and the shares of this device in the gradients by q, `kept` and the weights, in float32."""
        (keys, values), pull = jax.vjp(
            lambda learned, kept: options.expand(eqx.combine(learned, inputs.rest), kept), inputs.learned, kept
        )
        operands = _operands(options, inputs, keys, values, hop)
        by_q, *by_pair = part_gradients(operands, whole, back, options.order)
        if jax.tree.leaves(inputs.learned):  # then `expand` has products, and theirs follow those of attention
            sent, (by_q, by_pair) = lax.optimization_barrier((sent, (by_q, by_pair)))
        else:  # without the others, which a compiler may add to what arrives before they are rounded to their dtype
            sent, by_q = lax.optimization_barrier((sent, by_q))
        by_weights, by_kept = pull(tuple(by_pair))
        return sent, jax.tree.map(lambda x: x.astype(jnp.float32), (by_q, by_kept, by_weights))

    def step(carry: tuple, hop: Any) -> tuple[tuple, None]:
        kept, (by_q, passing, by_weights) = carry
        (arriving, passing), here = gradients(kept, hop, _send((kept, passing), options))
        return (arriving, _add((by_q, passing, by_weights), here)), None

    kept = _send(inputs.kept, options) if hops else None
    kept, (by_q, own, by_weights) = gradients(inputs.kept, 0, kept)
    if hops:
        arriving = _send(kept, options) if hops > 1 else kept
        arriving, (more_q, passing, more_weights) = gradients(kept, 1, arriving)
        carry = (arriving, (*_add((by_q,), (more_q,)), passing, _add(by_weights, more_weights)))
        (_, (by_q, passing, by_weights)), _ = lax.scan(step, carry, jnp.arange(2, hops + 1))
        own = _add(own, _send(passing, options, -hops))
    by_sinks = None
    if inputs.sinks is not None:
        # The value of a sink is zero, so the gradient by its score is its weight times -(back . result).
        weight = jnp.exp(inputs.sinks.astype(jnp.float32)[None, None] - whole.highest) / whole.total
        through = (back.astype(jnp.float32) * whole.result.astype(jnp.float32)).sum(-1)
        by_sinks = -(weight * through).sum((0, 1)).astype(inputs.sinks.dtype)
    by_inputs = (by_q, own, by_weights)
    like = (inputs.q, inputs.kept, inputs.learned)
    by_q, own, by_weights = jax.tree.map(lambda x, y: x.astype(y.dtype), by_inputs, like)
    return (
        inputs._replace(q=by_q, kept=own, learned=by_weights, rest=None, coordinates=None, sinks=by_sinks, seen=None),
    )


_attend.defvjp(_forward, _backward)


def _operands(options: _Options, inputs: _Inputs, k: Array, v: Array, hop: Any) -> Operands:
    """Return a kernel's operands for keys that have made `hop` hops, which are those of the device so far back."""
    group, keys, seen = options.group, inputs.coordinates.keys, inputs.seen
    if group.axes:
        tokens = keys.position.shape[1] // group.size
        device = (lax.axis_index(group.axes) - hop) % group.size
        keys = Coordinates(*(lax.dynamic_slice_in_dim(x, device * tokens, tokens, axis=1) for x in keys))
        if seen is not None:
            seen = Interval(*(_of_device(x, device, tokens, options) for x in seen))
    return Operands(inputs.q, k, v, inputs.coordinates.queries, keys, options.window, seen)


def _of_device(before: Array, device: Any, tokens: int, options: _Options) -> Array:
    """Return how many keys of a device lie before keys whose numbers in the whole sequence are given.

    The chunks of a device ascend, so its keys are sorted too.
    """
    assert options.chunks is not None
    each = len(options.chunks) // options.group.size
    length = tokens // each
    mine = lax.dynamic_slice_in_dim(jnp.asarray(options.chunks, jnp.int32), device * each, each)
    return sum((jnp.clip(before - mine[i] * length, 0, length) for i in range(each)), start=jnp.zeros_like(before))


def _count_hops(group: SequenceGroup, tokens: int, window: Reach) -> int:
    """Return the number of hops, for `tokens` tokens of a sequence per device.

    In contiguous order, what a window or a stretch shows lies on the device itself and on the nearest before it: along
    the tokens of a document, positions ascend by one.
    """
    hops, most = group.size - 1, most_seen(window)
    return hops if most is None or group.order == "balanced" else min(hops, -(-(most - 1) // tokens))


def _send(tree: PyTree, options: _Options, by: int = 1) -> PyTree:
    """Send every array to the device that is `by` further along the ring."""
    size = options.group.size
    around = [(i, (i + by) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, options.group.axes, around), tree)


def _add(one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, one, other)


def _of_sinks(options: _Options, inputs: _Inputs) -> Softmax:
    """Return the softmax over the sinks alone, keys of value zero; without sinks that over no key."""
    _, values = jax.eval_shape(options.expand, eqx.combine(inputs.learned, inputs.rest), inputs.kept)
    per_query = inputs.q.shape[:-1]
    score = jnp.float32(FLOOR) if inputs.sinks is None else inputs.sinks.astype(jnp.float32)
    empty = Softmax(
        jnp.zeros((*per_query, values.shape[-1]), jnp.float32),
        jnp.broadcast_to(score, per_query),
        jnp.ones(per_query, jnp.float32),
    )
    return Softmax(*(vary_like(x, inputs.q) for x in empty))
