"""Attention for Hopper, interpreted on a CPU, compared with a loop over queries in float64.

Interpretation needs jax 0.12, so these tests run in CI's part on a newer Python. Interpreted kernels show that blocks,
masks and indices are right; that they run on a device, and how fast, they do not. Each of a program's three warpgroups
blocks a thread of the CPU while it waits for another: with two threads, as one device on two cores has, they can wait
for ever. The suite has eight devices, and so at least as many threads.
"""

import functools
import importlib
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_loop import Inputs, check, loop, make_row, sees, stack_rows
from jax.sharding import PartitionSpec
from meshes import auto_mesh

from moezoo.kernels.attention import Attended, Operands, by_intervals, join_softmax
from moezoo.kernels.attention.base import Coordinates

pytestmark = pytest.mark.interpreted
BLOCK = 128  # the queries of a program


class Case(NamedTuple):
    """A row per entry of `rows`: where its documents begin, and which of these are padding, the last one if any."""

    tokens: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    window: int | None = None


# More than one block of queries and of keys, neither of which divides the numbers of tokens.
SMALL = Case(150, 1, 2, 64, 64, (((40, 90), ()), ((70, 131), (3,))))
CASES = {
    "documents": SMALL,
    "window, two key heads": Case(139, 2, 2, 128, 64, (((30,), ()),), 50),
    "latent attention": Case(198, 1, 1, 192, 128, (((), ()),)),
    "one kernel per gradient": Case(136, 1, 1, 256, 256, (((), ()),)),
    "widths are filled": Case(131, 1, 1, 24, 40, (((64,), ()),), 70),
}


@pytest.fixture(autouse=True)
def _interpreted():
    mosaic_gpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        yield


@functools.cache
def operands(case: Case, seed: int = 0) -> tuple[Inputs, Attended]:
    """Return operands, and cotangents of the result and of the log-sum-exp."""
    rng, batch, heads = np.random.default_rng(seed), len(case.rows), (case.kv_heads, case.group)
    shapes = (*heads, case.dim), (case.kv_heads, case.dim), (case.kv_heads, case.value_dim), (*heads, case.value_dim)
    q, k, v, back = (jnp.asarray(rng.standard_normal((batch, case.tokens, *x)), jnp.bfloat16) for x in shapes)
    to_total = jnp.asarray(rng.standard_normal((batch, case.tokens, *heads)), jnp.float32)
    return Inputs(q, k, v, jnp.float32(case.dim**-0.5)), Attended(back, to_total)


@functools.cache
def coordinates(case: Case) -> tuple[Coordinates, Coordinates]:
    """Return those of queries, which have any order and of which some see nothing, and of sorted keys."""
    keys = stack_rows(*(make_row(*row, case.tokens) for row in case.rows))
    rng, late = np.random.default_rng(1), max(0, case.tokens - BLOCK)
    # The first block has the last tokens. So there are blocks of keys that all its queries see.
    order = np.concatenate([late + rng.permutation(case.tokens - late), rng.permutation(late)])
    position, segment = (x[:, order] for x in keys)
    return Coordinates(position.at[:, -1].set(-1), segment.at[:, -2].set(99)), keys


def value_and_gradients(
    window: int | None, given: Inputs, queries: Any, keys: Any, cotangent: Attended, gradients: bool = True
) -> Any:
    """Return both results, and the gradients through both if they are wanted."""

    def run(given: Inputs) -> Attended:
        q, k, v, scale, _ = given
        return by_intervals.attend("hopper", Operands(q, k, v, queries, keys, window), scale)

    if not gradients:
        return run(given), ()
    value, pull = jax.vjp(run, given)
    return value, *pull(cotangent)


@functools.cache
def wanted_of(case: Case) -> Any:
    """Return what the loop computes of a case."""
    (given, cotangent), at = operands(case), coordinates(case)
    return loop(case.window, given, *at, cotangent)


def check_case(case: Case, gradients: bool = True) -> None:
    """Compare results, and gradients, with those of the loop."""
    (given, cotangent), at = operands(case), coordinates(case)
    run = jax.jit(functools.partial(value_and_gradients, case.window, gradients=gradients))
    found = run(given, *at, cotangent)
    assert [x.dtype for x in found[0]] == ["bfloat16", "float32"]
    wanted, seen = wanted_of(case), sees(*at, case.window)
    found, wanted = ((value, each[: 3 * gradients]) for value, each in (found, wanted))
    check(found, wanted, "bfloat16")
    for x, others in [(found[0].result, 2), *zip(found[1], (2, 1, 1), strict=False)]:
        assert not np.asarray(x, np.float32)[~seen.any(others)].any()


@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop(name):
    check_case(CASES[name])


def test_parts():
    """Two parts of the keys join to the whole, and the gradients that go through each sum to the whole's."""
    case = SMALL._replace(group=1, rows=SMALL.rows[:1])
    (given, cotangent), (queries, keys) = operands(case), coordinates(case)
    cotangent = cotangent._replace(logsumexp=jnp.zeros_like(cotangent.logsumexp))
    parts = slice(None, 61), slice(61, None)

    @jax.jit
    def run(q: Any, k: Any, v: Any, queries: Any, keys: Any, back: Any) -> Any:
        at = [Operands(q, k[:, x], v[:, x], queries, Coordinates(*(y[:, x] for y in keys)), None) for x in parts]
        whole = join_softmax(*(by_intervals.part("hopper", x) for x in at))
        gradients = [by_intervals.part_gradients("hopper", x, whole, back) for x in at]
        by_q, *others = ([x.astype(jnp.float32) for x in each] for each in zip(*gradients, strict=True))
        logsumexp = jnp.where(whole.highest > -1e29, whole.highest + jnp.log(whole.total), -1e30)
        return (whole.result, logsumexp), (by_q[0] + by_q[1], *(jnp.concatenate(x, 1) for x in others))

    q = (given.q.astype(jnp.float32) * given.scale).astype(given.q.dtype)
    found = run(q, given.k, given.v, queries, keys, cotangent.result)
    value, gradients = loop(None, given._replace(q=q, scale=1.0), queries, keys, cotangent)
    check(found, (value, gradients[:3]), "bfloat16")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_of_the_batch_do_not_mix():
    """Tiles reach beyond the last token of a row. What is there belongs to the next row, and may be NaN."""
    case = SMALL
    (given, cotangent), (queries, keys) = operands(case), coordinates(case)
    poison = lambda x: x.at[1].set(jnp.nan)  # noqa: E731
    poisoned = given._replace(q=poison(given.q), k=poison(given.k), v=poison(given.v))
    run = jax.jit(functools.partial(value_and_gradients, case.window))
    value, gradients = run(poisoned, queries, keys, cotangent)
    one = lambda tree: jax.tree.map(lambda x: x[:1], tree)  # noqa: E731
    first = given._replace(q=one(given.q), k=one(given.k), v=one(given.v))
    wanted = loop(case.window, first, one(queries), one(keys), one(cotangent))
    check((one(value), one(gradients[:3])), (wanted[0], wanted[1][:3]), "bfloat16")


def test_types_on_two_devices():
    """Queries differ by device, keys do not; their gradient is summed over devices.

    This is traced alone: interpreted kernels share the memory of one device, whose blocks two devices would mix up.
    """
    case = SMALL
    (given, cotangent), (queries, keys) = operands(case), coordinates(case)

    def local(q: Any, queries: Any, cotangent: Any, k: Any, v: Any, keys: Any) -> Any:
        k, v, keys = (jax.tree.map(lambda x: jax.lax.pcast(x, "a", to="varying"), x) for x in (k, v, keys))
        value, gradients = value_and_gradients(None, Inputs(q, k, v, 0.125), queries, keys, cotangent)
        assert all(jax.typeof(x).mat.varying == {"a"} for x in (*value, *gradients[:3]))
        return value, gradients[:3]

    split, whole = PartitionSpec("a"), PartitionSpec()
    k, v, keys = jax.tree.map(lambda x: x[:1], (given.k, given.v, keys))
    mapped = jax.shard_map(
        local, mesh=auto_mesh(a=2), in_specs=(split, split, split, whole, whole, whole), out_specs=split
    )
    value, gradients = jax.eval_shape(mapped, given.q, queries, cotangent, k, v, keys)
    assert [x.shape for x in (*value, *gradients)] == [x.shape for x in (*cotangent, *given[:3])]


# What each planted error changes: the only place in a file that is the first text.
ERRORS = {
    "a key too many at the begin": ("number >= _across(first", "number + 1 >= _across(first"),
    "a key too many at the end": ("number < _across(after", "number - 1 < _across(after"),
    "blocks are taken for wholly seen": ("key + keys <= spans.stop[b, block]", "key <= spans.stop[b, block]"),
    "the last block of keys is left out": ("(keys - 1), keys) - first", "0, keys) - first"),
    "keys of another row": ("there = lambda j: (b, first + j", "there = lambda j: (b * 0, first + j"),
    "sums are not rescaled": ("sums[i] * _across(fade, sums[i])", "sums[i]"),
    "the log-sum-exp lacks the largest score": ("softmax.highest + jnp.log", "jnp.log"),
}
ERRORS_OF_GRADIENTS = {
    "keys have gradients of their first head alone": (
        "lambda member: kv_head * group + member",
        "lambda _: kv_head * group",
    ),
    "the last block of queries is left out": ("to[b, block] - from_block", "to[b, block] - from_block - 1"),
    "no gradient by the log-sum-exp": ("else less - through_logsumexp", "else less"),
}


def plant(error: str, patch: pytest.MonkeyPatch) -> None:
    """Put functions with the error in the place of those of the backend."""
    from moezoo.kernels.attention import hopper

    before, after = (ERRORS | ERRORS_OF_GRADIENTS)[error]
    found = [x for x in (hopper, by_intervals) if before in Path(str(x.__file__)).read_text()]
    text = Path(str(found[0].__file__)).read_text()
    assert (len(found), text.count(before)) == (1, 1)
    changed = types.ModuleType("changed")
    exec(compile(text.replace(before, after), str(found[0].__file__), "exec"), changed.__dict__)
    for name in {"part", "part_gradients", "attend"} & vars(found[0]).keys():
        patch.setattr(found[0], name, vars(changed)[name])
    jax.clear_caches()


@pytest.mark.weekly
@pytest.mark.parametrize("error", ERRORS | ERRORS_OF_GRADIENTS)
def test_a_planted_error_is_seen(error, monkeypatch):
    plant(error, monkeypatch)
    case = CASES["latent attention"] if "wholly" in error else SMALL  # where there are such blocks
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_case(case, gradients=error in ERRORS_OF_GRADIENTS)
