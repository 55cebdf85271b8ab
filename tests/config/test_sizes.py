"""What no memory here holds is refused with the bytes, before anything is made; what may fit is not."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from refusals import by_table, refused

import moezoo
import moezoo.host.machine as host
from moezoo.config.build import build_execution
from moezoo.config.overrides import groups
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.memory import check_devices
from moezoo.parallel.mesh import abstract_mesh
from moezoo.training.build import build_step

# Sizes that differ, so that each has its part in the bytes.
TINY = ("model.layers=3", "model.embed=24", "model.vocab=40", "model.experts=8", "model.expert_mlp=20")


@pytest.fixture
def memory(monkeypatch):
    """Set the memory of this machine."""
    return lambda have: monkeypatch.setattr(host, "host_memory", lambda: have)


def prepare(*overrides):
    cfg = moezoo.compose(*overrides)
    return build_step(cfg, build_execution(cfg))


@pytest.mark.parametrize("model", ["mixtral", "deepseek", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "kimi_linear"])
def test_small_sizes_always_fit(memory, model):
    memory(2**30)
    prepare(f"model={model}", "mesh=ep8")


@pytest.mark.parametrize("model", groups()["model"])
def test_the_closed_bound_is_never_above_the_parameters(model):
    changed: Any = moezoo.compose(f"model={model}").model
    lists = {name: None for name in ("attention_layers",) if hasattr(changed, name)}
    for config in (changed, dataclasses.replace(changed, layers=5, vocab=7, **lists)):
        assert 0 < config.least_parameters <= count_parameters(Blueprint(config).shapes, 1)[0]


@pytest.mark.parametrize("mesh", ["mesh=single", "mesh=fsdp2_ep4", "mesh=ep8 rules=own.yaml"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_state_and_gradients_are_counted_to_the_byte(memory, tmp_path, mesh, optimizer):
    # Everything is stored whole on each device, except experts.
    (tmp_path / "own.yaml").write_text(
        "store: {expert: [expert]}\ncompute: {expert: [expert]}\nbatch: [expert]\nsequence: []\n"
    )
    words = (*TINY, *mesh.split(), f"optimizer={optimizer}")
    state = prepare(*words).arguments[0]
    shards = lambda tree: sum(  # noqa: E731
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * x.sharding.num_devices
        for x in jax.tree.leaves(tree)
    )
    needed = shards(state) + shards(state.model)
    memory(needed)
    prepare(*words)
    memory(needed - 1)
    with refused("model.vocab=40 model.embed=24 model.layers=3", "gradients, optimizer state"):
        prepare(*words)


@by_table(
    """
    overrides => parts
    model=deepseek_v3 mesh=ep8 => model.vocab= ... model.layers=61 ... 671,026,404,352 parameters in float32
        ... 9,999.2 GiB ... this machine has 16.0 GiB; choose a smaller model
    model=mixtral_8x7b mesh=single => model.vocab= ... 46,702,792,704 parameters ... 695.9 GiB of memory
        ... this machine has 16.0 GiB; choose a smaller model
    model=mixtral_8x7b execution.param_dtype=bfloat16
        => model.vocab= ... parameters in bfloat16 ... 521.9 GiB of memory ... choose a smaller model
    model=mixtral_8x7b optimizer=sgd
        => model.vocab= ... gradients ... 348.0 GiB of memory ... choose a smaller model
    model.embed=1000000000 => model.vocab=256 model.embed= ... 6,408,000,000,000 parameters ... 5,967.9 GiB
    model.vocab=2000000000 model.experts=2000000000 model.expert_mlp=2000000000 => model.vocab= ... GiB
    batch_size=16000000 mesh=ep8 => batch_size=16000000 x seq_len=128 ... GiB ... on 8 CPU devices
    batch_size=16000000 => batch_size=16000000 x seq_len=128 in execution.microbatches=1 ... 1,007.1 GiB
    batch_size=16000000 execution.microbatches=2000000 => batch_size= ... 30.5 GiB ... more execution.microb
    batch_size=16000000 execution.dtype=bfloat16 => batch_size= ... 518.8 GiB
    batch_size=16777216 => batch_size=16777216 x seq_len=128 makes 2147483648 tokens ... at most 2147483647
    """
)
def test_sizes_that_nothing_here_holds(memory, overrides, parts):
    memory(16 * 2**30)
    with refused(parts):
        prepare(*overrides.split())


def test_no_other_layout_is_advised_where_memory_is_short(memory):
    memory(16 * 2**30)
    with pytest.raises(moezoo.UserError, match=r"this machine has 16.0 GiB; choose smaller sizes$"):
        prepare("model.embed=1000000000", "mesh=ep8")


def test_a_mesh_without_devices_is_not_checked(memory):
    memory(0)
    cfg = moezoo.compose("model=mixtral_8x7b", "mesh=ep8")
    build_step(cfg, build_execution(cfg, abstract_mesh(cfg.mesh)))


def test_devices_that_report_their_memory(monkeypatch):
    """A device is compared with its share alone; one that reports nothing is not compared."""
    for stats, have in (({"bytes_limit": 2**30}, True), ({}, False), (None, False)):
        device = SimpleNamespace(platform="gpu", device_kind="big", memory_stats=lambda stats=stats: stats)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        check_devices("this", 2**30, None, "shrink")
        if not have:
            check_devices("this", 2**31, None, "shrink")
            continue
        with refused("this needs at least 2.0 GiB of memory per device", "a big has 1.0 GiB", "shrink"):
            check_devices("this", 2**31, None, "shrink")


def test_loading_what_does_not_fit(memory, tmp_path):
    model = moezoo.build_model(moezoo.compose(*TINY).model, key=jax.random.key(0))
    moezoo.save_pretrained(model, tmp_path / "hub")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    memory(size)
    moezoo.from_pretrained(tmp_path / "hub")
    memory(size - 1)
    with refused(str(tmp_path / "hub"), "float32", "GiB"):
        moezoo.from_pretrained(tmp_path / "hub")


def test_more_cpu_devices_than_jax_starts(monkeypatch):
    monkeypatch.setattr("moezoo.parallel.mesh.has_started", lambda: False)
    with refused("a mesh of 100000 devices", "at most 4096 virtual CPU devices", "smaller mesh"):
        moezoo.make_mesh(moezoo.MeshShape(expert=100000))
