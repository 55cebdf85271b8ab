"""`moezoo train`: train a model."""

from collections.abc import Sequence

from moezoo.cli.command import ConfiguredCommand
from moezoo.config.compose import compose
from moezoo.parallel import distributed
from moezoo.training import supervisor
from moezoo.training.signals import Stopped
from moezoo.training.train import train


def main(overrides: Sequence[str]) -> int:
    """Compose and train; 0, or what docs/running.md says of how else a run can end."""
    cfg = compose(*overrides)
    if supervisor.is_wanted(cfg.distributed):
        return supervisor.supervise(cfg.distributed)
    supervisor.attach()
    try:
        train(cfg)
    except Stopped as stopped:
        print(stopped, flush=True)
        return stopped.code
    except Exception as error:
        distributed.outlast_lost_process(error, cfg.distributed)
        raise
    return 0


COMMAND = ConfiguredCommand(
    "train", "train a model", main, description="Train a model; everything it leaves is in run_dir."
)
