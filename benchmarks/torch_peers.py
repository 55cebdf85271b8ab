"""PyTorch's grouped product and transformers' Mixtral block on the same numbers, if the libraries are installed.

Besides this module, only `benchmarks.generate` and `benchmarks.one_trainer` import them.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

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


def layers(x: jax.Array, block: MoE, cotangent: jax.Array) -> Iterator[Named]:
    """Yield transformers' block twice: with a loop over experts, and with grouped products."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return

    def make(implementation: str) -> Candidate:
        import torch
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

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

    def wait(result: Any) -> Any:
        if cotangent.is_cuda:
            torch.cuda.synchronize()
        return result

    def forward() -> Any:
        with torch.no_grad():
            return function(*inputs)

    kept = function(*inputs)
    calls: dict[Pass, Call] = {
        "forward": Queued(forward, wait),
        "backward": Queued(lambda: torch.autograd.grad(kept, inputs, cotangent, retain_graph=True), wait),
        "both": Queued(lambda: torch.autograd.grad(function(*inputs), inputs, cotangent), wait),
    }
    return Candidate(calls, dict.fromkeys(calls))
