"""Benchmarks: what a product, an MoE layer and a training step cost here, beside what else could do the same work.

The command is `moezoo bench`; what its figures mean is in docs/benchmarks.md.
"""
