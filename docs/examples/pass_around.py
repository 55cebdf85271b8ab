# In moezoo: moezoo/nn/pass_around.py
import dataclasses
import functools

import jax
from jax import lax

from moezoo.kernels.attention import Operands, attend, join
from moezoo.kernels.attention.partial import add_sinks
from moezoo.parallel.context_parallel import ContextParallel, Coordinates


@dataclasses.dataclass(frozen=True)
class PassAround(ContextParallel):
    """Attend to the tokens of one device at a time, and join the partial results."""

    def attend(self, operands, group):
        """One permutation of each array of `kept` per device after the first."""
        q, kept, weights, expand, coordinates, scoring, *_ = operands
        here = lax.axis_index(group.axes) if group.axes else 0
        around = [(i, (i + 1) % group.size) for i in range(group.size)]
        length, parts = jax.tree.leaves(kept)[0].shape[1], []
        for hop in range(group.size):
            if hop:
                kept = jax.tree.map(lambda x: lax.ppermute(x, group.axes, around), kept)
            first = (here - hop) % group.size * length
            at = Coordinates(*(lax.dynamic_slice_in_dim(x, first, length, axis=1) for x in coordinates.keys))
            part = Operands(q, *expand(weights, kept), coordinates.queries, at, scoring.window)
            parts.append(attend(part, scoring.scale, implementation=scoring.order))
        whole = functools.reduce(join, parts)
        return (whole if scoring.sinks is None else add_sinks(whole, scoring.sinks)).result
