"""Runs that start from weights: a Hugging Face folder, in numbers and in few bits, and another run."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from few_bit_folders import CASES, tensors_of, write_few_bits
from refusals import by_table, refused
from training_runs import assert_same_models, read_rows, steps_only, train_and_print

import moezoo
from moezoo.config.build import blueprint_of, build_execution
from moezoo.config.compose import as_mapping, to_yaml
from moezoo.config.settings import TrainConfig
from moezoo.data import Chat, Jsonl, Mixture, Text, Tokens, Weighted
from moezoo.hub.folders import end_of_text, hub_model_config
from moezoo.hub.kept import Form
from moezoo.models import DeepSeekConfig
from moezoo.models.blueprint import Blueprint
from moezoo.nn.few_bits import FewBits
from moezoo.parallel.axes import is_stored
from moezoo.tools.sharding.describe import describe
from moezoo.training.exporting import plan_export
from moezoo.training.initial import as_saved_pieces, describe_start, load_initial
from moezoo.training.saved import list_changes

WORDS = {"<unk>": 0, "one": 1, "two": 2, "three": 3, "</s>": 7}
RUN = ("seq_len=16", "batch_size=4", "eval_every=0", "checkpoint_minutes=0", "log_every=1")
SYNTHETIC = ("data=synthetic", "data.vocab=40", "data.documents=60", "data.eval_sequences=8")
# With a constant rate the program does not depend on `steps`.
STEPS = (
    "mesh.expert=2",
    *RUN,
    *SYNTHETIC,
    "schedule=constant",
    "optimizer.learning_rate=0.01",
    "checkpoint_every=1",
    "eval_every=1",
)
STORED = ("execution.param_dtype=stored", "frozen=['*.experts.gate','*.shared.*','*.norm.scale']")


class Folders(NamedTuple):
    """Folders of one DeepSeek: in FP8 with blocks that heads cut, and in float32, with a tokenizer. And text."""

    few: Path
    wide: Path
    text: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    from tokenizers import Tokenizer, models, pre_tokenizers

    root, case, rng = tmp_path_factory.mktemp("folders"), CASES["fp8"], np.random.default_rng(1)
    shapes = Blueprint(case.config).shapes
    model = jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), shapes)
    moezoo.save_pretrained(model, root / "plain")
    few, wide, *_ = write_few_bits(root / "plain", root, case)
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(wide / "tokenizer.json"))
    (wide / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    text = root / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(" ".join(rng.choice(list(WORDS)[:4], 50)))
    return Folders(few, wide, text)


class Start(NamedTuple):
    """A run without steps from the wide folder, and what it printed."""

    run: moezoo.Run
    lines: list[str]
    cfg: TrainConfig


@pytest.fixture(scope="module")
def start(folders, tmp_path_factory) -> Start:
    words = (f"init_from={folders.wide}", "data=text", f"data.path={folders.text}", "data.eval_sequences=8", "steps=0")
    words += (*RUN, "mesh=single", "dispatch=gather", f"run_dir={tmp_path_factory.mktemp('runs')}/start")
    return Start(*train_and_print(*words), moezoo.compose(*words))


def test_a_run_without_steps_evaluates_samples_draws_and_saves(start, folders):
    run, _, cfg = start
    assert_same_models(run.model, moezoo.from_pretrained(folders.wide))
    loss = moezoo.evaluate(moezoo.from_pretrained(folders.wide), cfg).loss
    assert run.evaluation.loss == loss
    assert read_rows(run.folder) == [{"step": 0, "val_loss": loss}]
    assert run.sample.continuation
    assert {path.name for path in run.folder.iterdir()} >= {"loss.png", "routing.png", "config.yaml"}
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["0"]


def test_model_tokenizer_and_end_token_come_from_the_folder(start, folders, tmp_path):
    cfg, config = start.cfg, hub_model_config(folders.wide)
    assert isinstance(config, DeepSeekConfig)
    calm = dataclasses.replace(config, load_balance=0.0, router=dataclasses.replace(config.router, bias_rate=0.0))
    assert cfg.model == calm != config
    text = Text(path=str(folders.text), tokenizer=f"{folders.wide}/tokenizer.json", end_token="</s>", eval_sequences=8)
    assert cfg.data == text
    link = tmp_path / "tokenizer.json"
    link.symlink_to(text.tokenizer or "")
    for origin in (folders.wide, start.run.folder):  # the same tokenizer, and so the same end
        named = moezoo.compose(f"init_from={origin}", "data=text", f"data.tokenizer={link}").data
        assert named == Text(tokenizer=str(link), end_token="</s>")
    assert cfg.optimizer.learning_rate == 2e-5
    copied = dataclasses.replace(text, tokenizer=f"{start.run.folder}/tokenizers/1/tokenizer.json")
    assert moezoo.saved_config(start.run.folder) == dataclasses.replace(cfg, run_dir=None, data=copied)


def test_the_summary_says_what_changed(start, folders):
    at = next(i for i, line in enumerate(start.lines) if line.startswith("init_from"))
    first, second, third = start.lines[at : at + 3]
    assert first == f"init_from   {folders.wide}, stored in float32; here parameters in float32"
    changed = "model.load_balance=0.0 (0.0001 there); model.router.bias_rate=0.0 (0.001 there)"
    assert second.strip() == f"{changed}; optimizer.learning_rate=2e-05, the default with init_from"
    assert third.startswith("run_dir")  # the tokenizer is the folder's
    data = next(line for line in start.lines if line.startswith("data"))
    assert f"text, tokenizer {folders.wide}/tokenizer.json, end token </s>, " in data
    assert "optimizer   learning rate 2e-05" in start.lines[:at]


@pytest.mark.parametrize("like", [False, True])
def test_a_folder_of_it_has_the_same_tensors(start, folders, tmp_path, like):
    plan_export(str(start.run.folder), str(tmp_path / "hub"), like=str(folders.wide) if like else None).write()
    before, after = tensors_of(folders.wide), tensors_of(tmp_path / "hub")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name])
        assert tensor.dtype == after[name].dtype
    assert (tmp_path / "hub" / "tokenizer.json").read_bytes() == (folders.wide / "tokenizer.json").read_bytes()
    assert (tmp_path / "hub" / "generation_config.json").exists()
    assert end_of_text(tmp_path / "hub") == ([7, 1] if like else [7])  # the data have the first of the folder's


def test_transformers_loads_a_folder_of_it(start, folders, tmp_path):
    from peer_results import load, transformers  # which skips the test without transformers

    plan_export(str(start.run.folder), str(tmp_path / "hub"), like=str(folders.wide)).write()
    load(tmp_path / "hub")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")("two").input_ids == [2]


def bits(model: Any) -> dict[str, np.ndarray]:
    """Return every array by its path."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(model)}


def test_what_is_frozen_stays_as_it_is_stored(folders):
    """On one device and on eight, which cut blocks; a trained parameter of few bits is widened to float32."""
    words, stored = (
        (f"init_from={folders.few}", *SYNTHETIC, *STORED),
        moezoo.from_pretrained(folders.few, dtype="stored"),
    )
    wide = bits(moezoo.from_pretrained(folders.few, dtype="float32"))
    for mesh in ("mesh=single", "mesh=fsdp2_ep4"):
        cfg = moezoo.compose(*words, mesh)
        model = load_initial(cfg, build_execution(cfg))
        kept = {
            path: x for path, x in bits(model).items() if "values" in path or ("scale" in path and "norm" not in path)
        }
        assert {path.rsplit(".", 1)[0] for path in kept} == {
            f".stacks[1].blocks[0].feed_forward.{name}"
            for name in ("experts.gate", "shared.gate", "shared.up", "shared.down")
        }
        for path, x in bits(model).items():
            if path.endswith("values"):
                np.testing.assert_array_equal(x, bits(stored)[path])
            elif path not in kept:
                np.testing.assert_array_equal(x, wide[path])
                assert x.dtype == np.float32
        rows = describe(cfg, parts="parameters").parameters
        assert {row.name for row in rows if not row.trained} >= kept.keys()


@pytest.fixture(scope="module")
def stored(folders, tmp_path_factory) -> Path:
    """Two steps with frozen weights of few bits, saved after each. The folder that the run started from is gone."""
    root = tmp_path_factory.mktemp("stored")
    shutil.copytree(folders.few, root / "few")
    with steps_only():
        moezoo.train(moezoo.compose(f"init_from={root}/few", *STEPS, *STORED, "steps=2", f"run_dir={root}/run"))
    shutil.rmtree(root / "few")
    return root / "run"


def test_routing_is_left_alone(stored, folders):
    """Where the run starts from weights, choice biases stay and no routing loss is trained."""
    trained, _ = moezoo.load_run(stored)
    before = bits(moezoo.from_pretrained(folders.few, dtype="stored"))
    after = bits(trained)
    biases = [path for path in after if path.endswith("choice_bias")]
    assert biases
    for path in biases:
        np.testing.assert_array_equal(after[path], before[path])
    assert [row["load_balance_loss"] for row in read_rows(stored)] == [0, 0]
    moved = [path for path in after if path in before and not np.array_equal(after[path], before[path])]
    assert any("query" in path or "embedding" in path for path in moved)
    assert not [path for path in moved if "values" in path or ".norm.scale" in path]


def test_a_run_goes_on_without_its_folder(stored, tmp_path):
    """Its checkpoints have the frozen arrays."""
    with steps_only():
        run = moezoo.train(moezoo.compose(f"resume={stored}/checkpoints/1", f"run_dir={tmp_path}/again"))
    assert read_rows(run.folder) == read_rows(stored)
    assert_same_models(moezoo.load_run(run.folder)[0], moezoo.load_run(stored)[0])


def test_checkpoints_may_leave_frozen_arrays_where_they_are(stored, folders, tmp_path):
    few, away = tmp_path / "few", tmp_path / "away"
    shutil.copytree(folders.few, few)
    words = (f"init_from={few}", *STEPS, *STORED, "checkpoint_frozen=false", f"run_dir={tmp_path}/a", "steps=1")
    with steps_only():
        moezoo.train(moezoo.compose(*words))
        assert not (tmp_path / "a" / "checkpoints" / "frozen").exists()
        few.rename(away)
        with refused(f"init_from={few}: the folder is not there any more; put it back, or set init_from to where"):
            moezoo.train(moezoo.compose(f"resume={tmp_path}/a", "steps=2"))
        with refused(f"init_from={few}: the folder is not there any more"):
            plan_export(f"{tmp_path}/a", f"{tmp_path}/moved")
        with refused(f"init_from={folders.wide} but the run began with init_from={few}"):
            plan_export(f"{tmp_path}/a", f"{tmp_path}/moved", init_from=str(folders.wide))
        assert plan_export(f"{tmp_path}/a", f"{tmp_path}/moved", init_from=str(away)).origin.wanted
        run = moezoo.train(moezoo.compose(f"resume={tmp_path}/a", "steps=2", f"init_from={away}"))
    assert read_rows(run.folder) == read_rows(stored)
    assert_same_models(moezoo.load_run(run.folder)[0], moezoo.load_run(stored)[0])
    for name, folder in {"one": run.folder, "other": stored}.items():
        plan_export(str(folder), str(tmp_path / name)).write()
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "other/model.safetensors").read_bytes()
    saved, sha256 = run.folder / "config.yaml", moezoo.saved_config(run.folder).init_sha256
    assert sha256 is not None
    other = sha256[:-1] + "01"[sha256[-1] == "0"]
    saved.write_text(saved.read_text().replace(sha256, other))
    with refused(f"init_from={away} is not the folder that the run began with", other, sha256):
        moezoo.load_run(run.folder)
    saved.write_text(saved.read_text().replace(other, sha256))
    config = json.loads((away / "config.json").read_text())
    (away / "config.json").write_text(json.dumps(config | {"bos_token_id": 3}))
    with refused(f"init_from={away} is not the folder that the run began with"):
        moezoo.load_run(run.folder)
    for read in (moezoo.load_run, lambda run, *words: moezoo.compose(f"resume={run}", *words)):
        with refused(f"init_from={folders.wide} but the run began with init_from=", "which holds something else"):
            read(tmp_path / "a", f"init_from={folders.wide}")


def numbers(parameter: Any, dtype: Any) -> np.ndarray:
    """Return a parameter, or what a container stands for."""
    return np.asarray(parameter.materialise(dtype) if is_stored(parameter) else parameter.astype(dtype))


def test_a_run_may_start_from_a_run(stored):
    """Few bits are kept, on a mesh that cuts their blocks, or widened; another checkpoint may be named."""
    last, _ = moezoo.load_run(stored)
    for words, dtype in (((*STORED, "mesh=ep8"), jnp.float32), (("execution.param_dtype=bfloat16",), jnp.bfloat16)):
        cfg = moezoo.compose(f"init_from={stored}", *SYNTHETIC, *words)
        assert (cfg.init_from, cfg.model) == (str(stored / "checkpoints/2"), moezoo.saved_config(stored).model)
        model = load_initial(cfg, build_execution(cfg))
        leaves = [jax.tree.leaves(each, is_leaf=is_stored) for each in (model, last)]
        for ours, theirs in zip(*leaves, strict=True):
            kind = dtype if is_stored(ours) else ours.dtype  # a choice bias stays float32
            np.testing.assert_array_equal(numbers(ours, kind), numbers(theirs, kind))
        assert any(map(is_stored, leaves[0])) == (dtype == jnp.float32)
        if dtype == jnp.float32:
            saved = as_saved_pieces(cfg, model)
            assert jax.tree.map(jnp.shape, saved) == jax.tree.map(jnp.shape, last) != jax.tree.map(jnp.shape, model)
            assert_same_models(saved, last)
    assert moezoo.compose(f"init_from={stored}/checkpoints/1").init_from == f"{stored}/checkpoints/1"
    left = describe_start(moezoo.compose(f"init_from={stored}", *SYNTHETIC, *STORED, "checkpoint_frozen=false"))
    assert ("init_from", "checkpoint_frozen=false: this run is read with that checkpoint, so keep it") in left


@by_table(
    """
    words => parts
    init_from=WIDE model=mixtral => model=mixtral but init_from= ... has its own model; leave model out
    init_from=WIDE model=deepseek => model=deepseek but init_from= ... has its own model; leave model out
    init_from=WIDE model.layers=3 => model.layers=3 but the weights of init_from= ... have model.layers=2
    init_from=WIDE model.router.scale=1 => model.router.scale=1 but the weights ... have model.router.scale=2.5
    init_from=WIDE upcycle=8 => upcycle=8: upcycle is a section; set its keys, such as upcycle.experts=VALUE
    init_from=WIDE upcycle={experts:8} => upcycle={experts: 8}: upcycle is a section; set its keys
    init_from=WIDE init_sha256=00 => init_sha256=00 but init_from= ... leave init_sha256 out
    init_from=no/such => init_from=no/such: there is no such folder ... hf download no/such --local-dir such
    init_from=/no/such => init_from=/no/such: there is no such folder; name a Hugging Face folder or a run
    init_from=WIDE/config.json => init_from= ... /config.json is a file; name the folder that has it
    init_from=TEXT => init_from= ... neither a Hugging Face folder (config.json is missing) nor a run
    init_from=FEW data=text => init_from= ... has no tokenizer.json; set data.tokenizer to
    init_sha256=00 => init_from=null init_sha256=00: compose reads the folder
    checkpoint_frozen=false => checkpoint_frozen=false leaves frozen arrays to init_from
    execution.param_dtype=stored => execution.param_dtype=stored keeps what init_from has
    """
)
def test_refused_when_composed(folders, words, parts):
    for name, path in zip(("FEW", "WIDE", "TEXT"), folders, strict=True):
        words = words.replace(name, str(path))
    with refused(parts):
        moezoo.compose(*words.split())


def test_settings_that_make_no_other_model_may_change(folders):
    words = ("model.load_balance=0.1", "model.router.bias_rate=0.5", "model.max_length=99", "model.layers=2")
    cfg = moezoo.compose(
        f"init_from={folders.wide}", *words, "optimizer.learning_rate=0.25", "data.end_token=null", "data=text"
    )
    assert isinstance(cfg.model, DeepSeekConfig)
    assert (cfg.model.load_balance, cfg.model.router.bias_rate, cfg.model.max_length) == (0.1, 0.5, 99)
    assert cfg.optimizer.learning_rate == 0.25
    assert cfg.data == Text(tokenizer=f"{folders.wide}/tokenizer.json")


def test_chats_and_sources_of_a_mixture_take_tokenizer_and_end_too(folders, start, tmp_path):
    """Of a folder, and of a run on chats, whose template they take as well; what is set in a file stays."""
    own: dict[str, Any] = {"tokenizer": f"{folders.wide}/tokenizer.json", "end_token": "</s>"}
    chat = ("data=chat", "data.path=chats.jsonl")
    assert moezoo.compose(f"init_from={folders.wide}", *chat).data == Chat(path="chats.jsonl", **own)
    sources = {
        "a": {"name": "text"},
        "b": {"name": "jsonl", "tokenizer": None},
        "c": {"name": "chat", "end_token": "one"},
    }
    (tmp_path / "mix.yaml").write_text(json.dumps(sources))
    mixture = ("data=mixture", f"data.sources={tmp_path}/mix.yaml", "data.sources.d={name: tokens}")
    found = moezoo.compose(f"init_from={folders.wide}", *mixture).data
    assert found.parts == {
        "a": Text(**own),
        "b": Jsonl(),
        "c": dataclasses.replace(Chat(**own), end_token="one"),
        "d": Tokens(),
    }
    copy: dict[str, Any] = {"tokenizer": f"{start.run.folder}/tokenizers/1/tokenizer.json"}
    own_of_run = moezoo.compose(f"init_from={start.run.folder}", *mixture).data.parts
    assert own_of_run == {
        **found.parts,
        "a": Text(**own | copy),
        "c": dataclasses.replace(Chat(**own | copy), end_token="one"),
    }
    (folders.wide / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with refused(f"data.sources.a: init_from={folders.wide} has no tokenizer.json; set data.tokenizer"):
        moezoo.compose(f"init_from={folders.wide}", *mixture)
    (tmp_path / "tokenizer.json").rename(folders.wide / "tokenizer.json")

    shutil.copytree(start.run.folder, tmp_path / "run")
    data = Chat(path="others.jsonl", template="own.jinja", **own)
    saved = dataclasses.replace(moezoo.saved_config(start.run.folder), data=Mixture(sources={"x": Weighted(data)}))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(as_mapping(saved)))
    own["tokenizer"] = f"{tmp_path}/run/tokenizers/1/tokenizer.json"
    again = moezoo.compose(f"init_from={tmp_path}/run", *chat)
    assert again.data == Chat(path="chats.jsonl", template="own.jinja", **own)
    assert moezoo.compose(f"init_from={tmp_path}/run", "data=text").data == Text(**own)
    other = moezoo.compose(f"init_from={tmp_path}/run", *chat, "data.template=other.jinja", "data.end_token=null")
    assert other.data == Chat(path="chats.jsonl", template="other.jinja", tokenizer=own["tokenizer"])


def test_a_run_is_read_without_the_files_that_made_its_tokens(start, folders, tmp_path, monkeypatch):
    """Resumed and converted too; a tokenizer that is named anew has the same contents."""
    mix = tmp_path / "mix"
    shutil.copytree(folders.wide, mix)
    (mix / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (mix / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    text = ("data=text", f"data.path={folders.text}", "data.eval_sequences=8", "steps=0")
    words = ("init_from=mix", *text, *RUN, "mesh=single", "dispatch=gather", "run_dir=run")
    train_and_print(*words)
    away = tmp_path / "away"
    mix.rename(away)
    changed = json.loads((away / "tokenizer.json").read_text())
    changed["model"]["vocab"] |= {"one": 2, "two": 1}
    monkeypatch.chdir(away)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        assert (tmp_path / "run/tokenizers/1" / name).read_bytes() == (away / name).read_bytes()
    cfg = moezoo.saved_config("../run")
    assert cfg.init_from == str(mix)
    assert moezoo.evaluate(start.run.model, cfg).loss == start.run.evaluation.loss
    plan_export("../run", "hub").write()
    assert (away / "hub/tokenizer.json").read_bytes() == (away / "tokenizer.json").read_bytes()

    before = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert before["data"]["tokenizer"] == f"{mix}/tokenizer.json"
    for named in ((), ("data.tokenizer=tokenizer.json",)):
        assert list_changes(moezoo.compose("resume=../run", *named), before) == []
    with refused(f"init_from={mix} but the run at resume=../run began with", "which holds something else"):
        list_changes(dataclasses.replace(moezoo.compose("resume=../run"), init_sha256="00"), before)
    (away / "tokenizer.json").write_text(json.dumps(changed))
    with refused("data.tokenizer=tokenizer.json but the run at resume=../run has data.tokenizer=", "cannot change"):
        list_changes(moezoo.compose("resume=../run", "data.tokenizer=tokenizer.json"), before)


def test_no_run_is_written_into_a_folder_of_a_model(folders):
    before = sorted(folders.wide.iterdir())
    for origin in ((), (f"init_from={folders.wide}",)):
        with refused(f"run_dir={folders.wide} is a Hugging Face folder (it has config.json); name another folder"):
            moezoo.train(moezoo.compose(*origin, *RUN, *SYNTHETIC, "steps=0", "mesh=single", f"run_dir={folders.wide}"))
    assert sorted(folders.wide.iterdir()) == before


def test_forms_that_no_folder_has(folders):
    cfg = moezoo.compose(f"init_from={folders.few}", "execution.param_dtype=stored", "frozen=['*.key_up']")
    words = ("float33", "int8", "fp8 16x24", "int32", "fp8 16 float32", "fp8 16x24 int32", "fp9 16x24 float32")
    for text in (*words, "fp8 0x24 float32", "fp8 16x24x32 float32", "uint8"):
        with refused("init_forms has ", "which is no form of this version; leave init_forms out"):
            Form.from_text(text)
    with refused("init_forms has mxfp4 with blocks of 1 x 31 and scales in uint8, which is no form of this version"):
        other = dataclasses.replace(cfg, init_forms={"*": Form("uint8", "mxfp4", (1, 31))})
        _ = blueprint_of(other).shapes


def test_runs_of_earlier_versions_have_forms_as_texts(stored, tmp_path):
    """In config.yaml and in checkpoints; they are resumed, evaluated and started from like others."""
    assert Form.from_text("bfloat16") == Form("bfloat16")
    old = tmp_path / "old"
    shutil.copytree(stored, old)
    found = moezoo.saved_config(stored).init_forms
    assert {form.format for form in found.values()} == {None, "fp8"}
    texts = {
        path: form.dtype if form.format is None else f"fp8 {form.block[0]}x{form.block[1]} {form.dtype}"
        for path, form in found.items()
    }
    own = as_mapping(moezoo.saved_config(stored))
    section = {"dtype": "float32", "format": "fp8", "block": [16, 24]}
    assert own["init_forms"]["*.feed_forward.shared.gate"] == section
    (old / "config.yaml").write_text(to_yaml(own | {"init_forms": texts}))
    for checkpoint in old.glob("checkpoints/[0-9]*"):
        about, sums = (json.loads((checkpoint / name).read_text()) for name in ("about.json", "sha256.json"))
        about["config"]["init_forms"] = texts
        (checkpoint / "about.json").write_text(json.dumps(about))
        sums["about.json"] = hashlib.sha256((checkpoint / "about.json").read_bytes()).hexdigest()
        (checkpoint / "sha256.json").write_text(json.dumps(sums))
    assert moezoo.saved_config(old).init_forms == found
    assert_same_models(moezoo.load_run(old)[0], moezoo.load_run(stored)[0])
    with steps_only():
        run = moezoo.train(moezoo.compose(f"resume={old}/checkpoints/1", f"run_dir={tmp_path}/again"))
    assert read_rows(run.folder) == read_rows(stored)
    assert moezoo.compose(f"init_from={old}", *SYNTHETIC, *STORED).init_forms == found


def test_tokens_that_are_not_those_of_the_weights(folders, tmp_path):
    """Bytes for a model of words, a tokenizer with more tokens than the model, and an end token that it lacks."""
    words = (f"init_from={folders.wide}", f"run_dir={tmp_path}/run", "mesh=single", "dispatch=gather")
    with refused("data=python_stdlib is bytes, but the weights of init_from=", "have the tokens of", "write data=text"):
        moezoo.train(moezoo.compose(*words))
    text = ("data=text", f"data.path={folders.text}")
    with refused("data.tokenizer=null makes 256 tokens but the weights of init_from=", "model.vocab=40"):
        moezoo.train(moezoo.compose(*words, *text, "data.tokenizer=null"))
    with refused("data.end_token=nothing is not a token of data.tokenizer=", "tokenizer.json; give the text"):
        moezoo.train(moezoo.compose(*words, *text, "data.end_token=nothing", "seq_len=16"))
    copy = tmp_path / "copy"
    shutil.copytree(folders.wide, copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": 30}')
    with refused(f"init_from={copy}: eos_token_id=30 is no token of tokenizer.json; set data.end_token"):
        moezoo.compose(f"init_from={copy}", *text)
    library = json.loads((copy / "tokenizer.json").read_text())
    library["model"]["vocab"]["more"] = 40
    (copy / "tokenizer.json").write_text(json.dumps(library))
    with refused(f"init_from={copy}: tokenizer.json has 41 tokens but the model 40; they belong to different models"):
        moezoo.compose(f"init_from={copy}", *text)


def test_blueprints_of_forms_are_those_of_the_run(folders):
    """`sharding` and `evaluate` see the containers; what a pattern would match and is trained has no form."""
    cfg = moezoo.compose(f"init_from={folders.few}", "execution.param_dtype=stored", "frozen=['.stacks[1]*.key_up']")
    assert cfg.init_forms == {".stacks[1].blocks[0].attention.key_up": Form("float32", "fp8", (16, 24))}
    stacks = blueprint_of(cfg).shapes.stacks
    assert [isinstance(stack.blocks[0].attention.key_up, FewBits) for stack in stacks] == [False, True]
