"""Convert text to token ids: `python scripts/prepare_data.py path=FOLDER out=FILE.npy`, like `moezoo prepare-data`."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("prepare-data")
