"""Muon (Jordan et al., 2024): orthogonalised momentum for matrices, and AdamW for everything else.

For one matrix with gradient g (already clipped), momentum m and rate r:

    m <- 0.95 m + g
    p <- p - r (0.2 sqrt(max(inputs, outputs)) orthogonalise(g + 0.95 m) + weight_decay p)

The Newton-Schulz steps are in `moezoo.optim.matrices`. The scale gives updates about the root mean square of those
of AdamW, so both parts take the same rate and decay (Liu et al., 2025, arXiv:2502.16982, section 2.2).
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.errors import UserError
from moezoo.optim.adamw import AdamW
from moezoo.optim.base import Choose, Group, MomentDType, Transformation, UpdateRule, as_kept, check_decays, newest
from moezoo.optim.matrices import orthogonal_flops, orthogonalised
from moezoo.parallel.axes import Role, matching
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.placement import Placement
from moezoo.typed import NotNegative, Positive, Range, show


class MuonState(NamedTuple):
    """The momentum of each matrix, laid out as the matrix."""

    momentum: PyTree


@dataclasses.dataclass(frozen=True)
class Muon(UpdateRule):
    """Orthogonalised momentum for the weights of layers, one matrix per layer and expert; AdamW for other parameters.

    - `momentum`: decay of the momentum; the update looks ahead by it (Nesterov).
    - `weight_decay`: of weights, in both parts; times the rate, not times the scale.
    - `per_head`: queries, keys and values have one matrix per head. Up-projections of latents always do.
    - `orthogonal_dtype`: what matrices travel and are multiplied in to be orthogonalised.
    - `moment_dtype`: what the momentum, and the moments of AdamW, are kept in.
    - `muon`, `adamw`: patterns of paths, such as "*.attention.out", that override which part updates a parameter; `*`
      stands for any text. By default AdamW has embeddings, the head, routers, the vectors that
      gate tokens, scales, biases and parts of containers.
    - `beta1`, `beta2`, `epsilon`: of AdamW.
    """

    how: ClassVar[str] = "each matrix moves by its momentum, made orthogonal so that no direction outweighs the others"
    learning_rate: float = 3e-3
    momentum: Annotated[float, Range(at_least=0, below=1)] = 0.95
    weight_decay: NotNegative = 0.1
    per_head: bool = False
    orthogonal_dtype: Literal["float32", "bfloat16"] = "float32"
    moment_dtype: MomentDType = "float32"
    muon: tuple[str, ...] = ()
    adamw: tuple[str, ...] = ()
    beta1: Annotated[float, Range(at_least=0, below=1)] = 0.9
    beta2: Annotated[float, Range(at_least=0, below=1)] = 0.95
    epsilon: Positive = 1e-8
    clip_norm: float | None = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_decays(self.moment_dtype, momentum=self.momentum, beta1=self.beta1, beta2=self.beta2)

    def assign(self, placements: PyTree) -> PyTree:
        """Return the group of each leaf, `muon` or `adamw`.

        Raises:
            UserError: A pattern matches nothing, both lists match a path, or `muon` matches what is no weight.
        """
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(AdamW)}
        muon, adamw = Group("muon", self), Group("adamw", AdamW(**shared))
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(placements)]
        chosen = {name: matching(f"optimizer.{name}", getattr(self, name), paths) for name in ("muon", "adamw")}
        if both := sorted(chosen["muon"] & chosen["adamw"]):
            raise UserError(f"optimizer.muon and optimizer.adamw both match {both[0]}; leave it to one of them")

        def leaf(path: Any, placement: Placement) -> Group:
            name, axes = jax.tree_util.keystr(path), placement.axes
            if name in chosen["muon"] and axes.role is not Role.WEIGHT:
                raise UserError(
                    f"optimizer.muon={show(self.muon)} matches {name}, which has role {axes.role.value} and no matrix; "
                    "choose weights only"
                )
            by_default = axes.role is Role.WEIGHT and not {"vocab", "router", "token_gate"} & set(axes.names)
            return muon if name in chosen["muon"] or (by_default and name not in chosen["adamw"]) else adamw

        return jax.tree_util.tree_map_with_path(leaf, placements)

    def transform(self, placements: PyTree) -> Transformation:
        """Return the update of matrices; its collectives are those of `moezoo.optim.matrices`."""

        def added(gradient: jax.Array, momentum: jax.Array) -> jax.Array:
            return _wide(gradient) + self.momentum * _wide(momentum)

        def init(parameters: PyTree) -> MuonState:
            return MuonState(jax.tree.map(lambda p: jnp.zeros_like(p, self.moment_dtype), parameters))

        def update(
            gradients: PyTree, state: MuonState, parameters: PyTree, choose: Choose = newest
        ) -> tuple[PyTree, MuonState]:
            momentum = jax.tree.map(lambda g, m: added(g, m).astype(m.dtype), gradients, state.momentum)
            momentum = as_kept(choose(momentum, state.momentum), self.moment_dtype)
            trees = (gradients, momentum)
            directions = orthogonalised(placements, added, trees, self.orthogonal_dtype, self.per_head)
            updates = jax.tree.map(lambda d, p: d + self.weight_decay * _wide(p), directions, parameters)
            return updates, MuonState(momentum)

        return Transformation(init, update)

    def flops(self, placements: PyTree, parameters: PyTree, ways: Callable[[MeshAxes], int]) -> int:
        """Return the FLOPs of orthogonalising."""
        return sum(orthogonal_flops(placements, parameters, self.per_head, ways))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
