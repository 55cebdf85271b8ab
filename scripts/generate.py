"""Continue texts: `python scripts/generate.py run_dir=runs/NAME prompt="def main("`; the same as `moezoo generate`."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("generate")
