"""Mixtral (Jiang et al., 2024, arXiv:2401.04088)."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class MixtralConfig:
    """Sizes of a Mixtral-style model; the defaults are the laptop size. Raises `UserError` on sizes that contradict."""

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    expert_mlp: int = 256
    experts: int = 8
    experts_per_token: int = 2
    window: int | None = None
    rope_base: float = 1e6
    norm_eps: float = 1e-5
    load_balance: float = 0.01
    load_balance_over: Literal["batch", "sequence"] = "batch"
    z_loss: float = 0.001
    init_std: float = 0.02


class Mixtral:
    pass
