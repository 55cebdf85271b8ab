"""One matrix product per group of rows: the kernel that experts run on."""

from moezoo.kernels.grouped_matmul.api import BACKENDS as BACKENDS
from moezoo.kernels.grouped_matmul.api import chosen_backend as chosen_backend
from moezoo.kernels.grouped_matmul.api import gated as gated
from moezoo.kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from moezoo.kernels.grouped_matmul.api import register as register
from moezoo.kernels.grouped_matmul.api import routed_mlp as routed_mlp
from moezoo.kernels.grouped_matmul.backend import Backend as Backend
