"""A rehearsal of `device` on a CPU: kernels for a GPU or a TPU are interpreted, as if one were here."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import jax

from moezoo.errors import UserError
from moezoo.kernels.attention import BACKENDS as ATTENTION
from moezoo.kernels.delta_rule import BACKENDS as DELTA_RULE
from moezoo.kernels.grouped_matmul import BACKENDS as PRODUCTS
from moezoo.parallel.kernels import Target, anywhere

TARGETS = {"gpu": Target("cuda", "9.0"), "tpu": Target("tpu")}


@contextlib.contextmanager
def interpreting(what: Literal["gpu", "tpu"] | None) -> Iterator[Target | None]:
    """Let the backends for a GPU of capability 9.0, or for a TPU, run here, and yield that target; None for None.

    Raises `UserError` where JAX cannot interpret kernels for GPUs.
    """
    if what is None:
        yield None
        return
    target = TARGETS[what]
    every: tuple[Any, ...] = (PRODUCTS, ATTENTION, DELTA_RULE)
    for backends in every:
        own = {name: one for name, one in backends.items() if one.runs_on is not anywhere and one.runs_on(target)}
        backends.update({name: one._replace(runs_on=lambda _: True) for name, one in own.items()})
    with _on_gpu() if what == "gpu" else _on_tpu():
        yield target


def check_gpu() -> None:
    """Raise `UserError` if this JAX cannot interpret kernels for GPUs."""
    if not hasattr(importlib.import_module("jax.experimental.pallas.mosaic_gpu"), "force_gpu_interpret_mode"):
        raise UserError(
            f"rehearse=gpu interprets kernels for GPUs, which needs jax 0.12, and this is {jax.__version__}; rehearse "
            "in an environment of Python 3.12 or newer, or without these kernels by rehearse=tpu"
        )


def _on_gpu() -> contextlib.AbstractContextManager[Any]:
    mosaic: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    return mosaic.force_gpu_interpret_mode(mosaic.InterpretGPUParams())


@contextlib.contextmanager
def _on_tpu() -> Iterator[None]:
    from moezoo.kernels.attention import splash
    from moezoo.kernels.grouped_matmul import megablox

    for module, names in ((splash, {"BLOCK": 128, "INTERPRET": True}), (megablox, {"ROWS": 16, "BYTES": 256})):
        for name, value in names.items():
            setattr(module, name, value)
    for name in ("gmm", "tgmm"):
        setattr(megablox, name, functools.partial(getattr(megablox, name), interpret=True))
    yield
