"""Mistakes on a command line: one line, exit code 2, nothing printed or written.

`tests/config` has the mistakes in settings alone, `tests/data` those in data, `tests/tools` those in words of tools.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import by_table, check_line

import moezoo
from moezoo.config.compose import as_mapping, compose, to_yaml
from moezoo.models import MixtralConfig
from moezoo.models.blueprint import Blueprint

ROOT = Path(__file__).parents[2]
RUN = to_yaml(as_mapping(compose()))


def chat(*roles):
    """Return a line with a message of each role."""
    return json.dumps({"messages": [{"role": role, "content": "w1"} for role in roles]})


FILES = {
    "begun/config.yaml": RUN,
    "run/config.yaml": RUN,
    "run/checkpoints/1/file": "",
    "text.txt": "w1 w2 " * 500,
    "nothing.jsonl": "\n",
    "two.jsonl": f"{chat('user', 'assistant')}\n" * 2,
    "cut.jsonl": "{",
    "text.jsonl": '{"text": "w1"}',
    "empty.jsonl": '{"messages": []}',
    "asked.jsonl": chat("user"),
    "answered.jsonl": chat("user", "assistant"),
    "system.jsonl": chat("system", "user", "assistant"),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with `FILES`, a model without a tokenizer, and one with a tokenizer of words and a template."""
    from tokenizers import Tokenizer, models

    path = tmp_path_factory.mktemp("here")
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    config = MixtralConfig(
        vocab=40, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, expert_mlp=8, max_length=64, z_loss=0.0
    )
    shapes = Blueprint(config).shapes
    for name in ("model", "chats"):
        moezoo.save_pretrained(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes), path / name)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0")).save(f"{path}/chats/tokenizer.json")
    (path / "chats/chat_template.jinja").write_text("{% if brief %}w25{% endif %}{{ messages[-1].content }}")
    return path


@by_table(
    """
    words => line
    train -m mesh=ep8,single => -m: ... --help, --cfg job ... loop ... moezoo train mesh=$m
    train --multirun => --multirun: ... --help, --cfg job ... loop
    train steps=3 --steps=3 => --steps=3: ... no dashes ... write steps=
    train - => -:
    train --cfg hydra => --cfg hydra: expected --cfg job
    train --cfg=all => --cfg all: expected --cfg job
    train --cfg job steps=abc => steps=abc: expected a whole number
    train mesh=ep8 model.experts=6 => mesh.expert=8 ... model.experts=6 ... (mesh=ep8)
    train mesh=fsdp8 model.embed=36 => mesh.fsdp=8 ... model.embed=36
    train mesh=ep8 dispatch.chunks=500 => dispatch.chunks=500 ... 128 tokens per device and micro-step ... at most 128
    train mesh=fsdp2_ep4 batch_size=4 => batch_size=4 ... mesh.fsdp=2 ... mesh.expert=4 ... (mesh=fsdp2_ep4)
    train mesh.expert=8 mesh.data=1 model.experts=6
        => mesh.expert=8 splits ... mesh.fsdp=4 mesh.expert=2 has as many devices
    train batch_size=8 execution.microbatches=3 => batch_size=8 ... execution.microbatches=3
    train mesh=ep8 execution.microbatches=2 => batch_size=8 ... 16 ... execution.microbatches=2 x mesh.expert=8
    train mesh.context=2 seq_len=127 => seq_len=127 ... mesh.context=2
    train rules.store.heads=[fsdp] rules.store.embed=[] mesh.fsdp=8 => mesh.fsdp=8 ... model.heads=4
    train model.heads=3 => model.heads=3 ... model.kv_heads=2
    train mesh.expert=3 batch_size=9 => mesh.expert=3 ... model.experts=8 ... mesh.expert=1
    train steps=5 schedule.warmup_steps=6 => schedule.warmup_steps=6 ... steps=5
    train mesh.tensor=2 => mesh.tensor=2 ... fsdp_ep ... 'tensor'
    train mesh=ep8 rules=pure_fsdp => mesh.expert=8 ... pure_fsdp
    train mesh.expert=16 => mesh.expert=16 ... 16 devices ... 8
    train mesh=ep8 rules.store.expert_embed=[expert] => rules fsdp_ep: ... 'expert' ... 'expert_embed'
    train rules.compute.expert=[fsdp] => rules.compute.expert=[fsdp] ... rules.store.expert=[expert]
    train rules.store.embd=[fsdp] => rules.store.embd ... 'embed'
    train data=synthetic data.vocab=300 => data.vocab=300 ... model.vocab=256
    train data=tokens data.path=. => data.path=. is a folder ... give a .npy file
    train data=synthetic data.documents=2000000000 => data.documents=2000000000 ... GiB ... (data=synthetic)
    train model=deepseek_v3 mesh=ep8
        => model.vocab= ... 671,026,404,352 parameters ... 9,999.2 GiB ... this machine ... (model=deepseek
    train model.embed=1000000000000 => model.embed=1000000000000 ... 2147483647
    train mesh.expert=100000000000 => mesh.expert=100000000000 ... 2147483647
    train batch_size=100000000000000000000 => batch_size=100000000000000000000 ... 2147483647
    train resume=nowhere => resume=nowhere
    train data=text data.path=text.txt data.tokenizer=chats/tokenizer.json model.vocab=32
        => data.tokenizer has 40 tokens but model.vocab=32
    train resume=begun => resume=begun: no checkpoint there
    evaluate run_dir=nowhere => run_dir=nowhere
    evaluate run_dir=a folder=b => run_dir=a and folder=b name two models; leave one of them out
    evaluate mesh=ep8 => name one model: run_dir=FOLDER
    # A key of the command and of a configuration.
    evaluate run_dir=a xyzzy=1 => xyzzy: ... , rules, run_dir, schedule,
    evaluate run_dirr=runs/a => run_dirr: there is no key 'run_dirr'; did you mean 'run_dir'?
    generate prompt=1 => name one model: run_dir=FOLDER of a run, or folder=FOLDER
    generate folder=model run_dir=b prompt=1 => run_dir=b and folder=
    generate folder=run prompt=1 => folder=run is the folder of a run; write run_dir=run
    generate folder=run/checkpoints/1 prompt=1
        => folder=run/checkpoints/1 is the folder of a run; write run_dir=run/checkpoints/1
    generate folder=nowhere prompt=1 => nowhere: there is no such folder; name a Hugging Face model folder
    generate run_dir=model prompt=1 => run_dir=model: no run there
    generate run_dir=run prompt=1 dtype=stored => dtype=stored: parameters of a run have the dtype
    generate run_dir=run chat=1
        => chat= needs a run on data=chat, which has a template; write prompt=TEXT, or name a folder
    generate folder=model => prompt is missing; write prompt="some text"
    generate folder=model prompt=1 prompt= => prompt=: expected text, found nothing; write prompt=TEXT
    generate folder=model 'prompt= ' => prompt= : the tokenizer makes no token of it; write another text
    generate folder=model prompt=@nowhere => prompt=@nowhere does not exist; name a UTF-8 text file
    generate folder=model prompt=@model/model.safetensors
        => prompt=@model/model.safetensors is not UTF-8 text (byte
    generate folder=model prompt=@@1 => '@1' is not a token:
    generate folder=model prompt=40 => '40' is not a token:
    generate folder=model prompt=1 model.layers=2 => model.layers=2: the model is
    generate folder=model prompt=1 max_new_tokens=64
        => a prompt of 1 tokens plus max_new_tokens=64 exceeds model.max_length=64; set max_new_tokens
    generate folder=model prompt=1 temprature=1 => temprature: there is no key 'temprature'; did you mean 'temperature'?
    generate folder=model prompt=1 mesh.expert=3 => mesh.expert=3 splits experts 3 ways but model.experts=8
    generate folder=model prompt=1 chat=1 => prompt= continues a text, and chat= is for a chat; leave one
    generate folder=model chat=@nowhere => chat=@nowhere does not exist; name a UTF-8 text file
    generate folder=chats prompt=w1 system=w1 => prompt= continues a text, and system= is for a chat; leave one
    generate folder=chats prompt=w1 history=asked.jsonl => prompt= continues a text, and history= is for a chat; leave
    generate folder=chats prompt=w1 template.brief=true => prompt= continues a text, and template= is for a chat; leave
    generate folder=chats system=w1 => prompt is missing; write prompt=
    generate folder=chats chat=w1 template=x => template=x: expected template.NAME=VALUE
    generate folder=chats chat=w1 template.brif=true => template.brif ... has no such variable; did you mean 'brief'?
    generate folder=chats chat=w1 template.reasoning_effort=low
        => template.reasoning_effort ... chat_template.jinja has no such variable; leave it out
    generate folder=chats chat=w1 template.messages=1
        => chat_template_kwargs has messages, which every template has already
    generate folder=chats chat=w1 history=nowhere.jsonl => history=nowhere.jsonl does not exist
    generate folder=chats chat=w1 history=nothing.jsonl => history=nothing.jsonl has no chat; give a file with one
    generate folder=chats chat=w1 history=two.jsonl => history=two.jsonl has several chats; give a file with one
    generate folder=chats chat=w1 history=cut.jsonl => history=cut.jsonl line 1 is not JSON (column 2
    generate folder=chats chat=w1 history=text.jsonl
        => history=text.jsonl line 1: neither messages nor another known form
    generate folder=chats chat=w1 history=empty.jsonl => history=empty.jsonl line 1: messages is empty
    generate folder=chats chat=w1 history=asked.jsonl
        => history=asked.jsonl ends with a message of the user, and chat= is another; leave
    generate folder=chats history=answered.jsonl
        => history=answered.jsonl ends with a message of the assistant, which nobody answers; write chat=
    generate folder=chats chat=w1 history=system.jsonl system=w2
        => history=system.jsonl begins with a message of the system, and system= is another; leave one of them out
    generate folder=chats chat=w1 top_k=5 => top_k=5 has no effect at temperature 0
    generate folder=chats chat=w1 max_new_tokens=0 => max_new_tokens=0 must be at least 1
    generate folder=chats chat=w1 stream=later => stream=later: expected true or false
    convert run => target is missing; write target=TARGET
    convert run a b => b: expected KEY=VALUE after source and target
    convert run a dtype=int8 => dtype=int8: expected one of float32, bfloat16, float16
    convert run a dtyp=int8 => dtyp: there is no key 'dtyp'; did you mean 'dtype'?
    convert model a max_shard_size=5GB => max_shard_size=5GB: the files are those of model; leave it out
    convert model a like=b => b: there is no such folder; name a Hugging Face model folder
    convert run model => model exists; name a new folder
    convert run/checkpoints/7 a => source=run/checkpoints/7: no such checkpoint; there are none
    convert a=b/c a => a: there is no key 'a'
    convert ./none a => ./none: there is no such folder; name a run or a Hugging Face folder
    convert org/name a => org/name: there is no such folder; name a run or a Hugging Face folder; a model of this
    convert . a => .: neither a run (config.yaml is missing) nor a Hugging Face folder (config.json
    """
)
def test_words(refuses, monkeypatch, here, words, line):
    monkeypatch.chdir(here)
    refuses(words, line)


def test_a_platform_that_is_not_there():
    lines = ["train.py", "bench.py grouped_matmul", "bench.py attention", "bench.py train_step"]
    code = f"""
import runpy, sys
for line in {lines}:
    sys.argv = f"{ROOT}/scripts/{{line}}".split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert end.code == 2, line
"""
    settings = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=settings)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    found = done.stderr.splitlines()
    assert len(found) == len(lines), done.stderr
    for line in found:
        assert line.startswith("error: JAX_PLATFORMS=nonsense: JAX cannot start there (")
        assert "set JAX_PLATFORMS=cpu to run on virtual CPU devices" in line
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("left", ["metrics.jsonl", "config.yaml", "checkpoints", "held_out.txt"])
def test_a_folder_that_holds_a_run_stays_as_it_is(refuses, left):
    Path("old").mkdir()
    Path("old", left).write_text("precious")
    refuses("train run_dir=old", "run_dir=old")
    assert Path("old", left).read_text() == "precious"


@by_table(
    """
    argument => line
    kill=3 => kill: there is no key 'kill'; did you mean 'kills'?
    model.layer=2 => model.layer: ... did you mean 'layers'?
    """
)
def test_endurance_makes_no_folder_for_a_mistake(capsys, monkeypatch, argument, line):
    script = str(ROOT / "tests/training/endurance.py")
    monkeypatch.setattr(sys, "argv", [script, "folder=new", argument])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(script, run_name="__main__")
    check_line(capsys.readouterr().err[:-1], f"error: {line}")
    assert (stop.value.code, os.listdir()) == (2, [])
