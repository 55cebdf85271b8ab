"""One matrix product per group of rows: the kernel that experts run on."""

from moezoo.kernels.grouped_matmul.api import Implementation as Implementation
from moezoo.kernels.grouped_matmul.api import chosen_backend as chosen_backend
from moezoo.kernels.grouped_matmul.api import gated as gated
from moezoo.kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from moezoo.kernels.grouped_matmul.api import routed_mlp as routed_mlp
