"""Benchmarks of a grouped product, attention, an MoE layer, a training step, the dispatch strategies and generation.

Each is measured next to alternatives that do the same work. The command is `moezoo bench`; docs/benchmarks.md defines
the columns.
"""
