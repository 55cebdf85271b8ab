"""Compare runs: `python scripts/compare.py runs/A runs/B` does what `moezoo compare` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("compare")
