"""Continue prompts: read each prompt in one pass, then one token per step with a cache."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from moezoo.errors import UserError, check_type
from moezoo.generation.sampling import Sampling
from moezoo.models.base import LanguageModel, as_integers, check_inside, check_key
from moezoo.models.block import Block
from moezoo.models.choice import choose_dispatch
from moezoo.nn.cache import Cache, Kept, State, fill_declared
from moezoo.nn.few_bits import cut_pieces
from moezoo.nn.positions import Context
from moezoo.parallel.cache import function_cache
from moezoo.parallel.collectives import gather, psum, vary
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import check_precision
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh, place
from moezoo.parallel.traffic import CallName
from moezoo.typed import Range, convert

_PAUSE = 0.1  # seconds between two items of a stream, where tokens take less


class Advanced(NamedTuple):
    """Logits after the last column, and the cache for the next one."""

    logits: Float[Array, "batch vocab"]
    cache: Cache


def prefill(
    model: LanguageModel,
    tokens: Int[Array, "batch seq"],
    at: Coordinates,
    length: int,
    execution: MeshExecution,
) -> Advanced:
    """Read prompts inside `shard_map` (or on one device); the cache has room for `length` tokens per row.

    `at` holds each token's position and segment; segment 0 is padding.
    """

    def collect(block: Block, kept: PyTree) -> State:
        return fill_declared(block.attention, kept, length)

    context = Context(at, at, chunks=(0,))  # padding, then one text
    x, states, _ = model.layers(model.embed(tokens, execution), context, execution, collect=collect)
    return Advanced(_last_logits(model, x, execution), Cache.of_prompts(states, at))


def decode(
    model: LanguageModel,
    tokens: Int[Array, "batch 1"],
    at: Coordinates,
    cache: Cache,
    execution: MeshExecution,
) -> Advanced:
    """Read one more token of each row, inside `shard_map` or on one device."""
    cache = cache.add_token(at)
    x, fresh, _ = model.layers(model.embed(tokens, execution), Context(at, at), execution, cache)
    return Advanced(_last_logits(model, x, execution), cache.advance(fresh))


def _last_logits(model: LanguageModel, x: Float[Array, "batch seq embed"], execution: MeshExecution) -> Array:
    """Return the logits [batch, vocab] after the last token: one all-gather over the devices that share the vocabulary.

    The result does not vary over these, so they choose the same token.
    """
    own = model.head(x[:, -1:], execution)[:, 0]
    with jax.named_scope("head"):
        return gather(own, execution.inner_group("vocab").axes, 1, tokens=())


@function_cache()
def generate(
    model: LanguageModel,
    ids: Array | np.ndarray | Sequence[Any],
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    execution: Execution | None = None,
    mask: Array | np.ndarray | Sequence[Any] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    vocab: int | None = None,
    key: Array | None = None,
) -> Int[np.ndarray, "batch longer"]:
    """Return prompts and their continuations, int32 [batch, seq + new].

    Two programs are compiled for each model, batch size and rounded length, one that reads and one that writes, and on
    one device kept for later processes, in `moezoo` in XDG_CACHE_HOME or ~/.cache (docs/running.md). A mesh splits the
    batch over those of its axes whose sizes divide it; devices along the other axes do the same work, except for the
    experts' work, which they share. The same key draws the same tokens on every mesh.

    Args:
        model: The model that continues the prompts.
        ids: The prompts, integers [batch, seq].
        max_new_tokens: The most tokens that are added to each row.
        eos_token_id: One or more tokens that end a row. An ended row is filled with the first of them; generation
            stops early when all rows have ended.
        execution: How the model runs; by default on one device.
        mask: Booleans [batch, seq], false at padding, which comes before the prompt. By default nothing is padding.
        temperature: 0 always takes the most likely token; above 0 draws at random, which needs `key`.
        top_k: See `moezoo.generation.sampling.Sampling`.
        top_p: See `moezoo.generation.sampling.Sampling`.
        vocab: See `moezoo.generation.sampling.Sampling`.
        key: One random key.

    Raises:
        UserError: Prompts are not integers [batch, seq] of the vocabulary, have padding on the right, or exceed
            `config.longest` with the new tokens; or the sampling settings are invalid.
    """
    sampling = Sampling(temperature, top_k, top_p, vocab)
    asked = _ask(model, ids, max_new_tokens, eos_token_id, execution, mask, sampling, key)
    end = _write(asked.model, asked.prompts, _read(*asked), asked.how)
    new, count = jax.device_get((end.new, end.count))
    return np.concatenate([np.asarray(ids).astype(np.int32), new[:, : int(count)]], axis=1)


@function_cache()
def stream(
    model: LanguageModel,
    ids: Array | np.ndarray | Sequence[Any],
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    execution: Execution | None = None,
    mask: Array | np.ndarray | Sequence[Any] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    vocab: int | None = None,
    key: Array | None = None,
) -> Iterator[Int[np.ndarray, "batch some"]]:
    """Return an iterator over the tokens that `generate` adds, int32 [batch, some], which has them as they come.

    Each item has the columns that were written in a tenth of a second, or one that took longer. All items together
    are what `generate`, which has the same arguments and programs, adds to the prompts. The prompts are read, and both
    programs are compiled, before this returns.

    Raises:
        UserError: As `generate`.
    """
    sampling = Sampling(temperature, top_k, top_p, vocab)
    asked = _ask(model, ids, max_new_tokens, eos_token_id, execution, mask, sampling, key)
    # Writing nothing compiles the program here, where `function_cache` keeps it.
    return _columns(asked, _write_until(asked, _read(*asked), 1))


def _columns(asked: "_Asked", now: "Continued") -> Iterator[Int[np.ndarray, "batch some"]]:
    """Yield the columns that are written, and write more."""
    limit, seen, steps = int(asked.prompts.limit), 0, 1
    while True:
        new, count, all_ended = jax.device_get((now.new, now.count, now.all_ended))
        yield new[:, seen : int(count)]
        seen = int(count)
        if all_ended or seen >= limit:
            return
        began = time.perf_counter()
        now = jax.block_until_ready(_write_until(asked, now, min(seen + steps, limit)))
        # A call from Python takes a part of a millisecond. Several processes have to make the same calls.
        if jax.process_count() == 1:
            steps = max(1, int(steps * _PAUSE / (time.perf_counter() - began)))


class _Asked(NamedTuple):
    """The arguments of `_read`."""

    model: LanguageModel
    prompts: "Prompts"
    how: "Continuation"


def _ask(
    model: LanguageModel,
    ids: Any,
    max_new_tokens: int,
    eos_token_id: Any,
    execution: Execution | None,
    mask: Any,
    sampling: Sampling,
    key: Array | None,
) -> _Asked:
    """Check the arguments of `generate`, and lay out what its programs take."""
    execution = Execution() if execution is None else execution
    check_type("model", model, LanguageModel, "load one with moezoo.load_run or moezoo.from_pretrained")
    check_precision()
    check_type("execution", execution, Execution, "write execution=moezoo.execution(cfg)")
    max_new_tokens = convert(int, max_new_tokens, "max_new_tokens", valid=Range(at_least=1))
    tokens, valid, stops = _check_prompts(model, ids, mask, max_new_tokens, eos_token_id)
    if sampling.temperature > 0 and key is None:
        raise UserError(f"temperature={sampling.temperature} draws at random and needs key=jax.random.key(SEED)")
    how = on_mesh(execution).exact.in_turn.for_rows(len(tokens))
    if how.mesh is not None:
        model = place(cut_pieces(model, how), how)

    # Lengths are rounded up (padding on the left, unused room on the right), so few programs are compiled.
    width, room = round_up(tokens.shape[1]), round_up(max_new_tokens)
    wider = ((0, 0), (width - tokens.shape[1], 0))
    prompts = Prompts(
        jnp.asarray(np.pad(tokens, wider)),
        jnp.asarray(np.pad(valid, wider)),
        jnp.arange(len(tokens)),
        jnp.asarray(max_new_tokens, jnp.int32),
        jnp.asarray(stops, jnp.int32),
        _threefry(jax.random.key(0) if key is None else key),
    )
    return _Asked(model, prompts, continuation(model, width, room, sampling, how, rows=len(tokens)))


def _threefry(key: Array) -> Array:
    """Return a threefry key: its draws for a row do not depend on the other rows, so a mesh does not change them."""
    check_key(key)
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")


def _check_prompts(
    model: LanguageModel, ids: Any, mask: Any, max_new_tokens: int, eos_token_id: Any
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Check the arguments; return tokens and mask [batch, seq], and the tokens that end a row."""
    tokens = np.asarray(as_integers("ids", ids))
    valid = _check_mask(mask, tokens.shape)
    if not valid.any(1).all():
        raise UserError(f"mask leaves no token in row {int(valid.any(1).argmin())}; a prompt needs at least one")
    if (valid[:, :-1] & ~valid[:, 1:]).any():
        raise UserError("mask is false after a token; put padding before the prompt, on the left")
    ends = [] if eos_token_id is None else eos_token_id
    ends = ends.tolist() if isinstance(ends, np.ndarray | jax.Array) else ends
    stops = convert(tuple[int, ...], ends if isinstance(ends, list | tuple) else [ends], "eos_token_id")
    for name, some in (("ids", tokens[valid]), ("eos_token_id", np.asarray(stops, int))):
        check_inside(name, some, model.vocab, f"model.vocab={model.vocab}")
    longest, limit = int(valid.sum(1).max()), model.config.longest
    if longest + max_new_tokens > limit.tokens:
        room = limit.tokens - longest
        raise UserError(
            f"a prompt of {longest} tokens plus max_new_tokens={max_new_tokens} exceeds {limit}; "
            + (f"set max_new_tokens to at most {room}" if room > 0 else "shorten the prompt")
        )
    return np.where(valid, tokens, 0).astype(np.int32), valid, list(stops)


def _check_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the mask as booleans of this shape; all true without one."""
    try:
        found = np.ones(shape, bool) if mask is None else np.asarray(mask)
    except ValueError:
        raise UserError("mask has rows of different lengths; give it the shape of ids") from None
    if found.shape != shape:
        raise UserError(f"mask is {list(found.shape)} and ids are {list(shape)}; give both the same shape")
    if found.dtype != bool and not (np.issubdtype(found.dtype, np.integer) and np.isin(found, (0, 1)).all()):
        raise UserError(f"mask is {found.dtype} and not only 0 and 1; write true at tokens and false at padding")
    return found.astype(bool)


def calls(rows: int, length: int) -> dict[CallName, tuple[int, int]]:
    """Return the rows and tokens per row that `generate` reads at once, for prompts of at most `length` tokens."""
    return {"prefill": (rows, round_up(length)), "decode": (rows, 1)}


def round_up(length: int) -> int:
    """Round up by at most a quarter: from 64 on, four lengths per power of two; below, multiples of 16."""
    step = max(16, 1 << max(length - 1, 0).bit_length() >> 3)
    return -(-length // step) * step


class Prompts(NamedTuple):
    """What a continuation reads: `row` numbers the rows; after `limit` new tokens it ends; `stops` end a row."""

    tokens: Int[Array, "batch seq"]
    valid: Bool[Array, "batch seq"]
    row: Int[Array, " batch"]
    limit: Int[Array, ""]
    stops: Int[Array, " stops"]
    key: Array


class Continued(NamedTuple):
    """The carry of the loop: `count` tokens are written to `new`; the model has not yet read the last, `token`."""

    count: Int[Array, ""]
    new: Int[Array, "batch room"]
    token: Int[Array, " batch"]
    ended: Bool[Array, " batch"]
    all_ended: Bool[Array, ""]
    cache: Cache


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How prompts are continued, by at most `room` tokens to texts of at most `length`.

    `begin`, `advance` and `proceed` run inside `shard_map`, or on one device.
    """

    length: int
    room: int
    sampling: Sampling
    prefill: MeshExecution
    decode: MeshExecution

    def begin(self, model: LanguageModel, prompts: Prompts) -> Continued:
        """Read the prompts and choose their first token."""
        tokens, valid, width = prompts.tokens, prompts.valid, prompts.tokens.shape[1]
        lengths = valid.sum(1, dtype=jnp.int32)
        position = jnp.maximum(jnp.arange(width, dtype=jnp.int32)[None] - (width - lengths)[:, None], 0)
        at = Coordinates(position, valid.astype(jnp.int32))
        logits, cache = prefill(model, tokens, at, self.length, self.prefill)
        empty = vary(jnp.zeros((len(tokens), self.room), jnp.int32), self.prefill.token_axes)
        ended = vary(jnp.zeros(len(tokens), bool), self.prefill.token_axes)
        start = Continued(jnp.int32(0), empty, empty[:, 0], ended, jnp.bool(False), cache)
        return self._append_token(prompts, start, logits)

    def advance(self, model: LanguageModel, prompts: Prompts, now: Continued) -> Continued:
        """Read one more token of each row and choose the next."""
        # A row that has ended continues as padding, which experts do not compute.
        lengths = prompts.valid.sum(1, dtype=jnp.int32)
        here = Coordinates((lengths + now.count - 1)[:, None], (~now.ended).astype(jnp.int32)[:, None])
        advanced = decode(model, now.token[:, None], here, now.cache, self.decode)
        return self._append_token(prompts, now._replace(cache=advanced.cache), advanced.logits)

    def proceed(self, model: LanguageModel, prompts: Prompts, now: Continued) -> Continued:
        """Write further tokens, up to the limit of the prompts."""
        return lax.while_loop(
            lambda now: (now.count < prompts.limit) & ~now.all_ended,
            lambda now: self.advance(model, prompts, now),
            now,
        )

    def _append_token(self, prompts: Prompts, now: Continued, logits: Array) -> Continued:
        stops, token = prompts.stops, self.sampling(logits, prompts.row, now.count, prompts.key)
        ended, all_ended = now.ended, now.all_ended
        if stops.size:
            token = jnp.where(now.ended, stops[0], token)
            ended = ended | (token[:, None] == stops[None]).any(1)
            all_ended = psum((~ended).sum(dtype=jnp.int32), self.prefill.token_axes) == 0
        new = lax.dynamic_update_slice(now.new, token[:, None], (0, now.count))
        return Continued(now.count + 1, new, token, ended, all_ended, now.cache)

    def programs(self, model: LanguageModel) -> "Programs":
        """Return the methods as functions of whole arrays, for models like `model`."""
        rows: Any = PartitionSpec(self.prefill.batch_axes or None)
        everywhere: Any = PartitionSpec()
        states = tuple(tuple(block.attention.state(self.length) for block in s.blocks) for s in model.stacks)
        laid_out: Any = jax.tree.map(functools.partial(_state_spec, execution=self.prefill), states)
        now = Continued(everywhere, rows, rows, rows, everywhere, Cache(laid_out, rows, everywhere))
        given = (self.prefill.specs(model), Prompts(rows, rows, rows, *(everywhere,) * 3), now)
        run = self.prefill.run
        return Programs(
            lambda *arguments: run(self.begin, arguments, given[:2], now),
            lambda *arguments: run(self.advance, arguments, given, now),
            lambda *arguments: run(self.proceed, arguments, given, now),
        )


def _state_spec(kept: Kept, execution: MeshExecution) -> PartitionSpec:
    """Return the layout of an array [layer, batch, ...] of a state."""
    inner = (execution.rules.kept(logical, execution.sizes) or None for logical in kept.sizes)
    return PartitionSpec(None, execution.batch_axes or None, *inner)


def continuation(
    model: LanguageModel, length: int, room: int, sampling: Sampling, execution: MeshExecution, *, rows: int
) -> Continuation:
    """Return how `rows` prompts of `length` tokens are continued; reading and writing may use two strategies."""
    chosen = (choose_dispatch(model.stacks, *n, execution, call) for call, n in calls(rows, length).items())
    return Continuation(round_up(length) + room, room, sampling, *chosen)


class Programs(NamedTuple):
    """`begin`, `advance` and `proceed` of a `Continuation` as functions of whole arrays."""

    begin: Callable[[LanguageModel, Prompts], Continued]
    advance: Callable[[LanguageModel, Prompts, Continued], Continued]
    proceed: Callable[[LanguageModel, Prompts, Continued], Continued]


@functools.partial(jax.jit, static_argnames="how")
def _read(model: LanguageModel, prompts: Prompts, how: Continuation) -> Continued:
    return how.programs(model).begin(model, prompts)


@functools.partial(jax.jit, static_argnames="how", donate_argnames="now")
def _write(model: LanguageModel, prompts: Prompts, now: Continued, how: Continuation) -> Continued:
    return how.programs(model).proceed(model, prompts, now)


def _write_until(asked: _Asked, now: Continued, count: int) -> Continued:
    """Write up to column `count`."""
    return _write(asked.model, asked.prompts._replace(limit=jnp.asarray(count, jnp.int32)), now, asked.how)


def prompt_shapes(rows: int, length: int) -> Prompts:
    """Return the shapes of `rows` prompts of `length` tokens, which are padded to a rounded length; no stop tokens."""
    make = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    whole, key = (rows, round_up(length)), jax.eval_shape(lambda: _threefry(jax.random.key(0)))
    shapes: Any = (make(whole), make(whole, jnp.bool), make((rows,)), make(()), make((0,)), key)
    return Prompts(*shapes)
