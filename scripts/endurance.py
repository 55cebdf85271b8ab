"""Disturb a run: `python scripts/endurance.py folder=/tmp/endurance` does what `moezoo endurance` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("endurance")
