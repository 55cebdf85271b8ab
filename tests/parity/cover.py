"""What the parity tests run: a tiny model and its data, meshes, rules, the product of settings and a cover of it."""

import functools
import itertools
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import moezoo
from moezoo.data import Batch
from moezoo.models import MixtralConfig, build

Balance = Literal["batch", "sequence"]

# Every size differs from its neighbours where it may, so that no two dimensions can be confused. The routing losses'
# coefficients are large, so that their gradients are as visible as the cross-entropy's.
VOCAB, EMBED, LAYERS, EXPERTS, ROWS, LENGTH = 40, 16, 2, 8, 16, 8
UNUSED = 5  # the expert of the first layer that no token goes to


def config(balance: Balance = "batch", **changes: Any) -> MixtralConfig:
    """The tiny model."""
    sizes = {"vocab": VOCAB, "embed": EMBED, "layers": LAYERS, "heads": 4, "kv_heads": 2, "head_dim": 8}
    sizes |= {"expert_mlp": 12, "experts": EXPERTS, "rope_base": 100.0, "init_std": 0.5}
    sizes |= {"load_balance": 0.3, "load_balance_over": balance, "z_loss": 0.05}
    return MixtralConfig(**{**sizes, **changes})


@functools.cache
def model(balance: Balance = "batch") -> Any:
    """The tiny model with every array told apart from what it starts as: norms are not one, one expert is not used."""
    fresh = build(config(balance), key=jax.random.key(3))
    rng = np.random.default_rng(4)
    leaves, structure = jax.tree.flatten(fresh)
    noisy = [np.asarray(x) + 0.2 * rng.standard_normal(x.shape).astype(np.float32) * (x.ndim < 3) for x in leaves]
    noisy = jax.tree.unflatten(structure, [jnp.asarray(x) for x in noisy])
    # The residual stream's first number is large for every token, and the unused expert's logit falls with it.
    embedding = noisy.embedding.weight.at[:, 0].set(2.0)
    router = noisy.stacks[0].layer.moe.router.weight.at[0, 0, UNUSED].set(-4.0)
    places = lambda m: (m.embedding.weight, m.stacks[0].layer.moe.router.weight)  # noqa: E731
    return eqx.tree_at(places, noisy, (embedding, router))


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
    """Layouts: the two that ship, and three that users write."""
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
    ]
    shipped = {name: moezoo.compose(f"rules={name}").rules for name in ("fsdp_ep", "pure_fsdp")}
    return shipped | {r.name: r for r in own}


def fits(mesh: str, layout: str) -> bool:
    """Whether the rules name every axis of the mesh, and are not the same as `fsdp_ep` there."""
    sizes = MESHES[mesh].sizes
    many = {axis for axis, size in sizes.items() if size > 1}
    special = {"replicated": {"expert"}, "shard_exp_on_fsdp": {"expert", "fsdp"}, "cp_as_ep": {"context"}}
    return many <= rules()[layout].named and special.get(layout, set()) <= many


@dataclass(frozen=True)
class Case:
    """One way to run the step."""

    strategy: str
    mesh: str
    rules: str
    remat: str
    microbatches: int
    balance: Balance

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    @property
    def execution(self) -> moezoo.Execution:
        """How it runs."""
        mesh = moezoo.make_mesh(MESHES[self.mesh])
        return moezoo.Execution(mesh, rules()[self.rules], self.strategy, remat=self.remat)  # type: ignore[arg-type]


@functools.cache
def product() -> tuple[Case, ...]:
    """Every strategy, mesh, rules that fit it, remat, number of micro-steps and balance."""
    values = itertools.product(
        ("dense", "gather", "ring"),
        MESHES,
        rules(),
        ("full", "dots", "none"),
        (1, 2),
        ("batch", "sequence"),
    )
    return tuple(Case(*v) for v in values if fits(v[1], v[2]))


def _pairs(case: Case) -> set[tuple[Any, ...]]:
    named = [(f.name, getattr(case, f.name)) for f in fields(case)]
    return set(itertools.combinations(named, 2))


@functools.cache
def cover() -> tuple[Case, ...]:
    """Few cases in which any two settings that can meet do meet: greedily, the one with most new pairs first."""
    missing = set().union(*map(_pairs, product()))
    chosen = []
    while missing:
        best = max(product(), key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return tuple(chosen)
