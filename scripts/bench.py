"""Measure a part of moezoo: `python scripts/bench.py PART` does what `moezoo bench` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("bench")
