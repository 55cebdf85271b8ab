"""Meshes with axes of any names."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def auto_mesh(devices: Sequence[Any] | None = None, /, **sizes: int) -> Mesh:
    """Return a mesh with these axes and sizes over the first of `devices`, all of axis type Auto."""
    chosen = np.array((devices or jax.devices())[: math.prod(sizes.values())])
    return Mesh(chosen.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
