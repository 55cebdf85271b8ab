"""The registry of sizes for benchmarks and compilation checks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One MoE layer: T tokens of width d, E SwiGLU experts of width f, K experts per token."""

    tokens: int
    embed: int
    mlp: int
    experts: int
    k: int

    @property
    def rows(self) -> int:
        """The number of assignments, T*K; none is dropped."""
        return self.tokens * self.k

    @property
    def letters(self) -> dict[str, int]:
        """The sizes by their letters, as results hold them."""
        return dict(zip(("T", "d", "f", "E", "K"), self, strict=True))

    @property
    def product_flops(self) -> int:
        """FLOPs of one grouped product, forward; the backward pass has twice as many."""
        return 2 * self.rows * self.embed * self.mlp

    @property
    def layer_flops(self) -> int:
        """FLOPs of a layer's three products, forward; routing, permutation and activation are not counted."""
        return 3 * self.product_flops


LAPTOP = {f"e{experts}k{k}": Shape(4096, 512, 1024, experts, k) for experts in (8, 32, 128) for k in (2, 4, 8)}
# Layers of models that train on a laptop: few tokens, narrow, and groups of 512, 256 and 128 rows.
SMALL = {
    "d256e8k2": Shape(2048, 256, 512, 8, 2),
    "d256e32k4": Shape(2048, 256, 256, 32, 4),
    "d512e16k2": Shape(1024, 512, 1024, 16, 2),
}

# L1 and L3: a layer of Qwen3-30B-A3B. L2: a layer of Mixtral-8x7B. S1 to S3: sizes of Guo et al., SonicMoE (2025).
# P1: a layer of Qwen3-Next-80B-A3B. Of L3 and P1 times on one H100 are published.
ACCELERATOR = {
    "L1": Shape(8192, 2048, 768, 128, 8),
    "L2": Shape(8192, 4096, 14336, 8, 2),
    "L3": Shape(32768, 2048, 768, 128, 8),
    "P1": Shape(32768, 2048, 512, 512, 10),
    "S1": Shape(24576, 1536, 256, 128, 8),
    "S2": Shape(32768, 4096, 1024, 64, 4),
    "S3": Shape(32768, 4096, 1024, 128, 8),
}

SHAPES = {"tiny": Shape(256, 32, 64, 8, 2)} | SMALL | LAPTOP | ACCELERATOR
