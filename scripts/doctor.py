"""Report what is installed here and whether it works: `python scripts/doctor.py` does what `moezoo doctor` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("doctor")
