"""Folders of low-rank adapters: written and read to the bit, in PEFT's packed form too, merged, and refused."""

import json
import re
import shutil
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_cases import PREFIX, delta, model_of, numbers, pairs_of, read, with_pairs, write
from refusals import by_table, refused
from safetensors.numpy import load_file
from tiny_models import CONFIGS, mixtral

import moezoo
from moezoo.hub import unfinished, writing
from moezoo.hub.adapter_files import read_adapter
from moezoo.hub.adapters import load_adapter, save_adapter
from moezoo.hub.peft import KNOWN
from moezoo.models.blueprint import Blueprint
from moezoo.models.family import MADE
from moezoo.moe.router import Choice
from moezoo.parallel.low_rank import without_pairs
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.training.exporting import plan_export

UNREAD = "PEFT 0.21 "
SMALL = mixtral(experts=3, kv_heads=1)
NAMES = ("mixtral", "qwen3", "glm", "minimax", "hy", "dots", "ernie", "olmoe", "gpt_oss", "v3", "v2", "mistral 4")


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def saved(model: Any, folder: Path, **about: Any) -> Path:
    """Save an adapter, whatever PEFT does with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save_adapter(model, folder, **about)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_what_was_saved_is_loaded_to_the_bit(name, tmp_path):
    """Beside the same weights, also in place of other pairs."""
    bare = model_of(CONFIGS[name])
    model = with_pairs(bare)
    folder = saved(model, tmp_path / "adapter")
    assert_same(load_adapter(bare, folder), model)
    assert_same(load_adapter(with_pairs(bare, "attention", rank=1), folder), model)
    assert {x.dtype for x in read(folder)[1].values()} == {np.dtype(np.float32)}


# Modules of layer 1 -> inputs and outputs, and the rank where it is not 2.
ATTENTION = {"self_attn.q_proj": (16, 32), "self_attn.k_proj": (16, 16), "self_attn.v_proj": (16, 16)}
ATTENTION |= {"self_attn.o_proj": (32, 16)}
LATENT = {"self_attn.q_a_proj": (16, 6), "self_attn.q_b_proj": (6, 56), "self_attn.kv_a_proj_with_mqa": (16, 13)}
LATENT |= {"self_attn.kv_b_proj": (5, 52, 4), "self_attn.o_proj": (28, 16)}
EXPERTS = {"mlp.experts.5.gate_proj": (16, 12), "mlp.experts.5.up_proj": (16, 12), "mlp.experts.5.down_proj": (12, 16)}
OTHERS = {name.replace("experts.5", "shared_experts"): sizes for name, sizes in EXPERTS.items()}
BLOCK_SPARSE = {"block_sparse_moe.experts.5.w1": (16, 12), "block_sparse_moe.experts.5.w3": (16, 12)}
BLOCK_SPARSE |= {"block_sparse_moe.experts.5.w2": (12, 16)}
TABLES = {
    "mixtral": ATTENTION | BLOCK_SPARSE,
    "minimax": ATTENTION | BLOCK_SPARSE,
    "gpt_oss": ATTENTION | EXPERTS,
    "v3": LATENT | EXPERTS | OTHERS,
    "qwen3": ATTENTION | {"mlp.gate_proj": (16, 20), "mlp.up_proj": (16, 20), "mlp.down_proj": (20, 16)},
    "hy": ATTENTION | {"mlp.gate_proj": (16, 20), "mlp.up_proj": (16, 20), "mlp.down_proj": (20, 16)},
}


@pytest.mark.parametrize("name", TABLES)
def test_names_and_shapes(name, tmp_path):
    """Of layer 1, with one expert for all."""
    config, tensors = read(saved(with_pairs(model_of(CONFIGS[name])), tmp_path / "adapter"))
    layer, wanted = f"{PREFIX}1.", {}
    for module, (inputs, outputs, *rank) in TABLES[name].items():
        rank = rank[0] if rank else 2
        wanted |= {f"{module}.lora_A.weight": (rank, inputs), f"{module}.lora_B.weight": (outputs, rank)}
    other = re.compile(r"\.experts\.[^5]\.")
    here = {key.removeprefix(layer): x.shape for key, x in tensors.items() if key.startswith(layer)}
    assert {key: shape for key, shape in here.items() if not other.search(key)} == wanted
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    joined = name == "v3"
    assert config["rank_pattern"] == ({"kv_b_proj": 4} if joined else {})
    assert config["alpha_pattern"] == ({"kv_b_proj": 6} if joined else {})
    assert {*config["target_modules"]} == {re.sub(r".*\.", "", module) for module in TABLES[name]}


def test_targets_are_the_shortest_ends_of_names(tmp_path):
    """Some modules with the last word of a name have no pair: the expert's number is enough, and no layer is named."""
    config, _ = read(saved(with_pairs(model_of(CONFIGS["v3"]), "experts"), tmp_path / "experts"))
    words = ("gate_proj", "up_proj", "down_proj")
    assert {*config["target_modules"]} == {f"{expert}.{word}" for expert in range(8) for word in words}
    config, _ = read(saved(with_pairs(model_of(CONFIGS["v3"]), "shared"), tmp_path / "shared"))
    assert {*config["target_modules"]} == {f"shared_experts.{word}" for word in words}
    one = with_pairs(model_of(CONFIGS["v3"]), "*stacks[0]*.attention.out")
    config, _ = read(saved(one, tmp_path / "one"))
    assert config["target_modules"] == ["0.self_attn.o_proj"]


def test_matrices_are_the_models(tmp_path):
    """B A with the file's factor is scale A B transposed: heads before their dimensions, and parts of heads joined."""
    model = with_pairs(model_of(CONFIGS["v3"]))
    config, tensors = read(saved(model, tmp_path / "adapter"))

    def product(module: str) -> np.ndarray:
        a, b = (tensors[f"{PREFIX}1.{module}.lora_{part}.weight"].astype(np.float64) for part in "AB")
        alpha = config["alpha_pattern"].get(module.rpartition(".")[2], config["lora_alpha"])
        return alpha / len(a) * (b @ a)

    pairs = {path.removeprefix("stacks[1].blocks[0]."): delta(x)[0] for path, x in pairs_of(model).items()}
    key, value = (pairs[f"attention.{part}_up"].reshape(5, 4, size) for part, size in (("key", 6), ("value", 7)))
    whole = np.concatenate([key, value], axis=-1).reshape(5, -1)
    np.testing.assert_array_equal(product("self_attn.kv_b_proj"), whole.T)
    np.testing.assert_array_equal(product("self_attn.q_b_proj"), pairs["attention.query_up"].T)
    np.testing.assert_array_equal(product("self_attn.o_proj"), pairs["attention.out"].T)
    for expert in (2, 7):
        np.testing.assert_array_equal(
            product(f"mlp.experts.{expert}.up_proj"), pairs["feed_forward.experts.up"][expert].T
        )


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.asarray(numbers(jax.ShapeDtypeStruct(shape, jnp.float32), seed))


def tensors_of(module: str, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}


@pytest.mark.parametrize("by_root", [False, True])
def test_ranks_and_scales_of_single_modules(by_root, tmp_path):
    """Patterns name modules by regular expressions. A layer or an expert without a pair is as without an adapter."""
    made = {
        "0.self_attn.q_proj": (1, 16, 32),
        "1.self_attn.q_proj": (3, 16, 32),
        "1.self_attn.o_proj": (2, 32, 16),
        "0.block_sparse_moe.experts.2.w1": (2, 16, 12),
    }
    pairs = {name: (draw(r, m, seed=i), draw(n, r, seed=9 + i)) for i, (name, (r, m, n)) in enumerate(made.items())}
    config = {
        "r": 2,
        "lora_alpha": 6,
        "use_rslora": by_root,
        "rank_pattern": {"0.self_attn.q_proj": 1, r".*\.1\.self_attn\.q_proj": 3, "(": 7},
        "alpha_pattern": {"q_proj": 12, "2.w1": 0.75},
    }
    tensors = {key: x for name, pair in pairs.items() for key, x in tensors_of(name, *pair).items()}
    folder = write(tmp_path / "adapter", config, tensors)
    found = {
        path.removeprefix("stacks[0].blocks[0]."): delta(x)
        for path, x in pairs_of(load_adapter(model_of(SMALL), folder)).items()
    }
    factor = lambda alpha, rank: alpha / (rank**0.5 if by_root else rank)  # noqa: E731
    alphas = {"0.self_attn.q_proj": 12, "1.self_attn.q_proj": 12, "0.block_sparse_moe.experts.2.w1": 0.75}
    wanted = {
        "attention.query": np.zeros((2, 16, 32)),
        "attention.out": np.zeros((2, 32, 16)),
        "feed_forward.experts.gate": np.zeros((2, 3, 16, 12)),
    }
    places = {"q_proj": "attention.query", "o_proj": "attention.out"}
    for name, (a, b) in pairs.items():
        x = factor(alphas.get(name, 6), len(a)) * (b.astype(float) @ a).T
        if name.endswith("w1"):
            wanted["feed_forward.experts.gate"][0, 2] = x
        else:
            wanted[places[name.rpartition(".")[2]]][int(name[0])] = x
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        # The ratio of two scales is rounded to float32, and so are its products with B.
        np.testing.assert_allclose(found[path], x, rtol=0, atol=2e-6 * abs(x).max())


# The names of experts in PEFT's packed form, ours of the same, and whether gate and up alternate.
PACKED = {"mixtral": False, "mistral 4": False, "gpt_oss": True}


@pytest.mark.parametrize("name", PACKED)
def test_packed_experts_by_their_definition(name, tmp_path):
    """Row e r + j of A and column j E + e of B are of expert e, in loops."""
    config = replace(
        CONFIGS[name], experts=3, experts_per_token=2, **({"router": Choice(scale=1.5)} if "4" in name else {})
    )
    model, count, rank = model_of(config), 3, 2
    inner = draw(count * rank, 16, seed=1), draw(24, rank * count, seed=2)
    outer = draw(count * rank, 12, seed=3), draw(16, rank * count, seed=4)
    above = "1.mlp.experts"
    tensors = tensors_of(f"{above}.base_layer", *inner) | tensors_of(above, *outer)
    about = {"r": rank, "lora_alpha": 3, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    folder = write(tmp_path / "adapter", about | {"peft_version": "0.19.0"}, tensors)
    wanted: dict[str, np.ndarray] = {}
    for expert in range(count):
        for path, (a, b) in (("both", inner), ("down", outer)):
            of_expert: Any = sum(
                np.outer(a[expert * rank + j], b[:, j * count + expert].astype(float)) for j in range(rank)
            )
            wanted[f"{path} {expert}"] = 1.5 * of_expert
        both = wanted.pop(f"both {expert}")
        alternate = PACKED[name]
        wanted[f"gate {expert}"] = both[:, ::2] if alternate else both[:, :12]
        wanted[f"up {expert}"] = both[:, 1::2] if alternate else both[:, 12:]
    found = {}
    adapter = read_adapter(folder, model)
    for path, of_path in adapter.pairs.items():
        for index in of_path:
            # Layer 1 is the second of one stack, or the first of another, or of a period.
            found[f"{path.rpartition('.')[2]} {index[-1]}"] = adapter.product(
                path, index, np.shape(model_part(model, path))[2:]
            )
    assert found.keys() == wanted.keys()
    for key, x in wanted.items():
        np.testing.assert_array_equal(found[key], x)


def model_part(model: Any, path: str) -> Any:
    """Return the array at a path."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return next(x for at, x in leaves if jax.tree_util.keystr(at).lstrip(".") == path)


def test_one_packed_parameter_alone(tmp_path):
    model = model_of(SMALL)
    pair = draw(6, 12), draw(16, 6, seed=1)
    about = {"r": 2, "lora_alpha": 2, "peft_version": "0.21.2"}
    for name, kind in (("down_proj", "down"), ("gate_up_proj", "gate")):
        rows = pair if kind == "down" else (draw(6, 16), draw(24, 6))
        tensors = tensors_of("0.mlp.experts", *rows)
        folder = write(tmp_path / name, about | {"target_parameters": [name]}, tensors)
        paths = {path.rpartition(".")[2] for path in read_adapter(folder, model).pairs}
        assert paths == ({"down"} if kind == "down" else {"gate", "up"})


@pytest.mark.parametrize("version", ["0.18.1", "0.17.0", None, "dev"])
def test_other_versions_of_the_packed_form_are_refused(version, tmp_path):
    about = {"r": 2, "lora_alpha": 2, "target_parameters": ["down_proj"]}
    about |= {} if version is None else {"peft_version": version}
    folder = write(tmp_path / "adapter", about, tensors_of("0.mlp.experts", draw(6, 12), draw(16, 6)))
    shown = "null" if version is None else version
    with refused(f"{folder}", f"peft_version={shown}", "before 0.19.0", "merge it"):
        load_adapter(model_of(SMALL), folder)


def test_onto_a_mesh(tmp_path):
    cfg = moezoo.compose("model=mixtral", "mesh=fsdp2_ep4")
    execution = moezoo.execution(cfg)
    config = mixtral(embed=16, experts=4)
    bare = model_of(config)
    model = with_pairs(bare)
    folder = saved(model, tmp_path / "adapter")
    placed = moezoo.place(bare, execution)
    found = load_adapter(placed, folder, execution)
    assert_same(found, model)
    shardings = jax.tree.leaves(on_mesh(execution).shardings(jax.eval_shape(lambda: model)))
    for x, sharding in zip(jax.tree.leaves(found), shardings, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert any(x.a.addressable_shards[0].data.size < x.a.size for x in pairs_of(found).values())
    assert_same(load_adapter(bare, saved(found, tmp_path / "again")), model)


def test_switching_adapters_recompiles_nothing(tmp_path):
    bare, traces = model_of(mixtral(layers=1)), []
    folders = [saved(with_pairs(bare, seed=i), tmp_path / str(i)) for i in range(3)]

    @jax.jit
    def logits(model: Any) -> Any:
        traces.append(1)
        return model(np.arange(12).reshape(2, 6)).logits

    found = [np.asarray(logits(load_adapter(bare, folder))) for folder in folders]
    assert len(traces) == 1
    assert not np.allclose(found[0], found[1])
    assert not np.allclose(found[1], found[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["v3", "mixtral", "gpt_oss"])
def test_merged_folders(name, dtype, tmp_path):
    """Each tensor is base + scale A B, which here is exact in float32, and is rounded once."""
    config = CONFIGS[name]
    base = numbers(Blueprint(config, dtype).shapes)
    moezoo.save_pretrained(base, tmp_path / "base")
    folder = saved(with_pairs(base), tmp_path / "adapter")
    export = plan_export(str(tmp_path / "base"), str(tmp_path / "merged"), adapter=str(folder))
    assert any("merged" in line and "rank" in line for line in export.describe())
    export.write()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    tensors = read(folder)[1]
    assert before.keys() == after.keys()
    changed = 0

    def product(module: str) -> np.ndarray | None:
        if f"{module}.lora_A.weight" not in tensors:
            return None
        a, b = (tensors[f"{module}.lora_{part}.weight"].astype(float) for part in "AB")
        return 1.5 * (b @ a)

    for key, x in before.items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        added: Any = product(module)
        if key.endswith(("gate_up_proj", "down_proj")) and "experts" in key:  # gpt-oss: [experts, inputs, outputs]
            above, last = module.rpartition(".")[::2]
            parts: Any = [[product(f"{above}.{e}.{part}_proj") for e in range(8)] for part in ("gate", "up", "down")]
            gate, up, down = (np.stack(part).swapaxes(1, 2) for part in parts)
            added = down if last == "down_proj" else np.stack([gate, up], axis=-1).reshape(*gate.shape[:2], -1)
        changed += added is not None
        wanted = x if added is None else (x.astype(float) + added).astype(np.float32).astype(x.dtype)
        np.testing.assert_array_equal(after[key], wanted, err_msg=key)
        assert after[key].dtype == x.dtype
    assert changed == {"v3": 10 + 3 + 24 + 3, "mixtral": 2 * (4 + 24), "gpt_oss": 5 * 6}[name]


def test_an_adapter_is_loaded_beside_its_own_base(tmp_path):
    models = [model_of(SMALL), model_of(replace(SMALL, norm_eps=1e-6))]
    for name, model in zip("ab", models, strict=True):
        moezoo.save_pretrained(model, tmp_path / name)
    from moezoo.hub.opening import open_folder

    hashes = [open_folder(tmp_path / name).sha256 for name in "ab"]
    own = saved(with_pairs(models[0]), tmp_path / "own", base_sha256=hashes[0], base="somewhere")
    plain = saved(with_pairs(models[0]), tmp_path / "plain")
    assert read(own)[0]["base_model_name_or_path"] == "somewhere"
    line = f"adapter={own} was trained beside weights with sha256 {hashes[0]}, and these have {hashes[1]}"
    with refused(line, "load it beside the former"):
        moezoo.from_pretrained(tmp_path / "b", adapter=own)
    with refused(line):
        plan_export(str(tmp_path / "b"), str(tmp_path / "new"), adapter=str(own))
    with refused(line):
        load_adapter(models[1], own, base_sha256=hashes[1])
    assert_same(moezoo.from_pretrained(tmp_path / "a", adapter=own), with_pairs(models[0]))
    assert pairs_of(moezoo.from_pretrained(tmp_path / "b", adapter=plain))
    assert pairs_of(load_adapter(models[1], own))  # where nothing is known of the weights


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    return saved(with_pairs(model_of(SMALL)), tmp_path_factory.mktemp("adapters") / "one")


@by_table(
    r"""
    keys => line
    {"peft_type": "IA3"} => peft_type=IA3, expected LORA
    {"peft_type": null} => peft_type=null, expected LORA
    {"use_dora": true} => use_dora=true computes something else ... false
    {"bias": "lora_only"} => bias=lora_only ... expected none ... merge
    {"trainable_token_indices": [3]} => trainable_token_indices= ... merge
    {"init_lora_weights": "pissa"} => init_lora_weights=pissa ... merge
    {"spin": 2} => unknown key spin=2 ... merge
    {"r": "two"} => r=two: expected a whole number
    {"r": 0} => the pair of model.layers.0.self_attn.q_proj has rank 2 ... but 0 by r
    {"r": 3} => the pair of model.layers. ... has rank 2 in adapter_model.safetensors, but 3 by
    {"rank_pattern": [1]} => rank_pattern=[1]
    {"rank_pattern": {"(a+)+z": 1}} => rank_pattern has (a+)+z ... never end
    {"lora_alpha": "x"} => lora_alpha=x: expected a number
    {"lora_alpha": 0} => lora_alpha or alpha_pattern has 0 for model.layers.
    {"alpha_pattern": {"q_proj": Infinity}} => is not JSON (Infinity is no number of JSON)
    {"alpha_pattern": {".*.*.*.*.*z": 1}} => alpha_pattern has
    """
)
def test_what_the_configuration_of_an_adapter_may_not_hold(keys, line, adapter, tmp_path):
    config, tensors = read(adapter)
    folder = write(tmp_path / "changed", config | {"peft_version": "0.21.2"} | json.loads(keys), tensors)
    with refused(f"{folder}/adapter_config.json ... {line}"):
        load_adapter(model_of(SMALL), folder)


ONE, PACKED_EXPERTS = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"
A, B = (f"base_model.model.{ONE}.lora_{part}.weight" for part in "AB")
NO_WEIGHT = ": no weight of this model has these: "


def whole(module: str, *shape: int) -> Any:
    return lambda tensors: {f"base_model.model.{module}.weight": np.zeros(shape, np.float32)}


def holding(name: str, value: float) -> Any:
    """Return what puts a number into a matrix."""
    return lambda tensors: {name: np.where(np.arange(tensors[name].shape[1]) == 1, np.float32(value), tensors[name])}


def named(new: str) -> Any:
    """Return what adds the matrix A of a pair under another name."""
    return lambda tensors: {new: tensors[A]}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            whole("lm_head", 40, 16),
            ": base_model.model.lm_head.weight is a whole weight that differs from the base",
        ),
        (whole("lm_head", 41, 16), ": base_model.model.lm_head.weight has shape [41, 16], expected [40, 16]"),
        (whole("score", 40, 16), f"{NO_WEIGHT}base_model.model.score.weight ... merge with PEFT, then load"),
        (lambda t: {B: None}, f": {ONE} has only one of lora_A and lora_B"),
        (holding(A, np.nan), f": the pair of {ONE} has NaN"),
        (holding(B, np.inf), f": the pair of {ONE} has NaN"),
        (lambda t: {A: t[A].astype(np.int32)}, f": {ONE} has a matrix ... in I32, expected ... F32"),
        (
            lambda t: {A: t[A][:, 1:].copy()},
            f": {ONE} has lora_A [2, 15] and lora_B [32, 2], expected [rank, 16] ... another",
        ),
        (lambda t: {A: t[A][0].copy()}, f": {ONE} has a matrix of shape [16] in"),
        (lambda t: {A: np.array(t[A][0, 0])}, f": {ONE} has a matrix of shape [] in"),
        (lambda t: {A: t[A][:0].copy(), B: t[B][:, :0].copy()}, f": {ONE} has a matrix of shape [0, 16] in"),
        (
            lambda t: {f"{PREFIX}0.mlp.gate_proj.lora_{x}.weight": t[A] for x in "AB"},
            f"{NO_WEIGHT} ... mlp.gate_proj ... another model",
        ),
        (lambda t: {name.replace("layers.0", "layers.2"): t[name] for name in (A, B)}, f"{NO_WEIGHT} ... layers.2"),
        (named(A.replace("lora_A.weight", "lora_magnitude_vector")), f"{NO_WEIGHT} ... lora_magnitude_vector"),
        (named(A.removeprefix("base_model.model.")), ": two tensors of adapter_model.safetensors have the same name"),
    ],
)
def test_what_the_tensors_of_an_adapter_may_not_be(change, line, adapter, tmp_path):
    config, tensors = read(adapter)
    changed = {name: x for name, x in (tensors | change(tensors)).items() if x is not None}
    folder = write(tmp_path / "changed", config | {"peft_version": "0.21.2"}, changed)
    with refused(f"{folder}{line}"):
        load_adapter(model_of(SMALL), folder)


PAIR = f"/adapter_config.json: the pair of {PACKED_EXPERTS}"


@pytest.mark.parametrize(
    ("parameters", "a", "b", "others", "line"),
    [
        (["down_proj"], (4, 12), (16, 4), "none", f"{PAIR}.down_proj has 4 rows in lora_A ... 3 experts"),
        (["down_proj"], (6,), (16, 6), "none", f": {PACKED_EXPERTS} has a matrix of shape [6] in"),
        (None, (6, 12), (16, 6), "none", f"{PAIR} is for all experts ... name none ... expected one"),
        (["gate_up_proj", "down_proj"], (6, 12), (16, 6), "none", f"{PAIR} is for all ... down_proj and gate_up_proj"),
        (["down_proj"], (6, 12), (16, 6), "of single experts", f"{NO_WEIGHT} ... mlp.experts"),
    ],
)
def test_what_packed_tensors_of_an_adapter_may_not_be(parameters, a, b, others, line, adapter, tmp_path):
    config, tensors = read(adapter)
    kept = {key: x for key, x in tensors.items() if others != "none" or ".experts." not in key}
    about = config | {"peft_version": "0.21.2", "target_parameters": parameters}
    folder = write(tmp_path / "changed", about, kept | tensors_of("0.mlp.experts", draw(*a), draw(*b)))
    with refused(f"{folder}{line}"):
        load_adapter(model_of(SMALL), folder)


@pytest.mark.parametrize(("dtype", "tied"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_copies_of_the_base_are_read(dtype, tied, adapter, tmp_path):
    """As PEFT names that of a head with a pair; also in bfloat16, and of the embedding that is the head too."""
    model = model_of(replace(SMALL, tied_embeddings=tied))
    moezoo.save_pretrained(model, tmp_path / "base")
    head = load_file(tmp_path / "base" / "model.safetensors")["model.embed_tokens.weight" if tied else "lm_head.weight"]
    config, tensors = read(adapter)
    tensors = {key: x for key, x in tensors.items() if "lm_head" not in key}
    tensors["base_model.model.lm_head.base_layer.weight"] = head.astype(dtype)
    folder = write(tmp_path / "adapter", config | {"modules_to_save": ["lm_head"]}, tensors)
    assert pairs_of(load_adapter(model, folder))
    plan_export(str(tmp_path / "base"), str(tmp_path / "new"), adapter=str(folder))
    tensors["base_model.model.lm_head.base_layer.weight"] = head.astype(dtype) * 2
    changed = write(tmp_path / "changed", config, tensors)
    line = f"{changed}: base_model.model.lm_head.base_layer.weight is a whole weight that differs"
    with refused(line):
        load_adapter(model, changed)
    with refused(line):
        plan_export(str(tmp_path / "base"), str(tmp_path / "new"), adapter=str(changed))


def test_damaged_and_missing_files(adapter, tmp_path):
    model = model_of(SMALL)
    folder = tmp_path / "copy"
    with refused(f"adapter={folder}: there is no such folder"):
        load_adapter(model, folder)
    with refused("adapter=org/name: there is no such folder", "hf download org/name"):
        load_adapter(model, "org/name")
    with refused("adapter=5: "):
        load_adapter(model, 5)  # pyright: ignore[reportArgumentType]
    with refused("load_adapter: the first argument is a dict, expected a model"):
        load_adapter({}, adapter)  # pyright: ignore[reportArgumentType]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copytree(adapter, folder)
        (folder / name).unlink()
        with refused(f"adapter={folder}: no {name}"):
            load_adapter(model, folder)
        (folder / name).mkdir()
        with refused(f"{folder / name} is a folder"):
            load_adapter(model, folder)
        shutil.rmtree(folder)
    shutil.copytree(adapter, folder)
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    for damaged in (data[:-7], data[: len(data) // 2], b"", data[:4], b"\0" * 100):
        file.write_bytes(damaged)
        with refused(str(file), "download it again"):
            load_adapter(model, folder)
    file.write_bytes(data)
    for text in ("", "[]", "{", '{"peft_type": "LORA", "peft_type": "LORA"}', '{"r": NaN}'):
        (folder / "adapter_config.json").write_text(text)
        with refused(f"{folder}/adapter_config.json"):
            load_adapter(model, folder)
    (folder / "file").write_text("")
    with refused(f"adapter={folder}/file"):
        load_adapter(model, folder / "file")


def test_an_expert_without_a_pair_is_left_as_it_is(adapter, tmp_path):
    """As everywhere where a pair is missing: PEFT writes no pair of what it does not adapt."""
    config, tensors = read(adapter)
    for part in "AB":
        tensors.pop(f"{PREFIX}1.block_sparse_moe.experts.1.w1.lora_{part}.weight")
    folder = write(tmp_path / "some", config, tensors)
    with pytest.warns(UserWarning, match=rf"^{folder}: target_modules .*: model.layers.1\S*.experts.1.w1; if"):
        some = pairs_of(load_adapter(model_of(SMALL), folder))
    whole = pairs_of(load_adapter(model_of(SMALL), adapter))
    path = "stacks[0].blocks[0].feed_forward.experts.gate"
    wanted = delta(whole[path])
    wanted[1, 1] = 0
    np.testing.assert_array_equal(delta(some[path]), wanted)


@pytest.mark.parametrize(
    ("pattern", "keys", "named"),
    [
        (r"1\.self_attn\.q_proj", {}, "model.layers.1.self_attn.q_proj"),
        (r"self_attn\.q_proj", {}, "model.layers.0-1.self_attn.q_proj (2)"),
        (r"1\.self_attn\.q_proj", {"layers_to_transform": [0]}, ""),
        (r"1\.self_attn\.q_proj", {"exclude_modules": ["1.self_attn.q_proj"]}, ""),
        (r"1\.self_attn\.q_proj", {"target_modules": r".*\.(k_proj|w1)"}, ""),
        (r"q_proj", {"target_modules": ["k_proj", "v_proj", "o_proj"]}, ""),
        # PEFT has pairs of all experts together, or none, where transformers has them in one tensor.
        (r"\.experts\.", {}, ""),
        (r"\.experts\.2\.w2", {}, "model.layers.0-1.block_sparse_moe.experts.2.w2 (2)"),
    ],
)
def test_modules_without_the_pair_that_the_configuration_promises_are_named(pattern, keys, named, adapter, tmp_path):
    config, tensors = read(adapter)
    tensors = {name: x for name, x in tensors.items() if not re.search(pattern, name)}
    folder = write(tmp_path / "some", config | keys, tensors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_adapter(folder, model_of(SMALL))
    lines = [str(each.message) for each in caught]
    assert [re.findall(r": (model\.layers.*);", line) for line in lines] == ([[named]] if named else [])


def test_what_is_not_saved(adapter, tmp_path):
    model = with_pairs(model_of(SMALL))
    with refused("save_adapter: the model has no low-rank pairs"):
        save_adapter(without_pairs(model), tmp_path / "a")
    with refused("save_adapter: the first argument is a dict"):
        save_adapter({}, tmp_path / "a")  # pyright: ignore[reportArgumentType]
    with refused(f"{adapter} already holds an adapter"):
        save_adapter(model, adapter)
    with refused("existing=yes"):
        save_adapter(model, adapter, existing="yes")  # pyright: ignore[reportArgumentType]
    (tmp_path / "file").write_text("")
    with refused(f"{tmp_path}/file"):
        save_adapter(model, tmp_path / "file")
    with refused(f"{tmp_path}/file/below"):
        save_adapter(model, tmp_path / "file" / "below")
    (tmp_path / "b").mkdir()
    shutil.copy(adapter / "README.md", tmp_path / "b")  # a card alone is no adapter
    save_adapter(with_pairs(model_of(SMALL), "attention"), tmp_path / "b")
    save_adapter(model, tmp_path / "b", existing="replace")
    assert_same(load_adapter(model, tmp_path / "b"), model)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_what_cannot_be_written_leaves_the_adapter_that_is_there(tmp_path, monkeypatch):
    """On a full disk, of which the size is known before or which fails while writing."""
    folder, other = saved(with_pairs(model_of(SMALL)), tmp_path / "a"), with_pairs(model_of(SMALL), seed=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    for where, name, put, line in (
        (unfinished.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5}), "the disk has 5 bytes free"),
        (writing._Output, "write", fail, "(No space left on device)"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, put)
            with refused(f"{folder}: cannot be written", line):
                save_adapter(other, folder, existing="replace")
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_adapter(other, folder, existing="replace")
    assert_same(load_adapter(model_of(SMALL), folder), other)


# What PEFT does not read (as `test_peft.py` sees): model, targets -> parts of the warning; none for all that it reads.
MLP = "{gate_proj, up_proj, down_proj}"
PEERS = [
    ("mixtral", ("all",), ()),
    ("minimax", ("attention", "experts", "*.router.weight"), ()),
    ("v3", ("attention", "experts", "*.router.weight", ".unembedding.weight"), ()),
    ("v3", ("all",), (f"ignores the pairs of mlp.{MLP}, mlp.shared_experts.{MLP}, because", "deepseek_v3 for one of")),
    ("glm", ("shared",), (f"ignores the pairs of mlp.shared_experts.{MLP}, because",)),
    ("ernie", ("mlp",), (f"ignores the pairs of mlp.{MLP}, because",)),
    ("mixtral", ("*.experts.gate", "*.experts.up"), ("ignores the pairs of block_sparse_moe.experts.{w1, w3}", "w2")),
    ("mixtral", ("*.experts.down",), ()),
    ("qwen3", ("*.experts.gate",), ("does not read", "joins gate_proj and up_proj", "only gate_proj")),
    ("olmoe", ("attention", "*.experts.up", "*.experts.down"), ("does not read", "only up_proj has pairs")),
    ("gpt_oss", ("attention",), ()),
    ("gpt_oss", ("all",), (f"ignores the pairs of mlp.experts.{MLP}, because", "in one tensor")),
    ("gpt_oss", ("*.router.weight",), ("does not read", "routers of gpt_oss: mlp.router")),
    ("mistral 4", ("attention", "shared"), ()),
    ("mistral 4", ("experts",), ("ignores the pairs of mlp.experts", "mistral4")),
    ("kimi linear", ("attention", "shared", "mlp"), ()),
    ("kimi linear", ("experts",), ("ignores the pairs of block_sparse_moe.experts", "kimi_linear")),
    ("kimi linear", ("*.router.weight",), ("does not read", "routers of kimi_linear: block_sparse_moe.gate")),
    ("hy", ("mlp", "attention"), ()),
    ("hy", ("shared", "experts"), ("ignores the pairs of mlp.experts", f"; and of mlp.shared_mlp.{MLP}, because")),
]


@pytest.mark.parametrize(("name", "targets", "parts"), PEERS)
def test_what_peft_would_not_read_is_named(name, targets, parts, tmp_path):
    model = with_pairs(model_of(CONFIGS[name]), *targets)
    pattern = ".*".join(
        re.escape(part) for part in (f"{tmp_path}/a: PEFT 0.21 ", *parts, "; for other libraries merge")
    )
    with pytest.warns(UserWarning, match=pattern) if parts else nullcontext():
        save_adapter(model, tmp_path / "a")


def test_gate_and_up_of_several_scales_are_named(tmp_path):
    """PEFT gives both the scale that most pairs have."""
    config, tensors = read(saved(with_pairs(model_of(SMALL), alpha=2.0), tmp_path / "one"))
    folder = write(tmp_path / "two", config | {"alpha_pattern": {"w3": 6}}, tensors)
    with pytest.warns(UserWarning, match=r"does not read .* rank and scale .*block_sparse_moe.experts.w3"):
        save_adapter(load_adapter(model_of(SMALL), folder), tmp_path / "again")


def test_all_types_are_known():
    """One that nobody has tried with PEFT would get no warning."""
    from moezoo.models import FAMILIES

    types = {name for family in FAMILIES.values() if family.name not in MADE for name in family.hub.types}
    # Written as deepseek_v3 and qwen3_moe.
    assert types - KNOWN == {"kimi_k2", "qwen3_vl_moe_text", "qwen3_omni_moe_text"}
