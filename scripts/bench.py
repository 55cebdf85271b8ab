"""Measure a part of moezoo: `python scripts/bench.py PART`; the same as `moezoo bench`."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("bench")
