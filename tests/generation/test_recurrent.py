"""Recurrent mixers between layers of attention: the loop, the cache and generation carry their states as they are.

One is made here; one is the library's with the smallest state, a gated short convolution; and one is alone in its
layers, between layers of experts alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array
from refusals import refused

import moezoo
from moezoo.generation import generate as generation
from moezoo.models import MixtralConfig
from moezoo.models.base import LanguageModel, TokenEmbedding, Unembedding
from moezoo.models.block import Block
from moezoo.models.layer_memory import layer_memory
from moezoo.models.layers import learn_stack, make_stacks
from moezoo.moe.dispatch import STRATEGIES
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention
from moezoo.nn.base import Mixer, MixerOutput, NoMixer
from moezoo.nn.cache import Kept, State
from moezoo.nn.gated_convolution import GatedConvolution
from moezoo.nn.linear import normal, project
from moezoo.nn.norm import RMSNorm
from moezoo.nn.positions import make_context
from moezoo.nn.rotary import Rotary
from moezoo.nn.state_space import StateSpaceMixer, StateSpaceSizes
from moezoo.parallel.axes import Weight
from moezoo.parallel.collectives import gather_tokens
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.mesh_execution import on_mesh

F32 = jnp.dtype("float32")
CONFIG = MixtralConfig(
    vocab=40, embed=16, layers=5, heads=4, kv_heads=2, head_dim=8, expert_mlp=16, experts=8, window=4, init_std=0.5
)
FADING = 0.75
IDS = np.random.default_rng(0).integers(1, 40, (4, 5)).astype(np.int32)
MASK = np.arange(5)[None] >= np.array([0, 4, 2, 1])[:, None]
NEW = 8


class Memory(State):
    """One vector per head, whatever the length of the text."""

    vector: Any

    def fill(self, kept):
        """Keep the vector after the prompt."""
        return Memory(0, kept)

    def advance(self, fresh, column):
        """Keep the vector after the token."""
        del column
        return Memory(0, fresh)


class Fading(Mixer):
    """y = out(h), with h = 3/4 h + value(x) along the tokens of a document."""

    splits_sequences = True
    value: Weight[Array, "embed -> heads head_dim"]
    out: Weight[Array, "heads head_dim -> embed"]

    def __init__(self, key):
        one, other = jax.random.split(key)
        self.value = normal(one, (16, 4, 8), 0.25, F32)
        self.out = normal(other, (4, 8, 16), 0.2, F32)

    def prepare(self, context):
        """Return how much of each token is left at each other, [batch, later, earlier]; nothing of padding."""
        (later, own), (earlier, theirs) = ((p.position, p.segment) for p in context.coordinates)
        distance = later[:, :, None] - earlier[:, None]
        seen = (own[:, :, None] == theirs[:, None]) & (theirs[:, None] > 0) & (distance >= 0)
        return jnp.where(seen, FADING ** distance.astype(F32), 0)

    def __call__(self, x, context, execution, past=None):
        """Sum over all tokens, or add one to the vector of the past."""
        v = project(execution.inner_group("heads").enter(x), self.value)
        group = execution.sequence_group
        v = gather_tokens(v, group.axes, 1, tokens=group.token_axes)
        left = self.prepare(context) if context.prepared is None else context.prepared
        h = jnp.einsum("bts,bsnh->btnh", left, v)
        if past is not None:
            h = h + FADING * lax.dynamic_index_in_dim(past.state.vector, past.layer, keepdims=False)[:, None]
        return MixerOutput(project(h, self.out, inputs=2), h[:, -1])

    def state(self, length):
        """Declare the vector."""
        del length
        vector: Any = Kept({"heads": self.value.shape[-2], "head_dim": self.value.shape[-1]})
        return Memory(0, vector)


MIXERS = ("fading", "convolution", "mamba")


def make_block(kind, key):
    """Return one layer, of a mixer of `MIXERS` or of attention with this window; `experts` for these alone."""
    c, keys = CONFIG, jax.random.split(key, 3)
    options: dict[str, Any] = {"out_std": 0.5, "dtype": F32}
    if kind == "fading":
        mixer = Fading(keys[0])
    elif kind == "convolution":
        mixer = GatedConvolution(c.embed, 3, biases="all", **options, key=keys[0])
    elif kind == "mamba":
        sizes = StateSpaceSizes(heads=4, head_dim=5, groups=2, state_dim=6, taps=3)
        mixer = StateSpaceMixer(c.embed, sizes, epsilon=1e-5, **options, key=keys[0])
        return Block(RMSNorm(c.embed, 1e-5, dtype=F32), mixer, None, None)
    elif kind == "experts":
        mixer = NoMixer()
    else:
        mixer = Attention(16, 4, 2, 8, rotary=Rotary(8, 100.0), window=kind, **options, key=keys[0])
    router = Router(c.embed, c.experts, c.experts_per_token, Choice(), dtype=F32, key=keys[1])
    feed_forward = MoE(router, Experts(c.experts, c.embed, c.expert_mlp, **options, key=keys[2]))
    norms = [RMSNorm(c.embed, 1e-5, dtype=F32) for _ in range(2)]
    return Block(None if kind == "experts" else norms[0], mixer, norms[1], feed_forward)


@functools.cache
def hybrid(mixer="fading"):
    """Return two periods of a recurrent layer and a window, or experts alone, then a layer that sees everything."""

    def make(key: Array) -> LanguageModel:
        keys = jax.random.split(key, 7)
        embedding = TokenEmbedding(40, 16, std=0.5, dtype=F32, key=keys[0])
        between = "experts" if mixer == "mamba" else 4
        stacks = make_stacks([mixer, between, mixer, between, 99], make_block, keys[1:6])
        return LanguageModel(
            embedding, stacks, Unembedding(16, 40, epsilon=1e-5, std=0.5, dtype=F32, key=keys[6]), CONFIG
        )

    return jax.jit(make)(jax.random.key(0))


@functools.cache
def naive(mixer):
    """Return greedy tokens of a model that reads the whole text again for every token, without a cache."""
    tokens, mask = np.pad(IDS, ((0, 0), (0, NEW))), np.pad(MASK, ((0, 0), (0, NEW)), constant_values=True)
    segments, positions = mask.astype(np.int32), np.maximum(np.cumsum(mask, 1) - 1, 0).astype(np.int32)
    read = jax.jit(lambda m, t: m(t, segments=segments, positions=positions).logits)
    for at in range(IDS.shape[1], tokens.shape[1]):
        logits = np.asarray(read(hybrid(mixer), tokens))[:, at - 1]
        top = np.sort(logits, axis=-1)
        assert (top[:, -1] - top[:, -2]).min() > 1e-4  # no near tie that rounding could turn
        tokens[:, at] = logits.argmax(-1)
    return tokens


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("rules", [None, pytest.param("serve", marks=pytest.mark.weekly)])
def test_tokens_are_those_without_a_cache(rules, mixer):
    """On one device, and with heads or channels and their states split."""
    execution = moezoo.Execution()
    if rules is not None:
        mesh = moezoo.make_mesh(moezoo.MeshShape(data=2, expert=2, tensor=2))
        execution = moezoo.Execution(mesh, moezoo.compose(f"rules={rules}").rules, STRATEGIES["ring"]())
    found = moezoo.generate(hybrid(mixer), IDS, mask=MASK, max_new_tokens=NEW, execution=execution)
    np.testing.assert_array_equal(found, naive(mixer))


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_split_sequence(mixer, monkeypatch):
    """The mixer exchanges what it needs of the tokens of its sequence; one that does not say so is refused."""
    mesh = moezoo.make_mesh(moezoo.MeshShape(fsdp=2, context=4))
    execution = moezoo.Execution(mesh, moezoo.compose("rules=fsdp_ep").rules)
    ids = np.pad(IDS, ((0, 0), (0, 11)))  # convolutions read two tokens of the chunk before
    found, wanted = (
        jax.jit(lambda m, how=how: m(ids, execution=how).logits)(moezoo.place(hybrid(mixer), how))
        for how in (execution, moezoo.Execution())
    )
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    kind = type(hybrid(mixer).stacks[0].blocks[0].attention)
    monkeypatch.setattr(kind, "splits_sequences", False)
    with refused("rules fsdp_ep split sequences over mesh axes context", f"mixer {kind.__name__} needs whole ones"):
        hybrid(mixer)(ids[:, :4], execution=execution)


@pytest.mark.parametrize(
    ("mixer", "states", "between", "counts"),
    [
        ("fading", {(2, 4, 4, 8)}, {(2, 4, 2, 4, 8)}, [4, 13]),
        ("convolution", {(2, 4, 2, 16)}, {(2, 4, 2, 4, 8)}, [4, 13]),
        ("mamba", {(2, 4, 2, 2, 6), (2, 4, 2, 4, 5), (2, 4, 4, 6, 5)}, set(), [13]),
    ],
)
def test_what_is_kept(mixer, states, between, counts):
    """States of a recurrent layer, a window's tokens, all tokens; and the coordinates of the latter two."""
    at = Coordinates(*(jnp.ones(IDS.shape, jnp.int32),) * 2)
    read = functools.partial(generation.prefill, length=13, execution=on_mesh(moezoo.Execution()))
    cache = jax.eval_shape(lambda m: read(m, jnp.asarray(IDS), at), hybrid(mixer)).cache
    shapes = [[{x.shape for x in jax.tree.leaves(state)} for state in stack] for stack in cache.states]
    assert shapes == [[states, between], [{(1, 4, 2, 13, 8)}]]
    assert sorted(cache.coordinates) == counts


def test_a_mixer_that_the_library_does_not_know_has_a_working_set():
    """What is predicted of its layers, from their traced program, is near what the compiler holds."""
    rows, length, layers = 2, 1024, 3
    (stack,) = make_stacks(["fading"] * layers, make_block, jax.random.split(jax.random.key(0), layers))
    execution = on_mesh(moezoo.Execution(moezoo.make_mesh(moezoo.MeshShape()), moezoo.compose().rules))
    token, x = jnp.ones((rows, length), jnp.int32), jnp.ones((rows, length, CONFIG.embed))

    def loss(stack: Any, x: Array, at: Coordinates) -> Array:
        return jnp.square(learn_stack(stack, x, make_context(at, execution), execution, 0)[0]).sum()

    program = jax.jit(jax.grad(loss)).lower(stack, x, Coordinates(token, token)).compile()
    held: Any = program.memory_analysis()
    trained = jax.tree.map(lambda _: True, stack)
    found = layer_memory(stack, trained, execution, rows, length)
    # How much of each token is left at each other is made once for all layers.
    assert found.backward.parts["arrays that all layers read"] >= 4 * rows * length**2
    predicted = layers * found.saved + found.backward.bytes + x.nbytes
    assert predicted / 1.2 < held.temp_size_in_bytes < 1.2 * predicted
