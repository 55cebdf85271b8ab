"""Show a layout: `python scripts/sharding.py model=mixtral mesh=ep8` does what `moezoo sharding` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("sharding")
