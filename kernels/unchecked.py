"""Call kernels that do not say which mesh axes their values vary over, also where that is checked."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from moezoo.parallel.collectives import vary_like


def call_unchecked(kernel: Callable[..., Any], *operands: Array) -> Any:
    """Return the tree of arrays `kernel(*operands)`, which vary over the axes that any operand does.

    The kernel may mix dtypes as NumPy does. It has no gradient here.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        one: Any = PartitionSpec()  # all axes are split already: each device's part is the whole here
        kernel = jax.shard_map(kernel, in_specs=one, out_specs=one, check_vma=False)
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda x: vary_like(x, *operands), kernel(*operands))
