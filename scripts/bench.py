"""Measure a part of moezoo next to alternatives: `python scripts/bench.py PART KEY=VALUE ...`."""

import sys
from pathlib import Path

# `benchmarks` is not installed, and moezoo need not be: both are those of this clone. The path is removed again,
# because libraries look for packages `kernels` and `models`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import benchmarks  # noqa: F401
import moezoo.interrupts as interrupts

del sys.path[0]

if __name__ == "__main__":
    with interrupts.ending():
        from benchmarks.parts import main

        main()
