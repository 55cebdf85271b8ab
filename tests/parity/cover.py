"""What the parity tests run: tiny models and their data, meshes, rules, the product of settings and a cover of it."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moezoo
from moezoo.config.compose import groups
from moezoo.config.settings import ExecutionSettings, TrainConfig
from moezoo.data import Batch
from moezoo.models import DeepSeekConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig, build_model
from moezoo.moe.dispatch import STRATEGIES

Balance = Literal["batch", "sequence"]
Family = str  # a key of _KINDS

# Every size differs from its neighbours where it may, so that no two dimensions can be confused. The routing losses'
# coefficients are large, so that their gradients are as visible as the cross-entropy's.
VOCAB, EMBED, ROWS, LENGTH = 40, 16, 16, 8
LAYERS = 2  # layers with experts; DeepSeek and Qwen3-MoE have a dense layer before them
UNUSED = 5  # the expert of the first of these layers that no token goes to
_COMMON = {"vocab": VOCAB, "embed": EMBED, "rope_base": 100.0, "init_std": 0.5, "load_balance": 0.3, "z_loss": 0.05}
_GROUPED = {"heads": 4, "kv_heads": 2, "head_dim": 8, "expert_mlp": 12, "experts": 8}
_MIXTRAL = {"layers": LAYERS, **_GROUPED}
# Of the rotary dimensions' four pairs each is extended by another share.
_YARN = {"factor": 4.0, "length": 64, "beta_fast": 8.0, "beta_slow": 1.0}
# Groups of experts have more than the two that make a group's score; the bias moves by whole quarters, which float32
# adds exactly.
_DEEPSEEK = {"layers": 1 + LAYERS, "dense_layers": 1, "heads": 3, "q_lora": 24, "kv_lora": 8, "nope_dim": 6}
_DEEPSEEK |= {"rope_dim": 8, "value_dim": 5, "mlp": 20, "expert_mlp": 12, "experts": 16, "experts_per_token": 3}
_DEEPSEEK |= {"norm_eps": 1e-3, "shared_experts": 2, "yarn": _YARN | {"mscale": 1.0, "mscale_all": 0.5}}
_DEEPSEEK |= {"router": {"groups": 4, "kept_groups": 2, "bias_rate": 0.25}}
_OLDER = _DEEPSEEK | {"q_lora": None, "rope_pairs": "halves", "yarn": {"factor": 1.0}}
_OLDER["router"] = {"groups": 4, "kept_groups": 2, "score": "softmax", "group_score": "max", "choice_bias": "none"}
_OLDER["router"] |= {"gates": "scores", "scale": 16.0}
_QWEN3 = {**_GROUPED, "layers": 1 + LAYERS, "moe_every": 1, "mlp_layers": (0,), "mlp": 20, "experts_per_token": 3}
_QWEN3 |= {"attention_bias": "all", "window": 4, "norm_eps": 1e-3, "yarn": _YARN, "router": {"gates": "renormalised"}}
_PERIODIC = _QWEN3 | {"layers": 2 * LAYERS, "moe_every": 2, "mlp_layers": (), "attention_bias": "none", "window": None}
_PERIODIC |= {"yarn": {"factor": 1.0}, "router": {"gates": "scores"}}
# The bound cuts off a part of the queries, keys and values of nearly every token.
_OLMOE = {**_GROUPED, "layers": LAYERS, "experts_per_token": 3, "norm_eps": 1e-3, "clip_qkv": 1.0}
_OLMOE |= {"router": {"gates": "scores"}}

Config = MixtralConfig | DeepSeekConfig | Qwen3MoeConfig | OlmoeConfig
# The class of a configuration, its values, and a seed with which the oracle finds no choice of experts to be a tie.
# `deepseek_v2` has the older DeepSeek's settings, `qwen3_moe_periodic` experts in every second layer: cases of BESIDE.
_KINDS: dict[Family, tuple[type[Config], dict[str, Any], int]] = {
    "mixtral": (MixtralConfig, _MIXTRAL, 3),
    "deepseek": (DeepSeekConfig, _DEEPSEEK, 3),
    "deepseek_v2": (DeepSeekConfig, _OLDER, 3),
    "qwen3_moe": (Qwen3MoeConfig, _QWEN3, 5),
    "qwen3_moe_periodic": (Qwen3MoeConfig, _PERIODIC, 3),
    "olmoe": (OlmoeConfig, _OLMOE, 4),
}
# The product contains every family of moezoo.
FAMILIES: tuple[Family, ...] = tuple(name for name in _KINDS if name in moezoo.models.FAMILIES)
assert set(FAMILIES) == set(moezoo.models.FAMILIES), "each family needs an entry of its name in _KINDS"


def config(family: Family = "mixtral", balance: Balance = "batch", **changes: Any) -> Config:
    """A tiny model's."""
    kind, sizes, _ = _KINDS[family]
    values = {**_COMMON, "load_balance_over": balance, **sizes, **changes}
    start: Any = kind()
    groups = {name: replace(getattr(start, name), **values[name]) for name in ("yarn", "router") if name in values}
    return kind(**{**values, **groups})


def routers(model: Any) -> list[Any]:
    """Of the blocks with experts, in order."""
    blocks = [block for stack in model.stacks for block in stack.blocks]
    return [block.feed_forward.router for block in blocks if hasattr(block.feed_forward, "router")]


@functools.cache
def model(family: Family = "mixtral", balance: Balance = "batch") -> Any:
    """A tiny model with every array told apart from what it starts as: norms are not one, one expert is not used."""
    fresh = build_model(config(family, balance), key=jax.random.key(_KINDS[family][2]))
    rng = np.random.default_rng(4)

    def noisy(path: Any, x: Any) -> Any:
        starts_plain = x.ndim < 3 or jax.tree_util.keystr(path).endswith("_bias")
        return jnp.asarray(np.asarray(x) + 0.2 * rng.standard_normal(x.shape).astype(np.float32) * starts_plain)

    result = jax.tree_util.tree_map_with_path(noisy, fresh)
    # The residual stream's first number is large for every token: no norm divides by next to nothing, which would make
    # rounding errors large; and the unused expert's logit falls with it.
    embedding = result.embedding.weight.at[:, 0].set(2.0)
    changed, rng = [], np.random.default_rng(4)
    for i, router in enumerate(routers(result)):
        if i == 0:
            router = eqx.tree_at(lambda r: r.weight, router, router.weight.at[0, 0, UNUSED].set(-4.0))
        if router.choice_bias is not None:
            # Large enough to change choices; the unused expert's is far below. In 64ths, so that moving it is exact.
            bias = np.round(64 * 0.3 * rng.standard_normal(router.choice_bias.shape)) / 64
            if i == 0:
                bias[0, UNUSED] = -8
            router = eqx.tree_at(lambda r: r.choice_bias, router, jnp.asarray(bias, jnp.float32))
        changed.append(router)
    return eqx.tree_at(lambda m: [m.embedding.weight, *routers(m)], result, [embedding, *changed])


@functools.cache
def batch(step: int) -> dict[str, np.ndarray]:
    """Rows of packed documents: some end in padding, one is nothing but padding; [ROWS, LENGTH] int32."""
    rng = np.random.default_rng(step)
    rows = {name: np.zeros((ROWS, LENGTH), np.int32) for name in Batch._fields}
    rows["labels"][:] = -1
    for row in range(ROWS):
        length = {2: 0, 5: 3, 11: 6, 14: 1}.get(row, LENGTH)
        at = document = 0
        while at < length:
            size, document = min(int(rng.integers(1, 7)), length - at), document + 1
            here = slice(at, at + size)
            rows["tokens"][row, here] = rng.integers(1, VOCAB, size)
            rows["labels"][row, at : at + size - 1] = rows["tokens"][row, at + 1 : at + size]
            rows["segments"][row, here] = document
            rows["positions"][row, here] = np.arange(size)
            at += size
    return rows


MESHES = {
    "single": moezoo.MeshShape(),
    "fsdp8": moezoo.MeshShape(fsdp=8),
    "ep8": moezoo.MeshShape(expert=8),
    "fsdp2_ep4": moezoo.MeshShape(fsdp=2, expert=4),
    "fsdp4_ep2": moezoo.MeshShape(fsdp=4, expert=2),
    "fsdp2_ep2_context2": moezoo.MeshShape(fsdp=2, expert=2, context=2),
    "data2_fsdp2_ep2": moezoo.MeshShape(data=2, fsdp=2, expert=2),
}


@functools.cache
def rules() -> dict[str, moezoo.Rules]:
    """Layouts: those that ship, and four that users might write."""
    everywhere = ("fsdp", "context", "expert")
    kept = {"expert": ("expert",)}
    own = [
        # Tokens are the same on all devices of the expert axis; dense weights are gathered over both kinds of axes.
        moezoo.Rules(
            "replicated",
            {"embed": everywhere, "expert": ("expert",), "expert_embed": ("fsdp",)},
            kept,
            ("data", "fsdp"),
            ("context",),
        ),
        # Experts over two axes of which one is gathered: any other order than the stored one permutes them.
        moezoo.Rules(
            "shard_exp_on_fsdp",
            {"embed": everywhere, "expert": ("expert", "fsdp")},
            kept,
            ("data", "fsdp", "expert"),
            ("context",),
        ),
        # Experts stay split over two axes, which split different dimensions of the tokens.
        moezoo.Rules(
            "cp_as_ep",
            {"embed": everywhere, "expert": ("context", "expert"), "expert_embed": ("fsdp",)},
            {"expert": ("context", "expert")},
            ("data", "fsdp", "expert"),
            ("context",),
        ),
        # The router in parts, and its choice bias whole all the same; for one case beside the product.
        moezoo.Rules(
            "router_on_data",
            {"embed": ("fsdp", "expert"), "router": ("data",), "expert": ("expert",)},
            kept,
            ("data", "fsdp", "expert"),
            (),
        ),
    ]
    shipped = {name: moezoo.compose(f"rules={name}").rules for name in groups()["rules"]}
    return shipped | {r.name: r for r in own}


def fits(mesh: str, layout: str) -> bool:
    """Whether the rules name every axis of the mesh, and are not the same as `fsdp_ep` there."""
    sizes = MESHES[mesh].sizes
    many = {axis for axis, size in sizes.items() if size > 1}
    special = {"replicated": {"expert"}, "shard_exp_on_fsdp": {"expert", "fsdp"}, "cp_as_ep": {"context"}}
    return layout != "router_on_data" and many <= rules()[layout].mesh_axes and special.get(layout, set()) <= many


@dataclass(frozen=True)
class Case:
    """One way to run the step."""

    strategy: str
    mesh: str
    rules: str
    remat: str
    microbatches: int
    balance: Balance
    family: Family = "mixtral"
    chunks: int = 1

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    @property
    def execution(self) -> moezoo.Execution:
        """How it runs: no strategy drops anything. Attention's backend goes with the number of micro-steps.

        Sequences are too short for the kernel's own order to choose `chunked`.
        """
        kernels = moezoo.Kernels(attention=("chunked",) if self.microbatches == 2 else ("reference",))
        mesh, strategy = moezoo.make_mesh(MESHES[self.mesh]), STRATEGIES[self.strategy](chunks=self.chunks).exact
        layout = rules()[self.rules]
        return moezoo.Execution(mesh, layout, strategy, remat=self.remat, kernels=kernels)  # type: ignore[arg-type]

    @property
    def settings(self) -> TrainConfig:
        """The case as a configuration, from which the traffic formula predicts its collectives."""
        return replace(
            _base(),
            model=config(self.family, self.balance),
            mesh=MESHES[self.mesh],
            rules=rules()[self.rules],
            dispatch=self.execution.dispatch,
            batch_size=ROWS,
            seq_len=LENGTH,
            execution=ExecutionSettings(remat=self.remat, microbatches=self.microbatches),  # type: ignore[arg-type]
        )


@functools.cache
def _base() -> TrainConfig:
    return moezoo.compose("model=mixtral")


@functools.cache
def product() -> tuple[Case, ...]:
    """Every strategy, mesh, rules that fit it, remat, number of micro-steps, balance and family."""
    values = itertools.product(
        tuple(STRATEGIES),
        MESHES,
        rules(),
        ("full", "offload", "dots", "none"),
        (1, 2),
        ("batch", "sequence"),
        FAMILIES,
    )
    return tuple(Case(*v) for v in values if fits(v[1], v[2]))


def _pairs(case: Case) -> set[tuple[Any, ...]]:
    named = [(f.name, getattr(case, f.name)) for f in fields(case) if f.name != "chunks"]
    return set(itertools.combinations(named, 2))


@functools.cache
def cover() -> tuple[Case, ...]:
    """Return few cases in which every pair of settings that can meet does meet.

    Greedy: each case is the one with the most pairs that are still missing, on a tie one of the family with the
    fewest cases so far. For each strategy, the first DeepSeek case on several devices also sends its tokens in three
    uneven chunks.
    """
    missing = set().union(*map(_pairs, product()))
    chosen: list[Case] = []
    while missing:
        had = Counter(case.family for case in chosen)
        best = max(product(), key=lambda case: (len(_pairs(case) & missing), -had[case.family]))
        missing -= _pairs(best)
        chosen.append(best)
    for strategy in STRATEGIES:
        split = (c.strategy == strategy and c.family == "deepseek" and c.mesh != "single" for c in chosen)
        first = list(split).index(True)
        chosen[first] = replace(chosen[first], chunks=3)
    return tuple(chosen)


# Cases outside the cover: the older DeepSeek with both kinds of strategies and both ways to split tokens; layers that
# alternate between experts and an MLP; and a router that is itself split.
BESIDE = (
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", "deepseek_v2"),
    Case("gather", "fsdp2_ep2_context2", "cp_as_ep", "none", 1, "sequence", "deepseek_v2"),
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "sequence", "qwen3_moe_periodic"),
    Case("ring", "data2_fsdp2_ep2", "router_on_data", "full", 1, "batch", "deepseek"),
)


def one_process(family: Family, balance: Balance = "batch") -> pytest.MarkDecorator:
    """Mark a test so that the same process runs all tests of a model, which share it and the oracle's results."""
    return pytest.mark.xdist_group(f"{family}-{balance}")


def as_parameters(cases: Iterable[Case]) -> list[Any]:
    """Return cases as parameters of a test."""
    return [pytest.param(case, id=str(case), marks=one_process(case.family, case.balance)) for case in cases]
