"""`moezoo evaluate`: the validation loss of a run's model."""

import dataclasses
from collections.abc import Sequence

from moezoo.cli.command import ConfiguredCommand
from moezoo.config.options import check_keys, take
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.training.evaluate import evaluate
from moezoo.training.saved import load_run, saved_config


@dataclasses.dataclass(frozen=True)
class Keys:
    """What can be set besides how to run."""

    run_dir: str | None = None


def _split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The run's folder, and what to change in its configuration."""
    keys, changes = take(Keys, arguments)
    check_keys(changes, Keys, TrainConfig)
    if keys.run_dir is None:
        raise UserError("run_dir is missing; write run_dir=FOLDER with the folder of a run")
    return keys.run_dir, changes


def configure(*arguments: str) -> TrainConfig:
    """The run's configuration with overrides on top."""
    folder, changes = _split(arguments)
    return saved_config(folder, *changes)


def main(arguments: Sequence[str]) -> None:
    """Load the run's last checkpoint and print its validation loss."""
    folder, changes = _split(arguments)
    model, cfg = load_run(folder, *changes)
    result = evaluate(model, cfg)
    over = f"{result.tokens:,} {result.unit}s, {result.dropped} dropped"
    print(f"validation  {result.loss:.6f} nats a {result.unit} over {over}")


COMMAND = ConfiguredCommand(
    "evaluate",
    "the validation loss of a run's model",
    main,
    description="Evaluate the last checkpoint of the run in run_dir, on its validation data.\n"
    "What is not set is the run's own; what concerns training alone changes nothing.",
    configure=configure,
    examples=("run_dir=runs/NAME", "run_dir=runs/NAME mesh=single dispatch=gather data.eval_sequences=0"),
)
