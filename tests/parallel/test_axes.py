"""Annotations declare parameters: roles, axes, tables, masks, and refusals of undeclared arrays."""

from typing import get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array

from moezoo.models import Mixtral, MixtralConfig
from moezoo.parallel.axes import (
    Axes,
    Bias,
    Buffer,
    Embedding,
    Role,
    Scale,
    Stack,
    Weight,
    axes_of,
    count_parameters,
    parameter_table,
    trainable_mask,
)


class Inner(eqx.Module):
    scale: Scale[Array, "norm"]
    shift: Scale[Array, "embed"] | None
    size: int = eqx.field(static=True)


class Outer(eqx.Module):
    table: Embedding[Array, "vocab embed"]
    out: Weight[Array, "heads head_dim -> embed"]
    experts: Weight[Array, "expert, expert_embed -> expert_mlp"]
    choice: Buffer[Array, "router"]
    blocks: tuple[Inner, ...]
    stack: Stack


def outer(shift=None):
    """Return a module whose axes all have different sizes."""
    inner = Inner(jnp.ones(3), shift, 3)
    stacked = Stack((Inner(jnp.ones((2, 3)), None, 3),), 2)
    return Outer(jnp.ones((7, 3)), jnp.ones((4, 5, 3)), jnp.ones((6, 3, 8)), jnp.ones(6), (inner,), stacked)


def test_annotations_declare_role_and_axes():
    axes = axes_of(outer(shift=jnp.ones(3)))
    assert (axes.table.role, axes.table.names) == (Role.EMBEDDING, ("vocab", "embed"))
    assert axes.out == Axes(Role.WEIGHT, (), ("heads", "head_dim"), ("embed",))
    assert axes.experts == Axes(Role.WEIGHT, ("expert",), ("expert_embed",), ("expert_mlp",))
    assert axes.experts.names == ("expert", "expert_embed", "expert_mlp")
    assert (axes.choice.role, axes.choice.names) == (Role.BUFFER, ("router",))
    assert (axes.blocks[0].scale.role, axes.blocks[0].scale.names) == (Role.SCALE, ("norm",))
    assert (axes.blocks[0].shift.role, axes.blocks[0].shift.names) == (Role.SCALE, ("embed",))


def test_an_optional_field_may_be_missing():
    axes = axes_of(outer(shift=None))
    assert axes.blocks[0].shift is None
    assert len(parameter_table(outer(shift=None))) + 1 == len(parameter_table(outer(shift=jnp.ones(3))))


def test_stacked_layers_gain_a_layer_axis():
    scale = axes_of(outer()).stack.blocks[0].scale
    assert scale.names == ("layer", "norm")
    assert scale.stacked == ("layer",)


def test_layers_and_experts_number_independent_matrices():
    """Stacking adds an axis of matrices and leaves their inputs and outputs unchanged."""
    model = jax.eval_shape(lambda: Mixtral(MixtralConfig(layers=3), key=jax.random.key(0)))
    table = {path: (axes, shape) for path, axes, shape in parameter_table(model)}
    axes, shape = table[".stacks[0].blocks[0].feed_forward.experts.down"]
    assert (axes.stacked, axes.inputs, axes.outputs) == (("layer", "expert"), ("expert_mlp",), ("expert_embed",))
    assert shape == (3, 8, 256, 128)


def test_shapes_stand_in_for_arrays():
    shapes = jax.eval_shape(outer)
    assert jax.tree.leaves(axes_of(shapes), is_leaf=is_axes) == jax.tree.leaves(axes_of(outer()), is_leaf=is_axes)


def is_axes(x):
    return isinstance(x, Axes)


def test_buffers_are_not_trained():
    tree = trainable_mask(outer(shift=jnp.ones(3)))
    assert tree.choice is False
    assert jax.tree.leaves(tree).count(False) == 1


def test_a_bias_is_trained_and_counted():
    class Biased(eqx.Module):
        router: Bias[Array, "router"]
        out: Bias[Array, "heads head_dim"] | None
        up: Bias[Array, "expert, expert_mlp"]
        choice: Buffer[Array, "router"]

    biased = Biased(jnp.zeros(6), jnp.zeros((2, 3)), jnp.zeros((6, 4)), jnp.zeros(6))
    axes = axes_of(biased)
    assert (axes.router.role, axes.router.names) == (Role.BIAS, ("router",))
    assert (axes.out.role, axes.out.names) == (Role.BIAS, ("heads", "head_dim"))
    assert (axes.up.stacked, axes.up.names) == (("expert",), ("expert", "expert_mlp"))
    assert jax.tree.leaves(trainable_mask(biased)) == [True, True, True, False]
    assert count_parameters(biased, experts_per_token=3) == (6 + 6 + 24, 6 + 6 + 12)


def test_the_annotation_is_jaxtypings_underneath():
    """A run-time type checker checks the shape."""
    hint = get_type_hints(Outer)["experts"]
    assert isinstance(jnp.ones((6, 3, 8)), hint)
    assert not isinstance(jnp.ones((6, 3)), hint)
    assert not isinstance(jnp.ones((6, 3, 8), jnp.int32), hint)


def test_an_array_without_axes_is_refused():
    class Undeclared(eqx.Module):
        scale: Scale[Array, "norm"]
        plain: Array

    with pytest.raises(TypeError, match=r"^Undeclared\.plain has shape \(2, 3\)"):
        axes_of(Undeclared(jnp.ones(3), jnp.ones((2, 3))))


def test_a_weight_needs_inputs_and_outputs():
    with pytest.raises(TypeError, match=r"inputs -> outputs.*embed mlp"):
        Weight[Array, "embed mlp"]


def test_parameter_table_of_mixtral():
    """Paths, roles, axes and shapes of a family; a change here changes checkpoints and layouts."""
    config = MixtralConfig(
        vocab=11, embed=12, layers=3, heads=4, kv_heads=2, head_dim=6, expert_mlp=5, experts=8, experts_per_token=2
    )
    model = jax.eval_shape(lambda: Mixtral(config, key=jax.random.key(0)))
    layer, weight, scale = ".stacks[0].blocks[0]", Role.WEIGHT, Role.SCALE
    assert [(path, a.role, a.names, shape) for path, a, shape in parameter_table(model)] == [
        (".embedding.weight", Role.EMBEDDING, ("vocab", "embed"), (11, 12)),
        (f"{layer}.attention_norm.scale", scale, ("layer", "norm"), (3, 12)),
        (f"{layer}.attention.query", weight, ("layer", "embed", "heads", "head_dim"), (3, 12, 4, 6)),
        (f"{layer}.attention.key", weight, ("layer", "embed", "kv_heads", "head_dim"), (3, 12, 2, 6)),
        (f"{layer}.attention.value", weight, ("layer", "embed", "kv_heads", "head_dim"), (3, 12, 2, 6)),
        (f"{layer}.attention.out", weight, ("layer", "heads", "head_dim", "embed"), (3, 4, 6, 12)),
        (f"{layer}.feed_forward_norm.scale", scale, ("layer", "norm"), (3, 12)),
        (f"{layer}.feed_forward.router.weight", weight, ("layer", "embed", "router"), (3, 12, 8)),
        (
            f"{layer}.feed_forward.experts.gate",
            weight,
            ("layer", "expert", "expert_embed", "expert_mlp"),
            (3, 8, 12, 5),
        ),
        (f"{layer}.feed_forward.experts.up", weight, ("layer", "expert", "expert_embed", "expert_mlp"), (3, 8, 12, 5)),
        (
            f"{layer}.feed_forward.experts.down",
            weight,
            ("layer", "expert", "expert_mlp", "expert_embed"),
            (3, 8, 5, 12),
        ),
        (".unembedding.norm.scale", scale, ("norm",), (12,)),
        (".unembedding.weight", weight, ("embed", "vocab"), (12, 11)),
    ]
    assert all(jax.tree.leaves(trainable_mask(model)))
