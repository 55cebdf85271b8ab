"""PyTorch's grouped product and transformers' Mixtral block on the same numbers, if the libraries are installed; and
PyTorch's products and attention alone.

Besides this module, only `benchmarks.generate` and `benchmarks.one_trainer` import them.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.shapes import Shape
from benchmarks.timing import Call, Candidate, Pass, Queued
from moezoo.moe.mixture import MoE

Named = tuple[str, Callable[[], Candidate]]


def products(x: jax.Array, w: jax.Array, sizes: jax.Array, cotangent: jax.Array) -> Iterator[Named]:
    """Yield `torch.nn.functional.grouped_mm`."""
    if importlib.util.find_spec("torch") is None:
        return

    def make() -> Candidate:
        import torch

        ends = torch.tensor(np.cumsum(np.asarray(sizes)).astype(np.int32), device=_device())
        function = partial(torch.nn.functional.grouped_mm, offs=ends)
        return _candidate(function, [_tensor(x), _tensor(w)], _tensor(cotangent))

    yield "torch grouped_mm", make


def yardsticks(
    shape: Shape, tokens: int, kv_heads: int, group: int, dim: int
) -> dict[tuple[str, str], Callable[[], tuple[Call, float]]]:
    """Return functions that make calls and their FLOPs, by name and pass, on operands that PyTorch draws itself.

    They are a product, the grouped products of the forward and the backward pass, and causal attention of one row.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    draw = partial(torch.randn, device=_device(), dtype=torch.bfloat16)
    # Its name before version 2.10.
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm")  # noqa: B009
    t, d, f, e, k = shape

    def product(who: str) -> tuple[Call, float]:
        x, y, w = draw(t * k, d), draw(t * k, f), draw(e, d, f)
        chosen = torch.randint(0, e, (t * k,), device=_device())
        offs = torch.bincount(chosen, minlength=e).cumsum(0).to(torch.int32)
        calls = {
            "matmul": lambda: x @ w[0],
            "grouped_mm": lambda: grouped(x, w, offs=offs),
            "grouped_mm transposed": lambda: grouped(y, w.transpose(1, 2), offs=offs),
            "grouped_mm by weights": lambda: grouped(x.t(), y, offs=offs),
        }
        return Queued(calls[who], _wait), float(shape.product_flops)

    def attention(passed: str) -> tuple[Call, float]:
        q, *kv = (draw(1, heads, tokens, dim, requires_grad=True) for heads in (kv_heads * group, kv_heads, kv_heads))
        forward = partial(scaled_dot_product_attention, q, *kv, is_causal=True, enable_gqa=True)
        back, flops = draw(q.shape), 2.0 * kv_heads * group * tokens * (tokens + 1) / 2 * 2 * dim
        if passed == "forward":
            return Queued(torch.no_grad()(forward), _wait), flops
        return Queued(lambda: torch.autograd.grad(forward(), [q, *kv], back), _wait), 3.5 * flops

    names = ("matmul", "grouped_mm", "grouped_mm transposed", "grouped_mm by weights")
    found: dict[tuple[str, str], Any] = {(name, "forward"): partial(product, name) for name in names}
    return found | {("sdpa", passed): partial(attention, passed) for passed in ("forward", "both")}


def _wait(result: Any) -> Any:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def layers(x: jax.Array, block: MoE, cotangent: jax.Array) -> Iterator[Named]:
    """Yield transformers' block twice: with a loop over experts, and with grouped products."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return

    def make(implementation: str) -> Candidate:
        import torch
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        assert block.experts.gate is not None
        e, d, f = block.experts.gate.shape
        sizes: dict[str, Any] = {"hidden_size": d, "intermediate_size": f, "num_local_experts": e}
        config = MixtralConfig(**sizes, num_experts_per_tok=block.router.k)
        config._experts_implementation = implementation
        arrays = (block.experts.gate, block.experts.up, block.experts.down, block.router.weight)
        gate, up, down, router = map(_tensor, arrays)
        theirs: Any = MixtralSparseMoeBlock(config).to(device=_device(), dtype=gate.dtype)
        with torch.no_grad():
            theirs.gate.weight.copy_(router.T)
            theirs.experts.gate_up_proj.copy_(torch.cat([gate, up], dim=2).transpose(1, 2))
            theirs.experts.down_proj.copy_(down.transpose(1, 2))
        return _candidate(lambda x, *_: theirs(x), [_tensor(x), *theirs.parameters()], _tensor(cotangent))

    for implementation in ("eager", "grouped_mm"):
        yield f"transformers {implementation}", partial(make, implementation)


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _tensor(x: jax.Array) -> Any:
    import torch

    # PyTorch does not read NumPy's bfloat16.
    return torch.tensor(np.asarray(x, np.float32), device=_device()).to(getattr(torch, str(x.dtype)))


def _candidate(function: Callable[..., Any], inputs: list[Any], cotangent: Any) -> Candidate:
    import torch

    for tensor in inputs:
        tensor.requires_grad_(True)

    def forward() -> Any:
        with torch.no_grad():
            return function(*inputs)

    kept = function(*inputs)
    calls: dict[Pass, Call] = {
        "forward": Queued(forward, _wait),
        "backward": Queued(lambda: torch.autograd.grad(kept, inputs, cotangent, retain_graph=True), _wait),
        "both": Queued(lambda: torch.autograd.grad(function(*inputs), inputs, cotangent), _wait),
    }
    return Candidate(calls, dict.fromkeys(calls))
