"""Permutations between tokens and rows grouped by expert."""

from moezoo.kernels.permute.api import permute as permute
from moezoo.kernels.permute.api import plan as plan
from moezoo.kernels.permute.api import plan_of_all as plan_of_all
from moezoo.kernels.permute.api import plan_with_capacity as plan_with_capacity
from moezoo.kernels.permute.api import sum_rows as sum_rows
from moezoo.kernels.permute.api import unpermute as unpermute
from moezoo.parallel.dispatch import Plan as Plan
