"""Folders whose tensors are named otherwise, made here by hand: read to the bit, written back, or refused in one line.

The forms are written down here a second time, as functions of the tensors that published folders have.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from few_bit_folders import FP8_CONFIG, Case, encode_fp8, is_projection, tensors_of, write_few_bits
from refusals import by_table, refused
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, deepseek_v3, mixtral, of_type, qwen3

import moezoo
from moezoo.hub.folders import hub_model_config
from moezoo.models.blueprint import Blueprint
from moezoo.training.exporting import plan_export

Tensors = dict[str, np.ndarray]
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def experts_by_layer(tensors: Tensors) -> dict[str, dict[str, list[np.ndarray]]]:
    """Take the experts out, and return those of each layer by the words gate, up and down, in order."""
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    words = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    pattern = re.compile(r"(.*layers\.\d+\.)\w+\.experts\.(\d+)\.(\w+)\.weight")
    matches = [match for name in tensors if (match := pattern.fullmatch(name))]
    for match in sorted(matches, key=lambda match: int(match[2])):
        found.setdefault(match[1], {}).setdefault(words[match[3]], []).append(tensors.pop(match[0]))
    return found


def pack(tensors: Tensors, transposed: bool = False) -> Tensors:
    """Return gate_up_proj [E, 2I, d] and down_proj [E, d, I] in place of experts, or the same with inputs first."""
    tensors = dict(tensors)
    for layer, experts in experts_by_layer(tensors).items():
        gate, up, down = (np.stack(experts[word]) for word in ("gate", "up", "down"))
        packed = {"gate_up_proj": np.concatenate([gate, up], axis=1), "down_proj": down}
        for name, array in packed.items():
            tensors[f"{layer}mlp.experts.{name}"] = array.swapaxes(1, 2).copy() if transposed else array
    return tensors


def stack(tensors: Tensors) -> Tensors:
    """Return gate_proj and up_proj [E, I, d] and down_proj [E, d, I] in place of experts."""
    tensors = dict(tensors)
    for layer, experts in experts_by_layer(tensors).items():
        tensors |= {f"{layer}mlp.experts.{word}_proj": np.stack(arrays) for word, arrays in experts.items()}
    return tensors


def in_memory(tensors: Tensors) -> Tensors:
    """Return packed experts, and the names that transformers 5 has in memory for what is beside them."""
    found = {}
    for name, array in pack(tensors).items():
        new = re.sub(r"block_sparse_moe\.(gate\.weight|e_score_correction_bias)", r"mlp.\1", name)
        new = new.replace("mlp.router.gate.", "mlp.gate.").replace("mlp.expert_bias", "mlp.e_score_correction_bias")
        new = new.replace("mlp.shared_mlp.", "mlp.shared_experts.").replace("mlp.moe_statics.", "mlp.gate.moe_statics.")
        found[new] = array
    return found


def named(rename: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    """Return a form in which names alone differ."""
    return lambda tensors: {rename(name): array for name, array in tensors.items()}


def below(prefix: str) -> Callable[[Tensors], Tensors]:
    """Return a form in which all names begin with `prefix`."""
    return named(lambda name: prefix + name)


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "memory": in_memory,
    "transposed": functools.partial(pack, transposed=True),
    "stacked": stack,
    "compiled": below("_orig_mod."),
    "compiled layers": named(lambda name: re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", name)),
    "wrapped twice": below("module._orig_mod.module."),
    "sharded": named(lambda name: f"_fsdp_wrapped_module.{name}".replace(".mlp.", "._checkpoint_wrapped_module.mlp.")),
    "base": named(lambda name: name.removeprefix("model.")),
    "inside": below("language_model."),
    "beside": named(lambda name: name.replace("model.", "model.language_model.", 1)),
    "base beside": named(lambda name: name.replace("model.", "language_model.", 1)),
    "compiled memory inside": lambda tensors: below("_orig_mod.language_model.")(in_memory(tensors)),
}
# Each name that differs between families, once. In `square` and `wide` experts the two dimensions of down_proj or of
# gate_up_proj are equal.
MODELS: dict[str, Any] = {
    "mixtral": mixtral(),
    "qwen3": CONFIGS["qwen3"],
    "minimax": CONFIGS["minimax"],
    "hy": CONFIGS["hy"],
    "ernie": CONFIGS["ernie"],
    "v3": deepseek_v3(),
    "square experts": mixtral(embed=12, expert_mlp=12),
    "wide experts": mixtral(embed=24, expert_mlp=12),
}
CHANGING = ("memory", "transposed", "stacked")  # forms with other tensors
PAIRS = [(name, form) for name in MODELS for form in (FORMS if name == "mixtral" else CHANGING)]


def random_numbers(config: Any) -> Any:
    """Return a model of random numbers."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), Blueprint(config).shapes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a function from a name in MODELS to its random model and the folder with published names."""

    @functools.cache
    def write(name: str) -> tuple[Any, Path]:
        model, folder = random_numbers(MODELS[name]), tmp_path_factory.mktemp("plain") / "model"
        moezoo.save_pretrained(model, folder)
        return model, folder

    return write


def rewrite(folder: Path, new: Path, change: Callable[[Tensors], Tensors], **keys: Any) -> Path:
    """Write a folder with other tensors, and other keys of config.json."""
    new.mkdir()
    config = json.loads((folder / "config.json").read_text()) | keys
    (new / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(x) for name, x in change(load_file(folder / "model.safetensors")).items()}
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    return new


def equal(a: Any, b: Any) -> bool:
    same = jax.tree.structure(a) == jax.tree.structure(b)
    return same and all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_read_to_the_bit(plain, tmp_path, name, form):
    model, folder = plain(name)
    other = rewrite(folder, tmp_path / "m", FORMS[form])
    assert load_file(other / "model.safetensors").keys() != load_file(folder / "model.safetensors").keys()
    again = moezoo.from_pretrained(other)
    assert equal(again, model)
    moezoo.save_pretrained(again, tmp_path / "new")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "new" / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.parametrize("form", CHANGING)
def test_every_device_reads_its_part(plain, tmp_path, form):
    model, folder = plain("mixtral")
    other = rewrite(folder, tmp_path / "m", FORMS[form])
    for rules, mesh in (("serve", ["mesh.expert=4", "mesh.tensor=2"]), ("fsdp_ep", ["mesh.fsdp=2", "mesh.expert=4"])):
        execution = moezoo.execution(moezoo.compose(f"rules={rules}", "model=mixtral", *mesh))
        assert equal(moezoo.from_pretrained(other, execution), model)


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_has_the_tensors_of_the_folder_and_no_beginnings(plain, tmp_path, form):
    """Names that only wrappers have are gone, because transformers does not read them; packed experts stay."""
    model, folder = plain("hy")
    other = rewrite(folder, tmp_path / "m", FORMS[form])
    carried = moezoo.save_pretrained(moezoo.from_pretrained(other), tmp_path / "same", like=other)
    assert not carried.changed
    wanted = (FORMS["memory" if "memory" in form else form] if set(form.split()) & {*CHANGING} else dict)(
        load_file(folder / "model.safetensors")
    )
    found = load_file(tmp_path / "same" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())
    if form in CHANGING:
        assert (tmp_path / "same/model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    trained = jax.tree.map(lambda x: x + 1, model)
    assert moezoo.save_pretrained(trained, tmp_path / "trained", like=other).changed
    assert equal(moezoo.from_pretrained(tmp_path / "trained"), trained)


def test_several_files_are_copied_with_their_index(plain, tmp_path):
    model, _ = plain("v3")
    moezoo.save_pretrained(model, tmp_path / "m", max_shard_size="20KB")
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    wrapped = index | {"weight_map": {f"_orig_mod.{name}": file for name, file in index["weight_map"].items()}}
    files = set(index["weight_map"].values())
    assert len(files) > 2
    before = {file: load_file(tmp_path / "m" / file) for file in files}
    for file in files:
        save_file(below("_orig_mod.")(before[file]), tmp_path / "m" / file, metadata={"format": "pt"})
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(wrapped))
    again = moezoo.from_pretrained(tmp_path / "m")
    assert equal(again, model)
    moezoo.save_pretrained(again, tmp_path / "new", like=tmp_path / "m")
    assert json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text()) == index
    for file, tensors in before.items():
        found = load_file(tmp_path / "new" / file)
        assert found.keys() == tensors.keys()
        assert all(np.array_equal(found[name], array) for name, array in tensors.items())


def test_a_model_for_images(plain, tmp_path):
    """A wrapper's beginning and packed experts, in the form that transformers has in memory; vision tensors stay."""
    model, folder = plain("v3")
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    outer = {"model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": False}
    images = {"module.model.vision_tower.norm0.weight": np.ones(3, np.float32)}

    def change(tensors: Tensors) -> Tensors:
        return below("module.")(FORMS["beside"](pack(tensors))) | images

    other = rewrite(folder, tmp_path / "m", change)
    (other / "config.json").write_text(json.dumps(outer))
    with pytest.warns(UserWarning, match="1 tensor is not loaded, for images: model.vision_tower.norm0.weight"):
        again = moezoo.from_pretrained(other)
    assert equal(again, model)
    moezoo.save_pretrained(again, tmp_path / "new", like=other)
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert {"model.vision_tower.norm0.weight", "model.language_model.layers.1.mlp.experts.gate_up_proj"} <= found.keys()


@pytest.mark.parametrize(("source", "like"), [("memory", "usual"), ("usual", "memory"), ("transposed", "stacked")])
def test_one_form_is_converted_to_another(plain, tmp_path, source, like):
    model, folder = plain("qwen3")
    places = {form: rewrite(folder, tmp_path / form, FORMS.get(form, dict)) for form in (source, like)}
    plan_export(str(places[source]), f"{tmp_path}/new", like=str(places[like])).write()
    found, wanted = (load_file(f / "model.safetensors") for f in (tmp_path / "new", places[like]))
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())
    plan = plan_export(str(places[source]), f"{tmp_path}/half", dtype="bfloat16")
    plan.write()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), model)
    assert equal(moezoo.from_pretrained(tmp_path / "half", dtype="float32"), half)


@pytest.mark.parametrize("name", ["fp8", "int4", "fp8 one scale", "nvfp4"])
def test_few_bits_below_a_wrapper(few_bits, tmp_path, name):
    """The format sees the names after the beginnings, so all formats are read; kept ones are written without them."""
    case = few_bits(name)
    shutil.copytree(case.few, tmp_path / "m")
    raw = (case.few / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    new = json.dumps({k if k == "__metadata__" else f"_orig_mod.{k}": about for k, about in header.items()}).encode()
    (tmp_path / "m/model.safetensors").write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + size :])
    wanted, found = (moezoo.from_pretrained(f, dtype="float32") for f in (case.few, tmp_path / "m"))
    assert equal(found, wanted)
    if name == "nvfp4":
        return
    kept = moezoo.from_pretrained(tmp_path / "m", dtype="stored")
    assert equal(kept, moezoo.from_pretrained(case.few, dtype="stored"))
    moezoo.save_pretrained(kept, tmp_path / "new", like=tmp_path / "m")
    found, wanted = tensors_of(tmp_path / "new"), tensors_of(case.few)
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == array.tobytes() for name, array in wanted.items())


def test_packed_experts_of_few_bits(tmp_path):
    config = qwen3(embed=64, expert_mlp=32, layers=2, mlp=40, mlp_layers=())
    moezoo.save_pretrained(random_numbers(config), tmp_path / "plain")
    packed = rewrite(tmp_path / "plain", tmp_path / "packed", pack)
    table = FP8_CONFIG | {"weight_block_size": [16, 24]}
    written = write_few_bits(packed, tmp_path, Case(config, is_projection, encode_fp8((16, 24)), table))
    assert "model.layers.0.mlp.experts.gate_up_proj_scale_inv" in written.tensors
    wanted, found = (moezoo.from_pretrained(f, dtype="float32") for f in (written.wide, written.few))
    assert equal(found, wanted)
    kept = moezoo.from_pretrained(written.few, dtype="stored")
    moezoo.save_pretrained(kept, tmp_path / "new", like=written.few)
    assert (tmp_path / "new/model.safetensors").read_bytes() == (written.few / "model.safetensors").read_bytes()
    # As the tensors that a folder without `like` has: each expert its own, whose blocks are those of all experts.
    plan_export(str(written.few), f"{tmp_path}/apart", dtype="float32", like=f"{tmp_path}/plain").write()
    assert equal(moezoo.from_pretrained(tmp_path / "apart"), wanted)
    transposed = {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if array.ndim == 3 and array.dtype.itemsize == 1 else array
        for name, array in written.tensors.items()
    }
    (tmp_path / "t").mkdir()
    shutil.copy(written.few / "config.json", tmp_path / "t")
    save_file(transposed, tmp_path / "t/model.safetensors")
    with refused(f"{tmp_path}/t: model.layers.0.mlp.experts.gate_up_proj: fp8 with inputs before outputs is not read"):
        moezoo.from_pretrained(tmp_path / "t")


def frequencies(size: int, base: float = 100.0) -> np.ndarray:
    return (base ** (-np.arange(0, size, 2) / size)).astype(np.float32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 0.5}
# By hand, of four pairs of dimensions with a base of 100: the first turns as fast, the last a quarter as fast.
SLOWED = frequencies(8) * np.array([1, 0.75, 0.5, 0.25], np.float32)


@by_table(
    """
    numbers => message
    plain => warns
    half => warns
    bfloat16 => warns
    float64 => warns
    another size => warns
    another base => [1.0, 0.17782793939113617, 0.03162277489900589, 0.0056 ... expected [1.0, 0.316
    order => [0.0316 ... expected [1.0
    whole numbers => I32, expected F32
    """
)
def test_rotary_frequencies_are_those_of_config_json(plain, tmp_path, numbers, message):
    """Those of another size than the rotated dimensions belong to no layer, as in Kimi K2 as released."""
    model, folder = plain("v3")
    assert model.config.rope_dim == 8
    keys = {"rope_theta": 100.0, "rope_scaling": None, "rope_parameters": None}
    stored = {
        "plain": frequencies(8),
        "half": frequencies(8).astype(np.float16),
        "bfloat16": frequencies(8).astype(ml_dtypes.bfloat16),
        "float64": frequencies(8).astype(np.float64),
        "another size": frequencies(4, 7.0),
        "another base": frequencies(8, 1000.0),
        "order": frequencies(8)[::-1],
        "whole numbers": np.ones(4, np.int32),
    }[numbers]
    other = rewrite(folder, tmp_path / "m", lambda tensors: tensors | {FREQUENCIES: stored}, **keys)
    if message == "warns":
        with pytest.warns(UserWarning, match=f"1 tensor is not loaded, for rotary frequencies: {FREQUENCIES}"):
            again = moezoo.from_pretrained(other)
        moezoo.save_pretrained(again, tmp_path / "new", like=other)
        assert load_file(tmp_path / "new/model.safetensors")[FREQUENCIES].tobytes() == stored.tobytes()
    else:
        begins = "is " if numbers == "whole numbers" else "begins with "
        for read in (moezoo.from_pretrained, lambda folder: plan_export(str(folder), str(tmp_path / "new"))):
            with refused(f"{other}: {FREQUENCIES} {begins}{message}"):
                read(other)


def test_rotary_frequencies_may_be_those_before_the_extension(plain, tmp_path):
    _, folder = plain("v3")
    keys = {"rope_theta": 100.0, "rope_scaling": YARN, "rope_parameters": None}
    for i, found in enumerate((frequencies(8), SLOWED)):
        other = rewrite(folder, tmp_path / f"m{i}", lambda tensors, x=found: tensors | {FREQUENCIES: x}, **keys)
        with pytest.warns(UserWarning, match="for rotary frequencies"):
            moezoo.from_pretrained(other)
    other = rewrite(folder, tmp_path / "m", lambda tensors: tensors | {FREQUENCIES: frequencies(8) / 4}, **keys)
    with refused(f"{other}: {FREQUENCIES} begins with [0.25,", "correct these, or take the tensor out"):
        moezoo.from_pretrained(other)


def add(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: np.ones(2, np.float32) for name in names}


def drop(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: array for name, array in tensors.items() if part not in name}


MEGATRON = named(lambda name: name.replace("model.layers.", "decoder.layers."))
META = named(lambda name: name.replace("model.embed_tokens.", "tok_embeddings.").replace("model.layers.", "layers."))
ALL_BUT_MLP = named(lambda name: name.replace(".block_sparse_moe.", ".moe."))
REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "one is missing": (
        drop("lm_head"),
        "1 tensor is missing: lm_head.weight; the files have 64 tensors, such as model.embed_tokens.weight, "
        "model.layers.0-1.block_sparse_moe.experts.0-7.w1.weight (16), ... and 7 more",
    ),
    "unknown names": (
        ALL_BUT_MLP,
        "50 tensors are missing: model.layers.0-1.block_sparse_moe.experts.0-7.w1.weight (16), ... the files have 65 "
        "tensors, 50 of them unknown: model.layers.0-1.moe.experts.0-7.w1.weight (16),",
    ),
    "Megatron": (MEGATRON, "62 tensors are missing: ... 62 of them unknown: decoder.layers. ... with Megatron Bridge"),
    "Meta": (META, "missing: model.embed_tokens.weight; ... tok_embeddings.weight; these are the names of Meta's"),
    "PEFT": (below("base_model.model."), "65 tensors are missing: ... PEFT wraps the model: merge_and_unload()"),
    "a wrapper's part in a name": (
        add("module.extra", "model.my_orig_mod.x", "model.layers.0.module.y"),
        "3 tensors are not in the model of config.json: model.layers.0.module.y, model.my_orig_mod.x, module.extra",
    ),
    "a beginning again in a name": (
        lambda tensors: below("language_model.")(add("model.layers.0.language_model.x")(tensors)),
        "1 tensor is not in the model of config.json: model.layers.0.language_model.x",
    ),
    "not all below": (add("language_model.model.layers.0.x"), "1 tensor is not ... language_model.model.layers.0.x"),
    "twice": (
        lambda tensors: tensors | below("_orig_mod.")(tensors),
        "has _orig_mod.lm_head.weight and lm_head.weight, two names of one tensor; take one out",
    ),
    "both forms": (lambda tensors: pack(tensors) | tensors, "4 tensors are not in the model ... gate_up_proj"),
    "half packed": (
        lambda tensors: {n: x for n, x in pack(tensors).items() if not n.endswith("experts.down_proj")},
        "48 tensors are missing: ... 2 of them unknown: model.layers.0-1.mlp.experts.gate_up_proj (2)",
    ),
    "wrong shapes": (
        lambda tensors: {n: x[:, :-1] if n.endswith("gate_up_proj") else x for n, x in pack(tensors).items()},
        "model.layers.0.mlp.experts.gate_up_proj has shape [8, 23, 16], expected [8, 24, 16]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(plain, tmp_path, case):
    change, line = REFUSED[case]
    other = rewrite(plain("mixtral")[1], tmp_path / "m", change)
    with refused(f"{other}", line):
        moezoo.from_pretrained(other)


def test_unknown_names_of_many_experts_are_not_called_another_model(plain, tmp_path):
    """That the files hold none of 500 experts says only that they are named otherwise."""
    other = rewrite(plain("mixtral")[1], tmp_path / "m", ALL_BUT_MLP, num_local_experts=500)
    with refused(f"{other}: config.json has num_local_experts=500, but ... 0 experts; the files have 65 tensors"):
        moezoo.from_pretrained(other)


@by_table(
    """
    file => line
    pytorch_model-00001-of-00002.bin => .bin: convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER)
    consolidated.00.pth => .pth: convert it: safetensors.torch.save_file(torch.load(NAME
    model.pt => .pt: convert it: safetensors.torch.save_file(torch.load(NAME
    model-Q4_K_M.gguf => .gguf: convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=
    adapter_model.safetensors => : it is an adapter: name the folder of its base, and this one with adapter=
    adapter_model.bin => : it is an adapter: save it again with PEFT's save_pretrained
    MODEL.GGUF => .GGUF: convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=
    model-00001-of-00002.safetensors => : download model.safetensors.index.json or model.safetensors too
    """
)
def test_folders_without_safetensors(plain, tmp_path, file, line):
    shutil.copy(plain("mixtral")[1] / "config.json", tmp_path)
    for name in (file, "optimizer.pt", "training_args.bin"):
        (tmp_path / name).write_bytes(b"x")
    there = f"there is {Path(file).stem if line.startswith('.') else file}{line}"
    with refused(f"{tmp_path} has neither model.safetensors nor ... only safetensors are read; {there}"):
        moezoo.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with refused(f"{tmp_path}: no config.json; name a Hugging Face model folder; {there}"):
        hub_model_config(tmp_path)


def test_a_base_model_with_tied_embeddings_needs_no_unembedding(tmp_path):
    model = random_numbers(of_type("glm4_moe", rotary_dims=4, shared_experts=1, tied_embeddings=True))
    moezoo.save_pretrained(model, tmp_path / "plain")
    other = rewrite(tmp_path / "plain", tmp_path / "m", FORMS["base"])
    assert not any(name.startswith(("model.", "lm_head.")) for name in load_file(other / "model.safetensors"))
    assert equal(moezoo.from_pretrained(other), model)
