"""What a notebook may pass by mistake to the public functions: one line each, before anything is made."""

import json
import subprocess
import sys

import pytest
from refusals import check_line

# The type checker of the suite would refuse most of these first, so they run in a process without it.
SETUP = """
import dataclasses, json, sys
import jax, numpy as np, moezoo
from moezoo import *
from moezoo.tools.cost import communication
from moezoo.config.build import blueprint_of
from moezoo.moe.dispatch import Gather, Ring

config = moezoo.models.MixtralConfig(
    vocab=40, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, expert_mlp=12, experts=4, max_length=16
)
key = jax.random.key(0)
model = build_model(config, key=key)
cfg = compose()
ids = np.ones((2, 8), np.int32)
half = np.full((2, 8), 0.5)
nan = float("nan")

def changed(**changes):
    return dataclasses.replace(cfg, **changes)

def moved(**changes):
    return communication(cfg, blueprint=dataclasses.replace(blueprint_of(cfg), **changes))

def drawn(**options):
    return generate(model, ids, **{"max_new_tokens": 2, **options})

class Outer:
    @dataclasses.dataclass(frozen=True)
    class Mine(Gather):
        pass

answers = {}
for text in json.load(sys.stdin):
    try:
        answers[text] = f"accepted: {type(eval(text)).__name__}"
    except UserError as error:
        answers[text] = str(error)
    except Exception as error:
        answers[text] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""
# What is called -> parts of the answer.
CALLS = {
    'cpu_devices("8")': "cpu_devices: count=8: expected a whole number|text",
    "cpu_devices(True)": "cpu_devices: count=true: expected a whole number",
    "compose(5)": "an override is an int|mesh=ep8",
    'compose(["mesh=ep8"])': "an override is a list|write *",
    "compose(None)": "an override is None",
    'compose(model="mixtral")': 'compose takes text and no keyword model; write compose("model=mixtral")',
    'compose("steps=3 mesh=ep8")': 'steps=3 mesh=ep8: expected one KEY=VALUE, found 2; pass each apart: "steps=3"',
    "models.MixtralConfig(embed=32.5)": "model.embed=32.5: expected a whole number|a decimal number",
    'models.MixtralConfig(layers="2")': "model.layers=2: expected a whole number|text",
    "models.MixtralConfig(layers=True)": "model.layers=true: expected a whole number",
    "models.MixtralConfig(vocab=np.int64(40))": "accepted: MixtralConfig",
    "models.DeepSeekConfig(router={})": "model.router={}: expected a value of Choice",
    "MeshShape(fsdp=2.0)": "mesh.fsdp=2.0: expected a whole number",
    "MeshShape(fsdp=True)": "mesh.fsdp=true: expected a whole number",
    'Rules("mine", {}, {}, "fsdp", ())': "rules.batch=fsdp: expected a list|text",
    'Rules("mine", {"embed": "fsdp"}, {}, (), ())': "rules.store.embed=fsdp: expected a list",
    'Rules("mine", 5, {}, (), ())': "rules.store=5: expected names and their values",
    'Ring(chunks="2")': "dispatch.chunks=2: expected a whole number",
    'Execution(remat="x")': "remat=x: expected one of full, offload, dots, none",
    'Execution(dtype="float7")': "dtype=float7: expected one of float32, bfloat16",
    'Execution(rules="fsdp_ep")': "rules=fsdp_ep: expected a value of Rules|moezoo.compose",
    "Execution(mesh=MeshShape())": "mesh=MeshShape(|expected a value of Mesh or AbstractMesh",
    'make_mesh("ep8")': "shape is a str, expected a MeshShape",
    "train(changed(steps=-5))": "steps=-5 must be at least 0",
    'train(changed(mesh="ep8"))': "mesh=ep8: expected a value of MeshShape",
    "train(changed(dispatch=Outer.Mine()))": "dispatch=__main__.Outer.Mine|at the top of a module",
    "train(5)": "cfg is an int, expected a TrainConfig|moezoo.compose",
    "train({})": "cfg is a dict, expected a TrainConfig",
    "from_pretrained(None)": "folder=null: expected text",
    'from_pretrained("a", "ep8")': "execution is a str, expected an Execution",
    'from_pretrained("a", upcycle=8)': "upcycle is an int|moezoo.Upcycle(",
    'Upcycle(experts="8")': "upcycle.experts=8: expected a whole number|text",
    "Upcycle(noise=-1.0)": "upcycle.noise=-1.0 must be at least 0",
    "save_pretrained(model, 5)": "folder=5: expected text",
    'save_pretrained(model, "x" * 300)': "folder=xxx|no folder can have this name (File name too long)",
    r'from_pretrained("a\0b")': r"'folder=a\x00b': no folder can have this name|embedded null",
    'compose("resume=" + "x" * 300)': "resume=xxx|no folder can have this name (File name too long)",
    'save_pretrained(model, "a", 5)': "like=5: expected text",
    'save_pretrained(model, "a", max_shard_size=2.5)': "max_shard_size=2.5: expected a whole number",
    'execution("x")': "cfg is a str, expected a TrainConfig",
    'execution(cfg, batches="x")': "batches=x: expected one of configured, any",
    "evaluate(model, {})": "cfg is a dict, expected a TrainConfig",
    "evaluate(5, cfg)": "model is an int, expected a LanguageModel",
    "build_model({}, key=key)": "config is a dict, expected one of DeepSeekConfig",
    "build_model(cfg, key=key)": "config is a TrainConfig, expected one of DeepSeekConfig|cfg.model",
    'build_model(config, key=key, dtype="float7")': "dtype=float7: expected one of float32",
    'build_model(config, key=key, dtype="int8")': "dtype=int8: expected one of float32",
    "build_model(config, key=0)": "key is not one random key|jax.random.key(SEED)",
    "load_run(5)": "run_dir is an int, expected the path of a folder",
    "saved_config(None)": "run_dir is None, expected the path of a folder",
    'saved_config("~nobody_here/x")': "run_dir=~nobody_here/x: there is no home folder",
    "tokenizer(5)": "folder=5: expected text",
    "place(model, cfg)": "execution is a TrainConfig, expected an Execution|moezoo.execution(cfg)",
    "place(5, Execution())": "model is an int, expected a Module",
    "model(ids * 40)": "tokens contains 40, expected 0 to 39 (model.vocab=40)",
    "model(jax.numpy.asarray(ids) * -1)": "tokens contains -1, expected 0 to 39",
    "model(ids.astype(np.int64) * 2**40)": "tokens contains 1099511627776, expected 0 to 39",
    "model(np.ones((2, 17), np.int32))": "tokens are [2, 17], longer than model.max_length=16",
    "model(np.ones((0, 8), np.int32))": "tokens are int32[0, 8], expected integers [batch, seq]|at least one token",
    "model(np.ones((2, 0), np.int32))": "tokens are int32[2, 0]|at least one token",
    "model(np.ones(8, np.int32))": "tokens are int32[8]|tokens[None]",
    'model("text")': "tokens are <U4[]|tokenizer",
    "model(ids, segments=half)": "segments are float64[2, 8], expected integers",
    "model(ids, segments=ids[:, :7])": "segments are [2, 7] and tokens are [2, 8]",
    "model(ids, segments=-ids)": "segments contains -1, expected 0",
    "model(ids, positions=half)": "positions are float64[2, 8], expected integers",
    "model(ids, positions=16 * ids)": "positions contains 16, expected 0 to 15 (model.max_length=16)",
    'model(ids, execution="ep8")': "execution is a str, expected an Execution",
    'generate(model, "text", max_new_tokens=2)': "ids are <U4[]|tokenizer",
    "stream(model, ids * 40, max_new_tokens=2)": "ids contains 40, expected 0 to 39 (model.vocab=40)",
    "generate(5, ids, max_new_tokens=2)": "model is an int, expected a LanguageModel",
    "drawn(max_new_tokens=2.5)": "max_new_tokens=2.5: expected a whole number",
    "drawn(temperature=nan)": "temperature=nan: expected a number",
    'drawn(temperature="hot")': "temperature=hot: expected a number",
    "drawn(temperature=1, top_p=2, key=key)": "top_p=2 must be above 0 and at most 1",
    "drawn(temperature=1, top_k=True, key=key)": "top_k=true: expected a whole number",
    "drawn(temperature=1, key=5)": "key is not one random key",
    "drawn(mask=half)": "mask is float64 and not only 0 and 1",
    'data.tokenize_files("a", 5)': "out=5: expected text",
    'data.Text(path=["a"])': "data.path=[a]: expected text",
    'data.Weighted("text")': "source=text: expected a value of DataSettings, found text",
    'data.Mixture(sources={"a": data.Text()})': "data.sources.a is a Text, expected a source with its weight",
    'data.Mixture(sources=["a"])': "data.sources=[a]: expected names and their sources, found a list",
    "data.load(5, seq_len=8, seed=0, vocab=40)": "settings is an int, expected a DataSettings",
    "communication(cfg, blueprint=model)": "blueprint is a LanguageModel, expected a Blueprint|blueprint_of(cfg)",
    'moved(trained=".attention.")': "blueprint.trained=.attention.: expected a list",
    "moved(change=lambda model: None)": "blueprint: what change returns is None, expected a LanguageModel",
    'moved(frozen=["*"])': "blueprint: frozen is [*], but frozen=[]|change=",
    "analysis.routing(5, ids)": "model is an int, expected a LanguageModel|moezoo.load_run",
    'analysis.routing(model, "text")': "data are <U4[]|tokenizer",
    "analysis.routing(model, ids.astype(np.int64) * 2**40)": "data contains 1099511627776, expected 0 to 39",
    "analysis.routing(model, np.ones((2, 17), int))": "positions of data contains 16, expected 0 to 15",
    'analysis.routing(model, ids, execution="ep8")': "execution is a str, expected an Execution",
    'analysis.routing(model, cfg, split="test")': "split=test: expected one of validation, all",
    "analysis.compare_routing(model, 5, ids)": "other is an int, expected a LanguageModel",
    # What is traced is not known, except for its shape; padding may hold anything.
    "jax.eval_shape(model, ids * 40)": "accepted: Output",
    "jax.eval_shape(model, np.ones((2, 17), np.int32))": "tokens are [2, 17], longer than model.max_length=16",
    "jax.eval_shape(lambda: model(ids * 50, segments=0 * ids, positions=-ids))": "accepted: Output",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SETUP],
        input=json.dumps(list(CALLS)),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path_factory.mktemp("nothing"),
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("call", CALLS)
def test_answers_in_one_line(answers, call):
    check_line(answers[call], *CALLS[call].split("|"))
