"""Write a model as a Hugging Face folder: `python scripts/convert.py SOURCE TARGET` does what `moezoo convert` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("convert")
