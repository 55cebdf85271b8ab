"""Trace a kernel's passes once for all layers with operands of the same types."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def traced_once(function: Callable, reads: Hashable, static: tuple[Hashable, ...], *operands: Any) -> Any:
    """Return `function(*static, *operands)`.

    JAX traces a function with its own gradient when it is called, and again when it is differentiated. But it keeps the
    trace of a `jax.jit` for each combination of static arguments and types.

    Args:
        function: One pass of a kernel.
        reads: The numbers that it reads from its module; others give another trace.
        static: Its arguments that are not arrays. They are hashable and have no state; JAX keeps them alive.
        operands: Its trees of arrays.
    """
    del reads
    return function(*static, *operands)
