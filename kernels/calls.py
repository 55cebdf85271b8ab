"""Call kernels so that JAX traces each pass once for all layers, and where it checks which axes values vary over."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from moezoo.parallel.collectives import vary_like


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def traced_once(function: Callable, reads: Hashable, static: tuple[Hashable, ...], *operands: Any) -> Any:
    """Return `function(*static, *operands)`, which is traced once for all operands of the same types.

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


def call_unchecked(kernel: Callable[..., Any], *operands: Array) -> Any:
    """Return the tree of arrays `kernel(*operands)`, which vary over the axes that any operand does.

    The kernel does not state which mesh axes its results vary over, which JAX may check. It may mix dtypes as NumPy
    does. It has no gradient here.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        one: Any = PartitionSpec()  # all axes are split already: each device's part is the whole here
        kernel = jax.shard_map(kernel, in_specs=one, out_specs=one, check_vma=False)
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda x: vary_like(x, *operands), kernel(*operands))
