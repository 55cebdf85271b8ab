"""The released sizes: exact totals, and that a large mesh has a share of nearly all of each."""

import math

import pytest

from moezoo.config.compose import CONF, as_mapping, compose, compose_onto, read_yaml
from moezoo.models import FAMILIES, model_shapes
from moezoo.parallel.axes import Role, count_parameters, parameter_table
from moezoo.parallel.rules import live

# The values that the released checkpoints train: choice biases and layers of multi-token prediction not among them.
TOTALS = {
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_404_352,
    "kimi_k2": 1_026_408_209_408,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "olmoe_1b_7b": 6_919_161_856,
}


@pytest.mark.parametrize("name", TOTALS)
def test_totals(name):
    config = compose(f"model={name}").model
    assert count_parameters(model_shapes(config), config.experts_per_token)[0] == TOTALS[name]


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "qwen3_moe", "olmoe", *TOTALS])
def test_nearly_all_is_split_over_all_devices(name):
    cfg = compose(f"model={name}", "rules=fsdp_ep")
    sizes = {"fsdp": 2, "expert": 4, "context": 2}
    split = total = 0
    for _, axes, shape in parameter_table(model_shapes(cfg.model)):
        if axes.role is Role.BUFFER:
            continue
        over = {a for name in axes.names for a in live(cfg.rules.store.get(name, ()), sizes)}
        total += math.prod(shape)
        split += math.prod(shape) * (over == set(sizes))
    assert split / total > (0.999 if name in TOTALS else 0.99)


# What no paper says; a softmax router has no choice bias whose rate one could give.
UNSAID = {"z_loss", "load_balance_over", "init_std", "router.bias_rate"}
# What families have that is of no use to these sizes: other routers than a softmax over all experts, longer texts.
UNUSED = {f"router.{name}" for name in ("score", "groups", "kept_groups", "group_score", "scale", "choice_bias")}
UNUSED |= {f"yarn.{name}" for name in ("factor", "length", "beta_fast", "beta_slow", "mscale", "mscale_all")}


def dotted(mapping, above=""):
    """The dotted keys of a mapping and the mappings in it."""
    for key, value in mapping.items():
        yield from dotted(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]


@pytest.mark.parametrize("name", TOTALS)
def test_says_every_number(name):
    said = read_yaml(CONF / "model" / f"{name}.yaml")
    assert set(said) == {"model", "execution"}
    every = as_mapping(compose(f"model={said['model']['family']}"))["model"]
    unsaid = set(dotted(every)) - set(dotted(said["model"]))
    assert unsaid <= (UNSAID if said["model"]["family"] == "deepseek" else UNSAID | UNUSED)
    assert type(compose(f"model={name}").model) is FAMILIES[said["model"]["family"]].config


@pytest.mark.parametrize("name", TOTALS)
def test_computes_in_bfloat16_unless_told_otherwise(name):
    assert compose(f"model={name}").execution.dtype == "bfloat16"
    assert compose(f"model={name}").execution.param_dtype == "float32"
    assert compose("execution.dtype=float32", f"model={name}").execution.dtype == "float32"


def test_a_preset_on_top_of_a_saved_configuration():
    saved = as_mapping(compose("execution.remat=dots", "steps=3"))
    cfg = compose_onto(saved, "model=deepseek_v3", "model.router.scale=2")
    assert cfg == compose("model=deepseek_v3", "model.router.scale=2", "execution.remat=dots", "steps=3")
    assert compose_onto(saved, "execution.dtype=float32", "model=deepseek_v3").execution.dtype == "float32"
    assert compose_onto(as_mapping(cfg), "model=mixtral").execution == cfg.execution  # which says nothing of it
