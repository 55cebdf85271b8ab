"""Permutations between tokens and rows grouped by expert."""

from moezoo.kernels.permute.api import Plan as Plan
from moezoo.kernels.permute.api import permute as permute
from moezoo.kernels.permute.api import plan as plan
from moezoo.kernels.permute.api import plan_with_capacity as plan_with_capacity
from moezoo.kernels.permute.api import unpermute as unpermute
