"""Attention for NVIDIA GPUs of compute capability 9.0 (Hopper), in Pallas's dialect for their tensor cores.

Query i sees the keys [first[i], after[i]). So causality, documents and windows cost nothing where keys are sorted, and
queries may have any order. Both passes hold the scores of one pair of blocks at a time (Dao, 2023, FlashAttention-2,
arXiv:2307.08691). A program has one block of one side and runs over blocks of the other side, from the first to the
last that it meets; in a pair of blocks that is not wholly seen, scores are masked one by one.

| kernel | a program | runs over |
|---|---|---|
| `part` | two blocks of queries of one head | keys and values |
| gradient by queries | the same | keys and values |
| gradients by keys and values | two blocks of keys of one key head | queries of all heads that share the key head |

Programs have three warpgroups: two compute one block each, and the third loads what both need, ahead of time, into a
ring of buffers in shared memory. Operands are in bfloat16; scores, sums and numbers per query are in float32. Weights
and gradients of scores go through shared memory, rounded to bfloat16, as operands of the next product.

Nothing here asks for a device: programs are compiled where there is none, and interpreted on a CPU.
Runs on an H200 are in docs/benchmarks.md.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moezoo.kernels.attention.base import FLOOR, NOTHING, Keys, PerQuery, Queries, Results, Softmax, Values
from moezoo.kernels.attention.intervals import Bounds, Spans, meeting, spans_of
from moezoo.parallel.collectives import vary_like

# The rows that a warpgroup's products have, and the units of widths: tensor cores take no other number.
ROWS, UNIT = 64, 64
# Arrays are copied in units of so many tokens.
_TOKENS = 8
_WORKERS = 2  # the warpgroups of a program that compute
# The most columns of a product that is added to sums in registers: both take a register per 128 numbers.
_COLUMNS = 128
# The most columns of both sums of gradients in one kernel.
_SUMS = 320
_SHARED = 220 * 1024  # bytes of shared memory that a program may fill with tiles, of 227 KiB

_Accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def _padded(x: Array, multiples: dict[int, int]) -> Array:
    """Return `x` with zeros up to multiples of sizes, given for some dimensions; `x` itself where they are."""
    more = [(0, -size % multiples.get(i, 1)) for i, size in enumerate(x.shape)]
    return jnp.pad(x, more) if any(high for _, high in more) else x


def _tiled(*arrays: Float[Array, "_ _ _ _"]) -> list[Array]:
    """Return arrays [batch, tokens, heads, dim] that can be read in tiles, which have zeros beyond the last token."""
    return [_padded(x, {1: _TOKENS, 3: UNIT}) for x in arrays]


def _bounds(first: Bounds, after: Bounds) -> Int[Array, "batch 2 padded"]:
    return _padded(jnp.stack([first, after], 1), {2: _WORKERS * ROWS})


def _merged(x: Float[Array, "batch queries kv_heads group *dim"]) -> Float[Array, "batch queries heads *dim"]:
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _digits(number: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the index of each dimension of an array of these sizes; the last one varies fastest."""
    found = []
    for size in reversed(sizes):
        found.append(lax.rem(number, size))
        number = lax.div(number, size)
    return found[::-1]


def _product(x: Any, y: Any) -> Array:
    """Multiply two tiles in shared memory."""

    def multiply(total: Any) -> Array:
        plgpu.wgmma(total, x, y)
        return total[...]

    return pl.run_scoped(multiply, _Accumulator((x.shape[0], y.shape[1])))


def _across(x: Array, like: Array, dimension: int = 0) -> Array:
    """Broadcast one number per row (dimension 0) or per column (1)."""
    return lax.broadcast_in_dim(x, like.shape, (dimension,))


def _masked(scores: Array, bounds: Sequence[Array], key: Any, whole: Any, keys: int) -> Array:
    """Return scores, `NOTHING` for unseen keys; dimension `keys` are keys from number `key` on.

    `whole` is whether all are seen.
    """

    def mask(scores: Array, first: Array, after: Array) -> Array:
        number = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, scores.shape, keys), plgpu.Layout.WGMMA) + key
        seen = (number >= _across(first, scores, 1 - keys)) & (number < _across(after, scores, 1 - keys))
        return jnp.where(seen, scores, NOTHING)

    return lax.cond(whole, lambda scores, *_: scores, mask, scores, *bounds)


class _Tile(NamedTuple):
    """The shape and the dtype of a buffer in shared memory."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def _launch(
    body: Callable[..., tuple[tuple[Any, ...], Sequence[Any], Sequence[Any], Callable[..., Any], Callable[..., None]]],
    programs: int,
    operands: Sequence[Array],
    out: Sequence[jax.ShapeDtypeStruct],
    loads: Sequence[_Tile],
    scratch: Sequence[_Tile],
    step: Sequence[_Tile],
    name: str,
) -> list[Array]:
    """Run programs of two warpgroups that compute.

    Args:
        body: Describes a program, given its number, the number of the warpgroup, `operands`, `out`, and this
            warpgroup's buffers. Returns the number of steps in each dimension, the blocks to load first, the blocks
            that are loaded for each step, and two functions. The first has indices, these blocks and a carry, and
            returns the next carry. The second is called with a function from the first carry to the last one.
        programs: The number of programs.
        operands: Arrays that are read.
        out: The results.
        loads: Tiles of each warpgroup that are loaded first.
        scratch: Other tiles of each warpgroup.
        step: Tiles of a step.
        name: The kernel's name.
    """
    taken = _WORKERS * sum(tile.bytes for tile in (*loads, *scratch))
    steps = max(2, min(4, (_SHARED - taken) // sum(tile.bytes for tile in step)))

    def scoped(refs: Sequence[Any], barriers: Any, *buffers: Any) -> None:
        worker = lax.axis_index("worker")
        mine = [buffer.at[worker] for buffer in buffers]
        grid, first, sources, visit, compute = body(lax.axis_index("program"), worker, *refs, *mine)

        def work(run: Callable[[Any], Any]) -> None:
            for source, buffer in first:
                plgpu.copy_gmem_to_smem(source, buffer, barriers.at[worker])
            plgpu.barrier_wait(barriers.at[worker])
            compute(run)
            plgpu.wait_smem_to_gmem(0)

        plgpu.emit_pipeline_warp_specialized(
            visit,
            grid=grid,
            memory_registers=40,
            in_specs=[spec for _, spec in sources],
            max_concurrent_steps=steps,
            wg_axis="worker",
            num_compute_wgs=_WORKERS,
            compute_context=work,
        )(*(ref for ref, _ in sources))

    def kernel(*refs: Any) -> None:
        buffers = [plgpu.SMEM((_WORKERS, *tile.shape), dtype=tile.dtype) for tile in (*loads, *scratch)]
        barriers = plgpu.Barrier(num_arrivals=len(loads), num_barriers=_WORKERS)
        pl.run_scoped(functools.partial(scoped, refs), barriers, *buffers, collective_axes="worker")

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True)
    found = plgpu.kernel(
        kernel,
        out_type=list(out),
        grid=(programs,),
        grid_names=("program",),
        num_threads=_WORKERS + 1,
        thread_name="worker",
        kernel_name=name,
        compiler_params=params,
    )(*operands)
    return [vary_like(x, *operands) for x in found]


class _Turn(NamedTuple):
    """What a program for blocks of queries does.

    Attributes:
        at: The indices of the warpgroup's block in [batch, queries, heads]: row of the batch, queries, head.
        steps: The number of blocks of keys that it runs over.
        sources: The blocks of keys and values.
        scores: The function of the indices of a step, queries, keys, and the bounds of queries that returns scores.
    """

    at: tuple[Any, Any, Any]
    steps: Any
    sources: list[Any]
    scores: Callable[..., Array]


def _over_keys(program: Any, worker: Any, spans: Spans, past: Sequence[Any], group: int, keys: int) -> _Turn:
    """Return what a program does whose blocks of `keys` come from `past`; `group` heads share a key head."""
    (batch, blocks), heads = spans.low.shape, past[0].shape[2]
    b, kv_head, block, member = _digits(program, (batch, heads, blocks, group))
    block = blocks - 1 - block  # the last ones, which often see the most keys, begin first
    first = lax.div(spans.low[b, block], keys)
    steps = lax.div(spans.high[b, block] + (keys - 1), keys) - first

    def scores(index: Any, q: Any, k: Any, bounds: Any) -> Array:
        key = (first + index[0]) * keys
        whole = (key >= spans.start[b, block]) & (key + keys <= spans.stop[b, block])
        return _masked(_product(q, k.transpose((1, 0))), (bounds[0], bounds[1]), key, whole, 1)

    there = lambda j: (b, first + j, kv_head, 0)  # noqa: E731
    sources = [(x, plgpu.BlockSpec((None, keys, None, x.shape[3]), there)) for x in past]
    return _Turn((b, pl.ds((block * _WORKERS + worker) * ROWS, ROWS), kv_head * group + member), steps, sources, scores)


def part(q: Queries, k: Keys, v: Values, first: Bounds, after: Bounds) -> Softmax:
    """Attend to the keys [first, after) of each query, which may be none. The queries have been scaled."""
    batch, queries, heads, group, _ = q.shape
    width, dtype = v.shape[3], v.dtype
    q, k, v = _tiled(_merged(q), k, v)
    dim, value_dim = q.shape[3], v.shape[3]
    keys, most = (2 * UNIT, _COLUMNS) if max(dim, value_dim) <= _COLUMNS else (UNIT, UNIT)
    spans, bounds = spans_of(first, after, _WORKERS * ROWS), _bounds(first, after)
    columns = [pl.ds(i, min(most, value_dim - i)) for i in range(0, value_dim, most)]

    def body(program: Any, worker: Any, *refs: Any) -> Any:
        q_ref, k_ref, v_ref, bounds_ref, out, numbers_out, q_tile, bounds, weights, numbers, *other = refs[4:]
        turn = _over_keys(program, worker, Spans(*refs[:4]), (k_ref, v_ref), group, keys)
        (b, row, head), result = turn.at, other[0] if other else q_tile

        def step(index: Any, k_tile: Any, v_tile: Any, carry: Any) -> Any:
            highest, total, *sums = carry
            scores = turn.scores(index, q_tile, k_tile, bounds)
            higher = jnp.maximum(highest, scores.max(1))
            found, fade = jnp.exp(scores - _across(higher, scores)), jnp.exp(highest - higher)
            weights[...] = found.astype(dtype)
            plgpu.commit_smem()
            total = total * fade + found.sum(1)
            for i, part in enumerate(columns):
                sums[i] = sums[i] * _across(fade, sums[i]) + _product(weights, v_tile.at[:, part])
            return higher, total, *sums

        def compute(run: Callable[[Any], Any]) -> None:
            widths: Any = columns  # Pallas's slices have sizes
            zeros = [jnp.zeros((ROWS, x.size), jnp.float32) for x in widths]
            highest, total, *sums = run((jnp.full(ROWS, FLOOR, jnp.float32), jnp.zeros(ROWS, jnp.float32), *zeros))
            total = jnp.where(total > 0, total, 1)
            for value, part in zip(sums, columns, strict=True):
                result[:, part] = (value * _across(1 / total, value)).astype(dtype)
            numbers[0], numbers[1] = highest, total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, out.at[b, row, head])
            plgpu.copy_smem_to_gmem(numbers, numbers_out.at[b, head, :, row])

        first = [(q_ref.at[b, row, head], q_tile), (bounds_ref.at[b, :, row], bounds)]
        return (turn.steps,), first, turn.sources, step, compute

    shapes = (*q.shape[:3], value_dim), (batch, heads * group, *bounds.shape[1:])
    out = [jax.ShapeDtypeStruct(shape, x) for shape, x in zip(shapes, (dtype, jnp.float32), strict=True)]
    loads = _Tile((ROWS, dim), dtype), _Tile((2, ROWS), jnp.int32)
    scratch = [_Tile((ROWS, keys), dtype), _Tile((2, ROWS), jnp.float32)]
    if value_dim != dim:  # otherwise the result takes the place of the queries
        scratch.append(_Tile((ROWS, value_dim), dtype))
    step = _Tile((keys, dim), dtype), _Tile((keys, value_dim), dtype)
    operands = *spans, q, k, v, bounds
    result, numbers = _launch(body, spans.low.size * q.shape[2], operands, out, loads, scratch, step, "attention")
    split = lambda x: x.reshape(batch, queries, heads, group, *x.shape[3:])  # noqa: E731
    highest, total = (split(numbers[:, :, i, :queries].swapaxes(1, 2)) for i in range(2))
    return Softmax(split(result[:, :queries, :, :width]), highest, total)


def part_gradients(
    q: Queries,
    k: Keys,
    v: Values,
    first: Bounds,
    after: Bounds,
    whole: Softmax,
    back: Results,
    through_logsumexp: PerQuery | None = None,
) -> tuple[Queries, Keys, Values]:
    """Return the gradients by q, k and v that go through the keys [first, after) of each query.

    `whole` is the softmax over all keys, of which these may be a part, `back` the gradient by its result, and
    `through_logsumexp` that by its log-sum-exp.
    """
    shapes = [x.shape for x in (q, k, v)]
    # The gradient of a score is its weight times (the gradient of the weight - `less`).
    less = (back.astype(jnp.float32) * whole.result.astype(jnp.float32)).sum(-1)
    less = less if through_logsumexp is None else less - through_logsumexp
    numbers = jnp.stack([_merged(x).swapaxes(1, 2) for x in (whole.highest, 1 / whole.total, less)], 2)
    q, k, v, back = _tiled(_merged(q), k, v, _merged(back))
    given = _Given(q, k, v, back, _padded(numbers, {3: _WORKERS * ROWS}), _bounds(first, after))
    by_q = _by_queries(given, spans_of(first, after, _WORKERS * ROWS))
    by_k, by_v = _by_keys(given, spans_of(first, after, given.tile))
    by_all = zip((by_q, by_k, by_v), shapes, strict=True)
    by_q, by_k, by_v = (x[:, : shape[1], :, : shape[-1]].reshape(shape) for x, shape in by_all)
    return by_q, by_k, by_v


class _Given(NamedTuple):
    """What gradients are computed from, as `_tiled` returns it.

    Attributes:
        q: The queries.
        k: The keys.
        v: The values.
        back: The gradient by the result.
        numbers: The largest score, 1 / the total, and what is subtracted from the gradients of weights.
        bounds: The first key of each query, and the one after the last.
        tile: The tokens of a block that a program runs over.
    """

    q: Float[Array, "batch queries heads head_dim"]
    k: Keys
    v: Values
    back: Float[Array, "batch queries heads value_dim"]
    numbers: Float[Array, "batch heads 3 padded"]
    bounds: Int[Array, "batch 2 padded"]

    @property
    def tile(self) -> int:
        return ROWS if self.q.shape[3] + self.v.shape[3] <= 2 * _COLUMNS else ROWS // 2


def _by_queries(given: _Given, spans: Spans) -> Float[Array, "batch queries heads head_dim"]:
    q, k, v, *_ = given
    (_, _, heads, dim), value_dim = q.shape, v.shape[3]
    group, keys = heads // k.shape[2], given.tile

    def body(program: Any, worker: Any, *refs: Any) -> Any:
        (q_ref, k_ref, v_ref, back_ref, numbers_ref, bounds_ref, out), tiles = refs[4:11], refs[11:]
        q_tile, back_tile, numbers, bounds, by_scores = tiles
        turn = _over_keys(program, worker, Spans(*refs[:4]), (k_ref, v_ref), group, keys)
        b, row, head = turn.at

        def step(index: Any, k_tile: Any, v_tile: Any, total: Any) -> Any:
            scores = turn.scores(index, q_tile, k_tile, bounds)
            weights = jnp.exp(scores - _across(numbers[0], scores)) * _across(numbers[1], scores)
            by_weights = _product(back_tile, v_tile.transpose((1, 0)))
            by_scores[...] = (weights * (by_weights - _across(numbers[2], scores))).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.wgmma(total, by_scores, k_tile)
            plgpu.wgmma_wait(0)
            return total

        def compute(run: Callable[[Any], Any]) -> None:
            def sums(total: Any) -> Array:
                run(total)
                return total[...]

            q_tile[...] = pl.run_scoped(sums, _Accumulator((ROWS, dim))).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out.at[b, row, head])

        first = [(x.at[b, row, head], tile) for x, tile in ((q_ref, q_tile), (back_ref, back_tile))]
        first += [(numbers_ref.at[b, head, :, row], numbers), (bounds_ref.at[b, :, row], bounds)]
        return (turn.steps,), first, turn.sources, step, compute

    rows = _Tile((ROWS, dim), q.dtype), _Tile((ROWS, value_dim), q.dtype)
    loads = *rows, _Tile((3, ROWS), jnp.float32), _Tile((2, ROWS), jnp.int32)
    scratch, step = [_Tile((ROWS, keys), q.dtype)], [_Tile((keys, size), q.dtype) for size in (dim, value_dim)]
    out = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    programs = spans.low.size * heads
    return _launch(body, programs, (*spans, *given), out, loads, scratch, step, "attention_by_queries")[0]


def _by_keys(given: _Given, spans: Spans) -> tuple[Keys, Values]:
    """Return both gradients from one kernel, or from two if the sums of both do not fit into registers."""
    if given.k.shape[3] + given.v.shape[3] <= _SUMS:
        by_k, by_v = _by_keys_of(given, spans, (True, True))
    else:
        (by_k,), (by_v,) = (_by_keys_of(given, spans, of) for of in ((True, False), (False, True)))
    return by_k, by_v


def _by_keys_of(given: _Given, spans: Spans, of: tuple[bool, bool]) -> list[Array]:
    """Return the gradients by keys and by values, those that `of` has True for."""
    q, k, v, *_ = given
    (batch, count, heads, dim), value_dim = k.shape, v.shape[3]
    group, tile, queries = q.shape[2] // heads, _WORKERS * ROWS, given.tile
    blocks = pl.cdiv(count, tile)
    from_block, to_block = meeting(spans, count, tile)

    def body(program: Any, worker: Any, *refs: Any) -> Any:
        from_, to, low, high, start, stop, q_ref, k_ref, v_ref, back_ref, numbers_ref, bounds_ref, *rest = refs
        outs, (k_tile, v_tile, scratch) = rest[:-3], rest[-3:]
        b, kv_head, block = _digits(program, (batch, heads, blocks))
        key = block * tile + worker * ROWS
        from_block = from_[b, block]

        def step(index: Any, q_tile: Any, back_tile: Any, numbers: Any, bounds: Any, totals: Any) -> Any:
            at = from_block + index[1]

            @pl.when((low[b, at] < key + ROWS) & (high[b, at] > key))
            def _() -> None:
                whole = (key >= start[b, at]) & (key + ROWS <= stop[b, at])
                scores = _masked(_product(k_tile, q_tile.transpose((1, 0))), (bounds[0], bounds[1]), key, whole, 0)
                weights = jnp.exp(scores - _across(numbers[0], scores, 1)) * _across(numbers[1], scores, 1)
                if of[1]:
                    scratch[...] = weights.astype(q.dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(totals[-1], scratch, back_tile)
                if of[0]:
                    by_weights = _product(v_tile, back_tile.transpose((1, 0)))  # waits for the other product too
                    scratch[...] = (weights * (by_weights - _across(numbers[2], scores, 1))).astype(q.dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(totals[0], scratch, q_tile)
                plgpu.wgmma_wait(0)

            return totals

        def compute(run: Callable[[Any], Any]) -> None:
            def sums(*totals: Any) -> list[Array]:
                run(totals)
                return [total[...] for total in totals]

            mine = [x for x, used in zip((k_tile, v_tile), of, strict=True) if used]
            found = pl.run_scoped(sums, *(_Accumulator(x.shape) for x in mine))
            for value, x in zip(found, mine, strict=True):
                x[...] = value.astype(q.dtype)
            plgpu.commit_smem()
            for x, out in zip(mine, outs, strict=True):
                plgpu.copy_smem_to_gmem(x, out.at[b, pl.ds(key, ROWS), kv_head])

        first = [(x.at[b, pl.ds(key, ROWS), kv_head], y) for x, y in ((k_ref, k_tile), (v_ref, v_tile))]
        head = lambda member: kv_head * group + member  # noqa: E731
        sources = [
            (ref, plgpu.BlockSpec((None, queries, None, size), lambda m, j: (b, from_block + j, head(m), 0)))
            for ref, size in ((q_ref, dim), (back_ref, value_dim))
        ]
        sources += [
            (numbers_ref, plgpu.BlockSpec((None, None, 3, queries), lambda m, j: (b, head(m), 0, from_block + j))),
            (bounds_ref, plgpu.BlockSpec((None, 2, queries), lambda m, j: (b, 0, from_block + j))),
        ]
        return (group, to[b, block] - from_block), first, sources, step, compute

    loads = [_Tile((ROWS, size), q.dtype) for size in (dim, value_dim)]
    step = [_Tile((queries, size), q.dtype) for size in (dim, value_dim)]
    step += [_Tile((3, queries), jnp.float32), _Tile((2, queries), jnp.int32)]
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, used in zip((k, v), of, strict=True) if used]
    operands, scratch = (from_block, to_block, *spans, *given), [_Tile((ROWS, queries), q.dtype)]
    return _launch(body, batch * heads * blocks, operands, out, loads, scratch, step, "attention_by_keys")
