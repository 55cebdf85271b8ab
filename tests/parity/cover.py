"""What the parity tests run: tiny models, their batches, meshes, rules, and the cases, each one way to run a step.

A `Case` has these columns:

| column | values |
|---|---|
| strategy | how tokens meet their experts: every strategy in `moezoo.moe.dispatch.STRATEGIES` |
| mesh | the six of `MESHES`: one device, or eight in one to three axes |
| rules | the layouts that moezoo ships, and one written here; `fits` has the pairs of mesh and rules that exist |
| remat | what a layer keeps for the backward pass: `full` `offload` `dots` `none` |
| microbatches | 1, with attention's backend `reference`, or 2, with its backend `chunked` |
| balance | what the load-balance loss is computed over: `batch` or `sequence` |
| family | `mixtral` `deepseek` `grouped` `olmoe` `gpt_oss` `kimi_linear`; others in lists of their own |
| optimizer | `sgd` `adamw` `muon`, each with the settings of `OPTIMIZERS` |
| context_parallel | `gather` `ring`; only `gather` where sequences are whole |
| chunks | how many parts an MoE layer's tokens are sent in; 1, except where `cover` sets 3 |

`product()` has every combination of all columns but chunks whose rules fit the mesh. `cover()` is a small part of it:
with `EXTRA_CASES`, a pairwise cover of the columns that can interact (`_INTERACT`). Any two values of such columns that
are together in some case of the product are together in some case that the suite runs each week; CI has `each_time()`
of them. With `-m full` it traces the product and runs a part of it.
"""

import functools
import itertools
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import yaml

import moezoo
from moezoo.config.overrides import CONF, groups
from moezoo.config.settings import ExecutionSettings, TrainConfig
from moezoo.data import Batch
from moezoo.models import (
    DeepSeekConfig,
    Gemma4Config,
    GptOssConfig,
    GroupedConfig,
    KimiLinearConfig,
    Lfm2MoeConfig,
    Llama4Config,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    Qwen35Config,
    WindowedConfig,
    build_model,
)
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import STRATEGIES
from moezoo.nn.context_parallel import CONTEXT_PARALLEL
from moezoo.optim import SGD, AdamW, Constant, Cosine, Muon, Schedule, UpdateRule
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.parallel.pipeline import Circular
from moezoo.parallel.rules import live
from moezoo.parallel.sequence_order import SequenceOrder
from moezoo.typed import convert

Balance = Literal["batch", "sequence"]
# A key of `_FAMILY_SETTINGS`: every family of moezoo, and variants for `EXTRA_CASES`: DeepSeek-V2 and a Qwen3-MoE in
# which only every second layer has experts, both with tied embeddings, a GLM-4.5 and a Mistral 4.
Family = str

# Adjacent dimensions have different sizes where possible, so a test fails where the code confuses two of them. The
# coefficients of the routing losses are large, so their gradients are about as large as the cross-entropy's.
VOCAB, EMBED, ROWS, LENGTH = 40, 16, 16, 8
LAYERS = 2  # layers with experts; DeepSeek and Qwen3-MoE have a dense layer before them
UNUSED = 5  # an expert that no token goes to, in the first layer with experts
_COMMON = {"vocab": VOCAB, "embed": EMBED, "rope_base": 100.0, "init_std": 0.5, "load_balance": 0.3, "z_loss": 0.05}
_GROUPED = {"heads": 4, "kv_heads": 2, "head_dim": 8, "expert_mlp": 12, "experts": 8}
_MIXTRAL = {"layers": LAYERS, **_GROUPED}
# Rotary positions have four pairs of dimensions; with these numbers YaRN changes each by a different factor.
_YARN = {"factor": 4.0, "length": 64, "beta_fast": 8.0, "beta_slow": 1.0}
# A group has four experts, and its score is the sum of the best two. The choice bias moves by 1/4, which float32 adds
# exactly.
_DEEPSEEK = {"layers": 1 + LAYERS, "dense_layers": 1, "heads": 4, "q_lora": 24, "kv_lora": 8, "nope_dim": 6}
_DEEPSEEK |= {"rope_dim": 8, "value_dim": 5, "mlp": 20, "expert_mlp": 12, "experts": 16, "experts_per_token": 3}
_DEEPSEEK |= {"norm_eps": 1e-3, "shared_experts": 2, "yarn": _YARN | {"mscale": 1.0, "mscale_all": 0.5}}
_DEEPSEEK |= {"router": {"groups": 4, "kept_groups": 2, "bias_rate": 0.25}}
_DEEPSEEK_V2 = _DEEPSEEK | {"q_lora": None, "rope_pairs": "halves", "yarn": {"factor": 1.0}, "tied_embeddings": True}
_DEEPSEEK_V2["router"] = {"groups": 4, "kept_groups": 2, "score": "softmax", "group_score": "max"}
_DEEPSEEK_V2["router"] |= {"choice_bias": "none", "gates": "scores", "scale": 16.0}
# The factor on queries has up to three values in a document of up to six tokens.
_MISTRAL4 = _DEEPSEEK | {"query_scale": {"beta": 0.7, "length": 2}}
_MISTRAL4["router"] = {"groups": 4, "kept_groups": 2, "score": "softmax", "choice_bias": "none", "scale": 1.5}
_QWEN3 = {**_GROUPED, "layers": 1 + LAYERS, "moe_every": 1, "mlp_layers": (0,), "mlp": 20, "experts_per_token": 3}
_QWEN3 |= {"attention_bias": "all", "window": 4, "norm_eps": 1e-3, "yarn": _YARN, "router": {"gates": "renormalised"}}
_PERIODIC = _QWEN3 | {"layers": 2 * LAYERS, "moe_every": 2, "mlp_layers": (), "attention_bias": "none", "window": None}
_PERIODIC |= {"yarn": {"factor": 1.0}, "router": {"gates": "scores"}, "tied_embeddings": True}
# Half of each head is rotated; two of eight dimensions have a pair each.
_GLM = _QWEN3 | {"model_type": "glm4_moe", "norm_over": "nothing", "rotary_dims": 4, "attention_bias": "inputs"}
_GLM |= {"shared_experts": 2, "window": None, "yarn": {"factor": 1.0}}
_GLM["router"] = {"score": "sigmoid", "choice_bias": "learned", "scale": 2.5, "bias_rate": 0.25}
_GLM["router"] |= {"groups": 2, "kept_groups": 1, "group_score": "sum_of_top2"}
# The bound of `clip_qkv` clips some of the queries, keys and values of nearly every token.
_OLMOE = {**_GROUPED, "layers": LAYERS, "experts_per_token": 3, "norm_eps": 1e-3, "clip_qkv": 1.0}
_OLMOE |= {"router": {"gates": "scores"}}
# The limit clamps some of the numbers in the experts of nearly every token.
_GPT_OSS = {**_GROUPED, "layers": LAYERS, "experts_per_token": 3, "norm_eps": 1e-3, "window": 3, "yarn": _YARN}
_GPT_OSS |= {"swiglu_limit": 1.0}
# The delta rule has other heads than attention. One of its layers has an MLP, the others experts.
_KIMI = {name: _DEEPSEEK[name] for name in ("dense_layers", "heads", "q_lora", "kv_lora", "nope_dim", "rope_dim")}
_KIMI |= {name: _DEEPSEEK[name] for name in ("value_dim", "mlp", "expert_mlp", "experts", "experts_per_token")}
_KIMI |= {name: _DEEPSEEK[name] for name in ("norm_eps", "shared_experts", "router", "layers")}
_KIMI |= {"attention_layers": (1,)}
_KIMI["delta"] = {"key_heads": 2, "value_heads": 2, "key_dim": 6, "value_dim": 5, "taps": 3}
# A layer of each mixer; each of two key heads serves two value heads. Chunks of a split sequence have at least the two
# tokens that convolutions read of the one before.
_QWEN3_5 = {**_GROUPED, "layers": LAYERS, "experts_per_token": 3, "norm_eps": 1e-3, "attention_every": 2}
_QWEN3_5 |= {"delta": {"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 5, "taps": 3}, "rotary_dims": 4}
_QWEN3_5 |= {"shared_mlp": 10}
# A layer of each part, and a second one with experts, which are in a latent; each group of Mamba-2 has two heads.
_NEMOTRON_H = {**_GROUPED, "layers": 5, "pattern": "ME-*E", "experts_per_token": 3, "norm_eps": 1e-3, "mlp": 20}
_NEMOTRON_H |= {"shared_mlp": 10, "expert_latent": 8, "router": {"bias_rate": 0.25}}
_NEMOTRON_H["mamba"] = {"heads": 4, "head_dim": 5, "groups": 2, "state_dim": 6, "taps": 3}
# Convolutions read two tokens of the chunk before; what is added to the sums of gates is a part of them.
_LFM2 = {
    **_GROUPED,
    "layers": 1 + LAYERS,
    "experts_per_token": 3,
    "norm_eps": 1e-3,
    "attention_layers": (1,),
    "mlp": 20,
}
_LFM2 |= {"convolution_bias": "all", "router": {"bias_rate": 0.25, "added_to_sum": 0.2}}
# A layer with a window and one without, whose heads have one size: the oracle stacks them. The cap bends most logits.
_GEMMA4 = {**_GROUPED, "layers": LAYERS, "experts_per_token": 3, "norm_eps": 1e-3, "window": 3, "mlp": 20}
_GEMMA4 |= {"full_kv_heads": 2, "full_head_dim": 8, "full_rope_base": 50.0, "full_rope_share": 0.5, "logit_cap": 2.0}
# A layer without a window, whose values are all that is narrow in it, and one with a window and sinks.
_WINDOWED = {**_GROUPED, "layers": LAYERS, "experts_per_token": 3, "norm_eps": 1e-3, "window": 3, "rotary_dims": 4}
_WINDOWED |= {"full_kv_heads": 2, "full_rope_base": 50.0, "value_dim": 5, "mlp_layers": (), "attention_bias": "inputs"}
_WINDOWED["router"] = _GLM["router"]

# A layer with rotation and stretches, and one without. Documents have up to three stretches, and three factors of
# queries. Released models have one expert per token; with two, each reads a copy of the token.
_LLAMA4 = {**_GROUPED, "layers": LAYERS, "experts_per_token": 2, "norm_eps": 1e-3, "stretch": 2, "plain_layers": (1,)}
_LLAMA4 |= {"query_scale": {"beta": 0.7, "length": 2}}

# With more layers, for pipeline stages. Of periods of layers that repeat, 2 and 4 stages divide those of some and not
# those of others; some have layers before them.
_DEEP: dict[str, tuple[str, dict[str, Any], int]] = {
    "mixtral_deep": ("mixtral", {"layers": 4}, 3),
    "deepseek_deep": ("deepseek", {"layers": 6}, 6),
    "grouped_deep": ("grouped", {"layers": 5}, 6),
    "grouped_periodic_deep": ("grouped_periodic", {"layers": 10}, 3),
    "olmoe_deep": ("olmoe", {"layers": 5}, 3),
    "gpt_oss_deep": ("gpt_oss", {"layers": 8}, 12),
    "lfm2_moe_deep": ("lfm2_moe", {"layers": 8, "dense_layers": 0, "attention_layers": (1, 3, 5, 7)}, 3),
    "qwen3_5_deep": ("qwen3_5", {"layers": 8, "moe_every": 2, "mlp": 20}, 3),
    "nemotron_h_deep": ("nemotron_h", {"layers": 8, "pattern": "ME*E"}, 3),
}

Config = (
    MixtralConfig
    | DeepSeekConfig
    | GroupedConfig
    | OlmoeConfig
    | Llama4Config
    | GptOssConfig
    | KimiLinearConfig
    | Lfm2MoeConfig
    | Qwen35Config
    | NemotronHConfig
    | Gemma4Config
    | WindowedConfig
)
# For each family: the class of its configuration, its values, and a seed with which no choice of experts is a tie.
_FAMILY_SETTINGS: dict[Family, tuple[type[Config], dict[str, Any], int]] = {
    "mixtral": (MixtralConfig, _MIXTRAL, 3),
    "deepseek": (DeepSeekConfig, _DEEPSEEK, 4),
    "deepseek_v2": (DeepSeekConfig, _DEEPSEEK_V2, 6),
    "mistral4": (DeepSeekConfig, _MISTRAL4, 6),
    "grouped": (GroupedConfig, _QWEN3, 5),
    "grouped_periodic": (GroupedConfig, _PERIODIC, 3),
    "glm4_moe": (GroupedConfig, _GLM, 5),
    "olmoe": (OlmoeConfig, _OLMOE, 6),
    "gpt_oss": (GptOssConfig, _GPT_OSS, 6),
    "llama4": (Llama4Config, _LLAMA4, 6),
    "kimi_linear": (KimiLinearConfig, _KIMI, 6),
    "qwen3_5": (Qwen35Config, _QWEN3_5, 6),
    "lfm2_moe": (Lfm2MoeConfig, _LFM2, 6),
    "nemotron_h": (NemotronHConfig, _NEMOTRON_H, 6),
    "gemma4": (Gemma4Config, _GEMMA4, 4),
    "windowed": (WindowedConfig, _WINDOWED, 4),
}
for _name, (_family, _changes, _seed) in _DEEP.items():
    _class, _values, _ = _FAMILY_SETTINGS[_family]
    _FAMILY_SETTINGS[_name] = (_class, _values | _changes, _seed)
# Every family of moezoo. The product has all but those with recurrent layers, which have `RECURRENT_CASES`, and two
# whose parts are those of others, except those that `WINDOWED_CASES` and `STRETCH_CASES` are for.
FAMILIES: tuple[Family, ...] = tuple(name for name in _FAMILY_SETTINGS if name in moezoo.models.FAMILIES)
assert set(FAMILIES) == set(moezoo.models.FAMILIES), "each family needs an entry of its name in _FAMILY_SETTINGS"
RECURRENT = ("qwen3_5", "lfm2_moe", "nemotron_h")
IN_PRODUCT = tuple(name for name in FAMILIES if name not in (*RECURRENT, "windowed", "llama4"))


def config(family: Family = "mixtral", balance: Balance = "batch", **changes: Any) -> Config:
    """Return the configuration of a tiny model."""
    config_class, sizes, _ = _FAMILY_SETTINGS[family]
    values = {**_COMMON, "load_balance_over": balance, **sizes, **changes}
    if not hasattr(config_class, "rope_base"):
        del values["rope_base"]
    # Large logits, so that gradients of layers are large.
    if not values.get("tied_embeddings", config_class().tied_embeddings):
        values.setdefault("unembedding_std", values["init_std"])
    defaults: Any = config_class()
    names = [name for name in ("yarn", "router", "query_scale", "delta", "mamba") if name in values]
    sections = {name: replace(getattr(defaults, name), **values[name]) for name in names}
    return config_class(**{**values, **sections})


def routers(model: Any) -> list[Any]:
    """Return the routers of the blocks with experts, in order."""
    blocks = [block for stack in model.stacks for block in stack.blocks]
    return [block.feed_forward.router for block in blocks if hasattr(block.feed_forward, "router")]


@functools.cache
def model(family: Family = "mixtral", balance: Balance = "batch") -> Any:
    """Return a tiny model with noise on every constant array, and with one expert that is never chosen.

    Norms are not 1 and biases not 0, so a test fails where the code ignores one.
    """
    if balance != "batch":  # the same arrays
        arrays, structure = (
            jax.tree.leaves(model(family)),
            jax.tree.structure(Blueprint(config(family, balance)).shapes),
        )
        return jax.tree.unflatten(structure, arrays)
    fresh = build_model(config(family), key=jax.random.key(_FAMILY_SETTINGS[family][2]))
    rng = np.random.default_rng(4)

    def with_noise(path: Any, x: Any) -> Any:
        starts_constant = x.ndim < 3 or jax.tree_util.keystr(path).endswith("_bias")
        return jnp.asarray(np.asarray(x) + 0.2 * rng.standard_normal(x.shape).astype(np.float32) * starts_constant)

    result = jax.tree_util.tree_map_with_path(with_noise, fresh)
    # The first number of the residual stream is 2 for every token. So no norm divides by almost 0, which would enlarge
    # rounding errors, and a large negative router weight on it keeps every token from the unused expert.
    embedding = result.embedding.weight.at[:, 0].set(2.0)
    changed, rng = [], np.random.default_rng(4)
    for i, router in enumerate(routers(result)):
        if i == 0:
            router = eqx.tree_at(lambda r: r.weight, router, router.weight.at[0, 0, UNUSED].set(-4.0))
        if router.choice_bias is not None:
            # Large enough to change choices. A multiple of 1/64, so that updates by 1/4 are exact.
            bias = np.round(64 * 0.3 * rng.standard_normal(router.choice_bias.shape)) / 64
            if i == 0:
                bias[0, UNUSED] = -8
            router = eqx.tree_at(lambda r: r.choice_bias, router, jnp.asarray(bias, jnp.float32))
        if router.input_scale is not None:  # larger logits, of which fewer are nearly tied
            router = eqx.tree_at(lambda r: r.input_scale, router, 12 * router.input_scale)
        changed.append(router)
    return eqx.tree_at(lambda m: [m.embedding.weight, *routers(m)], result, [embedding, *changed])


@functools.cache
def batch(step: int) -> dict[str, np.ndarray]:
    """Return the batch of a step, each array [ROWS, LENGTH] int32.

    Rows hold packed documents. Rows 5, 11 and 14 end in padding, and row 2 is padding only.
    """
    rng = np.random.default_rng(step)
    rows = {name: np.zeros((ROWS, LENGTH), np.int32) for name in Batch._fields}
    rows["labels"][:] = -1
    for row in range(ROWS):
        length = {2: 0, 5: 3, 11: 6, 14: 1}.get(row, LENGTH)
        start = document = 0
        while start < length:
            size, document = min(int(rng.integers(1, 7)), length - start), document + 1
            span = slice(start, start + size)
            rows["tokens"][row, span] = rng.integers(1, VOCAB, size)
            rows["labels"][row, start : start + size - 1] = rows["tokens"][row, start + 1 : start + size]
            rows["segments"][row, span] = document
            rows["positions"][row, span] = np.arange(size)
            start += size
    return rows


REMAT = ("full", "offload", "dots", "none")
MICROBATCHES = (1, 2)
MESHES = {
    "single": moezoo.MeshShape(),
    "fsdp8": moezoo.MeshShape(fsdp=8),
    "ep8": moezoo.MeshShape(expert=8),
    "fsdp2_ep4": moezoo.MeshShape(fsdp=2, expert=4),
    "fsdp2_ep2_context2": moezoo.MeshShape(fsdp=2, expert=2, context=2),
    "data2_fsdp2_ep2": moezoo.MeshShape(data=2, fsdp=2, expert=2),
    "ep2_context2_tensor2": moezoo.MeshShape(expert=2, context=2, tensor=2),
    # More devices than key-value heads. Only in `EXTRA_CASES`.
    "fsdp2_tensor4": moezoo.MeshShape(fsdp=2, tensor=4),
}
# Meshes with pipeline stages. Only in `STAGED_CASES`.
STAGED_MESHES = {
    "stage2_data2_fsdp2": moezoo.MeshShape(stage=2, data=2, fsdp=2),
    "stage2_fsdp2_ep2": moezoo.MeshShape(stage=2, fsdp=2, expert=2),
    "stage2_fsdp4": moezoo.MeshShape(stage=2, fsdp=4),
    "stage2_ep4": moezoo.MeshShape(stage=2, expert=4),
    "stage2_ep2_context2": moezoo.MeshShape(stage=2, expert=2, context=2),
    "stage2_ep2_tensor2": moezoo.MeshShape(stage=2, expert=2, tensor=2),
    "stage4_fsdp2": moezoo.MeshShape(stage=4, fsdp=2),
    "stage4_ep2": moezoo.MeshShape(stage=4, expert=2),
    "stage4_context2": moezoo.MeshShape(stage=4, context=2),
    "stage4_tensor2": moezoo.MeshShape(stage=4, tensor=2),
}


def shape_of(mesh: str) -> moezoo.MeshShape:
    """Return the sizes of a mesh by its name."""
    return {**MESHES, **STAGED_MESHES}[mesh]


# With a small epsilon the first update of AdamW is the sign of the gradient, which rounding decides where the gradient
# is almost zero. With 1e-2 the update is a smooth function of the gradient.
_ADAM: dict[str, Any] = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-2, "weight_decay": 0.5, "clip_norm": 2.5}
# With these rates no choice of experts becomes a tie in three steps.
OPTIMIZERS: dict[str, tuple[UpdateRule, Schedule]] = {
    "sgd": (SGD(0.1), Constant()),
    "adamw": (AdamW(0.02, **_ADAM), Cosine(warmup_steps=1, final_ratio=0.1)),
    "muon": (Muon(0.01, **_ADAM), Cosine(warmup_steps=1, final_ratio=0.1)),
}


# Of these families, queries, keys, values and gates of heads have one matrix per head under Muon.
PER_HEAD = ("grouped", "qwen3_5", "windowed")


@functools.cache
def rules() -> dict[str, moezoo.Rules]:
    """Return the layouts: those that moezoo ships, one that a user may write, and one for a single extra case."""
    kept = {"expert": ("expert",)}
    written = [
        # The expert axis does not split tokens. Dense weights are gathered over it and over axes that split tokens.
        moezoo.Rules(
            "replicated",
            {"embed": ("fsdp", "context", "expert"), "expert": ("expert",), "expert_embed": ("fsdp",)},
            kept,
            ("data", "fsdp"),
            ("context",),
        ),
        # The router is split and its choice bias is not. Only in `EXTRA_CASES`.
        moezoo.Rules(
            "router_on_data",
            {"embed": ("fsdp", "expert"), "router": ("data",), "expert": ("expert",)},
            kept,
            ("data", "fsdp", "expert"),
            (),
        ),
    ]
    # Not by `compose`, which takes some tenths of a second each.
    files = {name: yaml.safe_load((CONF / "rules" / f"{name}.yaml").read_text()) for name in groups()["rules"]}
    shipped = {name: convert(moezoo.Rules, file) for name, file in files.items()}
    return shipped | {r.name: r for r in written}


@functools.cache
def fits(mesh: str, layout: str) -> bool:
    """Return whether a layout is in the product on a mesh.

    Its rules name every axis of the mesh. Of layouts that are the same on the mesh, only the one that fits the fewest
    meshes is in the product, by preference `fsdp_ep`.
    """

    def possible(name: str, sizes: dict[str, int]) -> bool:
        return (
            name not in ("router_on_data", "serve")
            and mesh != "fsdp2_tensor4"
            and set(live(tuple(sizes), sizes)) <= rules()[name].mesh_axes
        )

    def there(name: str) -> list[Any]:
        layout = rules()[name]
        tables = ({key: live(axes, sizes) for key, axes in t.items()} for t in (layout.store, layout.compute))
        split = [{key: axes for key, axes in table.items() if axes} for table in tables]
        return [*split, live(layout.batch, sizes), live(layout.sequence, sizes)]

    def rank(name: str) -> Any:
        return sum(possible(name, shape.sizes) for shape in MESHES.values()), name != "fsdp_ep", name

    sizes = MESHES[mesh].sizes
    same = [name for name in rules() if possible(name, sizes) and there(name) == there(layout)]
    return bool(same) and layout == min(same, key=rank)


def shards(mesh: str, layout: str) -> int:
    """Return the number of parts that a layout splits sequences into on a mesh."""
    return math.prod(shape_of(mesh).sizes[axis] for axis in rules()[layout].sequence)


@dataclass(frozen=True)
class Case:
    """One way to run the step; the columns are described at the top of this file."""

    strategy: str
    mesh: str
    rules: str
    remat: str
    microbatches: int
    balance: Balance
    family: Family = "mixtral"
    optimizer: str = "sgd"
    context_parallel: str = "gather"
    chunks: int = 1
    pipeline: Circular | None = None
    sequence_order: SequenceOrder | None = None  # None: `order` chooses

    def __str__(self) -> str:
        left_out = {"pipeline"} if self.sequence_order else {"pipeline", "sequence_order"}
        fields = {name: value for name, value in asdict(self).items() if name not in left_out}
        piped = () if self.pipeline is None else asdict(self.pipeline).values()
        return "-".join(map(str, (*fields.values(), *piped)))

    @property
    def micro_batches(self) -> int:
        """The number of parts of a batch, over which routing losses are averaged."""
        stages = shape_of(self.mesh).stage
        return self.microbatches * (1 if self.pipeline is None else self.pipeline.count(stages))

    @property
    def execution(self) -> MeshExecution:
        """The execution. No strategy drops tokens.

        Backends of attention and of the delta rule are named: their own order never takes `chunked` for sequences this
        short.
        """
        backend = ("chunked",) if self.microbatches == 2 else ("reference",)
        kernels = moezoo.Kernels(attention=backend, delta_rule=backend)
        mesh, strategy = moezoo.make_mesh(shape_of(self.mesh)), STRATEGIES[self.strategy](chunks=self.chunks).exact
        layout = rules()[self.rules]
        options: Any = {"remat": self.remat, "kernels": kernels, "sequence_order": self.order}
        options["context_parallel"] = CONTEXT_PARALLEL[self.context_parallel]()
        return on_mesh(moezoo.Execution(mesh, layout, strategy, pipeline=self.pipeline, **options))

    @property
    def order(self) -> SequenceOrder:
        """The order of tokens: balanced, except where there are not two for each device, and as the case says."""
        if self.sequence_order is not None:
            return self.sequence_order
        return "contiguous" if LENGTH % (2 * shards(self.mesh, self.rules)) else "balanced"

    @property
    def rule(self) -> UpdateRule:
        """The update rule."""
        rule = OPTIMIZERS[self.optimizer][0]
        return replace(rule, per_head=True) if isinstance(rule, Muon) and self.family in PER_HEAD else rule

    @property
    def settings(self) -> TrainConfig:
        """The case as a training configuration, the input of `traffic_oracle`."""
        execution: Any = {"remat": self.remat, "microbatches": self.microbatches, "sequence_order": self.order}
        execution["context_parallel"] = self.context_parallel
        if self.pipeline is not None:
            execution["pipeline"] = self.pipeline
        return replace(
            _base(),
            model=config(self.family, self.balance),
            mesh=shape_of(self.mesh),
            rules=rules()[self.rules],
            dispatch=self.execution.dispatch,
            optimizer=self.rule,
            batch_size=ROWS,
            seq_len=LENGTH,
            execution=ExecutionSettings(**execution),
        )


@functools.cache
def _base() -> TrainConfig:
    return moezoo.compose("model=mixtral")


@functools.cache
def product() -> tuple[Case, ...]:
    """Return a case for every combination of the columns, where the rules fit the mesh; `chunks` is 1."""
    values = itertools.product(
        tuple(STRATEGIES),
        MESHES,
        rules(),
        REMAT,
        MICROBATCHES,
        get_args(Balance),
        IN_PRODUCT,
        OPTIMIZERS,
        CONTEXT_PARALLEL,
    )
    return tuple(Case(*v) for v in values if fits(v[1], v[2]) and (v[8] == "gather" or shards(v[1], v[2]) > 1))


# Which aspects of a case (see `_aspects`) can interact, and in what. Only their pairs of values have to occur in the
# cover. Others have nothing in common: the update rule gets gradients, whatever computed them; the balance loss gets
# the router's scores, whatever is done with the tokens afterwards. Strategies see no more of mesh and rules than their
# group and its tokens, update rules no more than which arrays are split; `tests/moe` has groups of two axes, and
# `tests/optim` has Muon on layouts that store matrices otherwise.
_INTERACT = (
    ("mesh", "rules"),  # where arrays are stored, and what is gathered and summed
    ("optimizer", "spread family"),  # matrices that are split, and the norm of all gradients; which arrays there are
    ("balance", "mesh rules microbatches family"),  # the tokens that a loss is over; the scores of the router
    ("microbatches", "rules family strategy sequences"),  # rows per device; a loop around layers; chunked attention
    ("strategy", "group spread family remat"),  # who sends which rows where, and what the backward pass sends again
    ("remat", "spread family sequences"),  # what a layer has computed, and which exchanges are repeated
    ("family", "spread sequences"),  # the dimensions of its arrays that are split; keys or latents that travel
)
_TOGETHER = tuple((one, other) for one, others in _INTERACT for other in others.split())


def _aspects(mesh: str, layout: str) -> dict[str, tuple[Any, ...]]:
    """Return the values that each aspect of a case can have on a mesh under a layout.

    Aspects are the columns but `chunks`, and what strategies, attention and layers see of mesh and rules:

    | aspect | values |
    |---|---|
    | group | the number of devices that the experts are split over |
    | spread | tokens are `split` over these devices or `replicated`; `tensor`, with widths split too; `alone` |
    | sequences | `context_parallel` where sequences are split, and `whole` |
    """
    sizes, there = MESHES[mesh].sizes, rules()[layout]
    group, tokens = there.kept("expert", sizes), live((*there.batch, *there.sequence), sizes)
    spread = "alone" if not group else "split" if set(group) <= set(tokens) else "replicated"
    return {
        "mesh": (mesh,),
        "rules": (layout,),
        "group": (math.prod(sizes[axis] for axis in group),),
        "spread": ("tensor" if there.inner_axes(sizes) else spread,),
        "sequences": tuple(CONTEXT_PARALLEL) if shards(mesh, layout) > 1 else ("whole",),
        "strategy": tuple(STRATEGIES),
        "family": IN_PRODUCT,
        "remat": REMAT,
        "microbatches": MICROBATCHES,
        "balance": get_args(Balance),
        "optimizer": tuple(OPTIMIZERS),
    }


def _pairs(values: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Return the pairs of values in aspects that can interact, as (aspect, value, aspect, value)."""
    return {(a, values[a], b, values[b]) for a, b in _TOGETHER if a in values and b in values}


@functools.cache
def cover() -> tuple[Case, ...]:
    """Return a small part of the product that has, with `EXTRA_CASES`, every pair of values that can interact.

    The choice is greedy. Fill a case for each mesh and layout, and add the one with the most pairs that are still
    missing, until none is. To fill a case, take for each aspect the value with the most missing pairs; between equal
    values, that of strategies and families with the fewest cases so far, else the first. Then, for each strategy, the
    first case on several devices that has one micro-step gets 3 chunks, which differ in length.
    """
    layouts = [_aspects(mesh, layout) for mesh in MESHES for layout in rules() if fits(mesh, layout)]
    missing = {(a, x, b, y) for values in layouts for a, b in _TOGETHER for x in values[a] for y in values[b]}
    for case in EXTRA_CASES:
        values = _aspects(case.mesh, case.rules)
        if values["sequences"] != ("whole",):
            values["sequences"] = (case.context_parallel,)
        missing -= _pairs({name: getattr(case, name, several[0]) for name, several in values.items()})
    chosen: list[dict[str, Any]] = []

    def fill(values: dict[str, tuple[Any, ...]], left: Counter[Any], cases_of: Counter[Any]) -> dict[str, Any]:
        case: dict[str, Any] = {}
        for name in sorted(values, key=lambda name: len(values[name]) > 1):
            gains = {
                value: (len(_pairs({**case, name: value}) & missing), left[name, value], -cases_of[value])
                for value in values[name]
            }
            case[name] = max(gains, key=gains.__getitem__)
        return case

    while missing:
        left = Counter(half for a, x, b, y in missing for half in ((a, x), (b, y)))
        cases_of = Counter(case[name] for case in chosen for name in ("strategy", "family"))
        filled = [fill(values, left, cases_of) for values in layouts]
        chosen.append(max(filled, key=lambda case: len(_pairs(case) & missing)))
        missing -= _pairs(chosen[-1])
    cases = []
    for case in chosen:
        sequences = case.pop("sequences")
        del case["group"], case["spread"]
        cases.append(Case(**case, context_parallel="gather" if sequences == "whole" else sequences))
    for strategy in STRATEGIES:
        eligible = (c.strategy == strategy and c.microbatches == 1 and c.mesh != "single" for c in cases)
        first = list(eligible).index(True)
        cases[first] = replace(cases[first], chunks=3)
    return tuple(cases)


# What CI has of the pairs above each time; all of them run each week. Families meet whether widths and whether
# sequences are split, which concerns their arrays and mixers. A strategy sees only rows and experts of a family.
_EACH_TIME = (
    ("mesh", "mesh"),
    ("rules", "rules"),
    ("optimizer", "widths"),
    ("strategy", "spread"),
    ("microbatches", "strategy"),
    ("balance", "sequences"),
    ("remat", "sequences"),
    ("family", "widths parted"),
)


@functools.cache
def each_time() -> tuple[Case, ...]:
    """Return the part of `cover()` that has, with `EXTRA_CASES`, what it has of the pairs in `_EACH_TIME`.

    On one device strategies do not differ in what moves, so not each of them meets it. The choice is greedy.
    """

    def pairs(case: Case) -> set[tuple[Any, ...]]:
        values = {name: several[0] for name, several in _aspects(case.mesh, case.rules).items()} | vars(case)
        values["widths"], values["parted"] = values["spread"] == "tensor", values["sequences"] != "whole"
        if values["parted"]:
            values["sequences"] = case.context_parallel
        every = ((a, values[a], b, values[b]) for a, others in _EACH_TIME for b in others.split())
        return {pair for pair in every if pair[0] != "strategy" or pair[3] != "alone"}

    chosen: list[Case] = []
    missing = set().union(*map(pairs, cover())) - set().union(*map(pairs, EXTRA_CASES))
    while missing:
        chosen.append(max(cover(), key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return tuple(case for case in cover() if case in chosen)


# Cases outside the product: DeepSeek-V2, with two sequences per micro-step on eight devices; layers that alternate
# between an MLP and experts; a router that is split; latents on a ring of four; four devices that share two key-value
# heads, under norms of projections, and under biases and norms of heads; devices that share a tied table, which decay
# spares; a GLM whose heads, widths, shared experts and sequences are split; queries that are scaled by their position,
# on a ring of devices that also share heads; sinks and biases of experts, with heads and widths split. CI runs the last
# four on a newer Python, as its slice of the parity suite there.
EXTRA_CASES = (
    Case("ring", "fsdp2_ep4", "ep_as_cp", "full", ROWS // 2, "batch", "deepseek_v2"),
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "sequence", "grouped_periodic"),
    Case("ring", "data2_fsdp2_ep2", "router_on_data", "full", 1, "batch", "deepseek"),
    Case("ragged", "fsdp2_ep4", "ep_as_cp", "full", 2, "sequence", "deepseek", "sgd", "ring"),
    Case("gather", "fsdp2_tensor4", "tensor", "dots", 1, "batch", "olmoe", "adamw"),
    Case("ragged", "ep2_context2_tensor2", "tensor", "full", 1, "batch", "glm4_moe"),
    Case("ring", "fsdp2_tensor4", "tensor", "full", 2, "sequence", "grouped", "muon"),
    Case("ring", "ep2_context2_tensor2", "tensor", "dots", 2, "batch", "grouped_periodic", "adamw"),
    Case("gather", "ep2_context2_tensor2", "tensor", "full", 1, "batch", "mistral4", "adamw", "ring"),
    Case("ragged", "fsdp2_tensor4", "tensor", "none", 1, "sequence", "gpt_oss", "adamw", chunks=3),
)
# Values narrower than keys, times a factor: around a ring of devices that also share heads, gathered, and with a matrix
# per head under Muon.
WINDOWED_CASES = (
    Case("ring", "ep2_context2_tensor2", "tensor", "full", 2, "batch", "windowed", "adamw", "ring"),
    Case("gather", "fsdp2_ep2_context2", "fsdp_ep", "dots", 1, "sequence", "windowed", "muon"),
)
# Cases with recurrent layers: each strategy, rule set, axis of a mesh, order of tokens, remat, optimiser, balance,
# backend of the delta rule, and way of attention between them on split sequences. For convolutions: channels,
# sequences and weights that are split.
RECURRENT_CASES = (
    Case("ragged", "ep2_context2_tensor2", "tensor", "full", 2, "batch", "lfm2_moe", "muon", "ring"),
    Case("ring", "fsdp2_ep2_context2", "fsdp_ep", "dots", 1, "sequence", "lfm2_moe", "adamw"),
    Case("gather", "single", "fsdp_ep", "full", 2, "sequence", "qwen3_5"),
    Case("ring", "fsdp2_ep2_context2", "fsdp_ep", "full", 1, "batch", "qwen3_5", "adamw"),
    Case("ragged", "fsdp2_ep2_context2", "cp_as_ep", "dots", 2, "sequence", "qwen3_5", "adamw", "ring"),
    Case("gather", "fsdp2_ep4", "ep_as_cp", "none", 2, "batch", "qwen3_5", "muon", sequence_order="contiguous"),
    Case("capacity", "data2_fsdp2_ep2", "shard_exp_on_fsdp", "offload", 2, "batch", "qwen3_5", "muon"),
    Case("dense", "ep2_context2_tensor2", "tensor", "full", 2, "batch", "qwen3_5", "sgd", "ring"),
    Case("ragged", "ep2_context2_tensor2", "tensor", "none", 1, "batch", "qwen3_5", "muon"),
    Case("dense", "fsdp8", "pure_fsdp", "dots", 1, "sequence", "qwen3_5", "adamw"),
    Case("ring", "fsdp2_ep4", "ep_as_dp", "none", 1, "batch", "qwen3_5"),
    Case("ring", "fsdp2_ep4", "replicated", "offload", 1, "batch", "qwen3_5"),
    Case("gather", "single", "fsdp_ep", "full", 1, "sequence", "nemotron_h", "muon"),
    Case("ragged", "fsdp2_ep2_context2", "fsdp_ep", "full", 1, "batch", "nemotron_h", "adamw", "ring"),
    Case("ring", "ep2_context2_tensor2", "tensor", "dots", 2, "batch", "nemotron_h"),
)
# Cases with stretches, and with gates on what experts read: each strategy, each order of tokens and way of attention on
# split sequences, both backends of attention, tokens that devices share, and split widths.
STRETCH_CASES = (
    Case("gather", "single", "fsdp_ep", "full", 2, "sequence", "llama4"),
    Case("ring", "fsdp2_ep2_context2", "fsdp_ep", "dots", 1, "batch", "llama4", "adamw", "ring", chunks=3),
    Case("ragged", "ep2_context2_tensor2", "tensor", "full", 1, "batch", "llama4", "muon"),
    Case("capacity", "data2_fsdp2_ep2", "shard_exp_on_fsdp", "full", 2, "batch", "llama4"),
    Case("dense", "fsdp2_ep2_context2", "cp_as_ep", "full", 1, "batch", "llama4", "sgd", "ring", 1, None, "contiguous"),
    Case("ring", "fsdp2_ep4", "replicated", "offload", 1, "batch", "llama4"),
)
# Cases with pipeline stages: each strategy, each family, each other axis of a mesh and each way to gather on 2 and on 4
# stages, and each remat and update rule, with one chunk and several. What else can interact does so within a stage.
# CI runs all but the first on a newer Python.
_TICK = Circular(8, gather="tick")
STAGED_CASES = (
    Case("dense", "stage2_fsdp2_ep2", "fsdp_ep", "full", 1, "batch", "mixtral_deep", pipeline=Circular(4)),
    Case("ring", "stage2_fsdp4", "pure_fsdp", "full", 1, "sequence", "deepseek_deep", "muon", pipeline=Circular(4, 2)),
    Case("capacity", "stage4_fsdp2", "fsdp_ep", "offload", 1, "sequence", "olmoe_deep", "adamw", pipeline=_TICK),
    Case("ring", "stage4_ep2", "fsdp_ep", "none", 1, "batch", "deepseek_deep", "adamw", pipeline=Circular(4)),
    Case("ragged", "stage2_ep2_tensor2", "tensor", "full", 2, "batch", "gpt_oss_deep", pipeline=Circular(2, 2, "tick")),
    Case("capacity", "stage2_ep4", "ep_as_dp", "full", 2, "batch", "grouped_periodic_deep", pipeline=Circular(2)),
    Case("gather", "stage2_ep2_context2", "fsdp_ep", "dots", 1, "batch", "grouped_deep", "muon", "ring", 1, _TICK),
    Case("dense", "stage4_tensor2", "tensor", "full", 1, "batch", "grouped_deep", "adamw", pipeline=_TICK),
    Case("gather", "stage4_context2", "fsdp_ep", "none", 1, "sequence", "mixtral_deep", "muon", "ring", 1, Circular(8)),
    Case(
        "ragged", "stage4_ep2", "shard_exp_on_fsdp", "full", 1, "batch", "gpt_oss_deep", "adamw", pipeline=Circular(4)
    ),
    Case("ring", "stage2_fsdp2_ep2", "fsdp_ep", "full", 1, "batch", "qwen3_5_deep", pipeline=Circular(4)),
    Case("gather", "stage2_ep2_context2", "fsdp_ep", "dots", 1, "batch", "qwen3_5_deep", "adamw", "ring", 1, _TICK),
    Case("ring", "stage2_ep2_tensor2", "tensor", "full", 1, "batch", "nemotron_h_deep", pipeline=Circular(2)),
    Case("gather", "stage2_ep2_context2", "fsdp_ep", "full", 1, "batch", "lfm2_moe_deep", "sgd", "ring", 1, _TICK),
    Case("ragged", "stage2_data2_fsdp2", "fsdp_ep", "dots", 1, "batch", "olmoe_deep", pipeline=Circular(4, 2)),
)
