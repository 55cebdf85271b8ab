"""Dropout (Srivastava et al., 2014) whose masks depend on no mesh, and are the same when a layer is computed again.

What is dropped for a token follows from a key, the token's number and the number of the input alone. So a latent that
moves to other devices takes the number of its token along, in columns behind it: four bytes, each of which every
floating-point dtype holds exactly.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, UInt32

from moezoo.errors import UserError
from moezoo.parallel.collectives import vary_like

_BYTES = 4


def mix(x: UInt32[Array, "*dims"]) -> UInt32[Array, "*dims"]:
    """Return other words for `x`, a bijection in which each bit of the result depends on each bit of `x`.

    It is lowbias32 (Wellons, 2018, "Prospecting for hash functions"): next to a product it costs little, where
    generators for statistics take ten times as many operations.
    """
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        x = (x ^ x >> shift) * jnp.uint32(factor)
    return x ^ x >> 16


class Dropout(eqx.Module):
    """What is dropped of the inputs of a product: each with probability `rate`.

    Input i of token t stays if mix(mix(t ^ key[0]) + mix(i ^ key[1])) is at least rate 2**32; all numbers are uint32.

    Attributes:
        rate: The probability, from 0 to below 1.
        key: Two words, which differ by step, micro-step, layer and weight.
        token: The number of each token that the product reads.
        first: The number of the first input on this device.
    """

    rate: float = eqx.field(static=True)
    key: UInt32[Array, "2"]
    token: Int[Array, "*tokens"]
    first: Int[Array, ""] = eqx.field(converter=lambda x: jnp.asarray(x, jnp.int32), default=0)

    @classmethod
    def start(cls, rate: float, seed: int, step: Int[Array, ""], token: Int[Array, "*tokens"]) -> "Dropout":
        """Return the dropout of a step of a run."""
        return cls(rate, jax.random.key_data(jax.random.fold_in(jax.random.key(seed), step)).reshape(-1)[:2], token)

    def of(self, number: Int[Array, ""] | int) -> "Dropout":
        """Return the dropout of one of several parts, such as micro-steps, layers or weights, by its number.

        The new key is mix(key + mix(number ^ [0, 1])).
        """
        words = mix(jnp.asarray(number, jnp.uint32) ^ lax.iota(jnp.uint32, 2))
        return Dropout(self.rate, mix(self.key + words), self.token, self.first)

    def __call__(self, x: Float[Array, "*tokens_inputs"]) -> Float[Array, "*tokens_inputs"]:
        """Return `x` with zeros for what is dropped. All dimensions after those of tokens number inputs.

        The rest stays as it is: whoever multiplies by the result divides by `kept`.

        Raises:
            UserError: The first dimensions are not those of the tokens.
        """
        if x.shape[: self.token.ndim] != self.token.shape or x.ndim == self.token.ndim:
            raise self.refusal(x)
        numbers = self.first + lax.iota(jnp.int32, math.prod(x.shape[self.token.ndim :]))
        by_token, by_input = (
            mix(x.reshape(-1).astype(jnp.uint32) ^ self.key[i]) for i, x in enumerate((self.token, numbers))
        )
        words = mix(by_token[:, None] + by_input[None])
        stays = vary_like(words >= jnp.uint32(self.rate * 2**32), x)
        return jnp.where(stays.reshape(x.shape), x, jnp.zeros((), x.dtype))

    @property
    def kept(self) -> float:
        """The probability that an input stays."""
        return 1 - self.rate

    def refusal(self, x: Float[Array, "..."]) -> UserError:
        """Return the error for activations `x` that are not those of the tokens, as only an own layer may pass."""
        return UserError(
            f"adapter.dropout={self.rate:g} knows tokens {list(self.token.shape)}, and a layer multiplies activations "
            f"{list(x.shape)} by a weight with a pair; keep the dimensions of tokens first, or set adapter.dropout=0"
        )


def _is_dropout(x: Any) -> bool:
    return isinstance(x, Dropout)


def dropouts(weights: PyTree) -> list[Dropout]:
    """List the dropouts of weights."""
    return [x for x in jax.tree.leaves(weights, is_leaf=_is_dropout) if _is_dropout(x)]


def take_numbers(x: Float[Array, "*tokens embed"], weights: PyTree) -> Float[Array, "*tokens wider"]:
    """Return `x` with the number of each token behind its activations, if `weights` have dropout; else `x`.

    The tokens of `x` are those of the dropout, in order; their dimensions may be others. Raises `UserError` for another
    number of tokens.
    """
    found = dropouts(weights)
    if not found:
        return x
    if math.prod(x.shape[:-1]) != found[0].token.size:
        raise found[0].refusal(x)
    token = found[0].token.reshape(x.shape[:-1])
    numbers = jnp.stack([token >> (8 * i) & 255 for i in range(_BYTES)], axis=-1)
    return jnp.concatenate([x, vary_like(numbers.astype(x.dtype), x)], axis=-1)


def read_numbers(x: Float[Array, "*tokens wider"], weights: PyTree) -> tuple[Float[Array, "*tokens embed"], PyTree]:
    """Return what `take_numbers` got, for these tokens, and the weights with dropout for them."""
    if not dropouts(weights):
        return x, weights
    x, numbers = x[..., :-_BYTES], lax.stop_gradient(x[..., -_BYTES:]).astype(jnp.int32)
    token = sum((numbers[..., i] << (8 * i) for i in range(1, _BYTES)), start=numbers[..., 0])

    def at(one: Any) -> Any:
        return Dropout(one.rate, one.key, token, one.first) if _is_dropout(one) else one

    return x, jax.tree.map(at, weights, is_leaf=_is_dropout)
