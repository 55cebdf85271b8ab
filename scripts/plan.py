"""Plan for absent hardware: `python scripts/plan.py model=mixtral topology=v5p:2x2x2` does what `moezoo plan` does."""

from moezoo.cli import run_script

if __name__ == "__main__":
    run_script("plan")
