"""Dropout of what low-rank pairs read, against loops over tokens and inputs that draw each number by the definition."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from test_low_rank import SCALE, low_rank

from moezoo.nn.linear import contract, project
from moezoo.parallel.dropout import Dropout, read_numbers, take_numbers

RATE = 0.4
KEY = (123_456_789, 4_000_000_000)
# As in test_low_rank.
TOLERANCE = 2e-6


def mixed(x: int) -> int:
    """Return lowbias32 of `x`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def stays(key: tuple[int, int], token: int, size: int, first: int = 0) -> np.ndarray:
    """Return which of a token's inputs stay."""
    of_token = mixed(token ^ key[0])
    words = [mixed((of_token + mixed(i ^ key[1])) % 2**32) for i in range(first, first + size)]
    return np.array([word >= int(RATE * 2**32) for word in words])


def part(key: tuple[int, int], number: int) -> tuple[int, int]:
    """Return the key of a part."""
    one, two = (mixed((word + mixed(number ^ i)) % 2**32) for i, word in enumerate(key))
    return one, two


def with_key(key: tuple[int, int], token: Any, first: int = 0) -> Dropout:
    return Dropout(RATE, jnp.asarray(key, jnp.uint32), jnp.asarray(token, jnp.int32), first)


def dropped(w: Any, token: Any, key: tuple[int, int] = KEY, first: int = 0) -> Any:
    dropout = with_key(key, token, first)
    return dataclasses.replace(w, dropout=dropout)


def naive(x: np.ndarray, w: Any, mask: np.ndarray) -> np.ndarray:
    """Return x W + scale / (1 - rate) (mask x A) B, for a vector of all inputs, in float64."""
    base, a, b = (np.asarray(part, np.float64) for part in (w.base, w.a, w.b))
    a, b, base = a.reshape(x.size, -1), b.reshape(b.shape[0], -1), base.reshape(x.size, -1)
    return x @ base + SCALE / (1 - RATE) * ((mask * x) @ a) @ b


def test_the_share_that_stays():
    """Of 40,000 inputs 60% stay, and tokens, inputs and parts are independent: within five standard deviations."""
    ones, dropout = jnp.ones((200, 200)), with_key(KEY, np.arange(200))
    found = np.stack([dropout(ones), dropout.of(0)(ones), dropout.of(1)(ones), dropout.of(0).of(1)(ones)])
    assert np.abs(found.mean((1, 2)) - 0.6).max() < 5 * (0.24 / 40_000) ** 0.5
    for rows in (*found, *found.swapaxes(1, 2), found.reshape(4, -1)):
        others = np.corrcoef(rows) - np.eye(len(rows))
        assert np.abs(others).max() < 5 * rows.shape[1] ** -0.5


def test_the_keys_of_parts():
    words = [dropout.key for dropout in (with_key(KEY, 0).of(3), with_key(KEY, 0).of(jnp.int32(3)).of(2**32 - 1))]
    np.testing.assert_array_equal(words, [part(KEY, 3), part(part(KEY, 3), 2**32 - 1)])


@pytest.mark.parametrize(("inputs", "outputs"), [((6,), (4, 5)), ((4, 5), (6,))], ids=str)
def test_a_product(inputs, outputs):
    """Tokens have any numbers, and inputs may begin with another than the first."""
    w, numbers, size = low_rank(0, (), inputs, outputs), np.array([[5, 2**30, 7], [0, 1, 300]]), int(np.prod(inputs))
    x = np.random.default_rng(1).standard_normal((2, 3, *inputs)).astype(np.float32)
    found = project(jnp.asarray(x), dropped(w, numbers, first=12), len(inputs))
    for at in np.ndindex(2, 3):
        wanted = naive(x[at].reshape(-1).astype(np.float64), w, stays(KEY, int(numbers[at]), size, 12))
        np.testing.assert_allclose(found[at].reshape(-1), wanted, rtol=0, atol=TOLERANCE * abs(wanted).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_numbers_travel_with_tokens(dtype):
    """Every int32 from 0 arrives; gradients pass the columns by."""
    numbers = np.array([[0, 255, 256], [2**24 + 1, 2**30 + 65_537, 2**31 - 1]])
    weights = {"w": dropped(low_rank(0, (), (6,), (5,)), numbers)}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 6)), dtype)

    def there_and_back(x: Any) -> Any:
        return read_numbers(take_numbers(x, weights)[::-1], weights)

    arrived, ready = there_and_back(x)
    np.testing.assert_array_equal(arrived, x[::-1])
    np.testing.assert_array_equal(ready["w"].dropout.token, numbers[::-1])
    gradient = jax.grad(lambda x: (there_and_back(x)[0] ** 2).sum().astype(jnp.float32))(x)
    np.testing.assert_array_equal(gradient, 2 * x)
    bare = {"w": low_rank(0, (), (6,), (5,))}
    assert take_numbers(x, bare) is x
    assert read_numbers(x, bare) == (x, bare)


def test_an_einsum_is_refused():
    w = dropped(low_rank(0, (), (6,), (4, 5)), np.zeros((2, 3)))
    with refused("adapter.dropout drops inputs of `project` only"):
        contract("bshn,lhn->bshl", jnp.ones((2, 3, 4, 5)), w)


def test_other_tokens_are_refused():
    """What is dropped follows from the number of a token, so a product of reshaped or fewer tokens has none."""
    w, x = dropped(low_rank(0, (), (6,), (5,)), np.zeros((2, 3))), jnp.ones((2, 3, 6))
    for other in (x.reshape(6, 6), x.swapaxes(0, 1), x[:, 0]):
        with refused("adapter.dropout=0.4 knows tokens [2, 3], and ... keep the dimensions"):
            project(other, w)
    with refused("adapter.dropout=0.4 ... activations [5, 6] by a weight with a pair"):
        take_numbers(jnp.ones((5, 6)), w)
