"""The MoE block: its formula, and the operations of its forward and backward pass."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import context_of

from moezoo.moe.experts import Experts
from moezoo.moe.mixture import BranchNorms, MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.mlp import MLP
from moezoo.nn.norm import RMSNorm
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import equations


def test_equals_its_formula():
    """The sum over the chosen experts times their gates, plus the shared MLP; padding passes the latter only."""
    keys, options = jax.random.split(jax.random.key(0), 4), {"out_std": 1.0, "dtype": jnp.dtype("float32")}
    router = Router(8, 4, 2, Choice(), dtype=options["dtype"], key=keys[0])
    experts, shared = Experts(4, 8, 12, **options, key=keys[1]), MLP(8, 5, **options, key=keys[2])
    x, valid = jax.random.normal(keys[3], (2, 3, 8)), jnp.asarray([[True, True, True], [True, False, False]])

    def run(block, x):
        out = block(x, context_of(valid), on_mesh(Execution()))
        return out.y, out.routed, block.router(x, valid).assignment

    y, routed, (expert_ids, gates) = jax.jit(run)(MoE(router, experts, shared), x)

    def mlp(token, gate, up, down):
        inner, times = token @ gate, token @ up
        return (inner / (1 + np.exp(-inner)) * times) @ down

    x = np.asarray(x, np.float64)
    wanted = np.zeros(x.shape)
    assert experts.gate is not None
    for token, choice in np.argwhere(np.asarray(expert_ids) < 4):
        at, expert = np.unravel_index(token, x.shape[:2]), expert_ids[token, choice]
        weights = (np.asarray(w[expert], np.float64) for w in (experts.gate, experts.up, experts.down))
        wanted[at] += float(gates[token, choice]) * mlp(x[at], *weights)
    assert not wanted[1, 1:].any()
    # Sums of at most 12 products of numbers of order one, and two more products.
    np.testing.assert_allclose(routed, wanted, rtol=0, atol=50 * 2.0**-24)
    wanted += mlp(x, *(np.asarray(w, np.float64) for w in (shared.gate, shared.up, shared.down)))
    np.testing.assert_allclose(y, wanted, rtol=0, atol=50 * 2.0**-24)


@pytest.mark.parametrize("k", [1, 2])
def test_gates_on_inputs(k):
    """Each chosen expert reads the token times its gate; padding goes to none. Gates have their gradients."""
    keys, options = jax.random.split(jax.random.key(0), 3), {"out_std": 1.0, "dtype": jnp.dtype("float32")}
    router = Router(8, 4, k, Choice("sigmoid", gates="scores"), dtype=options["dtype"], key=keys[0])
    experts = Experts(4, 8, 12, **options, key=keys[1])
    x, valid = jax.random.normal(keys[2], (2, 3, 8)), jnp.asarray([[True, True, True], [True, False, False]])

    def run(block, x):
        return block(x, context_of(valid), on_mesh(Execution())).routed

    def naive(block, x):
        expert_ids, gates = block.router(x, valid).assignment
        total = jnp.zeros((6, 8))
        for expert in range(4):
            weights = (w[expert] for w in (block.experts.gate, block.experts.up, block.experts.down))
            gate, up, down = weights
            given = x.reshape(6, 1, 8) * gates[..., None]
            y = (jax.nn.silu(given @ gate) * (given @ up)) @ down
            total = total + jnp.where((expert_ids == expert)[..., None], y, 0).sum(1)
        return total.reshape(2, 3, 8)

    def both(function):
        return jax.jit(lambda block, x: (*jax.vjp(function, block, x)[1](jnp.ones((2, 3, 8))), function(block, x)))

    block = MoE(router, experts, gates_on="inputs")
    found, wanted = (jax.tree.leaves(both(each)(block, x)) for each in (run, naive))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_nothing_is_added_by_scatter():
    """In the forward and backward pass, router included, sums have a fixed order."""
    keys = jax.random.split(jax.random.key(0), 3)
    router = Router(8, 4, 2, Choice(), dtype=jnp.dtype("float32"), key=keys[0])
    block = MoE(router, Experts(4, 8, 12, out_std=1.0, dtype=jnp.dtype("float32"), key=keys[1]))
    x, valid = jax.random.normal(keys[2], (2, 3, 8)), jnp.ones((2, 3), bool)

    def both(block, x):
        def results(block, x):
            y, sums, _ = block(x, context_of(valid), on_mesh(Execution()))
            return y, sums.probabilities, sums.z

        values, pull = jax.vjp(results, block, x)
        return values, pull(values)

    names = [e.primitive.name for e, *_ in equations(jax.make_jaxpr(both)(block, x))]
    assert {"gather", "top_k"} <= set(names)
    assert "scatter-add" not in names
    # The only scatter inverts the permutation of the sort.
    assert names.count("scatter") == 1


def test_norms_around_each_branch():
    """Each branch reads the stream through a norm of its own, and the router reads the stream itself."""
    keys, options = jax.random.split(jax.random.key(0), 8), {"out_std": 1.0, "dtype": jnp.dtype("float32")}
    router = Router(8, 4, 2, Choice(), dtype=options["dtype"], key=keys[0])
    experts, shared = Experts(4, 8, 12, **options, key=keys[1]), MLP(8, 5, **options, key=keys[2])
    scales = [jax.random.uniform(key, (8,), minval=0.5, maxval=2.0) for key in keys[3:7]]
    norms = BranchNorms(*(RMSNorm(8, 0.1, dtype=options["dtype"]) for _ in range(4)))
    norms = eqx.tree_at(lambda n: [norm.scale for norm in vars(n).values()], norms, scales)
    x, context = jax.random.normal(keys[7], (2, 3, 8)), context_of(np.ones((2, 3)))

    def run(block, x):
        return block(x, context, on_mesh(Execution()))

    found = jax.jit(run)(block := MoE(router, experts, shared, norms), x)
    assert block.is_whole
    # The router normalises nothing, so a plain mixture of the same router chooses as this one where it reads the same.
    assignment, _ = router(x, jnp.ones((2, 3), bool))
    assert experts.gate is not None
    tokens = norms.before_experts(x).reshape(-1, 8)
    routed = np.zeros((6, 8))
    for token, choice in np.ndindex(6, 2):
        e = int(assignment.expert_ids[token, choice])
        inner = jax.nn.silu(tokens[token] @ experts.gate[e]) * (tokens[token] @ experts.up[e])
        routed[token] += np.asarray(assignment.gates[token, choice] * (inner @ experts.down[e]))
    np.testing.assert_allclose(found.routed.reshape(-1, 8), routed, rtol=0, atol=1e-5)
    beside = run(shared, norms.before_shared(x)).y
    wanted = norms.after_experts(jnp.asarray(routed.reshape(2, 3, 8), jnp.float32)) + norms.after_shared(beside)
    np.testing.assert_allclose(found.y, wanted, rtol=0, atol=2e-5)
