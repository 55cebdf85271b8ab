"""`moezoo train`: train a model."""

from collections.abc import Sequence

from moezoo.cli.command import ConfiguredCommand


def main(overrides: Sequence[str]) -> int:
    """Compose and train; return 0, or the exit code that docs/running.md lists for another end."""
    from moezoo.config.compose import compose
    from moezoo.parallel import distributed
    from moezoo.training import supervisor
    from moezoo.training.signals import Stopped
    from moezoo.training.train import train

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
    "train",
    "train a model",
    main,
    description="Train a model. The folder run_dir receives its configuration, metrics, pictures and checkpoints.",
)
