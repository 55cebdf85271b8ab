"""What is timed, and against what: `python scripts/bench.py PART KEY=VALUE ...`. Not installed with moezoo.

Each part is measured next to alternatives that do the same work. docs/benchmarks.md defines the columns.
"""
