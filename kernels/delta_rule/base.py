"""The contract of a backend of the delta rule, and of the same without its correction, and what it returns."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moezoo.parallel.kernels import RunsOn, Target, anywhere, lacks

States = Float[Array, "batch key_heads group key_dim value_dim"]
Values = Float[Array, "batch tokens key_heads group value_dim"]


class Operands(eqx.Module):
    """What the delta rule reads: for each token of a text a query, a key, a value, a decay and a write strength.

    Without strengths nothing is corrected: each token writes its value whole, as in linear attention with decays.

    Each key head serves `group` value heads. Tokens lie in the order of the text, and those of a document are next to
    each other. All numbers are finite.

    Attributes:
        q: The queries, scaled as the caller wants them.
        k: The keys, in the dtype of `q`, which may be float32 beside narrower values. Their norms are at most about 1,
            and strengths are at most 2: then no state grows. Without strengths they may have any norm.
        v: The values; `value_dim` may differ from `key_dim`.
        decay: float32. The logarithm of the factor of the state before the token is read, at most 0: one per value
            head, or one per value head and channel of the key.
        strength: float32, how much of the error of the state's answer to a key is written; None: the value is written.
        segment: int32, the document of each token; the state is zero where a document begins. A number that has ended
            does not come again, except that of padding, whose results mean nothing.
    """

    q: Float[Array, "batch tokens key_heads key_dim"]
    k: Float[Array, "batch tokens key_heads key_dim"]
    v: Values
    decay: Float[Array, "batch tokens key_heads group *channel"]
    strength: Float[Array, "batch tokens key_heads group"] | None
    segment: Int[Array, "batch tokens"]

    @property
    def per_channel(self) -> bool:
        """Whether each channel of a key has a decay of its own."""
        return self.decay.ndim == self.v.ndim


class Start(NamedTuple):
    """What is known before the first token.

    Attributes:
        segment: int32, the document that was read last. A text that begins with another starts from zero.
        state: float32, the states after it.
    """

    segment: Int[Array, " batch"]
    state: States


class Recalled(NamedTuple):
    """What `delta_rule` returns.

    Attributes:
        result: What the states answer to the queries, in the dtype of the values.
        state: float32, the states after the last token.
    """

    result: Values
    state: States


class SpanMap(NamedTuple):
    """The affine map by which a span of tokens takes the state before it to the one after it: S -> factor S + term.

    Both float32. Without strengths the factor is a number per row of the state, or one for all of them: a column.
    """

    factor: Float[Array, "batch key_heads group rows columns"]
    term: States


# Compute `moezoo.kernels.delta_rule.delta_rule`; differentiable in all floats by both results. All operands vary over
# the same mesh axes, and there is at least one token.
Rule = Callable[[Operands, Start], Recalled]


class Backend(NamedTuple):
    """A way to compute the delta rule.

    Attributes:
        rule: The function.
        runs_on: Whether it can be traced and run for a target.
        dtypes: The dtypes of queries that it takes; None for all.
    """

    rule: Rule
    runs_on: RunsOn = anywhere
    dtypes: tuple[str, ...] | None = None

    def takes(self, target: Target, dtype: DTypeLike) -> bool:
        """Return whether it runs on the target with operands of this dtype."""
        return lacks(self, target, dtype) is None
