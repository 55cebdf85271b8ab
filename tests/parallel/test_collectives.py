"""Gathers of weights and their gradients: values, dtypes, collectives and varying types."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from meshes import auto_mesh

from moezoo.parallel.collectives import gather, gather_weight, psum, vary, vary_like, varying_axes
from moezoo.parallel.traces import equations

AXES = ("fsdp", "expert", "context")
DEVICES = PartitionSpec(AXES)


def on_mesh(function, in_specs, out_specs):
    """Map `function` over 2 x 2 x 2 devices."""
    mesh = auto_mesh(fsdp=2, expert=2, context=2)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def stored(dims):
    """Return the layout of a weight whose dimension i is stored over `dims[i]`."""
    return PartitionSpec(*(axes or None for axes in dims))


CASES = [
    # (mesh axes of each dimension, mesh axes that split tokens)
    ((("fsdp", "expert"), ()), AXES),
    (((), ("context", "fsdp", "expert")), AXES),
    ((("expert",), ("fsdp", "context")), AXES),
    # Tokens are the same along some of the axes; so is the result.
    ((("expert", "fsdp"), ()), ("fsdp",)),
    ((("fsdp", "expert", "context"), ()), ("fsdp", "context")),
    (((), ("context", "fsdp")), ()),
]


@pytest.mark.parametrize(("dims", "tokens"), CASES)
def test_a_gathered_weight_is_whole_and_its_gradient_the_sum(dims, tokens):
    """Any order of blocks except the stored one would permute rows."""
    weight = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    # A different cotangent for different tokens; whole numbers, so that sums are exact.
    cotangents = np.random.default_rng(0).integers(0, 99, (2 ** len(tokens), *weight.shape)).astype(np.float32)

    def local(block, cotangent):
        def make(block):
            return gather_weight(vary(block, tokens), dims, tokens, "float32", "float32")

        whole, pull = jax.vjp(make, block)
        assert varying_axes(whole) == set(tokens)
        return whole[None], *pull(cotangent[0])

    layout, by_token = stored(dims), PartitionSpec(tokens or None)
    mapped = on_mesh(local, (layout, by_token), (by_token, layout))
    whole, gradient = jax.jit(mapped)(weight, cotangents)
    np.testing.assert_array_equal(whole, np.broadcast_to(weight, cotangents.shape))
    np.testing.assert_array_equal(gradient, cotangents.sum(0))


def collectives(dtype, reduce_dtype, stored_dtype="float32", dims=(("expert", "fsdp"), ())):
    """Return (dtype, name) of each collective in the forward and backward pass of a gathered weight."""

    def local(block):
        whole, pull = jax.vjp(lambda w: gather_weight(w, dims, AXES, dtype, reduce_dtype), block)
        assert whole.dtype == dtype
        (gradient,) = pull(whole)
        return gradient

    weight = jax.ShapeDtypeStruct((16, 24), stored_dtype)
    function = on_mesh(local, stored(dims), stored(dims))
    assert jax.eval_shape(function, weight).dtype == stored_dtype
    found: list[Any] = [equation for equation, *_ in equations(jax.make_jaxpr(function)(weight))]
    names = "all_gather", "all_gather_invariant", "reduce_scatter", "psum", "psum_invariant"
    return [(str(e.outvars[0].aval.dtype), e.primitive.name) for e in found if e.primitive.name in names]


def test_devices_take_their_part_before_anything_is_gathered():
    """Four devices share two parts, so the gradient of each part is the sum over two of them, and over tokens."""
    weight = np.arange(8 * 2 * 3, dtype=np.float32).reshape(8, 2, 3)
    cotangents = np.random.default_rng(0).integers(0, 99, (2, 4, 8, 1, 3)).astype(np.float32)
    dims, taken, tokens = (("fsdp",), (), ()), ((), ("expert", "context"), ()), ("fsdp",)

    def local(block, cotangent):
        def make(block):
            return gather_weight(block, dims, tokens, "float32", "float32", taken)

        part, pull = jax.vjp(make, block)
        return part[None, None], *pull(cotangent[0, 0])

    layout, by_device = stored(dims), PartitionSpec("fsdp", ("expert", "context"))
    mapped = jax.jit(on_mesh(local, (layout, by_device), (by_device, layout)))
    parts, gradient = mapped(weight, cotangents)
    np.testing.assert_array_equal(parts[0], weight[:, [0, 0, 1, 1]].swapaxes(0, 1)[:, :, None])
    np.testing.assert_array_equal(parts[1], parts[0])
    by_part = cotangents.sum(0)[:, :, 0]
    np.testing.assert_array_equal(gradient, np.stack([by_part[:2].sum(0), by_part[2:].sum(0)], 1))
    found = [e.equation for e in equations(jax.make_jaxpr(mapped)(weight, cotangents))]
    given: list[Any] = [e.invars[0].aval for e in found if e.primitive.name == "all_gather"]
    assert [x.shape for x in given] == [(4, 1, 3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_a_weight_travels_in_the_narrower_dtype(dtype, reduce_dtype):
    """Forward one all-gather in `dtype` or the stored one, backward one reduce-scatter in `reduce_dtype`."""
    for stored_dtype in ("float32", "bfloat16"):
        travels = "bfloat16" if "bfloat16" in (stored_dtype, dtype) else "float32"
        wanted = [(travels, "all_gather"), (reduce_dtype, "reduce_scatter")]
        assert collectives(dtype, reduce_dtype, stored_dtype) == wanted


def test_a_whole_weight_takes_no_collective():
    assert collectives("bfloat16", "float32", dims=((), ())) == []


def test_a_gradient_is_summed_in_the_precision_asked_for():
    """256 + 1 is 256 in bfloat16. Summed over 8 devices in float32, ones added to 256 count."""
    parts = np.asarray([256, *[1] * 7], np.float32)

    def local(block, part):
        _, pull = jax.vjp(lambda w: gather_weight(w, (AXES,), AXES, "bfloat16", "float32"), block)
        (gradient,) = pull(vary_like(jnp.full((8,), part[0], jnp.bfloat16), part))
        return gradient

    gradient = jax.jit(on_mesh(local, (DEVICES, DEVICES), DEVICES))(np.zeros(8, np.float32), parts)
    np.testing.assert_array_equal(gradient, np.full(8, 263))


def test_varying_types():
    """Casts may be repeated."""

    def local(split, same):
        assert varying_axes(split) == {"expert"}
        assert varying_axes(same) == set()
        assert varying_axes(vary(split, ("expert", "fsdp"))) == {"expert", "fsdp"}
        assert varying_axes(vary_like(same, split, vary(same, ("context",)))) == {"expert", "context"}
        assert varying_axes(psum(split, ("expert",))) == set()
        assert varying_axes(psum(split, ())) == {"expert"}
        assert varying_axes(gather(split, ("expert",), 0, tokens=("expert",))) == {"expert"}
        assert varying_axes(gather(split, ("expert",), 0, tokens=())) == set()
        return psum(same, ("fsdp", "expert"))

    mapped = jax.jit(on_mesh(local, (PartitionSpec("expert"), PartitionSpec()), PartitionSpec()))
    total = mapped(jnp.ones(2), jnp.ones(2))
    np.testing.assert_array_equal(total, [4, 4])  # the same value on each of four devices counts four times
