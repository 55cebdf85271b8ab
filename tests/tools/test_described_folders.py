"""`sharding` and `plan` with `folder=`: what is laid out is the model of config.json, and no weight is read."""

import json

import jax
import pytest

import moezoo
from moezoo.config.compose import compose, compose_described
from moezoo.hub.opening import open_folder
from moezoo.models import FAMILIES, build_model
from moezoo.tools.described import folder_lines

LAYOUT = ("mesh.expert=2", "batch_size=8", "seq_len=16")
SHARDING = ("sharding", *LAYOUT, "--json")
PLAN = ("topology=v5p:2x1x1", "mesh=ep2", "batch_size=8", "seq_len=16", "--estimate")


def keys_of(name):
    """Return the config.json of a family's laptop size."""
    family = FAMILIES[name]
    return family.hub.write(family.config()) | {"dtype": "float32"}


def write(folder, keys):
    """Write a config.json alone, and return its folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def save(folder, name, **keywords):
    """Save a family's laptop size with its weights, and return its folder."""
    moezoo.save_pretrained(build_model(FAMILIES[name].config(), key=jax.random.key(0)), folder, **keywords)
    return folder


@pytest.mark.parametrize(
    ("name", "call"),
    [("mixtral", "train"), pytest.param("deepseek", "decode", marks=pytest.mark.weekly), ("gpt_oss", "evaluate")],
)
def test_it_is_the_layout_of_the_folder_with_weights(console, tmp_path, name, call):
    """The rows of `init_from`, which compares all tensors: parameters, activations, collectives and memory."""
    folder = save(tmp_path / "whole", name)
    alone = write(tmp_path / "alone", json.loads((folder / "config.json").read_text()))
    _, wanted, _ = console(*SHARDING, f"init_from={folder}", f"--call={call}")
    code, found, notes = console(*SHARDING, f"folder={alone}", f"--call={call}")
    assert (code, json.loads(found)) == (0, json.loads(wanted))
    assert f"folder={alone}: by its config.json alone, it has " in notes
    for path in (alone / "config.json", folder):
        _, out, _ = console(*SHARDING, f"folder={path}", "--parameters-only")
        assert json.loads(out)["parameters"] == json.loads(wanted)["parameters"]


def test_weights_are_not_read(console, tmp_path):
    folder = write(tmp_path / "damaged", keys_of("mixtral"))
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert console(*SHARDING, f"folder={folder}", "--parameters-only")[0] == 0
    assert console("plan", f"folder={folder}", *PLAN)[0] == 0


def test_a_run_may_have_other_numbers_than_the_folder(console, tmp_path):
    folder = write(tmp_path / "narrow", keys_of("mixtral") | {"dtype": "bfloat16"})
    line = "; a run has numbers as execution.param_dtype=float32"
    assert line in console(*SHARDING, f"folder={folder}")[2]
    assert line not in console(*SHARDING, f"folder={folder}", "execution.param_dtype=bfloat16")[2]


def test_a_model_inside_one_for_images(console, tmp_path):
    """Its keys are in text_config; the numbers are those of the text model by itself."""
    text = write(tmp_path / "text", keys_of("deepseek"))
    table = keys_of("deepseek") | {"dtype": "float16"}
    outer = write(tmp_path / "outer", {"model_type": "kimi_k25", "text_config": table, "dtype": "float32"})
    _, wanted, _ = console(*SHARDING, f"folder={text}")
    code, found, notes = console(*SHARDING, f"folder={outer}")
    assert (code, found) == (0, wanted)
    assert "stored as float16: " in notes


@pytest.mark.filterwarnings("ignore:.*transformers 5.23 and 5.24 do not read FP8")
@pytest.mark.parametrize(("name", "form"), [("deepseek", "fp8"), ("gpt_oss", "mxfp4")])
def test_few_bits_are_kept_as_the_folder_keeps_them(console, tmp_path, name, form):
    """What is not trained is laid out in the stated format, equal to what the tensors of such a folder give."""
    folder = save(tmp_path / "few", name, format=form)
    asked = (*SHARDING, "execution.param_dtype=stored", 'frozen=["*.experts.*"]')
    _, wanted, _ = console(*asked, f"init_from={folder}")
    code, found, notes = console(*asked, f"folder={folder}")
    assert (code, json.loads(found)) == (0, json.loads(wanted))
    assert f"float32, {form}: " in notes
    stored = open_folder(folder).files.tensors
    assert f"{sum(path_bytes(each) for each in stored.values()):,} bytes; which weights are {form}" in notes


def path_bytes(tensor):
    """Return the bytes of a tensor of a folder."""
    count = 1
    for size in tensor.shape:
        count *= size
    return count * {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}[tensor.dtype]


def test_the_plan_names_the_folder_to_train_from(console, tmp_path):
    folder = write(tmp_path / "alone", keys_of("mixtral"))
    for path in (folder, folder / "config.json"):
        code, out, _ = console("plan", f"folder={path}", *PLAN)
        assert code == 0
        assert out.startswith("fits v5p:2x1x1: yes")
        assert f"init_from={folder} " in "".join(out.split("\\\n")).replace("'", "").replace("  ", " ")
        assert "by its config.json alone" in " ".join(out.split())
    other = folder / "mixtral.json"
    (folder / "config.json").rename(other)
    assert "init_from=FOLDER" in console("plan", f"folder={other}", *PLAN)[1]


def test_another_layout_and_another_model_to_compare(console, tmp_path):
    one, other = write(tmp_path / "one", keys_of("mixtral")), write(tmp_path / "other", keys_of("deepseek"))
    code, out, _ = console(*SHARDING[:-1], f"folder={one}", "--against", f"folder={other}")
    assert code == 0
    assert "- train mixtral" in out
    assert "+ train deepseek" in out
    code, out, _ = console(*SHARDING[:-1], f"folder={one}", "--against", "model=deepseek")
    assert code == 0
    assert "+ train deepseek" in out
    assert out.count("by its config.json alone") == 1


def test_dense_models_become_mixtures(console, tmp_path):
    experts = ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef")
    keys = keys_of("mixtral") | {"model_type": "mistral"}
    folder = write(tmp_path / "dense", {key: value for key, value in keys.items() if key not in experts})
    code, _, notes = console(*SHARDING, f"folder={folder}", "upcycle.experts=4", "upcycle.per_token=2")
    assert code == 0
    assert "after its MLPs are copied into experts" in notes


def test_settings_are_those_of_training_from_the_folder(tmp_path):
    """Nothing moves the routing that the weights came with, as with `init_from`, and keys that may differ are taken."""
    folder = save(tmp_path / "whole", "olmoe")
    cfg = compose_described(f"folder={folder}", "model.max_length=64")
    assert cfg.model == compose(f"init_from={folder}", "model.max_length=64").model
    assert cfg.optimizer == compose(f"init_from={folder}").optimizer
    assert compose_described("model=deepseek") == compose("model=deepseek")


def test_a_folder_without_a_dtype_counts_as_bfloat16(tmp_path):
    keys = keys_of("mixtral") | {"torch_dtype": None}
    without, half = (write(tmp_path / str(name), keys | {"dtype": name}) for name in (None, "bfloat16"))
    dtype = "execution.param_dtype=bfloat16"
    line, wanted = (folder_lines([f"folder={folder}", dtype])[0].partition("it has ")[2] for folder in (without, half))
    assert line == f"{wanted}; it names no dtype, so numbers count as bfloat16"
