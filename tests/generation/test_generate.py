"""Generation with caches against the same model run whole for every token; on meshes, padded, stopped, drawn."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moezoo
from moezoo.generation import generate as generation
from moezoo.models import DeepSeekConfig, MixtralConfig, build_model
from moezoo.moe.dispatch import STRATEGIES
from moezoo.nn.yarn import Yarn
from moezoo.parallel.context_parallel import Place

VOCAB = 40
SMALL: dict[str, Any] = {
    "vocab": VOCAB,
    "embed": 16,
    "layers": 2,
    "heads": 4,
    "expert_mlp": 12,
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
    "no q_lora": DeepSeekConfig(**SMALL, **LATENT, q_lora=None, dense_layers=0, rope_pairs="halves"),
}
# Prompts of five tokens or fewer: two are filled up on the left.
IDS = np.random.default_rng(0).integers(1, VOCAB, (4, 5)).astype(np.int32)
MASK = np.array([[1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]], bool)
NEW = 9


@functools.cache
def model(name):
    """Every array random, so that no part of a layer is what it starts as."""
    fresh = build_model(CONFIGS[name], key=jax.random.key(1))
    rng = np.random.default_rng(2)
    noise = lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape) * (x.ndim < 3), x.dtype)  # noqa: E731
    return jax.tree.map(lambda x: x + noise(x), fresh)


@functools.cache
def whole(name):
    """The whole model over rows of one length, compiled once."""
    read = jax.jit(lambda model, tokens, segments, positions: model(tokens, segments=segments, positions=positions))
    return functools.partial(read, model(name))


def segments_and_positions(mask):
    """Segments and positions of rows whose padding is on the left."""
    return mask.astype(np.int32), np.maximum(np.cumsum(mask, 1) - 1, 0).astype(np.int32)


@functools.cache
def naive(name):
    """Greedy tokens and logits [row, new, vocab]: the whole text runs again for every token."""
    tokens, mask = np.pad(IDS, ((0, 0), (0, NEW))), np.pad(MASK, ((0, 0), (0, NEW)), constant_values=True)
    logits = []
    for at in range(IDS.shape[1], tokens.shape[1]):
        logits.append(np.asarray(whole(name)(tokens, *segments_and_positions(mask)).logits)[:, at - 1])
        tokens[:, at] = logits[-1].argmax(-1)
    return tokens, np.stack(logits, axis=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_running_the_whole_text_again(name):
    wanted, logits = naive(name)
    # What decides is no near tie that rounding could turn.
    top = np.sort(logits, axis=-1)
    assert (top[..., -1] - top[..., -2]).min() > 1e-4
    found = moezoo.generate(model(name), IDS, mask=MASK, max_new_tokens=NEW)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.int32


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_with_a_cache_equal_those_without(name):
    tokens, logits = naive(name)
    width, execution = IDS.shape[1], moezoo.Execution()
    segments, positions = segments_and_positions(np.pad(MASK, ((0, 0), (0, NEW)), constant_values=True))

    @jax.jit
    def read(model, tokens, segments, positions):
        at = Place(positions[:, :width], segments[:, :width])
        first, cache = generation.prefill(model, tokens[:, :width], at, width + NEW, execution)

        def one(cache, column):
            here = Place(*(jax.lax.dynamic_slice_in_dim(p, column, 1, 1) for p in (positions, segments)))
            token = jax.lax.dynamic_slice_in_dim(tokens, column, 1, 1)
            logits, cache = generation.decode(model, token, here, cache, execution)
            return cache, logits

        _, rest = jax.lax.scan(one, cache, jnp.arange(width, width + NEW - 1))
        return jnp.concatenate([first[:, None], jnp.moveaxis(rest, 0, 1)], axis=1)

    found = read(model(name), *map(jnp.asarray, (tokens, segments, positions)))
    # float32 sums of some tens of terms in two layers, against an error in a key, a position or a mask.
    np.testing.assert_allclose(found, logits, rtol=0, atol=2e-5 * abs(logits).max())


def test_what_is_kept():
    """Mixtral's window and DeepSeek's latents bound it: no key or value of a head, no token beyond a window."""
    for name, slots, numbers in (("mixtral", 14, {2 * 8}), ("window", 3, {2 * 8}), ("deepseek", 14, {8, 4})):
        at: Any = Place(*(jax.ShapeDtypeStruct(IDS.shape, jnp.int32),) * 2)  # type: ignore[arg-type]
        read = functools.partial(generation.prefill, length=14, execution=moezoo.Execution())
        cache = jax.eval_shape(lambda m, t, p, read=read: read(m, t, p), model(name), at.position, at).cache
        kept = jax.tree.leaves(cache.kept)
        assert {int(np.prod(x.shape[3:])) for x in kept} == numbers
        assert {x.shape[1:3] for x in kept} == {(4, slots)}


def make_execution(mesh, strategy, rules="fsdp_ep"):
    """Rules and strategy by name."""
    layout = moezoo.compose(f"rules={rules}").rules
    return moezoo.Execution(moezoo.make_mesh(moezoo.MeshShape(**mesh)), layout, STRATEGIES[strategy]())


MESHES = [
    ("deepseek", {"expert": 8}, "ring", "fsdp_ep"),
    ("window", {"expert": 8}, "gather", "fsdp_ep"),
    ("mixtral", {"fsdp": 2, "expert": 4}, "dense", "fsdp_ep"),
    ("deepseek", {"fsdp": 2, "expert": 4}, "gather", "fsdp_ep"),
    ("mixtral", {"fsdp": 2, "expert": 2, "context": 2}, "ring", "fsdp_ep"),
    ("deepseek", {"fsdp": 4}, "ring", "pure_fsdp"),
    ("mixtral", {"expert": 8}, "ragged", "fsdp_ep"),
    # Bounded in training: not here.
    ("deepseek", {"fsdp": 2, "expert": 4}, "capacity", "fsdp_ep"),
]


@pytest.mark.parametrize(("name", "mesh", "strategy", "rules"), MESHES)
def test_meshes_give_the_same(name, mesh, strategy, rules):
    """Four rows, of which a mesh takes as many ways as divide them, and a single one."""
    wanted, _ = naive(name)
    execution = make_execution(mesh, strategy, rules)
    there = moezoo.place(model(name), execution)
    found = moezoo.generate(there, IDS, mask=MASK, max_new_tokens=NEW, execution=execution)
    np.testing.assert_array_equal(found, wanted)
    # From wherever the model is.
    found = moezoo.generate(model(name), IDS[:1], max_new_tokens=NEW, execution=execution)
    np.testing.assert_array_equal(found, wanted[:1])


def test_rows_over_what_divides_them():
    execution = make_execution({"fsdp": 2, "expert": 2, "context": 2}, "ring")
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


def test_stops_where_every_row_has_ended():
    wanted, _ = naive("mixtral")
    new = wanted[:, 5:]
    # Three tokens at which all rows have ended before the last column, some earlier than others.
    for stops in itertools.combinations(range(VOCAB), 3):
        ends = [next((i for i, t in enumerate(row) if t in stops), NEW) for row in new]
        if max(ends) < NEW - 1 and len(set(ends)) > 1:
            break
    else:
        pytest.fail("choose another seed: no three tokens end all rows")
    found = moezoo.generate(model("mixtral"), IDS, mask=MASK, max_new_tokens=NEW, eos_token_id=stops)
    assert found.shape == (4, 5 + max(ends) + 1)
    for row, end, greedy in zip(found[:, 5:], ends, new, strict=True):
        np.testing.assert_array_equal(row[: end + 1], greedy[: end + 1])
        assert (row[end + 1 :] == stops[0]).all()
    eight = make_execution({"fsdp": 2, "expert": 4}, "ring")
    split = moezoo.generate(model("mixtral"), IDS, mask=MASK, max_new_tokens=NEW, eos_token_id=stops, execution=eight)
    np.testing.assert_array_equal(split, found)
    # One that never comes changes nothing.
    absent = next(t for t in range(VOCAB) if t not in new)
    kept = moezoo.generate(model("mixtral"), IDS, mask=MASK, max_new_tokens=NEW, eos_token_id=absent)
    np.testing.assert_array_equal(kept, wanted)


def test_draws_are_the_same_on_a_mesh_and_differ_by_key_and_row():
    same = np.repeat(IDS[:1], 4, axis=0)
    drawn = functools.partial(moezoo.generate, model("mixtral"), same, max_new_tokens=NEW, temperature=1.5, top_p=0.95)
    one = drawn(key=jax.random.key(0))
    np.testing.assert_array_equal(drawn(key=jax.random.key(0)), one)
    np.testing.assert_array_equal(
        drawn(key=jax.random.key(0), execution=make_execution({"fsdp": 2, "expert": 4}, "ring")), one
    )
    assert (drawn(key=jax.random.key(1)) != one).any()
    assert len({tuple(row) for row in one.tolist()}) == 4


def test_any_kind_of_key_draws_the_same_on_a_mesh():
    drawn = functools.partial(moezoo.generate, model("mixtral"), IDS, max_new_tokens=4, temperature=1.0)
    for key in (jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)):
        np.testing.assert_array_equal(drawn(key=key, execution=make_execution({"expert": 4}, "ring")), drawn(key=key))
    with pytest.raises(moezoo.UserError, match=r"^key is not one random key; write key=jax.random.key\(SEED\)$"):
        drawn(key=jax.random.split(jax.random.key(0)))


def test_lengths_that_round_alike_are_compiled_once():
    compiled: Any = generation._continue
    before = compiled._cache_size()
    for width, new in ((3, 2), (9, 16), (16, 5)):
        moezoo.generate(model("window"), np.ones((2, width), np.int32), max_new_tokens=new)
    assert compiled._cache_size() == before + 1
    lengths = [1, 16, 17, 128, 129, 1100]
    assert [generation._round_up(n) for n in lengths] == [16, 16, 32, 128, 160, 1280]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": [1, 2]}, r"ids are int64\[2\], expected integers \[batch, seq\]; for one text write ids\[None\]"),
        ({"ids": [[1.0]]}, r"ids are float64\[1, 1\], expected integers \[batch, seq\]$"),
        ({"ids": [[1], [1, 2]]}, "ids have rows of different lengths; fill the shorter ones up on the left"),
        ({"ids": np.zeros((1, 0), int)}, r"ids are int64\[1, 0\], expected integers"),
        ({"ids": [[40]]}, "ids holds 40 but the model's tokens are 0 to 39"),
        ({"ids": [[-1]]}, "ids holds -1 but the model's tokens are 0 to 39"),
        ({"eos_token_id": 41}, "eos_token_id holds 41 but the model's tokens are 0 to 39"),
        ({"mask": [[1, 0]]}, "mask is false behind a token; padding comes before the prompt, on the left"),
        ({"mask": [[1, 0, 1]], "ids": [[1, 2, 3]]}, "mask is false behind a token"),
        ({"mask": [[0, 0]]}, "mask leaves no token in row 0; a prompt has at least one"),
        ({"mask": [[1]]}, r"mask is \[1, 1\] and ids are \[1, 2\]; give both the same shape"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number of at least 1"),
        ({"max_new_tokens": 5000}, "a prompt of 2 tokens and max_new_tokens=5000 are more than model.max_length=4096"),
        ({"ids": np.ones((1, 4096), int)}, "more than model.max_length=4096; shorten the prompt"),
        ({"temperature": 1.0}, r"temperature=1.0 draws at random and needs key=jax.random.key\(SEED\)"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be at least 0"),
        ({"top_k": 3}, "top_k=3 does nothing at temperature 0"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_k": 0, "temperature": 1.0}, "top_k=0 must be a whole number of at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line(changes, message):
    arguments = {"ids": [[1, 2]], "max_new_tokens": 1} | changes
    with pytest.raises(moezoo.UserError, match=message) as error:
        moezoo.generate(model("deepseek"), **arguments)
    assert "\n" not in str(error.value)
