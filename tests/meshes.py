"""Meshes of the virtual devices, with axes of any names."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def auto_mesh(devices: Sequence[Any] | None = None, /, **sizes: int) -> Mesh:
    """A mesh of these axes and sizes over the first of `devices`; axis types are those of the library's own meshes."""
    chosen = np.array((devices or jax.devices())[: math.prod(sizes.values())])
    return Mesh(chosen.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
