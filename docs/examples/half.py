# In moezoo: moezoo/nn/half.py
import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16

from moezoo.parallel.roles import Role
from moezoo.parallel.stored import Stored


class Half(Stored):
    """A weight as bfloat16."""

    values: BFloat16[Array, "..."]
    dtype: np.dtype = eqx.field(static=True)

    def __init__(self, weight, axes):
        self.values, self.dtype = weight.astype(jnp.bfloat16), np.dtype(weight.dtype)

    def axes(self, declared):
        """Those of the array, as a part."""
        return {"values": dataclasses.replace(declared, role=Role.PART)}

    @property
    def shape(self):
        """That of the values."""
        return self.values.shape

    def materialise(self, dtype):
        """The values in `dtype`."""
        return self.values.astype(dtype)
