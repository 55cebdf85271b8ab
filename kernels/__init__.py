"""Kernels: one folder per kernel, with the contract in `api` and one file per backend.

`moezoo.kernels.grouped_matmul` is the function.
"""

from moezoo.kernels.grouped_matmul import grouped_matmul as grouped_matmul
