"""Compare a folder with transformers: `python scripts/parity.py folder=FOLDER`; the same as `moezoo parity`."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("parity")
