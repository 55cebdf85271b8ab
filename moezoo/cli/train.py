"""`moezoo train`: train a model."""

from collections.abc import Sequence

from moezoo.cli.command import ConfiguredCommand


def main(overrides: Sequence[str]) -> int:
    """Compose and train; return 0, or the exit code that docs/running.md lists for another end."""
    from moezoo.config.compose import compose
    from moezoo.config.run_folders import AUTO, find
    from moezoo.parallel import distributed
    from moezoo.training import supervisor
    from moezoo.training.metrics import count_validations, read_metrics
    from moezoo.training.signals import Stopped
    from moezoo.training.train import train

    cfg = compose(*overrides)
    if f"resume={AUTO}" in overrides and cfg.resume not in (None, AUTO):
        folder, step = find(cfg.resume, "run_dir")
        before = count_validations(read_metrics(folder.parent / "metrics.jsonl", until=step))
        if step == cfg.steps or before.exhaust(
            cfg.eval_patience
        ):  # a scheduler may start a run again that has just ended
            print(f"{folder.parent} is complete: step {step} is its last", flush=True)
            return 0
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
