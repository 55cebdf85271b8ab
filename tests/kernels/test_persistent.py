"""The product of programs that stay (`hopper_persistent`): its tasks, its slots, and the interpreted kernel."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from test_grouped_matmul import GROUPS, check, compare_with_loop, group_sizes, operands, value_and_gradients, with_nan

from moezoo.kernels import blocks
from moezoo.kernels.grouped_matmul import api, persistent
from moezoo.parallel.kernels import KernelOrder, Target, anywhere
from moezoo.parallel.traces import equations

NAME = "hopper_persistent"
# More than two tiles of rows; widths that no tile divides: 128 columns forward, and three times 64 backward.
ROWS, INPUTS, OUTPUTS = 300, 136, 72
# Fewer programs than tiles, more and narrower tiles, and no slot to spare.
OTHER_SIZES = {"programs": 3, "columns": 128, "slots": 2, "snake": 1}


@pytest.fixture
def interpret(monkeypatch):
    """Let the backend run here; return a function that sets what an interpreter is asked for."""
    mosaic_gpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    monkeypatch.setitem(api.BACKENDS, NAME, api.BACKENDS[NAME]._replace(runs_on=anywhere))
    return lambda **asked: mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams(**asked))


@settings(max_examples=60, deadline=None)
@given(sizes=group_sizes(ROWS), rows=st.sampled_from([ROWS, ROWS + 1, 1000]))
@example(sizes=(0, 0, 0, 0), rows=ROWS)
@example(sizes=(7, 129, 121, 9), rows=ROWS)  # as many tiles as groups of their sizes can have
def test_each_row_is_in_one_tile_of_its_group(sizes, rows):
    used, *tasks = map(np.asarray, persistent.tasks_of(jnp.asarray(sizes, jnp.int32), rows))
    assert 0 < used[0] <= tasks[0].size
    groups = np.full(rows, -1)
    for group, row, low, high in zip(*(x[: used[0]] for x in tasks), strict=True):
        assert row % 8 == 0
        assert 0 <= low < high <= 128
        assert (groups[row + low : row + high] == -1).all()
        groups[row + low : row + high] = group
    np.testing.assert_array_equal(groups, np.repeat(range(GROUPS + 1), [*sizes, rows - sum(sizes)]))


@pytest.mark.parametrize("contract", [1, 2])
def test_products_are_done_before_their_slot_is_free(contract):
    """A warpgroup frees a step's slot when only the next step's product is left, and the last slot when none is.

    Interpreted products are done at once, so nothing else here can see this.
    """
    weights = (GROUPS, INPUTS, OUTPUTS) if contract == 1 else (GROUPS, OUTPUTS, INPUTS)
    shapes = ((ROWS, INPUTS), jnp.bfloat16), (weights, jnp.bfloat16), ((GROUPS,), jnp.int32)
    run = functools.partial(persistent.multiply, persistent.Sizes(), contract=contract)
    traced = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    found = []
    for each in equations(traced):
        equation: Any = each.equation
        name, parameters = equation.primitive.name.removesuffix("_p"), equation.params
        if name in ("wgmma_ref", "barrier_arrive"):
            found.append(name)
        elif name == "wgmma_wait":
            found.append(parameters["n"] if "n" in parameters else equation.invars[0].val)  # jax 0.10
        elif name == "wgmma_accumulator_deref":
            found.append(parameters.get("wait_n", 0))
    assert found == ["wgmma_ref", 1, "barrier_arrive", 0, "barrier_arrive"]


@pytest.mark.interpreted
def test_a_product_and_its_gradients(interpret):
    examples = [
        (0, 0, ROWS, 0),
        (0, 128, 64, 0),  # whole tiles
        (1, 126, 1, 1),  # tiles that begin before their group
    ]
    run = jax.jit(functools.partial(value_and_gradients, NAME))
    with interpret():
        compare_with_loop(run, examples, most=2, rows=ROWS, inputs=INPUTS, outputs=OUTPUTS)


@pytest.mark.interpreted
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 8, 1), (37, 64, 300), (520, 72, 40)])
def test_any_size(interpret, rows, inputs, outputs):
    """Fewer rows than a tile; widths of one number, and of several tiles of which the last goes beyond the array."""
    sizes = (rows // 3, 0, rows // 4, 0)
    order = KernelOrder((NAME,), Target("cuda", "9.0"))
    x, weights, cotangent = operands(rows, "bfloat16", 0, inputs, outputs)
    given_x, given_cotangent = with_nan(sizes, x, cotangent)
    with interpret(), blocks.trying({"9.0": {NAME: OTHER_SIZES}}):
        run = jax.jit(functools.partial(value_and_gradients, order))
        check(run(given_x, weights, jnp.asarray(sizes, jnp.int32), given_cotangent), x, weights, sizes, cotangent)


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [persistent.Sizes(programs=2), persistent.Sizes(**OTHER_SIZES)], ids=str)
def test_no_copy_races_with_a_warpgroup(interpret, monkeypatch, sizes):
    """Loads and stores that run on touch no memory in use: slots, and the two tiles that are stored by turns."""
    # The detector takes the tiles of both warpgroups for the same memory where two kinds of tiles are in one place.
    monkeypatch.setattr(persistent.plgpu, "RefUnion", lambda *refs: refs)
    x, weights, _ = operands(ROWS, "bfloat16", 0, 320, 160)
    groups = jnp.asarray((70, 0, 131, 3), jnp.int32)
    with interpret(detect_races=True):
        jax.jit(functools.partial(persistent.multiply, sizes, contract=1))(x, weights, groups).block_until_ready()


@pytest.mark.interpreted
@pytest.mark.parametrize("which", ["rows", "weights", "both"])
def test_inside_shard_map(interpret, which):
    """The operands that are split differ by device; the gradient of another one is summed over devices, so it does not.

    On two devices this is traced alone: interpreted kernels share the memory of one device.
    """
    rows, weights = (PartitionSpec("a") if which in (name, "both") else PartitionSpec() for name in ("rows", "weights"))
    split, groups = PartitionSpec("a"), (70, 0, 11, 3)

    def local(x: Any, w: Any, sizes: Any, cotangent: Any) -> Any:
        results = value_and_gradients(NAME, x, w, sizes[0], cotangent)
        assert [jax.typeof(y).mat.varying for y in results] == [frozenset(spec) for spec in (split, rows, weights)]
        return results

    x, w, cotangent = operands(100, "bfloat16", 0, 72, 64)
    for devices in (1, 2):
        specs = {"in_specs": (rows, weights, split, split), "out_specs": (split, rows, weights)}
        mapped = jax.jit(jax.shard_map(local, mesh=auto_mesh(a=devices), **specs))
        several = lambda y, spec, devices=devices: jnp.concatenate([y] * (devices if spec == split else 1))  # noqa: E731
        given = several(x, rows), several(w, weights), jnp.asarray([groups] * devices), several(cotangent, split)
        with interpret():
            assert [y.shape for y in jax.eval_shape(mapped, *given)] == [given[i].shape for i in (3, 0, 1)]
            if devices == 1 and which == "rows":
                check(mapped(*given), x, w, groups, cotangent)
