"""Tokens to rows grouped by expert, and back."""

from moezoo.kernels.permute.api import Plan as Plan
from moezoo.kernels.permute.api import permute as permute
from moezoo.kernels.permute.api import plan as plan
from moezoo.kernels.permute.api import plan_by_place as plan_by_place
from moezoo.kernels.permute.api import unpermute as unpermute
