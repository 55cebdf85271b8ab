"""Generation under `rules=serve`: no weight is gathered, and tokens are those of one device."""

import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from cover import FAMILIES, VOCAB, model, rules

import moezoo
from moezoo.moe.dispatch import STRATEGIES
from moezoo.tools.sharding.describe import describe

NEW = 5
IDS = np.random.default_rng(0).integers(1, VOCAB, (8, 4)).astype(np.int32)
# Prompts of one to four tokens, padded on the left; the first has a padded column too.
MASK = np.arange(4)[None] >= np.array([1, 0, 3, 2, 0, 1, 0, 2])[:, None]
# Two key-value heads are split over two devices, and four devices share them.
MESHES = {"tensor2": moezoo.MeshShape(data=2, expert=2, tensor=2), "tensor4": moezoo.MeshShape(expert=2, tensor=4)}


def serving(mesh: str, strategy: str = "ring") -> moezoo.Execution:
    """Return an execution under `serve`."""
    return moezoo.Execution(moezoo.make_mesh(MESHES[mesh]), rules()["serve"], STRATEGIES[strategy]())


@functools.cache
def served(family: str) -> Any:
    """Return the tiny model of a family; that of OLMoE has tied embeddings."""
    return eqx.tree_at(lambda m: m.unembedding.weight, model(family), None) if family == "olmoe" else model(family)


def on_one_device(family: str, texts: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the token that one device gives for each new column of the texts, which it reads without a cache."""
    mask = np.pad(mask, ((0, 0), (0, NEW - 1)), constant_values=True)
    segments, positions = mask.astype(np.int32), np.maximum(np.cumsum(mask, 1) - 1, 0).astype(np.int32)
    read = jax.jit(lambda m, tokens: m(tokens, segments=segments, positions=positions).logits)
    return np.asarray(read(served(family), texts[:, :-1])).argmax(-1)[:, IDS.shape[1] - 1 :]


# Every family and strategy; families of grouped attention have two key-value heads. Eight rows are split over devices,
# and all devices read one row, on each mesh.
CASES = [
    ("mixtral", "tensor2", "ragged", (8, 1)),
    ("deepseek", "tensor4", "capacity", (8,)),
    ("grouped", "tensor2", "ring", (8,)),
    ("olmoe", "tensor4", "ring", (1,)),
    ("gpt_oss", "tensor4", "ragged", (8,)),
    ("llama4", "tensor2", "ring", (8,)),
    ("kimi_linear", "tensor2", "ring", (8,)),
    ("qwen3_5", "tensor2", "capacity", (8,)),
    ("lfm2_moe", "tensor4", "ring", (8,)),
    ("nemotron_h", "tensor2", "ragged", (8,)),
    ("gemma4", "tensor2", "ragged", (8,)),
    ("windowed", "tensor4", "ring", (8,)),
]
_DAILY = ("mixtral", "deepseek")


def test_every_family_has_a_case():
    assert [case[0] for case in CASES] == list(FAMILIES)


@pytest.mark.parametrize(
    ("family", "mesh", "strategy", "batches"),
    [pytest.param(*case, marks=[] if case[0] in _DAILY else pytest.mark.weekly) for case in CASES],
)
def test_tokens_are_those_of_one_device(family, mesh, strategy, batches):
    """With padding on the left."""
    execution = serving(mesh, strategy)
    placed = moezoo.place(served(family), execution)
    for rows in batches:
        found = moezoo.generate(placed, IDS[:rows], mask=MASK[:rows], max_new_tokens=NEW, execution=execution)
        np.testing.assert_array_equal(found[:, : IDS.shape[1]], IDS[:rows])
        np.testing.assert_array_equal(found[:, IDS.shape[1] :], on_one_device(family, found, MASK[:rows]))


@pytest.mark.filterwarnings("ignore:.*transformers has no key for")
def test_a_folder_loads_straight_into_it(tmp_path):
    """No device holds more than its part of the heads, the width of experts, the experts and the vocabulary."""
    moezoo.save_pretrained(model("mixtral"), tmp_path / "model")
    execution = serving("tensor2")
    loaded = moezoo.from_pretrained(tmp_path / "model", execution=execution)
    placed = moezoo.place(model("mixtral"), execution)

    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(placed), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        np.testing.assert_array_equal(x, y)
    experts = loaded.stacks[0].blocks[0].feed_forward.experts
    layers, num_experts, embed, width = experts.gate.shape
    assert experts.gate.sharding.shard_shape(experts.gate.shape) == (layers, num_experts // 2, embed, width // 2)


@pytest.mark.parametrize(
    ("preset", "call"),
    [("mixtral_8x7b", "prefill"), ("deepseek_v3", "decode"), ("qwen3_235b_a22b model.tied_embeddings=true", "decode")],
)
def test_nothing_of_a_weight_is_gathered(preset, call):
    """Of released models: what travels are tokens on their way to experts, sums over devices, and a row of logits."""
    words = f"model={preset} rules=serve dispatch=ragged mesh.expert=8 mesh.tensor=8 batch_size=8 seq_len=512"
    cfg = moezoo.compose(*words.split())
    layout = describe(cfg, call)
    scopes = {row.scope for row in layout.collectives}
    assert "layers/attention" in scopes
    assert not any("weights" in scope for scope in scopes)
    gathers = {row.scope for row in layout.collectives if row.op == "all-gather"}
    assert gathers <= {"head", "layers/feed_forward/dispatch", "layers/feed_forward/combine"}
    # Keys and values lie with their heads; latents and the shared key are whole.
    cache = [row for row in layout.activations if "in the cache" in row.name]
    assert bool(cache) == (call == "decode")
    for row in cache:
        assert ("tensor" in dict(zip(row.axes, row.spec, strict=True)).get("kv_heads", ())) == ("kv_heads" in row.axes)
