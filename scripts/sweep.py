"""Train several runs: `python scripts/sweep.py seed=0,1 steps=100` does what `moezoo sweep` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("sweep")
