"""Mistakes in the words of a tool: one line, exit code 2, nothing printed or written."""

import json
from pathlib import Path

import pytest
from refusals import by_table


@pytest.fixture
def _runs():
    for name in "ab":
        Path(name).mkdir()
        Path(name, "config.yaml").touch()
        Path(name, "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
    }
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32}
    moe = sizes | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    few = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    other = moe | {"num_experts": 4, "moe_intermediate_size": 8, "norm_topk_prob": True, "router_aux_loss_coef": 0.01}
    other |= {"model_type": "foo_moe", "router_heads": 2, "stem_kernel": 3, "mlp_bias": True}
    del other["num_local_experts"], other["hidden_size"]
    written = {"moe": moe, "dense": sizes | {"model_type": "mistral"}, "other": other, "nvfp4": moe | few}
    for name, keys in written.items():
        Path(f"{name}.json").write_text(json.dumps(keys))


# PLAN is a plan of a small model on eight v5p, which nothing compiles.
@by_table(
    """
    words => line
    compare => runs is missing ... FOLDER
    compare a => a is one run; name two or more
    compare a nowhere => runs=nowhere ... no run there
    compare a . => runs=. ... no run there
    compare a a/../a => runs= ... /a is given twice
    compare a b by=time => by=time ... steps, tokens
    compare a b out=x.pdf => out=x.pdf ... .png
    compare a b out=a/config.yaml/x.png => out=a/config.yaml/x.png ... cannot write
    compare a b of=3 => of: there is no key 'of'
    compare a b --jsn => --jsn: no such option
    doctor seconds=0 => seconds=0 must be at least 1
    doctor secnds=9 => secnds: there is no key 'secnds'; did you mean 'seconds'?
    doctor --markdwn => --markdwn: no such option
    doctor runs => runs: expected KEY=VALUE, such as seconds=runs
    plan model=mixtral => topology is missing; write topology=KIND:SIZES
    plan topology=h20:8 => topology=h20:8: no chip 'h20'; did you mean 'h200'?
    plan topology=quantum => topology=quantum: no chip 'quantum'; valid: ... v5p
    plan topology=v5p:8x8 => topology=v5p:8x8: v5p takes chips along each torus dimension, such as v5p:2x2x2
    plan topology=v5e:4x4x4 => topology=v5e:4x4x4: v5e takes ... v5e:2x4
    plan topology=v5e:0x4 => topology=v5e:0x4:
    plan topology=v5q:2x2 => topology=v5q:2x2: no chip 'v5q'; did you mean 'v5p'?
    plan topology=h200: => topology=h200:: h200 takes NODESxGPUS or GPUS, such as h200:16x8
    plan topology=h200:2x2x2 => topology=h200:2x2x2:
    plan topology=h200:16 => topology=h200:16: a node has at most 8 h200; write nodes x GPUs, such as h200:2x8
    PLAN mesh=fsdp => mesh=fsdp: expected axes and sizes such as fsdp16_ep4
    PLAN mesh=ep_8 => mesh=ep_8: expected axes and sizes such as fsdp16_ep4
    PLAN mesh=ep8 dispatch=ragde => dispatch=ragde: no such dispatch
    PLAN mesh=ep8 rules=fsdp => rules=fsdp: no such rules
    PLAN mesh=all mesh.fsdp=2 => mesh=all mesh.fsdp=2: a search chooses all sizes
    PLAN mesh=ep8 --picture=nope/a.png => --picture=nope/a.png: there is no such folder
    PLAN run_dir=x => run_dir=x: plan writes no run
    PLAN mesh=ep8 layouts=9 => layouts=9: of a search, and there is none; leave it out, or write mesh=all
    PLAN layouts=0 => layouts=0 must be at least 1
    PLAN --pictur=x => --pictur=x: no such option; did you mean '--picture'?
    sharding mesh.expert=-1 --json => mesh.expert=-1 takes the devices of a machine ... give a number
    sharding --against "rules='fsdp_ep" => --against=rules='fsdp_ep: a quote is not closed
    sharding --call fly => --call=fly: expected one of train, evaluate, prefill, decode
    sharding mesh=ep8 batch_size=12 => batch_size=12 ... 8
    sharding mesh=ep8 --against batch_size=12 => batch_size=12 is not divisible by 8
    sharding --paramaters-only => --paramaters-only: no such option; did you mean '--parameters-only'?
    sharding run_dir=old => run_dir=old: sharding writes no run; to describe a saved one, write resume=FOLDER
    sharding folder=nowhere => folder=nowhere: there is no such folder, and no such file
    sharding folder=org/model => folder=org/model: there is no ... hf download org/model
    sharding folder=a => a: no config.json; name a Hugging Face model folder
    sharding folder=a folder=b => folder=b: folder is given twice
    sharding folder=a init_from=b => folder=a and init_from=b name two models; leave one of them out
    sharding folder=a resume=b => folder=a and resume=b name two models
    sharding folder=moe.json model=mixtral => model=mixtral but folder= ... moe.json has its own model; leave model out
    sharding folder=moe.json model.layers=3 => model.layers=3 but the weights of folder= ... have model.layers=2
    sharding folder=dense.json => dense.json: model_type=mistral is a dense model
    sharding folder=moe.json --against folder=b => b: no config.json
    sharding folder=moe.json --against flder=b => flder: there is no key 'flder'; did you mean 'folder'?
    sharding folder=other.json => other.json: unknown model_type 'foo_moe'; it is a model of its own: qwen3_moe
        knows most of its keys, but not router_heads, stem_kernel, and has no mlp_bias=true, and needs hidden_size
    sharding folder=nvfp4.json execution.param_dtype=stored
        => few bits cannot be kept: model.layers.0.self_attn.q_proj.weight is in the format nvfp4 of ModelOpt
    plan topology=v5p:2x2x2 folder=nowhere --estimate => folder=nowhere: there is no such folder
    plan topology=v5p:2x2x2 mesh=ep8 folder=other.json --estimate => other.json: unknown model_type 'foo_moe'
    train folder=moe.json => folder: there is no key 'folder'; did you mean 'init_from'
    sharding --mesh=ep8 => --mesh=ep8: settings have no dashes; write mesh=VALUE
    sharding model=mixtral_8x7b --few-bits=mxfp4 --parameters-only
        => --few-bits=mxfp4: folders of this family have no weight that fits it; choose another format
    sharding --few-bits=nf4 --parameters-only => --few-bits=nf4: expected one of fp8_channels, fp8, mxfp4, int4
    sharding --few-bits=nvfp4 --parameters-only
        => --few-bits=nvfp4: nvfp4 is only widened while loading, so leave --few-bits out; else expected one of fp8_
    sharding model=deepseek model.index_topk=64 seq_len=64 --call=decode
        => seq_len=64 ... model.index_topk=64 (b ... at most 63
    sharding seq_len=32768 --call=decode => seq_len=32768 ... model.max_length=32768 ... at most 32767
    sweep seed=1 => no key has several values ... moezoo train
    sweep seed=0,1,0 => seed=0,1,0 ... 0 is listed twice
    sweep seed=0,1 seed=3 => seed ... twice
    sweep seed=3 seed=0,1 => seed ... twice
    sweep seed=glob(*) => seed=glob(*) ... list them
    sweep seed=interval(0,1) => seed=interval(0,1) ... list them
    sweep seed=shuffle(0,1) => seed=shuffle(0,1) ... list them
    sweep seed=range(0,3,0) => seed=range(0,3,0) ... zero
    sweep seed=range(3,0) => seed=range(3,0) ... no value
    sweep seed=range(0,1000000000000) => seed= ... more than 1000 values
    sweep seed=range(0,100) steps=range(0,100) => ... 10000 runs ... 1000
    sweep run_dir=a,b => run_dir=a,b ... sweep_dir=
    sweep seed=0,1 resume=x => resume=x ... sweep_dir=
    sweep seed=0,1 distributed=auto => distributed=auto ... only=
    sweep seed=0,1 sed=3 => sed: there is no key
    sweep steps=0 seed=0,1 optimizer.learning_rate=1,fast => optimizer.learning_rate=fast ... run 2
    sweep mesh=ep8,ep9 => mesh=ep9: no such mesh
    sweep steps=0 mesh=single,ep8 model.experts=6 => mesh.expert=8 ... run 1
    sweep seed=0,1 only=2 sweep_dir=x => only=2 ... 0 to 1
    sweep seed=0,1 only=-1 => only=-1 ... at least 0
    sweep seed=0,1 only=1 => only=1 ... sweep_dir
    sweep seed=0,1 --multirun => --multirun
    """
)
@pytest.mark.usefixtures("_runs")
def test_words(refuses, words, line):
    small = "plan model=mixtral topology=v5p:2x2x2 batch_size=16 seq_len=32 --estimate"
    refuses(words.replace("PLAN", small), line)
