"""Stacks of matrices in the order of an all-gather: what they stand for, and what is gathered in this order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import auto_mesh

import moezoo
from moezoo.kernels.grouped_matmul import grouped_matmul, routed_mlp
from moezoo.kernels.permute import plan
from moezoo.moe.dispatch import Ring
from moezoo.moe.experts import Experts
from moezoo.nn.mlp import SWIGLU
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.stacks import Gathered
from moezoo.parallel.stored import matrix_of
from moezoo.parallel.traces import equations
from moezoo.parallel.weight_mover import WeightMover

KEYS = jax.random.split(jax.random.key(0), 8)
STACK = jax.random.normal(KEYS[0], (3, 4, 5))


def moved(stack: jax.Array, dim: int) -> Gathered:
    return Gathered(values=jnp.moveaxis(stack, dim, 0), dim=dim, dtype=stack.dtype)


@pytest.mark.parametrize("dim", [1, 2])
def test_it_stands_for_the_stack(dim):
    gathered, part = moved(STACK, dim), jnp.arange(20.0).reshape(4, 5)
    assert gathered.shape == STACK.shape
    np.testing.assert_array_equal(gathered.materialise(jnp.float32), STACK)
    for group in range(3):
        np.testing.assert_array_equal(matrix_of(gathered, jnp.int32(group)), STACK[group])
        more, other = (gathered.put(jnp.int32(group), part, add) for add in (True, False))
        np.testing.assert_array_equal(more.materialise(jnp.float32), STACK.at[group].add(part))
        np.testing.assert_array_equal(other.materialise(jnp.float32), STACK.at[group].set(part))


@pytest.mark.parametrize("implementation", ["blocked", "reference"])
def test_experts_and_gradients_are_those_of_arrays(implementation):
    """Of a kernel that reads matrices one by one, and of one that needs whole stacks.

    To the bit, but for gradients of matrices that are read one by one: sums over 6 rows, in an order that the compiler
    chooses by the layout of the stack.
    """
    tokens = jax.random.normal(KEYS[1], (6, 4))
    gates = jax.random.uniform(KEYS[2], (6, 2))
    rows = plan(jnp.asarray([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2], [0, 2]], jnp.int32), 0, 3)  # group 1 is empty
    gate, up = (jax.random.normal(key, (3, 4, 5)) for key in KEYS[3:5])
    down = jax.random.normal(KEYS[5], (3, 5, 4))

    def loss(gate, up, down, gates):
        y = routed_mlp(tokens, gates, rows, gate, up, down, activation=SWIGLU, implementation=implementation)
        return (y**2).sum() + (
            grouped_matmul(tokens, gate, jnp.asarray([2, 0, 3]), implementation=implementation)
        ).sum()

    of = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    value, (by_gate, by_up, by_down, by_gates) = of(gate, up, down, gates)
    same, (g, u, d, k) = of(moved(gate, 1), moved(up, 1), moved(down, 2), gates)
    whole = [x.materialise(jnp.float32) for x in (g, u, d)]
    np.testing.assert_array_equal((value, *by_gates.ravel()), (same, *k.ravel()))
    for one, other in zip((by_gate, by_up, by_down), whole, strict=True):
        most = 6 * np.finfo(np.float32).eps * np.abs(other).max() if implementation == "blocked" else 0
        np.testing.assert_allclose(one, other, rtol=0, atol=most)


def test_experts_are_gathered_and_scattered_along_the_first_dimension():
    """Their weights and gradients, where they are cut along a dimension of their matrices."""
    execution = on_mesh(moezoo.Execution(auto_mesh(fsdp=4, expert=2), moezoo.compose().rules, Ring()))
    experts = Experts(2, 8, 12, out_std=1.0, dtype=jnp.dtype("float32"), key=KEYS[6])
    specs = execution.specs(experts)

    def local(experts):
        def total(experts):
            return sum((x**3).sum() for x in jax.tree.leaves(WeightMover(execution).gather(experts)))

        return jax.grad(total)(experts)

    program = jax.make_jaxpr(jax.shard_map(local, mesh=execution.mesh, in_specs=(specs,), out_specs=specs))(experts)
    params = [found.equation.params for found in equations(program)]
    dims = [p.get("all_gather_dimension", p.get("scatter_dimension")) for p in params]
    assert [dim for dim in dims if dim is not None] == [0] * 6
