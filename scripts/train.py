"""Train a model: `python scripts/train.py model=mixtral mesh=ep8`; the same as `moezoo train`."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("train")
