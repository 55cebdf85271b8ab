"""Backends whose kernels take the interval of keys that each query sees: `hopper` and `splash`, for keys in order.

Keys of each row must be sorted by segment, then position, with padding (segment 0) at one end. Queries may have any
order. `kernels` is the name of the file with the kernels, which a call imports: it takes 0.2 s to import Pallas. It has
two functions of q, k, v and both ends of the intervals: `part`, and `part_gradients`, which also takes the softmax over
all keys and the gradients by the result and, except for a part, by the log-sum-exp.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from moezoo.kernels.attention.base import FLOOR, NOTHING, Attended, Operands, Results, Scale, Softmax
from moezoo.kernels.attention.intervals import intervals
from moezoo.kernels.calls import traced_once
from moezoo.parallel.collectives import ATTENTION


def attend(kernels: str, operands: Operands, scale: Scale) -> Attended:
    """Attend block after block; queries times `scale` are rounded to the queries' dtype."""
    _, *others = _given(operands)
    return _attend(kernels, (operands.q.astype(jnp.float32) * scale).astype(operands.q.dtype), *others)


def part(kernels: str, operands: Operands) -> Softmax:
    """Attend to a part of the keys, block after block."""
    return traced_once(_call, None, (kernels, "part"), *_given(operands))


def part_gradients(kernels: str, operands: Operands, whole: Softmax, back: Results) -> tuple[Array, Array, Array]:
    """Return the gradients that go through a part of the keys, block after block."""
    return traced_once(_call, None, (kernels, "part_gradients"), *_given(operands), whole, back)


def _given(operands: Operands) -> tuple[Array, ...]:
    seen = operands.seen or intervals(operands.queries, operands.keys, operands.window)
    return operands.q, operands.k, operands.v, *seen


def _call(kernels: str, name: str, *given: Any) -> Any:
    if kernels == "hopper":
        from moezoo.kernels.attention import hopper as file
    else:
        from moezoo.kernels.attention import splash as file
    return getattr(file, name)(*given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernels: str, *given: Array) -> Attended:
    return _forward(kernels, *given)[0]


def _forward(kernels: str, *given: Array) -> tuple[Attended, Any]:
    # Named where the backward pass uses them: if a policy saves them, no kernel runs twice. It uses two numbers per
    # query, not the log-sum-exp, which is too rounded for large scores to give weights that sum to one.
    softmax = traced_once(_call, None, (kernels, "part"), *given)
    softmax = Softmax(*(checkpoint_name(x, ATTENTION) for x in softmax))
    logsumexp = jnp.where(softmax.highest > FLOOR, softmax.highest + jnp.log(softmax.total), NOTHING)
    return Attended(softmax.result, logsumexp), (given, softmax)


def _backward(kernels: str, residuals: Any, cotangent: Attended) -> tuple[Array | None, ...]:
    given, softmax = residuals
    gradients = traced_once(_call, None, (kernels, "part_gradients"), *given, softmax, *cotangent)
    return *gradients, None, None


_attend.defvjp(_forward, _backward)
