"""The backend for TPUs: `splash`, for keys that are sorted.

Keys of each row must be sorted by segment, then position, with padding (segment 0) at one end. Queries may have any
order.

Gradients are our own rule around the kernels, whose own rule refuses a log-sum-exp. The forward kernel returns the
log-sum-exp alone: for scores of magnitude s, weights of the backward pass sum to one within s x 2**-24.

Functions import their kernels when they are called, because it takes 0.2 s to import Pallas.
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
    return traced_once(_gradients, None, (), *given, _logsumexp(whole), whole.result, back, jnp.zeros_like(whole.total))


def _intervals(operands: Operands) -> Interval:
    return operands.seen or intervals(operands.queries, operands.keys, operands.window)


def _softmax(*given: Array) -> Softmax:
    from moezoo.kernels.attention import splash

    return splash.part(*given)


def _gradients(*given: Array) -> tuple[Array, Array, Array]:
    from moezoo.kernels.attention import splash

    return splash.part_gradients(*given)


def _logsumexp(softmax: Softmax) -> Array:
    return jnp.where(softmax.highest > FLOOR, softmax.highest + jnp.log(softmax.total), NOTHING)


@jax.custom_vjp
def _attend(*given: Array) -> Attended:
    return _forward(*given)[0]


def _forward(*given: Array) -> tuple[Attended, Any]:
    softmax = traced_once(_softmax, None, (), *given)
    # Named where the backward pass uses them: if a policy saves them, no kernel runs twice.
    attended = Attended(*(checkpoint_name(x, ATTENTION) for x in (softmax.result, _logsumexp(softmax))))
    return attended, (given, attended)


def _backward(residuals: Any, cotangent: Attended) -> tuple[Array | None, ...]:
    given, (result, logsumexp) = residuals
    return *traced_once(_gradients, None, (), *given, logsumexp, result, *cotangent), None, None


_attend.defvjp(_forward, _backward)
