"""Try what a run survives: `python scripts/endurance.py folder=/tmp/endurance`; the same as `moezoo endurance`."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("endurance")
