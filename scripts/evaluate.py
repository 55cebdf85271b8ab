"""Evaluate a run: `python scripts/evaluate.py run_dir=runs/NAME mesh=single` does what `moezoo evaluate` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("evaluate")
