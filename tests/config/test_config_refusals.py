"""Settings that are refused: one line, the same from the start and on top of a saved configuration."""

import contextlib
import copy
import shlex

import pytest
from refusals import by_table, check_line

from moezoo.config.compose import as_mapping, compose, compose_onto, from_saved, to_yaml
from moezoo.config.other_names import RENAMED
from moezoo.config.overrides import read
from moezoo.errors import UserError
from moezoo.training.saved import saved_config

LONG = {"NEWLINE": "\n", "DIGITS": "9" * 5000, "BRACKETS": "[" * 300}


@pytest.fixture(scope="module")
def saved():
    return as_mapping(compose())


@pytest.fixture(scope="module")
def deepseek():
    return as_mapping(compose("model=deepseek"))


def refusal(function, *arguments):
    """Return the message with which `function` refuses its arguments."""
    with pytest.raises(UserError) as caught:
        function(*arguments)
    assert caught.value.__cause__ is None  # a notebook would print the cause too
    message = str(caught.value)
    for internal in ("https://", "omegaconf", "full_key", "ConfigStore", "Traceback", "--multirun"):
        assert internal not in message
    return message


@by_table(
    r"""
    words => line
    # Words that are no settings.
    steps => steps: ... found no '=' ... steps=VALUE
    'steps 5' => steps 5: ... found no '=' ... KEY=VALUE
    ep8 => ep8: ... mesh=ep8
    '' => : expected KEY=VALUE
    =3 => =3 ... found nothing
    'st eps=3' => st eps=3 ... 'st eps'
    steps=[1 => steps=[1 ... cannot be read ... brackets
    steps=foo(3) => steps=foo(3) ... cannot be read
    steps=DIGITS => steps=999 ... cannot be read
    steps=BRACKETS => steps=[[[ ... cannot be read
    'steps=3NEWLINEseed=4' => 'steps=3\nseed=4' ... found 2; pass each apart: "steps=3", "seed=4"
    run_dir=a=b => run_dir=a=b ... 'run_dir="a=b"'
    run_dir=${ => run_dir=${ ... cannot be read
    +steps=1 => +steps=1 ... cannot add ... steps=1
    +foo=1 => foo ... no key 'foo' ... valid: adapter, batch_size
    ++steps=5 => ++steps=5 ... '++' cannot add ... write steps=5
    ++rules.store.vocab=[fsdp] => ++rules.store.vocab= ... '++' cannot add ... write rules.store.vocab=[fsdp]
    ~model => ~model ... nothing can be removed ... model=VALUE
    ~model=mixtral => ~model=mixtral ... nothing can be removed
    # Choices of entries.
    mesh=epp8 => mesh=epp8 ... no such mesh ... 'ep8'
    mesh=ep4 => mesh=ep4 ... no such mesh ... mesh.expert=4
    mesh=fsdp2_ep8 => mesh=fsdp2_ep8 ... no such mesh ... mesh.fsdp=2 mesh.expert=8
    mesh=foo => mesh=foo ... valid: ep8, fsdp2_ep4, fsdp4_ep2, fsdp8, single
    mesh=null => mesh=null ... valid: ep8
    mesh=3 => mesh=3 ... valid: ep8
    mesh= => mesh=: ... valid: ep8
    mesh=[ep8,single] => mesh=[ep8, single] ... no such mesh
    mesh={expert:4} => mesh={expert: 4} ... no such mesh
    mesh=ep8 mesh=single => mesh=single ... mesh=ep8 ... choose one
    mesh=ep8,single => mesh=ep8,single ... one configuration ... loop
    mesh@foo=ep8 => mesh@foo=ep8 ... 'mesh@foo'
    hydra/launcher=x => hydra/launcher=x ... 'hydra/launcher'
    rules=fsdp_e => rules=fsdp_e ... 'fsdp_ep' ... .yaml
    rules=shard_experts_on_fsdp => rules=shard_experts_on_fsdp: no such rules; did you mean 'shard_exp_on_fsdp'?
    rules=epascp => rules=epascp: no such rules; did you mean 'ep_as_cp'?
    rules=cp_as_ap => rules=cp_as_ap: no such rules; did you mean 'cp_as_ep'?
    rules=zzz => rules=zzz: no such rules; valid: cp_as_ep, ep_as_cp, ep_as_dp, fsdp_ep,
    rules=_own => rules=_own: no such rules
    rules=none.yaml => rules=none.yaml does not exist; give the path
    adapter=dora => adapter=dora: no such adapter; did you mean 'lora'?
    tracker=tensorbord => tracker=tensorbord: no such tracker; did you mean 'tensorboard'? ... your own
    tracker=[tensorboard,wandbb] => tracker= ... wandbb is no tracker for a list ... did you mean 'wandb'?
    tracker=[wandb,none] => tracker= ... none is no tracker for a list; valid: mlflow, tensorboard, wandb
    tracker=[wandb,nowhere.Mine] => tracker= ... no module 'nowhere' ... tracker=package.module.Class
    tracker=[wandb,wandb] => tracker= ... expected each tracker once; write tracker=[tensorboard,wandb]
    tracker=[] => tracker=[] ... expected each tracker once
    tracker=nowhere.Mine => tracker= ... no module 'nowhere' ... tracker=package.module.Class
    tracker=recorders.Kept => tracker= ... Kept is no tracker ... moezoo.trackers.Tracker
    # Several values of a key.
    steps=range(1,3) => steps=range(1,3) ... one configuration
    steps=glob(*) => steps=glob(*) ... one configuration
    rules.batch=data,fsdp => rules.batch=data,fsdp ... rules.batch=[a,b]
    # Keys.
    lr=1e-3 => lr: ... 'optimizer.learning_rate'
    batch=16 => batch: ... 'batch_size'
    model.d_model=3 => model.d_model ... 'model.embed'
    modle=mixtral => modle ... 'model'
    model.layer=3 => model.layer: ... model mixtral ... 'layers'
    step=3 => step: ... 'steps'
    layers=3 => layers: ... 'model.layers'
    nothing_like_it=3 => nothing_like_it ... valid: adapter, batch_size, ... steps
    hydra.run.dir=x => hydra.run.dir ... no key 'hydra'
    dispatch.foo=1 => dispatch.foo ... dispatch ring ... valid: buffer_factor
    data.path=x => data.path ... data python_stdlib ... valid: eval_sequences
    mesh.exprt=1 => mesh.exprt ... 'expert'
    model.groups=2 => model.groups ... no key 'groups' in model mixtral
    adapter.rank=3 => adapter.rank: there is no key 'rank' in adapter none ... adapter=lora has it
    tracker.mode=online => tracker.mode ... there is no key 'mode' in tracker none ... tracker=wandb has it
    optimizer=sgd optimizer.beta1=0.5
        => optimizer.beta1: there is no key 'beta1' in optimizer sgd; valid: clip_norm, learning_rate
        ... ; optimizer=adamw and optimizer=muon have it
    steps.foo=3 => steps.foo ... steps=VALUE
    steps={a:1} steps.a=2 => steps={a: 2}: expected a whole number
    model.layers.foo=3 => model.layers.foo ... model.layers=VALUE
    rules.store.embed.foo=3 => rules.store.embed.foo ... rules.store.embed=VALUE
    rules.store.foo=[fsdp] => rules.store.foo ... no such logical axis
    rules.store=3 rules.store.embed=[fsdp] => rules.store.embed
    execution=3 => execution=3 ... section ... execution.dtype=VALUE
    execution={dtype:float32} => execution={dtype: float32} ... section
    model.family=mixtral => model.family=mixtral ... model=NAME
    optimizer.name=sgd => optimizer.name=sgd ... optimizer=NAME
    model=deepseek model.router.scor=softmax => model.router.scor: there is no key 'scor' in model.router; did you mean
    model=deepseek model.router.score.x=1 => model.router.score.x: model.router.score is one value
    model=deepseek model.router=3 => model.router=3: model.router is a section
    model=deepseek model.router={groups:1} => model.router={groups: 1}: model.router is a section
    # Types of values.
    steps=${nope} => steps=${nope} ... refers to nothing ... ${KEY}
    steps=${steps} => steps=${steps} ... refers to nothing
    run_dir=x${oc.env:NO_SUCH_VARIABLE} => run_dir=x${oc.env:NO_SUCH_VARIABLE} ... refers to nothing
    rules.batch=[${nope}] => rules.batch=[${nope}] ... refers to nothing
    steps=??? => steps=??? ... refers to nothing
    steps=abc => steps=abc ... whole number ... found text
    steps=1.5 => steps=1.5 ... whole number ... found a decimal number
    steps=true => steps=true ... whole number ... found true or false
    steps= => steps=: ... whole number ... found nothing
    steps=[1] => steps=[1] ... whole number ... found a list
    steps=${model} => steps={family: mixtral ... whole number ... found names and values
    model.layers=null => model.layers=null ... whole number ... found null
    model.window=x => model.window=x ... whole number ... or null ... found text
    execution.dtype=float16 => execution.dtype=float16 ... float32, bfloat16
    execution.remat=null => execution.remat=null ... full, offload, dots, none
    model=deepseek model.router.score=hard => model.router.score=hard: expected one of softmax, sigmoid
    tracker=wandb tracker.mode=on => tracker.mode=on: expected one of offline, online
    watch=yes => watch=yes: expected true or false
    optimizer.learning_rate=nan => optimizer.learning_rate=nan ... no finite number
    run_dir=2026 => run_dir=2026 ... text, or null ... found a whole number ... quotes
    run_dir= => run_dir=: ... text ... found nothing
    rules.store.embed=fsdp => rules.store.embed=fsdp ... a list ... found text
    rules.batch=[1] => rules.batch[0]=1 ... text ... found a whole number
    rules.store=3 => rules.store=3 ... names and their values ... found a whole number
    # Values.
    rules.store.embed=[fsd] => rules.store.embed ... 'fsd' ... 'fsdp'
    model.experts_per_token=9 => model.experts_per_token=9 ... model.experts=8
    model=deepseek model.router.groups=3 => model.experts=16 is not divisible by model.router.groups=3
    model=deepseek model.router.kept_groups=5
        => model.router.kept_groups=5 must be at most model.router.groups=4
    model=deepseek model.router.groups=16 => model.router.group_score=sum_of_top2 needs two experts
    model=deepseek model.experts_per_token=9
        => model.experts_per_token=9 exceeds the 8 experts of model.router.kept_groups=2
    model=deepseek model.experts_per_token=17 => model.experts_per_token=17 must be at most model.experts=16
    model.llama3.low=4.5 => model.llama3.low=4.5 must be at most model.llama3.high=4.0
    batch_size=0 => batch_size=0 must be at least 1
    execution.microbatches=0 => execution.microbatches=0 must be at least 1
    mesh.expert=0 => mesh.expert=0 must be at least 1
    dispatch.chunks=0 => dispatch.chunks=0 must be at least 1
    dispatch.chunks=-1 => dispatch.chunks=-1 must be at least 1
    model.llama3.factor=0.5 => model.llama3.factor=0.5 must be at least 1
    model.llama3.length=0 => model.llama3.length=0 must be at least 1
    model=deepseek model.router.groups=0 => model.router.groups=0 must be at least 1
    model=deepseek model.yarn.factor=0.5 => model.yarn.factor=0.5 must be at least 1
    model=deepseek model.yarn.length=0 => model.yarn.length=0 must be at least 1
    seq_len=1 => seq_len=1 must be at least 2
    steps=-1 => steps=-1 must be at least 0
    eval_every=-1 => eval_every=-1 must be at least 0
    checkpoint_every=-1 => checkpoint_every=-1 must be at least 0
    log_every=-1 => log_every=-1 must be at least 0
    data.eval_sequences=-1 => data.eval_sequences=-1 must be at least 0
    optimizer.weight_decay=-0.1 => optimizer.weight_decay=-0.1 must be at least 0
    schedule.warmup_steps=-1 => schedule.warmup_steps=-1 must be at least 0
    model=deepseek model.router.bias_rate=-1 => model.router.bias_rate=-1 must be at least 0
    model=deepseek model.load_balance=-1 => model.load_balance=-1 must be at least 0
    seed=-1 => seed=-1 must be at least 0 and at most 4294967295
    schedule.final_ratio=1.5 => schedule.final_ratio=1.5 must be at least 0 and at most 1
    schedule.final_ratio=-0.5 => schedule.final_ratio=-0.5 must be at least 0 and at most 1
    optimizer.beta1=1 => optimizer.beta1=1 must be at least 0 and below 1
    optimizer.beta2=-0.1 => optimizer.beta2=-0.1 must be at least 0 and below 1
    optimizer.learning_rate=0 => optimizer.learning_rate=0 must be above 0
    optimizer.epsilon=0 => optimizer.epsilon=0 must be above 0
    optimizer.clip_norm=0 => optimizer.clip_norm=0 must be above 0
    model=deepseek model.yarn.beta_fast=0 => model.yarn.beta_fast=0 must be above 0
    model=deepseek model.yarn.beta_slow=-1 => model.yarn.beta_slow=-1 must be above 0
    steps=3000000000 => steps=3000000000 must be at most 2147483647
    model.window=4000000000 => model.window=4000000000 must be at most 2147483647
    model.max_length=2147483648 => model.max_length=2147483648 must be at most 2147483647
    batch_size=2147483648 => batch_size=2147483648 must be at most 2147483647
    seq_len=2147483648 => seq_len=2147483648 must be at most 2147483647
    eval_every=2147483648 => eval_every=2147483648 must be at most 2147483647
    checkpoint_every=2147483648 => checkpoint_every=2147483648 must be at most 2147483647
    checkpoint_keep=2147483648 => checkpoint_keep=2147483648 must be at most 2147483647
    log_every=2147483648 => log_every=2147483648 must be at most 2147483647
    guard.patience=2147483648 => guard.patience=2147483648 must be at most 2147483647
    execution.microbatches=2147483648 => execution.microbatches=2147483648 must be at most 2147483647
    schedule.warmup_steps=2147483648 => schedule.warmup_steps=2147483648 must be at most 2147483647
    dispatch.chunks=2147483648 => dispatch.chunks=2147483648 must be at most 2147483647
    data.eval_sequences=2147483648 => data.eval_sequences=2147483648 must be at most 2147483647
    mesh.expert=2147483648 => mesh.expert=2147483648 must be at most 2147483647
    """
)
def test_settings(saved, words, line):
    for name, text in LONG.items():
        words = words.replace(name, text)
    overrides = shlex.split(words)
    message = refusal(compose, *overrides)
    check_line(message, line)
    assert refusal(compose_onto, saved, *overrides) == message
    with contextlib.suppress(UserError):
        read(overrides)
        return
    assert refusal(read, overrides) == message


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_is_refused_with_its_new_name(old, new, deepseek):
    """In an override, and in a saved configuration."""
    message = f"{old} is now {new}"
    assert refusal(compose_onto, deepseek, f"{old}=1") == message
    mapping = copy.deepcopy(deepseek)
    section, name = new.removeprefix("model.").split(".")
    mapping["model"][old.removeprefix("model.")] = mapping["model"][section].pop(name)
    assert refusal(from_saved, mapping) == message


def test_an_older_run_is_left_to_the_version_that_reads_it(tmp_path, deepseek):
    mapping = copy.deepcopy(deepseek)
    mapping["model"]["yarn_factor"] = 1.0
    (tmp_path / "config.yaml").write_text(to_yaml(mapping))
    for key, message in (
        ("resume", refusal(compose, f"resume={tmp_path}")),
        ("run_dir", refusal(saved_config, tmp_path)),
    ):
        assert message.startswith(f"{key}={tmp_path}: moezoo 0.1 saved this run")
        assert "(model.yarn_factor is now model.yarn.factor)" in message


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (lambda m: m.pop("steps"), "steps is missing; set it to a whole number"),
        (lambda m: m.update(stepps=3), "stepps: there is no key 'stepps'; did you mean 'steps'?"),
        (lambda m: m["dispatch"].update(name="rign"), "dispatch.name=rign: no such dispatch; did you mean 'ring'?"),
        (lambda m: m["model"].pop("family"), "model.family is missing; set it to one of deepseek, mixtral"),
        (lambda m: m.update(model=3), "model=3: expected a section with keys, found a whole number"),
        (lambda m: m.update(execution=None), "execution=null: expected a section with keys, found null"),
    ],
)
def test_refuses_a_damaged_saved_config(change, start, saved):
    mapping = copy.deepcopy(saved)
    change(mapping)
    assert refusal(from_saved, mapping).startswith(start)
    assert refusal(compose_onto, mapping, "mesh=ep8").startswith(start)
