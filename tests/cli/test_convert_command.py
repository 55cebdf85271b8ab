"""`moezoo convert`: a run or a folder becomes a folder, to the bit or rounded, and nothing is read twice."""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chat_styles import save_tokenizer
from refusals import refused
from safetensors.numpy import load_file, save_file

import moezoo
from moezoo.config.compose import as_mapping, to_yaml
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.training.checkpoint import Checkpoints
from moezoo.training.exporting import plan_export
from moezoo.training.saved_arrays import SavedArray

pytestmark = pytest.mark.filterwarnings("ignore:.*transformers has no key for")


SIZES = {"vocab": 40, "embed": 16, "heads": 2, "q_lora": 8, "kv_lora": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 6}
SIZES |= {"layers": 3, "mlp": 20, "expert_mlp": 12, "experts": 8, "experts_per_token": 2}
SIZES |= {"router.groups": 4, "router.kept_groups": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder with one checkpoint of random numbers. Its experts are in two chunks, as of two devices."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    folder.mkdir()
    cfg = moezoo.compose("model=deepseek", *(f"model.{key}={value}" for key, value in SIZES.items()), "mesh.expert=2")
    (folder / "config.yaml").write_text(to_yaml(as_mapping(cfg)))
    rng = np.random.default_rng(0)
    shapes = Blueprint(cfg.model).shapes
    numbers = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), shapes)
    model = jax.device_put(numbers, on_mesh(moezoo.execution(cfg)).shardings(shapes))
    checkpoints = Checkpoints(folder / "checkpoints", count=1, size=0)
    about = {"versions": {"moezoo": "0"}, "config": as_mapping(cfg), "loader": {}}
    checkpoints.save(1, {"model": model, "training": {"step": np.zeros(2)}}, about)
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory) -> Path:
    """A folder of the run's model, as `save_pretrained` writes it, in several files, with a tokenizer."""
    path = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(moezoo.load_run(run)[0], path, max_shard_size=9000)
    (path / "tokenizer.json").write_text("{}")
    (path / "modeling.py").write_text("raise SystemExit")
    return path


def read_files(folder: Path, *apart: str) -> dict[str, bytes]:
    """Return all files but the model card, which `save_pretrained` does not write."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("README.md", *apart)}


def test_a_run_becomes_a_folder(run, folder, tmp_path, console):
    """The bytes of `save_pretrained`, of the newest checkpoint or of one that is named. Each chunk is read once."""
    code, out, err = console("convert", str(run), "new", "max_shard_size=9000")
    assert (code, err) == (0, "")
    total, _ = count_parameters(moezoo.load_run(run)[0], 2)
    files = read_files(folder, "tokenizer.json", "modeling.py")
    size = sum(map(len, files.values())) + (tmp_path / "new" / "README.md").stat().st_size
    assert out.splitlines() == [
        f"from        {run}/checkpoints/1: deepseek, {total:,} parameters in float32",
        f"to          new: {size:,} bytes, {len(files) - 2} files of weights in float32 and 3 others",
        "README.md   a model card",
        "written     new",
    ]
    assert read_files(tmp_path / "new") == files
    assert console("convert", f"{run}/checkpoints/1", "target=again", "max_shard_size=9000")[0] == 0
    assert read_files(tmp_path / "again") == files


def test_each_chunk_of_a_checkpoint_is_read_once(run, tmp_path, monkeypatch):
    read, really_read = [], SavedArray._read_block

    def reading(self: Any, start: tuple[int, ...]) -> np.ndarray:
        read.append((self._name, start))
        return really_read(self, start)

    monkeypatch.setattr(SavedArray, "_read_block", reading)
    export = plan_export(str(run), "new")
    values: Any = export.origin.values
    assert read == []
    export.write()
    gates = [start for name, start in read if name.endswith("experts/gate")]
    assert sorted(gates) == [(0, 0), (0, 4)]  # of eight experts, all layers in one chunk
    assert len(read) == len({*read})
    assert sum(array._block is not None for array in values._arrays.values()) == 1


def test_a_folder_is_copied(folder, tmp_path, console):
    assert console("convert", str(folder), "same")[0] == 0
    assert read_files(tmp_path / "same") == read_files(folder, "modeling.py")


def test_few_bits_are_rounded_to_and_kept(folder, tmp_path, console):
    """The folder of `save_pretrained`, which then is copied to the bit; widened, it has none."""
    partial = "transformers 5.23 and 5.24 do not read FP8 weights that have blocks that are not whole"
    with pytest.warns(UserWarning, match=partial):
        moezoo.save_pretrained(moezoo.from_pretrained(folder), tmp_path / "few", like=folder, format="fp8")
    for source, target, arguments, line, warning in (
        (folder, "rounded", ("format=fp8",), "few bits    72 weights rounded to fp8", f"warning: rounded: {partial}"),
        (tmp_path / "few", "kept", (), "few bits    72 weights kept in fp8", ""),
    ):
        code, out, err = console("convert", str(source), target, *arguments)
        assert code == 0
        assert err.startswith(warning)
        assert bool(err) == bool(warning)
        assert line in out.splitlines()
        assert read_files(tmp_path / target) == read_files(tmp_path / "few")
    code, out, _ = console("convert", str(tmp_path / "few"), "wide", "dtype=float32")
    assert (code, "few bits" in out) == (0, False)
    assert "quantization_config" not in (tmp_path / "wide/config.json").read_text()


def test_another_dtype_rounds_and_says_so(run, folder, tmp_path, console):
    """As loading in that dtype does; from a run and from a folder."""
    moezoo.save_pretrained(moezoo.from_pretrained(folder, dtype="bfloat16"), tmp_path / "half", max_shard_size=4500)
    wanted = {name: x for file in (tmp_path / "half").glob("*.safetensors") for name, x in load_file(file).items()}
    for source, target in ((run, "a"), (folder, "b")):
        code, out, err = console("convert", str(source), target, "dtype=bfloat16")
        assert (code, err) == (0, "")
        count = len(wanted) - 2  # choice biases stay as they are
        assert f"rounds      {count} tensors from float32 to bfloat16\n" in out
        found = {name: x for file in Path(target).glob("*.safetensors") for name, x in load_file(file).items()}
        assert found.keys() == wanted.keys()
        for name, x in found.items():
            np.testing.assert_array_equal(x, wanted[name], strict=True)
        assert json.loads((tmp_path / target / "config.json").read_text())["dtype"] == "bfloat16"
    code, out, _ = console("convert", "b", "wide", "dtype=float32")
    assert "rounds" not in out


def test_what_is_rounded_without_a_dtype(folder, tmp_path, console):
    """float64 becomes float32; and tensors that are wider than most."""
    for name, kinds in (("wide", {".weight": np.float64}), ("mixed", {".weight": np.float16, "lm_head": np.float32})):
        shutil.copytree(folder, tmp_path / name)
        for file in (tmp_path / name).glob("*.safetensors"):
            found = load_file(file)
            for (part, kind), key in itertools.product(kinds.items(), found):
                found[key] = (found[key].astype(kind) / 3).astype(kind) if part in key else found[key]
            save_file(found, file, metadata={"format": "pt"})
    _, out, err = console("convert", "wide", "a")
    assert "parameters in float64\n" in out
    assert re.search(r"^rounds      \d+ tensors from float64 to float32$", out, re.MULTILINE)
    assert err == ""
    _, out, err = console("convert", "mixed", "b")
    assert "parameters in float16\n" in out
    assert "rounds      1 tensor from float32 to float16\n" in out
    assert err == "warning: b: 1 tensor is less precise than in mixed; dtype=float32 keeps them: lm_head.weight\n"
    with pytest.warns(UserWarning, match=r"tensors are less precise than in \S+, which has float64; no model is more"):
        moezoo.save_pretrained(moezoo.from_pretrained("wide"), tmp_path / "c", like="wide")


def test_numbers_too_large_are_reported(folder, tmp_path, console):
    shutil.copytree(folder, tmp_path / "large")
    file = next(file for file in (tmp_path / "large").glob("*.safetensors") if "lm_head.weight" in load_file(file))
    tensors = load_file(file)
    tensors["lm_head.weight"][0, 0] = 1e6
    save_file(tensors, file, metadata={"format": "pt"})
    _, _, err = console("convert", "large", "half", "dtype=float16")
    assert err == "warning: half: tensors with NaN or infinities: lm_head.weight\n"


def test_like_another_folder(run, folder, tmp_path, console):
    """The run's numbers, in the files of the folder, with its tokenizer."""
    assert console("convert", str(run), "new", f"like={folder}")[0] == 0
    assert read_files(tmp_path / "new") == read_files(folder, "modeling.py")
    # Of another folder the keys that change are listed.
    shutil.copytree(folder, tmp_path / "base")
    keys = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta": 7.0, "rope_parameters": keys["rope_parameters"] | {"rope_theta": 7.0}}
    other = {"rms_norm_eps": 0.5, **rope}
    (tmp_path / "base" / "config.json").write_text(json.dumps(keys | other | {"eos_token_id": 1}))
    code, out, _ = console("convert", str(run), "changed", "like=base")
    assert (code, [line for line in out.splitlines() if line.startswith("config.json")]) == (
        0,
        [
            "config.json rms_norm_eps=1e-06 (0.5 there)",
            "config.json rope_parameters.rope_theta=10000.0 (7.0 there)",
            "config.json rope_theta=10000.0 (7.0 there)",
        ],
    )
    config = moezoo.load_run(run)[0].config
    shapes = Blueprint(dataclasses.replace(config, expert_mlp=14)).shapes
    moezoo.save_pretrained(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes), tmp_path / "other")
    code, out, err = console("convert", str(run), "not", "like=other")
    assert (code, out) == (2, "")
    assert err.startswith(
        "error: like=other is not a folder of this model: it has moe_intermediate_size=14 and the model 12"
    )
    assert not (tmp_path / "not").exists()


def test_the_tokenizer_of_a_runs_data(run, tmp_path, console):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "words.json").write_text('{"words": 1}')
    data = {"name": "text", "path": "text.txt", "tokenizer": str(tmp_path / "words.json")}
    mapping = as_mapping(moezoo.saved_config(run)) | {"data": data}
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(mapping))
    _, out, _ = console("convert", "run", "new")
    assert f"tokenizer   {tmp_path}/words.json\ntexts       no token is known to end them\n" in out
    assert (tmp_path / "new" / "tokenizer.json").read_text() == '{"words": 1}'
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text()) == common
    # What stands beside the tokenizer, with a class that transformers 4 has too.
    for number, (beside, expected) in enumerate(
        (
            ({"eos_token": "é"}, {"eos_token": "é"} | common),
            ({"tokenizer_class": "TokenizersBackend"}, common),
            ({"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "LlamaTokenizer"}),
        )
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
        assert console("convert", "run", f"class_{number}")[0] == 0
        assert json.loads((tmp_path / f"class_{number}" / "tokenizer_config.json").read_text()) == expected
    # A run on chats also leaves its template.
    tokens = ("tokenizer_config.json", "special_tokens_map.json")
    for name, text in ((tokens[0], "{}"), (tokens[1], "{}"), ("chat_template.jinja", "beside"), ("own.jinja", "own")):
        (tmp_path / name).write_text(text)
    for template, expected in ((None, "beside"), (str(tmp_path / "own.jinja"), "own")):
        chats = {"data": {**data, "name": "chat", "template": template}}
        (tmp_path / "run" / "config.yaml").write_text(to_yaml(mapping | chats))
        assert console("convert", "run", expected)[0] == 0
        assert (tmp_path / expected / "chat_template.jinja").read_text() == expected
        assert (tmp_path / expected / tokens[1]).read_text() == "{}"
        assert json.loads((tmp_path / expected / "tokenizer_config.json").read_text()) == common
    # The tokens that end texts: of the data, of the template, and of all sources of a mixture.
    save_tokenizer(tmp_path / "words.json", ("<a>", "<b>", "<c>"))
    first = json.loads((tmp_path / "words.json").read_text())["added_tokens"][0]["id"]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<c>"}')
    text, chat = data | {"end_token": "<b>"}, data | {"name": "chat", "template": None}
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}<a>{% endfor %}")
    both, answers = {"name": "mixture", "sources": {"one": text, "two": chat}}, chat | {"template": "own.jinja"}
    for name, each, ends in (
        ("text", text, first + 1),
        ("chat", chat, first + 2),
        ("two", both, [first + 1, first + 2]),
        ("answers", answers, [first, first + 2]),
    ):
        (tmp_path / "run" / "config.yaml").write_text(to_yaml(mapping | {"data": each}))
        code, out, _ = console("convert", "run", f"ends_{name}")
        assert f"texts       end with token {str(ends).strip('[]').replace(', ', ' or ')}\n" in out
        assert json.loads((tmp_path / f"ends_{name}" / "config.json").read_text())["eos_token_id"] == ends
        assert json.loads((tmp_path / f"ends_{name}" / "generation_config.json").read_text()) == {"eos_token_id": ends}
    # A copy of a folder gains the tokens of answers, and keeps all else that it says of generation.
    kept = {"temperature": 0.5, "eos_token_id": first + 2}
    (tmp_path / "ends_text" / "generation_config.json").write_text(json.dumps(kept))
    assert console("convert", "run", "like", "like=ends_text")[0] == 0
    found = json.loads((tmp_path / "like" / "generation_config.json").read_text())
    assert found == kept | {"eos_token_id": [first + 2, first]}
    (tmp_path / "words.json").unlink()
    code, out, _ = console("convert", "run", "without")
    assert code == 0
    assert "words.json is not there any more, so the folder has none" in out
    assert not (tmp_path / "without" / "tokenizer.json").exists()


def test_checkpoints_that_are_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    largest = max((tmp_path / "run" / "checkpoints" / "1" / "model").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with refused(f"{tmp_path}/run/checkpoints/1 is damaged"):
        plan_export(str(tmp_path / "run"), "new")
    with refused(f"source={run}/checkpoints/7: no such checkpoint; there are 1"):
        plan_export(f"{run}/checkpoints/7", "new")
    with refused('max_shard_size=5G: expected bytes, or a size such as "5GB"'):
        plan_export(str(run), "new", max_shard_size="5G")


def test_strategies_of_the_users_own_have_no_part_in_it(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    mapping = as_mapping(moezoo.saved_config(run))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(mapping | {"dispatch": {"name": "mine.Broadcast"}}))
    plan_export("run", "new").write()
    assert (tmp_path / "new" / "config.json").exists()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(mapping | {"model": {"family": "mine.Family"}}))
    with refused("run: model=mine.Family is a family of your own"):
        plan_export("run", "other")
