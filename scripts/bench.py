"""Measure a part of moezoo: `python scripts/bench.py PART`; `--help` lists them and what can be set."""

import os
import sys

# Python puts this folder first on its path, where tokenize.py would stand in for the standard library's module.
if (here := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(here)

from moezoo.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
