"""The backend for NVIDIA GPUs of compute capability 9.0 (Hopper): `hopper`, for keys that are sorted.

Keys of each row must be sorted by segment, then position, with padding (segment 0) at one end. Queries may have any
order.
Operands are in bfloat16. Functions import their kernels when they are called, because it takes 0.2 s to import Pallas.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from moezoo.kernels.attention.base import FLOOR, NOTHING, Attended, Interval, Operands, Results, Scale, Softmax
from moezoo.kernels.attention.intervals import intervals
from moezoo.kernels.once import traced_once
from moezoo.parallel.collectives import ATTENTION


def attend(operands: Operands, scale: Scale) -> Attended:
    """Attend block after block; queries times `scale` are rounded to the queries' dtype."""
    q = (operands.q.astype(jnp.float32) * scale).astype(operands.q.dtype)
    return _attend(q, operands.k, operands.v, *_intervals(operands))


def part(operands: Operands) -> Softmax:
    """Attend to a part of the keys, block after block."""
    return traced_once(_softmax, None, (), operands.q, operands.k, operands.v, *_intervals(operands))


def part_gradients(operands: Operands, whole: Softmax, back: Results) -> tuple[Array, Array, Array]:
    """Return the gradients that go through a part of the keys, block after block."""
    given = operands.q, operands.k, operands.v, *_intervals(operands)
    return traced_once(_gradients, None, (), *given, whole, back)


def _intervals(operands: Operands) -> Interval:
    return operands.seen or intervals(operands.queries, operands.keys, operands.window)


def _softmax(*given: Array) -> Softmax:
    from moezoo.kernels.attention import hopper

    return hopper.part(*given)


def _gradients(*given: Any) -> tuple[Array, Array, Array]:
    from moezoo.kernels.attention import hopper

    return hopper.part_gradients(*given)


@jax.custom_vjp
def _attend(*given: Array) -> Attended:
    return _forward(*given)[0]


def _forward(*given: Array) -> tuple[Attended, Any]:
    # Named where the backward pass uses them: if a policy saves them, no kernel runs twice. It uses two numbers per
    # query, not the log-sum-exp, which is too rounded for large scores to give weights that sum to one.
    softmax = Softmax(*(checkpoint_name(x, ATTENTION) for x in traced_once(_softmax, None, (), *given)))
    logsumexp = jnp.where(softmax.highest > FLOOR, softmax.highest + jnp.log(softmax.total), NOTHING)
    return Attended(softmax.result, logsumexp), (given, softmax)


def _backward(residuals: Any, cotangent: Attended) -> tuple[Array | None, ...]:
    given, softmax = residuals
    gradients = traced_once(_gradients, None, (), *given, softmax, cotangent.result, cotangent.logsumexp)
    return *gradients, None, None


_attend.defvjp(_forward, _backward)
