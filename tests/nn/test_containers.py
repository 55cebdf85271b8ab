"""Containers against loops over channels, and models with containers."""

import itertools
from typing import get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from refusals import by_table, refused

from moezoo.models import MixtralConfig
from moezoo.models.blueprint import Blueprint
from moezoo.nn.containers import Int8, store
from moezoo.nn.linear import contract, project
from moezoo.parallel.axes import (
    Axes,
    Role,
    Stack,
    Weight,
    axes_of,
    count_parameters,
    parameter_table,
    trainable_mask,
)

# The stacked, input and output axes of declared weights, and the sizes of these dimensions.
DECLARED = [
    (((), ("embed",), ("heads", "head_dim")), (6, 3, 4)),
    (((), ("heads", "head_dim"), ("embed",)), (3, 4, 6)),
    (((), ("kv_lora",), ("heads", "nope_dim")), (5, 3, 4)),
    ((("layer",), ("embed",), ("mlp",)), (2, 5, 7)),
    ((("layer", "expert"), ("expert_embed",), ("expert_mlp",)), (2, 3, 5, 4)),
]


def weight(shape, dtype=jnp.float32):
    """Return channels of very different magnitude; the last one is zero."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 2, shape[-1])
    values[..., -1] = 0
    return jnp.asarray(values, dtype)


@pytest.mark.parametrize(("names", "shape"), DECLARED, ids=lambda x: " ".join(map(str, x)))
def test_int8_channel_by_channel(names, shape):
    dtype = jnp.bfloat16 if len(shape) > 3 else jnp.float32
    axes = Axes(Role.WEIGHT, *names)
    array = weight(shape, dtype)
    stored = jax.jit(Int8, static_argnums=1)(array, axes)
    wide = np.asarray(array.astype(jnp.float32))
    first, last = len(names[0]), len(names[0]) + len(names[1])
    assert stored.values.dtype == jnp.int8
    assert stored.scale.dtype == jnp.float32
    assert (stored.shape, stored.ndim, stored.dtype) == (shape, len(shape), jnp.dtype(dtype))
    assert stored.scale.shape == shape[:first] + shape[last:]
    whole = np.asarray(stored.materialise(jnp.float32))
    for before in itertools.product(*map(range, shape[:first])):
        for after in itertools.product(*map(range, shape[last:])):
            channel = (*before, *(slice(None),) * len(names[1]), *after)
            largest = np.abs(wide[channel]).max()
            scale = np.float32(largest / np.float32(127)) if largest else np.float32(1)
            np.testing.assert_allclose(stored.scale[(*before, *after)], scale, rtol=2e-7)
            np.testing.assert_allclose(whole[channel], np.rint(wide[channel] / scale) * scale, rtol=3e-7)
            assert np.abs(whole[channel] - wide[channel]).max() <= scale * 0.5001
            assert np.abs(np.asarray(stored.values)[channel]).max() == (127 if largest else 0)
    assert stored.materialise(dtype).dtype == dtype
    # The product with the scale is rounded once, to the dtype asked for.
    np.testing.assert_array_equal(stored.materialise(dtype), stored.materialise(jnp.float32).astype(dtype))
    assert {name: a.names for name, a in stored.axes(axes).items()} == {
        "values": axes.names,
        "scale": (*names[0], *names[2]),
    }


@pytest.mark.parametrize(
    ("declared", "dtype"), [(0, jnp.float32), (0, jnp.bfloat16), (1, jnp.bfloat16), (2, jnp.float32)]
)
def test_products(declared, dtype):
    """They agree with float64, and to the bit with products of the whole array, forward and backward."""
    names, shape = DECLARED[declared]
    inputs = len(names[1])
    stored = Int8(weight(shape), Axes(Role.WEIGHT, *names))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, *shape[:inputs])), dtype)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(stored.materialise(jnp.float32), np.float64), inputs)
    scale = np.abs(exact).max(tuple(range(exact.ndim - 1)))  # channels differ by orders of magnitude
    # float32: some dozen roundings. bfloat16, 8 bits: the array and the product are rounded.
    tolerance = 1e-6 if dtype == jnp.float32 else 2.0**-7
    y = project(x, stored, inputs)
    assert y.dtype == dtype
    assert (np.abs(np.asarray(y, np.float64) - exact) <= tolerance * scale).all()
    assert project(x, stored, inputs, dtype=jnp.float32).dtype == jnp.float32

    def value_and_gradient(weight):
        y, pull = jax.vjp(lambda x: project(x, weight, inputs), x)
        return y, *pull(y)

    for found, wanted in zip(value_and_gradient(stored), value_and_gradient(stored.materialise(dtype)), strict=True):
        np.testing.assert_array_equal(found, wanted, strict=True)
    letters = "wxyz"[: len(names[2])]
    equation = f"bs{'ij'[:inputs]},{'ij'[:inputs]}{letters}->bs{letters}"
    found = contract(equation, x, stored)
    assert (np.abs(np.asarray(found, np.float64) - exact) <= tolerance * scale).all()
    np.testing.assert_array_equal(found, contract(equation, x, stored.materialise(dtype)))


def test_scales_have_a_gradient_where_they_are_trained():
    """The cotangent of the array times its derivative by the scale; also rematerialised."""
    stored = Int8(weight((5, 4)), Axes(Role.WEIGHT, (), ("embed",), ("mlp",)))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 5)), jnp.float32)
    wanted = np.einsum(
        "bi,io->o", 2 * np.asarray(x @ stored.materialise(jnp.float32)).sum(1, keepdims=True) * x, stored.values
    )

    def loss(scale, multiply):
        return (multiply(x, eqx.tree_at(lambda s: s.scale, stored, scale)).sum(1) ** 2).sum()

    for multiply in (project, lambda x, s: contract("bi,io->bo", x, s), jax.checkpoint(project)):
        np.testing.assert_allclose(jax.grad(loss)(stored.scale, multiply), wanted, rtol=1e-5)


class Pair(eqx.Module):
    up: Weight[Array, "embed -> mlp"]
    down: Weight[Array, "expert, expert_mlp -> expert_embed"]


def pair():
    return Pair(weight((4, 6)), weight((3, 5, 4)))


def test_axes_and_masks_go_array_by_array():
    module = Stack((jax.tree.map(lambda x: jnp.stack([x, x]), pair()),), 2)
    stored = store(module, lambda path: path.endswith("down"))
    axes = axes_of(stored).blocks[0]
    assert axes.up == Axes(Role.WEIGHT, ("layer",), ("embed",), ("mlp",))
    within = ("layer", "expert", "expert_mlp", "expert_embed")
    assert axes.down.values == Axes(Role.PART, ("layer", "expert"), ("expert_mlp",), ("expert_embed",), within)
    assert axes.down.scale == Axes(Role.PART, ("layer", "expert"), (), ("expert_embed",), within)
    assert jax.tree.leaves(trainable_mask(stored)) == [True, False, False]
    mask = trainable_mask(stored, ["*scale"])
    assert jax.tree.leaves(mask) == [False, False, True]
    # The number of parameters and the table do not change.
    assert parameter_table(stored) == parameter_table(module)
    assert count_parameters(stored, 2) == count_parameters(module, 2)
    # A scan cuts a container into containers of one layer.
    one = jax.tree.map(lambda x: x[1], stored.blocks[0])
    np.testing.assert_array_equal(one.down.materialise(jnp.float32), stored.blocks[0].down.materialise(jnp.float32)[1])
    assert axes_of(one).down.values.stacked == ("expert",)


def test_a_weight_may_be_a_container_and_nothing_else():
    """The type checker at run time accepts arrays and containers, and refuses a wrong shape."""
    hint = get_type_hints(Pair)["up"]
    assert isinstance(pair().up, hint)
    assert isinstance(store(pair(), lambda path: path == ".up").up, hint)
    assert not isinstance(jnp.ones((4, 6, 1)), hint)
    assert not isinstance(jnp.ones((4, 6), jnp.int8), hint)
    assert not isinstance(Pair, hint)


def test_a_whole_model():
    """A model of shapes is enough, and layers see the shapes of the arrays that containers stand for."""
    shapes = Blueprint(MixtralConfig(layers=2)).shapes
    stored = jax.eval_shape(
        lambda m: store(m, lambda path: "embedding.weight" not in path and "norm" not in path), shapes
    )
    assert stored.vocab == shapes.vocab
    assert parameter_table(stored) == parameter_table(shapes)
    experts = stored.stacks[0].blocks[0].feed_forward.experts
    assert experts.gate.scale.shape == (2, 8, 256)


@by_table(
    """
    part => line
    rooter => store: no parameter matches; paths look like .stacks[0].blocks[0].attention.
    .embedding.weight => store: .embedding.weight is of kind embedding, expected a weight
    .unembedding.weight => store: .unembedding.weight is of kind Int8, expected a weight
    """
)
def test_store_refuses(part, line):
    shapes = jax.eval_shape(
        lambda m: store(m, lambda path: path == ".unembedding.weight"), Blueprint(MixtralConfig()).shapes
    )
    with refused(line):
        jax.eval_shape(lambda m: store(m, lambda path: part in path), shapes)


def test_filter_refuses():
    stored = store(pair(), lambda path: path == ".up")
    with refused("trained chooses .up.values, which is int8; choose"):
        trainable_mask(stored, [".up*"])
    with refused("trained: *weight* matches no whole path of a parameter; valid: .down"):
        trainable_mask(stored, ["*weight*"])


def test_a_weight_that_is_not_finite_stays_visible():
    for bad in (np.nan, np.inf):
        array = np.full((4, 3), 0.3, np.float32)
        array[1, 1] = bad
        stored = Int8(jnp.asarray(array), Axes(Role.WEIGHT, (), ("embed",), ("mlp",)))
        whole = np.asarray(stored.materialise(jnp.float32))
        assert np.isnan(whole[:, 1]).any()
        np.testing.assert_allclose(whole[:, [0, 2]], 0.3, rtol=1e-6)


def test_store_refuses_a_block_of_a_stack():
    """Its arrays have a dimension more than they declare, and a scale would span layers."""
    block = Blueprint(MixtralConfig()).shapes.stacks[0].blocks[0]
    with refused("store: .attention.query has 4 dimensions", "give the whole model"):
        jax.eval_shape(lambda b: store(b, lambda path: path.endswith("query")), block)
    with refused("store: no parameter matches; RMSNorm has no weight"):
        store(block.attention_norm, lambda path: False)
