"""Kernels: a folder for each one with backends, which has the contract in `api` and a file per backend; permutations.

`moezoo.kernels.grouped_matmul` is the function.
"""

from moezoo.kernels.grouped_matmul import grouped_matmul as grouped_matmul
