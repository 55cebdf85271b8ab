"""Train a model: `python scripts/train.py model=mixtral mesh=ep8`; `--help` lists what can be set."""

import os
import sys

# Python puts this folder first on its path, where tokenize.py would stand in for the standard library's module.
if (here := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(here)

from collections.abc import Sequence

from moezoo import cli


def main(overrides: Sequence[str]) -> int:
    """Compose and train; 0, or what docs/running.md says of how else a run can end."""
    import moezoo
    from moezoo.train import supervisor

    cfg = moezoo.compose(*overrides)
    if supervisor.wanted(cfg.distributed):
        return supervisor.supervise(cfg.distributed)
    supervisor.attach()
    try:
        moezoo.train(cfg)
    except moezoo.Stopped as stopped:
        print(stopped, flush=True)
        return stopped.code
    return 0


if __name__ == "__main__":
    cli.run(main, description="Train a model; everything it leaves is in run_dir.")
