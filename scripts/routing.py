"""Show a model's routing: `python scripts/routing.py run_dir=runs/NAME` does what `moezoo routing` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("routing")
