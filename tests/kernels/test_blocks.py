"""Sizes of blocks by capability: which a backend takes, and what is refused of the table."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_loop import GROUP, Case, packed, random_operands
from programs import executed_products
from refusals import by_table
from test_grouped_matmul import check, operands, value_and_gradients

from benchmarks import tuning
from moezoo.errors import UserError
from moezoo.kernels import blocks
from moezoo.kernels.attention import Operands, Softmax, attend, attend_part, part_gradients
from moezoo.kernels.grouped_matmul import blocked, grouped_matmul, routed_mlp
from moezoo.kernels.permute import plan
from moezoo.nn.mlp import SWIGLU
from moezoo.parallel.kernels import KernelOrder, Target

AMPERE, ADA = Target("cuda", "8.0"), Target("cuda", "8.9")


def entry(**sizes):
    """Return a table with the sizes of `blocked` on Ampere."""
    return {"8.0": {"blocked": sizes}}


def test_blocked_takes_the_sizes_of_its_gpu():
    """A GPU without an entry takes those of all GPUs, and a CPU its own; nothing else changes."""
    sizes = (0, 5, 17, 1)
    x, weights, cotangent = operands(40)

    def rows_of(target):
        run = functools.partial(value_and_gradients, KernelOrder((), target))
        arguments = x, weights, jnp.asarray(sizes, jnp.int32), cotangent
        check(run(*arguments), x, weights, sizes, cotangent)
        return sorted(shape[0] for shape in executed_products(run, *arguments))

    with blocks.trying(entry(products=[8, 2])):
        assert rows_of(AMPERE) == sorted(2 * [2, 2, 2, 8, 8, 2, 2] + [6, 8, 8, 2, 2])
        ada = rows_of(ADA)
        cpu = rows_of(Target("cpu"))
    # 40 rows, fewer than the smallest block of GPUs, are one block per group; a CPU has blocks of 32.
    assert set(ada) == {40}
    assert set(cpu) == {32}


def test_chunked_attention_takes_the_sizes_of_its_gpu():
    """Both passes, and those of a part of the keys; programs with other sizes are others, and results are the same."""
    case = Case(130, 130, 0)
    (q, k, v, *_), cotangent = random_operands(case)
    given, ones = Operands(q, k, v, *packed(case), None), jnp.ones_like(cotangent.logsumexp)
    whole = Softmax(cotangent.result, 10 * ones, ones)
    passes = {
        "forward": lambda order, given: attend(given, 1.0, implementation=order),
        "part": lambda order, given: attend_part(given, order),
        "backward": lambda order, given: part_gradients(given, whole, cotangent.result, order),
    }

    def both(order: KernelOrder, given: Operands) -> Any:
        run = lambda q: attend(dataclasses.replace(given, q=q), 1.0, implementation=order)  # noqa: E731
        return jax.vjp(run, given.q)[1](cotangent)

    for run in (*passes.values(), both):
        found = []
        compared = run in (passes["part"], both)  # `both` has the numbers of the other two
        for target, rows, keys in ((AMPERE, 33, 44), (ADA, 130, 130), (Target("cpu"), 44, 44)):
            order = KernelOrder(("chunked",), target)
            with blocks.trying({"8.0": {"chunked": {"queries": 40, "keys": 50}}}):
                shapes = executed_products(functools.partial(run, order), given)
                if compared:
                    found.append(jax.jit(functools.partial(run, order))(given))
            assert {shape[1] for shape in shapes} == {GROUP * rows}, target
            assert keys in {shape[2] for shape in shapes} or run is passes["backward"], target
        for other in found[1:]:
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found[0], other)


def test_measured_sizes_replace_only_their_fields():
    with blocks.trying(entry(experts=[64])):
        assert blocks.measured(blocked.ON_GPUS, "blocked", AMPERE) == blocked.ON_GPUS._replace(experts=(64,))
        assert blocks.measured(blocked.ON_GPUS, "blocked", ADA) == blocked.ON_GPUS
        assert blocks.measured(blocked.ON_GPUS, "blocked", Target("cuda")) == blocked.ON_GPUS


def test_the_table_is_read_from_its_file(monkeypatch, tmp_path):
    monkeypatch.setattr(blocks, "TABLE", tmp_path / "blocks.json")
    assert blocks.read() == {}
    (tmp_path / "blocks.json").write_text(json.dumps(entry(products=[16])))
    assert blocks.measured(blocked.ON_GPUS, "blocked", AMPERE).products == (16,)
    (tmp_path / "blocks.json").write_text("{")
    with pytest.raises(UserError, match=r"blocks\.json is not JSON .*; remove it, or measure again$"):
        blocks.read()


@pytest.mark.parametrize("wrong", [{"rows": [8]}, {"products": 8}, {"products": []}, {"products": [0]}])
def test_other_entries_are_refused(wrong):
    name, value = next(iter(wrong.items()))
    message = f"8.0 blocked has {name}={value}, expected fields products, experts with integers above 0"
    with blocks.trying(entry(**wrong)), pytest.raises(UserError) as caught:
        blocks.measured(blocked.ON_GPUS, "blocked", AMPERE)
    assert str(caught.value).endswith(message)


def test_experts_as_one_take_the_sizes_of_their_gpu():
    """Products of one loop over experts: each block has as many rows as the table says."""
    tokens, embed, mlp, experts = 24, 5, 3, 2
    draw = np.random.default_rng(0).standard_normal
    shapes = ((experts, embed, mlp),) * 2 + ((experts, mlp, embed),)
    x, *weights = (jnp.asarray(draw(shape), jnp.float32) for shape in ((tokens, embed), *shapes))
    gates, ids = jnp.ones((tokens, 1)), jnp.zeros((tokens, 1), jnp.int32)

    def run(x):
        order = KernelOrder((), AMPERE)
        return routed_mlp(x, gates, plan(ids, 0, experts), *weights, activation=SWIGLU, implementation=order)

    with blocks.trying(entry(experts=[8])):
        assert {shape[0] for shape in executed_products(run, x)} == {8}


@pytest.mark.parametrize("table", [[], {"8.0": []}, {"8.0": {"blocked": 5}}, {"8.0": {"blocked": None}}])
def test_a_file_that_is_no_table_is_refused(table, monkeypatch, tmp_path):
    monkeypatch.setattr(blocks, "TABLE", tmp_path / "blocks.json")
    (tmp_path / "blocks.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match=r'blocks\.json is no table {"9\.0": {"BACKEND": {FIELD: SIZE}}}; remove it'):
        blocks.read()


@by_table(
    """
    backend => sizes => reason
    hopper => {"rows": 100} => rows=100 must be 64 or 128
    hopper => {"depth": 32} => depth=32 must be 64 or 128
    hopper => {"columns": 256} => columns=256 must be 64 or 128
    hopper => {"buffers": 65535} => buffers=65535 must be from 65536
    hopper => {"rows": 64, "buffers": 65535} => buffers=65535 must be from 65536
    hopper => {"rows": 64, "columns": 64, "buffers": 49151} => buffers=49151 must be from 49152
    hopper => {"depth": 128, "buffers": 65536} => buffers=65536 must be from 131072
    hopper => {"buffers": 262144} => buffers=262144 must be from 65536
    hopper_persistent => {"columns": 100} => columns=100 must be 64, 128, 192 or 256
    hopper_persistent => {"slots": 5} => slots=5 must be from 2 to 4 for tiles of 256 columns
    hopper_persistent => {"columns": 128, "slots": 1} => slots=1 must be from 2 to 6 for tiles of 128 columns
    """
)
def test_tiles_that_cannot_work_are_refused(backend, sizes, reason):
    """The compilers' own messages, if they notice, name neither the table nor the field."""
    x, weights, _ = operands(40, "bfloat16")
    order = KernelOrder((backend,), Target("cuda", "9.0"))
    run = functools.partial(grouped_matmul, group_sizes=jnp.asarray((0, 5, 17, 1)), implementation=order)
    with blocks.trying({"9.0": {backend: json.loads(sizes)}}), pytest.raises(UserError) as caught:
        jax.eval_shape(run, x, weights)
    rest = " to 166912 for tiles of these sizes" if reason.startswith("buffers") else ""
    assert str(caught.value).endswith(f"9.0 {backend}: {reason}{rest}; remove the entry, or measure again")


def test_tiles_that_tune_tries_are_accepted():
    """Fields are varied one by one; the least buffers alone are too small for the largest tiles."""
    for name in ("hopper", "hopper_persistent", "blackwell"):
        sizes, choices = tuning.TRIED[name]
        tried = [sizes._replace(**{field: value}) for field, values in choices.items() for value in values]
        assert [each.refusal() for each in tried] == [None] * len(tried)
