"""Generation with a cache against the same model without one; on meshes, with padding, end tokens and draws."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import by_table, refused

import moezoo
from moezoo.generation import generate as generation
from moezoo.models import DeepSeekConfig, Llama4Config, MixtralConfig, build_model
from moezoo.models.base import LanguageModel
from moezoo.moe.dispatch import STRATEGIES, Auto, Capacity, Gather, Ragged
from moezoo.nn.rotary import Yarn
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.mesh_execution import on_mesh

VOCAB = 40
SMALL: dict[str, Any] = {
    "vocab": VOCAB,
    "embed": 16,
    "layers": 2,
    "heads": 4,
    "expert_mlp": 16,  # as `embed`, divisible by 16: a new token's experts run row by row
    "experts": 8,
    "init_std": 0.5,
}
LATENT: dict[str, Any] = {
    "kv_lora": 8,
    "nope_dim": 6,
    "rope_dim": 4,
    "value_dim": 5,
    "mlp": 20,
    "router": dataclasses.replace(DeepSeekConfig().router, groups=2, kept_groups=1),
}
CONFIGS = {
    "mixtral": MixtralConfig(**SMALL, kv_heads=2, head_dim=8, rope_base=100.0),
    "window": MixtralConfig(**SMALL, kv_heads=2, head_dim=8, rope_base=100.0, window=3),
    "deepseek": DeepSeekConfig(**SMALL, **LATENT, q_lora=8, yarn=Yarn(4.0, 8)),
    "stretches": Llama4Config(**SMALL, kv_heads=2, head_dim=8, rope_base=100.0, stretch=3, plain_layers=(1,)),
    "no q_lora": DeepSeekConfig(**SMALL, **LATENT, q_lora=None, dense_layers=0, rope_pairs="halves"),
}
# Prompts of one to five tokens; the shorter ones are padded on the left.
IDS = np.random.default_rng(0).integers(1, VOCAB, (4, 5)).astype(np.int32)
MASK = np.array([[1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]], bool)
NEW = 9


@functools.cache
def model(name):
    """Return a model in which every array is random, norms and biases included."""
    fresh = jax.jit(lambda key: build_model(CONFIGS[name], key=key))(jax.random.key(1))
    rng = np.random.default_rng(2)
    noise = lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape) * (x.ndim < 3), x.dtype)  # noqa: E731
    return jax.tree.map(lambda x: x + noise(x), fresh)


@functools.cache
def whole(name):
    """Return the model without a cache, compiled once."""
    read = jax.jit(lambda model, tokens, segments, positions: model(tokens, segments=segments, positions=positions))
    return functools.partial(read, model(name))


def segments_and_positions(mask):
    """Return segments and positions of rows with padding on the left."""
    return mask.astype(np.int32), np.maximum(np.cumsum(mask, 1) - 1, 0).astype(np.int32)


@functools.cache
def naive(name):
    """Return greedy tokens and logits [row, new, vocab]; the model reads the whole text again for every token."""
    tokens, mask = np.pad(IDS, ((0, 0), (0, NEW))), np.pad(MASK, ((0, 0), (0, NEW)), constant_values=True)
    logits = []
    for at in range(IDS.shape[1], tokens.shape[1]):
        logits.append(np.asarray(whole(name)(tokens, *segments_and_positions(mask)).logits)[:, at - 1])
        tokens[:, at] = logits[-1].argmax(-1)
    # No near tie decides a token, so rounding cannot change any.
    top = np.sort(np.stack(logits, axis=1), axis=-1)
    assert (top[..., -1] - top[..., -2]).min() > 1e-4
    return tokens, np.stack(logits, axis=1)


def find_stops(new):
    """Return three tokens at which all rows end before the last column, some earlier than others."""
    for stops in itertools.combinations(range(VOCAB), 3):
        ends = count_until(new, stops)
        if max(ends) < NEW - 1 and len(set(ends)) > 1:
            return list(stops)
    pytest.fail("choose another seed: no three tokens end all rows")


def count_until(new, stops):
    """Return how many of each row's new tokens come before the first of `stops`."""
    return [next((i for i, token in enumerate(row) if token in stops), NEW) for row in new]


def end_at(tokens, stops):
    """Return greedy tokens as they are with `stops`: ended rows continue with the first, up to the longest row."""
    width, ends, ended = IDS.shape[1], count_until(tokens[:, IDS.shape[1] :], stops), tokens.copy()
    for row, end in zip(ended, ends, strict=True):
        row[width + end + 1 :] = stops[0]
    return ended[:, : width + max(ends) + 1]


def test_greedy_equals_running_the_whole_text_again():
    """A model with a window; "mixtral" is in the test of end tokens, "deepseek" in that of meshes."""
    found = moezoo.generate(model("window"), IDS, mask=MASK, max_new_tokens=NEW)
    np.testing.assert_array_equal(found, naive("window")[0])
    assert found.dtype == np.int32


# The tokens of "mixtral" are in the test of end tokens.
@pytest.mark.parametrize(
    "name", ["window", "stretches", "deepseek", pytest.param("no q_lora", marks=pytest.mark.weekly)]
)
def test_logits_with_a_cache_equal_those_without(name):
    tokens, logits = naive(name)
    width, execution = IDS.shape[1], on_mesh(moezoo.Execution())
    segments, positions = segments_and_positions(np.pad(MASK, ((0, 0), (0, NEW)), constant_values=True))

    @jax.jit
    def read(model, tokens, segments, positions):
        at = Coordinates(positions[:, :width], segments[:, :width])
        first, cache = generation.prefill(model, tokens[:, :width], at, width + NEW, execution)

        def one(cache, column):
            here = Coordinates(*(jax.lax.dynamic_slice_in_dim(p, column, 1, 1) for p in (positions, segments)))
            token = jax.lax.dynamic_slice_in_dim(tokens, column, 1, 1)
            logits, cache = generation.decode(model, token, here, cache, execution)
            return cache, logits

        _, rest = jax.lax.scan(one, cache, jnp.arange(width, width + NEW - 1))
        return jnp.concatenate([first[:, None], jnp.moveaxis(rest, 0, 1)], axis=1)

    found = read(model(name), *map(jnp.asarray, (tokens, segments, positions)))
    # Far above the rounding of float32 sums of tens of terms, far below a wrong key, position or mask.
    np.testing.assert_allclose(found, logits, rtol=0, atol=2e-5 * abs(logits).max())


def test_what_is_kept():
    """A window bounds the number of slots; DeepSeek keeps a latent and a shared key, not keys and values of heads."""
    for name, slots, numbers in (("mixtral", 14, {2 * 8}), ("window", 3, {2 * 8}), ("deepseek", 14, {8 + 4})):
        at: Any = Coordinates(*(jax.ShapeDtypeStruct(IDS.shape, jnp.int32),) * 2)  # type: ignore[arg-type]
        read = functools.partial(generation.prefill, length=14, execution=on_mesh(moezoo.Execution()))
        cache = jax.eval_shape(lambda m, t, p, read=read: read(m, t, p), model(name), at.position, at).cache
        kept = jax.tree.leaves(cache.states)
        assert {int(np.prod(x.shape[2:])) // x.shape[-2] for x in kept} == numbers
        # As declared.
        states = [block.attention.state(14) for stack in model(name).stacks for block in stack.blocks]
        declared = [tuple(leaf.sizes.values()) for leaf in jax.tree.leaves(states)]
        assert [x.shape[2:] for x in kept] == declared
        assert {(x.shape[1], x.shape[-2]) for x in kept} == {(4, slots)}


def make_execution(mesh, strategy, rules="fsdp_ep"):
    """Return an execution; rules and strategy are names."""
    layout = moezoo.compose(f"rules={rules}").rules
    # In training this capacity drops tokens; generation must not.
    dispatch = Capacity(0.25) if strategy == "capacity" else STRATEGIES[strategy]()
    return moezoo.Execution(moezoo.make_mesh(moezoo.MeshShape(**mesh)), layout, dispatch)


# A model, a mesh, a strategy, rules, and rows. With `expert` 8, and for one row, all devices have the same tokens; the
# other cases split rows. The test of end tokens splits rows on a mesh with a context axis.
MESHES = [
    ("mixtral", {"expert": 8}, "ragged", "fsdp_ep", 4),
    ("window", {"fsdp": 2, "expert": 4}, "gather", "fsdp_ep", 4),
    ("mixtral", {"fsdp": 2, "expert": 4}, "dense", "fsdp_ep", 1),
    ("deepseek", {"fsdp": 2, "expert": 4}, "capacity", "fsdp_ep", 4),
    ("window", {"fsdp": 4}, "ring", "pure_fsdp", 4),
    ("window", {"fsdp": 2, "tensor": 4}, "ring", "tensor", 4),
    pytest.param("deepseek", {"expert": 4, "tensor": 2}, "ragged", "tensor", 1, marks=pytest.mark.weekly),
]


@pytest.mark.parametrize(("name", "mesh", "strategy", "rules", "rows"), MESHES)
def test_meshes_give_the_same_tokens(name, mesh, strategy, rules, rows):
    execution = make_execution(mesh, strategy, rules)
    # A model may be on the mesh already, or anywhere else.
    there = moezoo.place(model(name), execution) if rows > 1 else model(name)
    found = moezoo.generate(there, IDS[:rows], mask=MASK[:rows], max_new_tokens=NEW, execution=execution)
    np.testing.assert_array_equal(found, naive(name)[0][:rows])


def test_auto_chooses_for_prompt_and_token_each(monkeypatch):
    """Weights move for many prompts, tokens move for one more token of each; the texts are those of one device."""
    used = {}
    for name, run in (("prefill", generation.prefill), ("decode", generation.decode)):

        def spy(*arguments, name=name, run=run):
            used[name] = arguments[-1].dispatch
            return run(*arguments)

        monkeypatch.setattr(generation, name, spy)
    execution = dataclasses.replace(make_execution({"expert": 8}, "ring"), dispatch=Auto())
    ids, mask = (np.tile(part, (12, 1)) for part in (IDS, MASK))
    found = moezoo.generate(model("mixtral"), ids, mask=mask, max_new_tokens=NEW, execution=execution)
    assert used == {"prefill": Gather(), "decode": Ragged()}
    np.testing.assert_array_equal(found, np.tile(naive("mixtral")[0], (12, 1)))


def test_rows_are_split_over_axes_that_divide_them():
    execution = on_mesh(make_execution({"fsdp": 2, "expert": 2, "context": 2}, "ring"))
    over = {rows: execution.for_rows(rows).batch_axes for rows in (1, 2, 3, 4, 6, 8)}
    assert over == {
        1: (),
        2: ("fsdp",),
        3: (),
        4: ("fsdp", "expert"),
        6: ("fsdp",),
        8: ("fsdp", "expert", "context"),
    }
    assert execution.for_rows(8).sequence_axes == ()


def test_stops_when_all_rows_have_ended():
    greedy, _ = naive("mixtral")
    new = greedy[:, IDS.shape[1] :]
    stops = find_stops(new)
    stopped = functools.partial(moezoo.generate, model("mixtral"), IDS, mask=MASK, max_new_tokens=NEW)
    np.testing.assert_array_equal(stopped(eos_token_id=stops), end_at(greedy, stops))
    mesh = make_execution({"fsdp": 2, "expert": 2, "context": 2}, "ring")
    np.testing.assert_array_equal(stopped(eos_token_id=stops, execution=mesh), end_at(greedy, stops))
    # Tokens that never come change nothing.
    absent = [token for token in range(VOCAB) if token not in new][:3]
    np.testing.assert_array_equal(stopped(eos_token_id=absent), greedy)
    np.testing.assert_array_equal(stopped(eos_token_id=absent, execution=mesh), greedy)


@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "expert": 4}])
def test_a_stream_has_the_tokens_as_they_come(mesh, monkeypatch):
    """One column at a time where a token takes long, several where it does not, none once all rows have ended."""
    execution = None if mesh is None else make_execution(mesh, "gather")
    stops = find_stops(naive("window")[0][:, IDS.shape[1] :])
    same: dict[str, Any] = {"mask": MASK, "max_new_tokens": NEW, "execution": execution}
    for settings in ({**same, "temperature": 1.5, "key": jax.random.key(3)}, {**same, "eos_token_id": stops}):
        whole = moezoo.generate(model("window"), IDS, **settings)[:, IDS.shape[1] :]
        for pause in (0.0, 1e3):
            monkeypatch.setattr(generation, "_PAUSE", pause)
            parts = [*moezoo.stream(model("window"), IDS, **settings)]
            np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
            rest = whole.shape[1] - 2
            assert [part.shape[1] for part in parts] == [1, 1, *([rest] if pause and rest else [1] * rest)]


def test_draws_are_the_same_on_a_mesh_and_differ_by_key_and_row():
    same = np.repeat(IDS[:1], 4, axis=0)
    drawn = functools.partial(moezoo.generate, model("mixtral"), same, max_new_tokens=NEW, temperature=1.5, top_p=0.95)
    mesh = make_execution({"fsdp": 2, "expert": 4}, "ring")
    one = drawn(key=jax.random.key(0))
    np.testing.assert_array_equal(drawn(key=jax.random.key(0)), one)
    assert (drawn(key=jax.random.key(1)) != one).any()
    assert len({tuple(row) for row in one.tolist()}) == 4
    for key in (jax.random.key(0), jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)):
        np.testing.assert_array_equal(drawn(key=key, execution=mesh), drawn(key=key))
    with pytest.raises(moezoo.UserError, match=r"^key is not one random key; write key=jax.random.key\(SEED\)$"):
        drawn(key=jax.random.split(jax.random.key(0)))


def test_every_token_has_a_random_key_of_its_own():
    """Of logits that are all equal: tokens of one key are the same in every row."""
    even = jax.tree.map(jnp.zeros_like, model("window"))
    drawn = moezoo.generate(even, IDS, mask=MASK, max_new_tokens=NEW, temperature=1.5, key=jax.random.key(0))
    assert len({tuple(column) for column in drawn[:, IDS.shape[1] :].T.tolist()}) == NEW


@pytest.fixture
def traced_widths(monkeypatch):
    """The widths of the token arrays that a model embeds while it is traced."""
    widths, embed = [], LanguageModel.embed

    def recorded(self, tokens, execution):
        widths.append(tokens.shape[1])
        return embed(self, tokens, execution)

    monkeypatch.setattr(LanguageModel, "embed", recorded)
    return widths


def test_lengths_that_round_alike_share_a_program(traced_widths):
    moezoo.generate(model("window"), IDS[:, :3], max_new_tokens=2)
    traced_widths.clear()
    moezoo.generate(model("window"), np.ones((4, 9), np.int32), max_new_tokens=16)
    moezoo.generate(model("window"), np.ones((4, 16), np.int32), max_new_tokens=5)
    assert not traced_widths


def test_lengths_are_rounded_up(monkeypatch):
    """By at most a quarter, or to 16. The last text has as many tokens as the model allows."""

    class TracingEndedError(Exception):
        """Nothing is compiled."""

    widths = []

    def stop(self, tokens, execution):
        widths.append(tokens.shape[1])
        raise TracingEndedError

    monkeypatch.setattr(LanguageModel, "embed", stop)
    for length, rounded in {1: 16, 16: 16, 17: 32, 128: 128, 129: 160, 1100: 1280, 32767: 32768}.items():
        with pytest.raises(TracingEndedError):
            moezoo.generate(model("window"), np.ones((3, length), np.int32), max_new_tokens=1)
        assert widths[-1] == rounded


@by_table(
    """
    changes => line
    ids=[1, 2] => ids are int64[2], expected integers [batch, seq]; for one text write ids[None]
    ids=[[1.0]] => ids are float64[1, 1], expected integers [batch, seq]
    ids=[[1], [1, 2]] => ids have rows of different lengths; pad the shorter ones
    ids=np.zeros((1, 0), int) => ids are int64[1, 0], expected integers
    ids=[[40]] => ids contains 40, expected 0 to 39 (model.vocab=40)
    ids=[[-1]] => ids contains -1, expected 0 to 39
    eos_token_id=41 => eos_token_id contains 41, expected 0 to 39
    mask=[[1, 0]] => mask is false after a token; put padding before the prompt, on the left
    mask=[[1, 0, 1]], ids=[[1, 2, 3]] => mask is false after a token
    mask=[[0, 0]] => mask leaves no token in row 0; a prompt needs at least one
    mask=[[0.5, 0.5]] => mask is float64 and not only 0 and 1
    mask=[[2, 2]] => mask is int64 and not only 0 and 1
    mask=[[1]] => mask is [1, 1] and ids are [1, 2]; give both the same shape
    max_new_tokens=0 => max_new_tokens=0 must be at least 1
    max_new_tokens=5000 => a prompt of 2 tokens plus max_new_tokens=5000 exceeds model.max_length=4096
    ids=np.ones((1, 4096), int)
        => a prompt of 4096 tokens plus max_new_tokens=1 exceeds model.max_length=4096; shorten the prompt
    ids=np.ones((2, 4095), int), mask=np.arange(4095) >= [[4094], [0]], max_new_tokens=2
        => a prompt of 4095 tokens plus max_new_tokens=2 exceeds model.max_length=4096
    # Numbers at padding are ignored, so the next mistake is named.
    ids=[[99, 1]], mask=[[0, 1]], temperature=1.0 => temperature=1.0 draws at random
    temperature=1.0 => temperature=1.0 draws at random and needs key=jax.random.key(SEED)
    temperature=-1.0 => temperature=-1.0 must be at least 0
    temperature=np.nan => temperature=nan: expected a number
    top_k=3 => top_k=3 has no effect at temperature 0
    top_p=0.0, temperature=1.0 => top_p=0.0 must be above 0 and at most 1
    top_k=0, temperature=1.0 => top_k=0 must be at least 1
    """
)
def test_refuses_in_one_line(changes, line):
    arguments = {"ids": [[1, 2]], "max_new_tokens": 1} | eval(f"dict({changes})")
    with refused(line):
        moezoo.generate(model("deepseek"), **arguments)
