"""The released sizes: exact numbers of parameters, and how much of them a large mesh splits."""

import functools
import math
import re

import pytest

from moezoo.config.compose import as_mapping, compose, compose_onto
from moezoo.config.overrides import CONF, groups, read_yaml
from moezoo.models import FAMILIES, family_of
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import Auto
from moezoo.parallel.axes import Role, count_parameters, parameter_table
from moezoo.parallel.rules import live

# Trained values of the released checkpoints, without choice biases, layers of multi-token prediction, and the scale of
# each layer in Gemma 4.
TOTALS = {
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_404_352,
    "kimi_k2": 1_026_408_209_408,
    "moonlight_16b_a3b": 15_960_108_544,
    "glm4_7_flash": 29_943_390_976,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_vl_30b_a3b": 30_532_122_624,
    "qwen3_vl_235b_a22b": 235_093_634_560,
    "qwen3_omni_30b_a3b": 30_532_646_912,
    "qwen1_5_moe_a2_7b": 14_315_784_192,
    "qwen2_57b_a14b": 57_408_658_944,
    "olmoe_1b_7b": 6_919_161_856,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "glm4_5_air": 106_852_245_504,
    "glm4_5": 352_797_814_784,
    "minimax_m2": 228_689_748_992,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "qwen3_5_122b_a10b": 122_111_526_912,
    "qwen3_5_397b_a17b": 396_346_350_336,
    "kimi_linear_48b_a3b": 49_122_675_072,
    "lfm2_8b_a1b": 8_339_929_856,
    "nemotron_3_nano_30b_a3b": 31_577_940_288 - 23 * 128,  # layers with experts, choice biases
    "nemotron_3_super_120b_a12b": 120_668_707_840 - 40 * 512,
    "nemotron_3_ultra_550b_a55b": 549_308_993_536 - 48 * 512,
    "llama4_scout_17b_16e": 107_769_861_120,
    "llama4_maverick_17b_128e": 400_711_848_960,
    "gemma4_26b_a4b": 25_233_141_790 - 30,  # layers
    "mimo_v2_flash": 308_778_780_864 - 47 * 256,  # choice biases
}


@functools.cache
def configuration(name):
    return compose(f"model={name}")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "mixtral",
            "deepseek",
            "qwen3_moe",
            "olmoe",
            "gpt_oss",
            "glm4_moe",
            "qwen3_5",
            "kimi_linear",
            "lfm2_moe",
            "nemotron_h",
            "gemma4",
            "mimo_v2",
            "llama4",
        ),
        *TOTALS,
    ],
)
def test_totals_and_nearly_all_is_split_over_all_devices(name):
    cfg = configuration(name)
    shapes = Blueprint(cfg.model).shapes
    if name in TOTALS:
        counts = count_parameters(shapes, cfg.model.experts_per_token)
        assert counts[0] == TOTALS[name]
        # The figures of its comment, which docs/families.md repeats, are rounded to the digits that they have.
        comment = (CONF / "model" / f"{name}.yaml").read_text().splitlines()[1]
        for figure, count in zip(re.findall(r"([\d.]*\d) (?:billion|active)", comment), counts, strict=True):
            assert float(figure) == round(count / 1e9, len(figure.partition(".")[2])), comment
    sizes = {"fsdp": 2, "expert": 4, "context": 2}
    split = total = 0
    for _, axes, shape in parameter_table(shapes):
        if axes.role is Role.BUFFER:
            continue
        over = {a for name in axes.names for a in live(cfg.rules.store.get(name, ()), sizes)}
        total += math.prod(shape)
        split += math.prod(shape) * (over == set(sizes))
    assert split / total > (0.999 if name in TOTALS else 0.99)


# What no paper gives (no released size is tied); a softmax router has no choice bias and so no rate of it; only ERNIE
# has a least sum.
NO_PAPER = {"z_loss", "load_balance_over", "tied_embeddings", "unembedding_std", "router.bias_rate", "router.least_sum"}
NO_PAPER |= {"yarn.truncate", "yarn.attention_factor", "router.added_to_sum"}
# Keys that these sizes do not use: routers other than a softmax over all experts, and longer texts.
UNUSED = {f"router.{name}" for name in ("score", "groups", "kept_groups", "group_score", "scale", "choice_bias")}
UNUSED |= {f"yarn.{name}" for name in ("factor", "length", "beta_fast", "beta_slow", "mscale", "mscale_all")}
UNUSED |= {f"llama3.{name}" for name in ("factor", "length", "low", "high")}
# The defaults of their family are those of Qwen3-MoE.
QWEN3 = {"model_type", "shared_experts", "shared_mlp", "norm_over", "rotary_dims", "rope_pairs"}
# Shared experts of a width of their own, which only Qwen2-MoE has.
OWN_WIDTH = {"shared_mlp"}
# What these sizes of DeepSeek do not have: sparse attention, and queries that are scaled by their position.
NOT_HERE = {"index_topk", "index_pairs", "query_scale.beta", "query_scale.length"}
# Every layer of Qwen3.5 has experts.
QWEN3_5 = {"mlp"}


def dotted(mapping, above=""):
    """Return the dotted keys of a mapping and the mappings in it."""
    for key, value in mapping.items():
        yield from dotted(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]


@pytest.mark.parametrize("name", TOTALS)
def test_a_preset_lists_every_number_and_computes_in_bfloat16(name):
    preset = read_yaml(CONF / "model" / f"{name}.yaml")
    assert set(preset) == {"defaults", "model", "execution"}
    family = preset["model"]["family"]
    missing = set(dotted(as_mapping(configuration(name))["model"])) - set(dotted(preset["model"]))
    unused = NOT_HERE if family == "deepseek" else UNUSED | OWN_WIDTH if family == "grouped" else UNUSED
    assert missing <= NO_PAPER | unused | (QWEN3_5 if "qwen3_5_" in name else QWEN3 if "qwen3" in name else set())
    cfg = configuration(name)
    assert type(cfg.model) is FAMILIES[family].config
    assert (cfg.execution.dtype, cfg.execution.param_dtype) == ("bfloat16", "float32")
    assert cfg.dispatch == Auto()
    # A comment says how much room the token-moving strategies have for each row in use.
    ratio = f"{cfg.model.experts / cfg.model.experts_per_token:.3g}"
    assert f"up to {ratio} times the rows in use" in (CONF / "model" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", groups()["model"])
def test_a_folder_keeps_every_setting_of_a_preset(name):
    """So `save_pretrained` has nothing to warn of, but for a z-loss, which transformers does not have."""
    config = configuration(name).model
    assert family_of(config).hub.lost(config) == ({"z_loss": (config.z_loss, 0.0)} if config.z_loss else {})


def test_the_dtype_of_a_preset_can_be_set():
    assert compose("execution.dtype=float32", "model=olmoe_1b_7b").execution.dtype == "float32"


@pytest.mark.parametrize("saved", [False, True])
def test_a_strategy_by_name_overrides_that_of_a_preset(saved):
    base = as_mapping(compose("dispatch=gather"))
    for name in ("ring", "gather"):
        words = (f"dispatch={name}", "model=deepseek_v3")
        cfg = compose_onto(base, *words) if saved else compose(*words)
        assert as_mapping(cfg)["dispatch"]["name"] == name


def test_a_preset_on_top_of_a_saved_configuration():
    saved = as_mapping(compose("execution.remat=dots", "steps=3"))
    cfg = compose_onto(saved, "model=deepseek_v3", "model.router.scale=2")
    assert cfg == compose("model=deepseek_v3", "model.router.scale=2", "execution.remat=dots", "steps=3")
    assert compose_onto(saved, "execution.dtype=float32", "model=deepseek_v3").execution.dtype == "float32"
    assert compose_onto(as_mapping(cfg), "model=mixtral").execution == cfg.execution  # not a key of this entry
