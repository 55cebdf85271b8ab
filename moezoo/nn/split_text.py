"""What a recurrent mixer needs where devices share a sequence: the chunks of a text, and what lies before each.

A device has one chunk of consecutive tokens of a sequence, or two in the balanced order. Each becomes a row of the
batch. What a chunk needs of the ones before it is small whatever its length: the last inputs of a convolution, and the
state, for which each chunk tells its affine map (`moezoo.kernels.delta_rule.SpanMap`).
"""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, Shaped

from moezoo.errors import UserError
from moezoo.kernels.delta_rule import SpanMap, times
from moezoo.nn.positions import Context
from moezoo.parallel.collectives import gather_tokens, own_block
from moezoo.parallel.context_parallel import SequenceGroup, in_order

_Tree = TypeVar("_Tree", bound=PyTree)


@dataclasses.dataclass(frozen=True)
class SplitText:
    """The chunks of a sequence.

    Attributes:
        group: The devices that share it.
        chunks: The numbers of the chunks in the order of devices, equally many on each.
    """

    group: SequenceGroup
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, context: Context, group: SequenceGroup, mixer: str) -> "SplitText":
        """Return the chunks of this forward pass.

        Raises `UserError` if devices share sequences whose tokens lie in an unknown order.
        """
        if group.size > 1 and context.chunks is None:
            raise UserError(
                f"mixer {mixer} reads tokens in order, and with positions or segments of the caller the order on "
                f"{group.size} devices is unknown; leave both out, or use a mesh whose devices do not share sequences"
            )
        return cls(group, context.chunks if group.size > 1 and context.chunks else (0,))

    @property
    def here(self) -> int:
        """The number of chunks on a device."""
        return len(self.chunks) // self.group.size

    def cut(self, tree: _Tree) -> _Tree:
        """Take arrays [batch, tokens, ...] of this device to [rows, tokens of a chunk, ...]."""
        return jax.tree.map(lambda x: x.reshape(x.shape[0] * self.here, -1, *x.shape[2:]), tree)

    def join(self, x: Array) -> Array:
        """Invert `cut`."""
        return x.reshape(x.shape[0] // self.here, -1, *x.shape[2:])

    def last_before(self, x: Float[Array, "rows token *dims"], count: int) -> Float[Array, "rows count *dims"]:
        """Return what the last `count` tokens before each chunk have; zeros before the first. One all-gather.

        Raises `UserError` if chunks are shorter.
        """
        if len(self.chunks) == 1 or not count:
            return jnp.zeros((x.shape[0], count, *x.shape[2:]), x.dtype)
        self._check(x.shape[1], count)
        return self._shifted(self._gather(x[:, -count:]), 0)

    def segments_before(self, context: Context, count: int) -> Int[Array, "rows count"]:
        """Return the documents of the last `count` tokens before each chunk; -1 before the first."""
        rows = context.queries.segment.shape[0]
        if len(self.chunks) == 1:
            return jnp.full((rows, count), -1, jnp.int32)
        whole = context.keys.segment.reshape(rows, len(self.chunks), -1)
        self._check(whole.shape[2], count)
        return self._shifted(whole[:, :, whole.shape[2] - count :], -1)

    def _shifted(self, x: Shaped[Array, "batch chunk *dims"], first: int) -> Shaped[Array, "rows *dims"]:
        """Return what the chunk before each chunk of this device has, of all in the order of devices."""
        before = self._in_order(x)[:, :-1]
        return self._own(jnp.pad(before, ((0, 0), (1, 0), *((0, 0),) * (before.ndim - 2)), constant_values=first))

    @staticmethod
    def _check(tokens: int, count: int) -> None:
        if tokens < count:
            raise UserError(
                f"chunks of {tokens} tokens are shorter than the {count} tokens that a layer reads of the chunk "
                "before; take longer sequences, or fewer devices that share them"
            )

    def states_before(self, spans: SpanMap) -> Float[Array, "rows key_heads group key_dim value_dim"]:
        """Return the states before each chunk, given the map of each. One all-gather for factors, one for terms."""
        factors, terms = (self._in_order(self._gather(x)) for x in spans)
        state, states = jnp.zeros_like(terms[:, 0]), []
        for number in range(len(self.chunks)):
            states.append(state)
            state = terms[:, number] + times(factors[:, number], state)
        return self._own(jnp.stack(states, axis=1))

    def _gather(self, x: Shaped[Array, "rows *dims"]) -> Shaped[Array, "batch chunk *dims"]:
        """Return what all chunks have, in the order of devices."""
        x = x.reshape(-1, self.here, *x.shape[1:])
        return gather_tokens(x, self.group.axes, 1, tokens=self.group.token_axes)

    def _in_order(self, x: Array) -> Array:
        """Take [batch, chunk, ...] from the order of devices to that of tokens."""
        return in_order(x, self.chunks)

    def _own(self, x: Shaped[Array, "batch chunk *dims"]) -> Shaped[Array, "rows *dims"]:
        """Return what belongs to the chunks of this device, of all in the order of tokens."""
        x = in_order(x, tuple(map(int, np.argsort(self.chunks))))
        mine = own_block(x, self.group.axes, 1) if self.group.axes else x
        return mine.reshape(-1, *x.shape[2:])
