"""Continue texts: `python scripts/generate.py run_dir=FOLDER prompt="def main("` does what `moezoo generate` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("generate")
