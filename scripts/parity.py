"""Compare a folder with transformers: `python scripts/parity.py folder=FOLDER` does what `moezoo parity` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("parity")
