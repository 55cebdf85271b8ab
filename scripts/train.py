"""Train a model: `python scripts/train.py model=mixtral mesh=ep8` does what `moezoo train` does."""

from moezoo.__main__ import run_script

if __name__ == "__main__":
    run_script("train")
